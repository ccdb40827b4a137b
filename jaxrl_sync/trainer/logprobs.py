"""Log-probs of given tokens without logits of the whole batch.

The convention of the wire: position t holds the log-prob of token t given the tokens before it, of
``log_softmax(logits / temperature)`` in float32 over the unfiltered vocabulary; the first token of a segment
and padding hold 0. Temperature 0 (greedy) reports at temperature 1.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrl_sync.sharding.presets.qwen3 import DecoderConfig
from jaxrl_sync.trainer.axes import Tree, constrain
from jaxrl_sync.trainer.config import TrainerConfig
from jaxrl_sync.trainer.model import compute_params, head_kernel, hidden_states


def chunk_logprobs(
    hidden_BCD: jax.Array,
    head_DV: jax.Array,
    targets_BC: jax.Array,
    temperature: float,
    entropy_gradient: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Log-prob of each target and entropy of its distribution, both float32 ``[B, C]``.

    The target's logit is picked by a masked sum, which stays local under a sharded vocabulary. The entropy
    carries a gradient only if asked for: as a mere metric it must not cost a backward pass.
    """
    logits = jnp.einsum("bcd,dv->bcv", hidden_BCD, head_DV, preferred_element_type=jnp.float32)
    logits = logits * (1.0 / (temperature or 1.0))
    peak = jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    shifted = logits - peak
    exp = jnp.exp(shifted)
    total = jnp.sum(exp, axis=-1)
    vocabulary = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 2)
    picked = jnp.sum(jnp.where(vocabulary == targets_BC[..., None], shifted, 0.0), axis=-1)
    log_total = jnp.log(total)
    entropy = log_total - jnp.sum(jnp.where(exp > 0, exp * shifted, 0.0), axis=-1) / total
    return picked - log_total, entropy if entropy_gradient else jax.lax.stop_gradient(entropy)


def token_logprobs(
    hidden_BSD: jax.Array,
    head_DV: jax.Array,
    targets_BS: jax.Array,
    temperature: float,
    chunk: int,
    entropy_gradient: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """``chunk_logprobs`` over pieces of ``chunk`` tokens of every row; the backward pass is chunked too.

    ``hidden[:, t]`` predicts ``targets[:, t]``; callers shift. At most ``B * chunk * V`` logits exist at
    a time: each chunk is rematerialised in the backward pass. ``chunk`` must divide S (``ValueError``).
    """
    B, S, D = hidden_BSD.shape
    chunk = min(chunk, S)
    if S % chunk:
        raise ValueError(f"sequence length {S}: expected a multiple of the log-prob chunk {chunk}")
    if chunk == S:
        return chunk_logprobs(hidden_BSD, head_DV, targets_BS, temperature, entropy_gradient)

    @jax.checkpoint
    def piece(inputs: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return chunk_logprobs(inputs[0], head_DV, inputs[1], temperature, entropy_gradient)

    pieces = (
        jnp.swapaxes(hidden_BSD.reshape(B, S // chunk, chunk, D), 0, 1),
        jnp.swapaxes(targets_BS.reshape(B, S // chunk, chunk), 0, 1),
    )
    logp, entropy = jax.lax.map(piece, pieces)
    return jnp.swapaxes(logp, 0, 1).reshape(B, S), jnp.swapaxes(entropy, 0, 1).reshape(B, S)


def policy_logprobs(
    params: Tree,
    cfg: DecoderConfig,
    config: TrainerConfig,
    mesh: Mesh,
    tokens_BS: jax.Array,
    positions_BS: jax.Array,
    segments_BS: jax.Array,
    entropy_gradient: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Log-probs and entropies, float32 ``[B, S]``, of packed rows, in the convention of the wire."""
    compute = compute_params(params, config, mesh)
    hidden = hidden_states(compute, cfg, config, mesh, tokens_BS, positions_BS, segments_BS)
    before = jnp.roll(hidden, 1, axis=1)  # the state that predicts token t is the one at t - 1
    logp, entropy = token_logprobs(
        before,
        head_kernel(compute),
        tokens_BS,
        config.temperature,
        config.logprob_chunk,
        entropy_gradient,
    )
    predicted = (positions_BS > 0) & (segments_BS > 0)
    logp = constrain(jnp.where(predicted, logp, 0.0), ("batch", "seq"), mesh)
    return logp, jnp.where(predicted, entropy, 0.0)
