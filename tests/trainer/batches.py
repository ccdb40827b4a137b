"""Small models, random samples and a plain numpy decoder that the trainer is compared with."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxrl_sync.batch.frame import BatchFrame, BatchHeader
from jaxrl_sync.batch.pack import PackConfig, PackedBatch, pack
from jaxrl_sync.batch.rollout import Sample
from jaxrl_sync.sharding.presets.qwen3 import DecoderConfig
from jaxrl_sync.trainer import axes
from jaxrl_sync.trainer import state as train_state
from jaxrl_sync.trainer.config import LossConfig, MeshConfig, OptimizerConfig, TrainerConfig
from jaxrl_sync.trainer.losses import Batch
from jaxrl_sync.trainer.model import init_params
from jaxrl_sync.trainer.optimizer import make_optimizer
from jaxrl_sync.trainer.state import TrainState
from jaxrl_sync.trainer.step import Step, build_step
from jaxrl_sync.trainer.trained import trained
from jaxrl_sync.trainer.trainer import split

MODEL = DecoderConfig(
    vocab_size=24, num_layers=2, d_model=16, num_heads=8, num_kv_heads=4, head_dim=4, d_ff=24
)
ROWS, SEQ_LEN = 8, 32
OPTIMIZER = OptimizerConfig(learning_rate=1e-2)


def trainer_config(dp: int = 1, fsdp: int = 1, tp: int = 1, **changes: Any) -> TrainerConfig:
    settings: dict[str, Any] = {
        "mesh": MeshConfig(dp, fsdp, tp),
        "optimizer": OPTIMIZER,
        "rows": ROWS,
        "seq_len": SEQ_LEN,
        "logprob_chunk": 8,
        "init_std": 0.2,
        **changes,
    }
    return TrainerConfig(**settings)


@functools.lru_cache
def _compiled(config: TrainerConfig, loss: LossConfig, model: DecoderConfig, first: int) -> Step:
    devices = jax.devices()[first : first + config.mesh.num_devices]
    return build_step(model, config, loss, axes.make_mesh(config.mesh, devices))


@functools.lru_cache
def _weights(std: float, seed: int, model: DecoderConfig) -> Any:
    params = jax.jit(lambda s: init_params(model, std, jax.random.key(s)))(seed)
    return host(params)


def build(
    config: TrainerConfig,
    loss: LossConfig | None = None,
    seed: int = 0,
    model: DecoderConfig = MODEL,
    first: int = 0,
) -> tuple[Step, TrainState]:
    """Step (compiled once per test process) and fresh state on the devices from number ``first``."""
    step = _compiled(config, loss or LossConfig(correction="clip"), model, first)
    where = train_state.shardings(model, config, step.mesh)
    params = _weights(config.init_std, seed, model)
    zeros = make_optimizer(config.optimizer).init(trained(params, model))
    count, key = np.zeros((), np.int32), np.zeros(2, np.uint32)
    fresh: Any = TrainState(params, host(zeros), count, key)  # type: ignore[arg-type]
    state: TrainState = jax.device_put(fresh, where)
    return step, state


def samples(count: int, seed: int = 0, longest: int = SEQ_LEN) -> list[Sample]:
    """Random samples with prompts (not trained on), near-on-policy log-probs and mixed advantages."""
    rng = np.random.default_rng(seed)
    out = []
    for i in range(count):
        n = int(rng.integers(4, longest + 1))
        p = int(rng.integers(1, n - 1))
        mask = np.arange(n) >= p
        out.append(
            Sample(
                uid=f"u{i}",
                group_id=f"g{i // 4}",
                tokens=rng.integers(0, MODEL.vocab_size, n).astype(np.int32),
                loss_mask=mask,
                logprobs=np.where(mask, rng.normal(-3.2, 0.3, n), 0).astype(np.float32),
                versions=np.zeros(n, np.int32),
                reward=float(rng.random()),
                advantage=float(rng.normal()),
                dispatch_version=0,
            )
        )
    return out


def packed(items: Sequence[Sample], rows: int = ROWS, ranks: int = 1, seq_len: int = SEQ_LEN) -> PackedBatch:
    return pack(items, PackConfig(ranks, rows, seq_len))


def micros(step: Step, batch: PackedBatch, rank: int = 0) -> list[Batch]:
    return [step.put(fields) for fields in split(batch.for_rank(rank), batch.micro_batches)]


def frame(batch: PackedBatch, number: int, rank: int = 0, **header: Any) -> BatchFrame:
    """The decoded frame of one step, as a data connection hands it over."""
    config = batch.config
    return BatchFrame(
        BatchHeader(
            number,
            rank,
            batch.micro_batches,
            config.rows,
            config.seq_len,
            batch.num_valid_tokens,
            **header,
        ),
        batch.for_rank(rank),
    )


def same_bits(a: Any, b: Any) -> bool:
    """Whether two trees of arrays hold the same bits."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in pairs)


