"""Nested programs that are called again must give what following each call anew gives."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_sync.sharding import trace
from jaxrl_sync.sharding.presets import family
from tests.sharding.probe import agreed, ids_of

Tree = dict[str, Any]

SMALL = {
    "dense": family.FamilyConfig(16, 3, 8, 4, 2, 4, 12, qk_norm=True),
    "moe": family.FamilyConfig(16, 4, 8, 4, 2, 4, 12, num_dense_layers=1, num_experts=4, d_expert=6,
                               num_shared_experts=1, router_bias=True),
    "mla": family.FamilyConfig(16, 3, 8, 4, 4, 4, 12, num_dense_layers=1, num_experts=2, d_expert=6, q_rank=6,
                               kv_rank=4, rope_dim=2),
}  # fmt: skip


def _flat(convert: Any) -> Any:
    """The conversion over flat dictionaries of paths, as the probe wants it."""
    from jaxrl_sync.sharding.paths import leaves_by_path, nested

    return lambda t: leaves_by_path(convert(nested(t)))


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("per_expert", [True, False])
def test_families_agree_with_the_probe_with_and_without_jitted_layers(name: str, per_expert: bool) -> None:
    cfg = SMALL[name]
    ids = ids_of(family.trainer_shapes(cfg))
    shapes = {k: jax.ShapeDtypeStruct(v.shape, v.dtype) for k, v in ids.items()}
    digests = set()
    for jit_layers in (True, False):
        convert = _flat(functools.partial(family.convert, cfg=cfg, dtype=jnp.int32, per_expert=per_expert,
                                          jit_layers=jit_layers))  # fmt: skip
        corr = trace(convert, shapes)
        digests.add(corr.digest)
        if jit_layers:
            agreed(corr, convert, ids)
    assert len(digests) == 1


def test_repeated_calls_with_computed_and_constant_parts_stay_apart() -> None:
    @jax.jit
    def layer(w: Any) -> Any:
        return {"w": w.T.astype(jnp.bfloat16), "n": w[0] + 1, "c": jnp.arange(3)}

    def convert(t: Tree) -> Tree:
        return {str(i): layer(t["w"][i]) for i in range(4)}

    params = {"w": jnp.asarray(np.random.default_rng(0).standard_normal((4, 3, 5)), jnp.float32)}
    corr = trace(convert, params)
    assert len([leaf for leaf in corr.leaves if leaf.kind == "computed"]) == 4
    exported = corr.export(params)
    for i in range(4):
        name = corr.leaves[corr.tensors[f"{i}/n"].fragments[0].source].name
        assert np.array_equal(exported[name], np.asarray(params["w"][i, 0] + 1))
        assert corr.kind_of(f"{i}/c") == "constant"
        assert corr.kind_of(f"{i}/w") == "cast"


def test_calls_whose_arguments_are_fragmented_are_followed_anew() -> None:
    @jax.jit
    def turn(w: Any) -> Any:
        return w.T

    def convert(t: Tree) -> Tree:
        both = jnp.concatenate([t["a"], t["b"]])
        return {"0": turn(t["a"]), "1": turn(t["b"]), "2": turn(both), "3": turn(both[::-1])}

    ids = ids_of({"a": (2, 3), "b": (2, 3)})
    agreed(trace(convert, {k: jax.ShapeDtypeStruct(v.shape, v.dtype) for k, v in ids.items()}), convert, ids)
