"""Published model shapes, by the names that ``jaxrl-sync plan --model`` takes.

Numbers are those of each model's published configuration file. Latent-attention models keep 128 dimensions
per head for queries, keys and values beside 64 rotary ones.
"""

from __future__ import annotations

from jaxrl_sync.sharding.errors import MappingError
from jaxrl_sync.sharding.paths import nearest
from jaxrl_sync.sharding.presets.family import FamilyConfig

MODELS: dict[str, FamilyConfig] = {
    "llama-3.1-8b": FamilyConfig(128_256, 32, 4096, 32, 8, 128, 14_336),
    "llama-3.1-70b": FamilyConfig(128_256, 80, 8192, 64, 8, 128, 28_672),
    "qwen3-0.6b": FamilyConfig(151_936, 28, 1024, 16, 8, 128, 3072, qk_norm=True),
    "qwen3-8b": FamilyConfig(151_936, 36, 4096, 32, 8, 128, 12_288, qk_norm=True),
    "qwen3-30b-a3b": FamilyConfig(
        151_936, 48, 2048, 32, 4, 128, 6144, num_experts=128, d_expert=768, qk_norm=True, num_dense_layers=0
    ),
    "qwen3-235b-a22b": FamilyConfig(
        151_936, 94, 4096, 64, 4, 128, 12_288, num_experts=128, d_expert=1536,
        qk_norm=True, num_dense_layers=0,
    ),
    "deepseek-v3": FamilyConfig(
        129_280, 61, 7168, 128, 128, 128, 18_432, num_dense_layers=3, num_experts=256, d_expert=2048,
        num_shared_experts=1, q_rank=1536, kv_rank=512, rope_dim=64, router_bias=True,
    ),
    "kimi-k2": FamilyConfig(
        163_840, 61, 7168, 64, 64, 128, 18_432, num_dense_layers=1, num_experts=384, d_expert=2048,
        num_shared_experts=1, q_rank=1536, kv_rank=512, rope_dim=64, router_bias=True,
    ),
}  # fmt: skip


def model(name: str) -> FamilyConfig:
    """The shapes of a published model; an unknown name is a `MappingError` with the nearest one."""
    if name not in MODELS:
        raise MappingError(f"unknown model {name!r}{nearest(name, MODELS)}; known: {', '.join(MODELS)}")
    return MODELS[name]