def host(tree: Any) -> Any:
    """A copy of a tree of arrays in host memory."""
    return jax.tree.map(lambda x: np.array(x, copy=True), tree)


def numpy_logprobs(params: Any, cfg: DecoderConfig, tokens: Any, temperature: float = 1.0) -> Any:
    """Log-probs ``[T]`` of one unpadded sequence in the wire convention: a plain float64 decoder, by hand."""
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    layers, T = params["layers"], len(tokens)
    x = params["embed"]["embedding"][np.asarray(tokens)]
    for i in range(cfg.num_layers):
        attn = {name: next(iter(part.values()))[i] for name, part in layers["attn"].items()}
        mlp = {name: part["kernel"][i] for name, part in layers["mlp"].items()}
        h = _norm(x, layers["input_norm"]["scale"][i], cfg.norm_eps)
        out = np.zeros_like(x)
        for head in range(cfg.num_heads):
            group = head // (cfg.num_heads // cfg.num_kv_heads)
            q, k = h @ attn["q_proj"][:, head], h @ attn["k_proj"][:, group]
            if cfg.qk_norm:
                q, k = _norm(q, attn["q_norm"], cfg.norm_eps), _norm(k, attn["k_norm"], cfg.norm_eps)
            q, k = _rotate(q, cfg), _rotate(k, cfg)
            scores = np.where(np.tril(np.ones((T, T))) > 0, q @ k.T / np.sqrt(cfg.head_dim), -np.inf)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            out += weights @ (h @ attn["v_proj"][:, group]) @ attn["o_proj"][head]
        x = x + out
        h = _norm(x, layers["post_attn_norm"]["scale"][i], cfg.norm_eps)
        gate = h @ mlp["gate_proj"]
        x = x + (gate / (1 + np.exp(-gate)) * (h @ mlp["up_proj"])) @ mlp["down_proj"]
    x = _norm(x, params["final_norm"]["scale"], cfg.norm_eps)
    head_DV = params["embed"]["embedding"].T if cfg.tied_embeddings else params["lm_head"]["kernel"]
    logits = x @ head_DV / (temperature or 1.0)
    logp = logits - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
    logp -= logits.max(-1, keepdims=True)
    return np.concatenate([[0.0], logp[np.arange(T - 1), np.asarray(tokens)[1:]]])


def _norm(x: Any, scale: Any, eps: float) -> Any:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * scale


def _angle_per_token(cfg: DecoderConfig, i: int) -> float:
    plain = float(cfg.rope_theta ** (-2 * i / cfg.head_dim))
    if (scaling := cfg.rope_scaling) is None:
        return plain
    wavelength, low = 2 * np.pi / plain, scaling.original_max_position / scaling.low_freq_factor
    high = scaling.original_max_position / scaling.high_freq_factor
    if wavelength > low:
        return plain / scaling.factor
    if wavelength < high:
        return plain
    smooth = scaling.original_max_position / wavelength - scaling.low_freq_factor
    smooth /= scaling.high_freq_factor - scaling.low_freq_factor
    return (1 - smooth) * plain / scaling.factor + smooth * plain


def _rotate(x: Any, cfg: DecoderConfig) -> Any:
    T, K = x.shape
    out = np.empty_like(x)
    for t in range(T):
        for i in range(K // 2):
            angle = t * _angle_per_token(cfg, i)
            a, b = x[t, i], x[t, i + K // 2]
            out[t, i] = a * np.cos(angle) - b * np.sin(angle)
            out[t, i + K // 2] = b * np.cos(angle) + a * np.sin(angle)
    return out
