"""``config.json`` of a published Qwen3 or Llama checkpoint, to and from ``DecoderConfig``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxrl_sync.sharding.errors import UserError
from jaxrl_sync.sharding.presets.qwen3 import DecoderConfig, RopeScaling

# model_type -> (class in transformers, whether queries and keys are normalised)
FAMILIES = {"qwen3": ("Qwen3ForCausalLM", True), "llama": ("LlamaForCausalLM", False)}
_FACTORS = ("factor", "low_freq_factor", "high_freq_factor")


class CheckpointError(UserError, ValueError):
    """A checkpoint that this decoder can't serve: names the file or tensor, what it has, what is expected."""

    exit_code = 2


class MissingCheckpointError(CheckpointError):
    """A file of the checkpoint is not there or not readable."""

    exit_code = 3


@dataclasses.dataclass(frozen=True)
class HFModel:
    """What ``config.json`` says: the decoder, the longest context it was made for, and its special ids."""

    decoder: DecoderConfig
    max_position: int
    eos_ids: tuple[int, ...]
    bos_id: int | None


def parse_config(config: Mapping[str, Any]) -> HFModel:
    """The decoder of a ``config.json`` object. Raises CheckpointError for what it can't compute exactly."""
    kind = config.get("model_type")
    if kind not in FAMILIES:
        why = "its projections have biases" if kind == "qwen2" else "another decoder"
        raise CheckpointError(
            f"config.json: model_type {kind!r} is not supported ({why}); expected {' or '.join(FAMILIES)}"
        )
    _refuse_variants(config)
    heads = _integer(config, "num_attention_heads")
    return HFModel(
        decoder=DecoderConfig(
            vocab_size=_integer(config, "vocab_size"),
            num_layers=_integer(config, "num_hidden_layers"),
            d_model=_integer(config, "hidden_size"),
            num_heads=heads,
            num_kv_heads=_integer(config, "num_key_value_heads", heads),
            head_dim=_integer(config, "head_dim", _integer(config, "hidden_size") // heads),
            d_ff=_integer(config, "intermediate_size"),
            rope_theta=_rope_theta(config),
            norm_eps=_positive(config, "rms_norm_eps", 1e-6),
            tied_embeddings=bool(config.get("tie_word_embeddings", False)),
            qk_norm=FAMILIES[kind][1],
            rope_scaling=_rope_scaling(config),
        ),
        max_position=_integer(config, "max_position_embeddings", 32768),
        eos_ids=_ids(config.get("eos_token_id")),
        bos_id=next(iter(_ids(config.get("bos_token_id"))), None),
    )


def render_config(
    cfg: DecoderConfig,
    dtype: str,
    max_position: int,
    eos_ids: tuple[int, ...] = (),
    pad_id: int | None = None,
) -> dict[str, Any]:
    """The ``config.json`` object of a decoder; ``dtype`` is ``float32``, ``bfloat16`` or ``float16``."""
    kind = next(name for name, (_, normed) in FAMILIES.items() if normed == cfg.qk_norm)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": cfg.rope_theta}
    if cfg.rope_scaling is not None:
        scaling = dataclasses.asdict(cfg.rope_scaling)
        scaling["original_max_position_embeddings"] = scaling.pop("original_max_position")
        rope |= scaling | {"rope_type": "llama3"}
    return {
        "architectures": [FAMILIES[kind][0]],
        "model_type": kind,
        "vocab_size": cfg.vocab_size,
        "hidden_size": cfg.d_model,
        "intermediate_size": cfg.d_ff,
        "num_hidden_layers": cfg.num_layers,
        "num_attention_heads": cfg.num_heads,
        "num_key_value_heads": cfg.num_kv_heads,
        "head_dim": cfg.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "rms_norm_eps": cfg.norm_eps,
        "rope_theta": cfg.rope_theta,
        "rope_parameters": rope,
        "rope_scaling": None if cfg.rope_scaling is None else rope,
        "max_position_embeddings": max_position,
        "tie_word_embeddings": cfg.tied_embeddings,
        "torch_dtype": dtype,
        "dtype": dtype,
        "eos_token_id": list(eos_ids) if len(eos_ids) > 1 else next(iter(eos_ids), None),
        "pad_token_id": pad_id,
        "use_cache": True,
    }


def _refuse_variants(config: Mapping[str, Any]) -> None:
    plain: dict[str, tuple[Any, ...]] = {
        "hidden_act": (None, "silu"),
        "attention_bias": (None, False),
        "mlp_bias": (None, False),
        "use_sliding_window": (None, False),
        "quantization_config": (None,),
    }
    for name, allowed in plain.items():
        if config.get(name) not in allowed:
            raise CheckpointError(
                f"config.json: {name}={config[name]!r} is not supported, expected {allowed[-1]!r}"
            )


def _rope_scaling(config: Mapping[str, Any]) -> RopeScaling | None:
    found: RopeScaling | None = None
    for name in ("rope_scaling", "rope_parameters"):
        scaling = _object(config, name)
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        if kind == "llama3":
            factor, low, high = (_positive(scaling, key) for key in _FACTORS)
            original = _integer(scaling, "original_max_position_embeddings")
            try:
                found = RopeScaling(factor, low, high, original)
            except ValueError as error:
                raise CheckpointError(f"config.json: {name}: {error}") from None
        elif kind != "default":
            raise CheckpointError(
                f"config.json: {name} of type {kind!r} is not supported, expected 'default' or 'llama3'"
            )
    return found


def _rope_theta(config: Mapping[str, Any]) -> float:
    nested = _object(config, "rope_parameters")
    return _positive(nested if "rope_theta" in nested else config, "rope_theta", 10_000.0)


def _integer(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = config.get(name)
    value = default if value is None else value
    if type(value) is not int or value < 1:
        raise CheckpointError(f"config.json: {name}={value!r}, expected an integer >= 1")
    return value


def _positive(config: Mapping[str, Any], name: str, default: float | None = None) -> float:
    value = config.get(name, default)
    if type(value) not in (int, float) or not 0 < value < 1e300:
        raise CheckpointError(f"config.json: {name}={str(value)[:60]!r}, expected a number above 0")
    return float(value)


def _object(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = config.get(name) or {}
    if not isinstance(value, dict):
        raise CheckpointError(f"config.json: {name} is a {type(value).__name__}, expected an object")
    return value


def _ids(value: Any) -> tuple[int, ...]:
    return tuple(i for i in (value if isinstance(value, list) else [value]) if type(i) is int)
