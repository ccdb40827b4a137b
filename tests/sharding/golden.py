"""Digests of layouts, correspondences and plans, as JSON: what every Python, numpy and jax must agree on.

Run as a program it prints those of the interpreter that runs it: python golden.py [--large].
"""

from __future__ import annotations

import functools
import json
import sys
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxrl_sync.sharding import Layout, Policy, Topology, plan, trace
from jaxrl_sync.sharding.cli import paper_source, paper_target
from jaxrl_sync.sharding.paper import PaperMesh, layout
from jaxrl_sync.sharding.presets import family
from jaxrl_sync.sharding.presets.catalog import model

SMALL = family.FamilyConfig(64, 3, 64, 4, 2, 16, 96, num_dense_layers=1, num_experts=8, d_expert=32)


def convert(tree: Any) -> Any:
    """Movement of every kind, a cast, a constant, arithmetic."""
    w, order = tree["w"], np.random.default_rng(0).permutation(8)
    return {
        "turned": jnp.pad(w.T, ((0, 2), (0, 0))).astype(jnp.bfloat16),
        "ordered": w[order].reshape(3, 16),
        "twice": jnp.repeat(jnp.flip(w, 1), 2, axis=0),
        "sum": w[0] + tree["n"],
    }


def small() -> dict[str, str]:
    """Name -> digest of small cases; seconds."""
    on, to = PaperMesh.parse("fsdp=4", 2), PaperMesh.parse("tp=2", 2)
    source = layout({"w": on.placement((8, 6), ("fsdp",)), "n": on.placement((6,), ())}, "float32")
    corr = trace(convert, source)
    target = Layout(
        {
            p: layout({p: to.placement(t.shape, ("tp" if t.shape[0] % 2 == 0 else None,))}, t.dtype)[p]
            for p, t in corr.tensors.items()
        }
    )
    found = {"layout": source.digest, "target": target.digest, "correspondence": corr.digest}
    for name, topology, policy in (
        ("plan", Topology(), Policy()),
        ("plan by node", Topology(), Policy("node")),
        ("plan of rates", Topology(source_rates={0: 1, 1: 50}, rate=1), Policy(split_bytes=16)),
    ):
        found[name] = plan(source, target, corr, topology, policy).digest
    return found | {"experts": _family(SMALL, "fsdp=16", "ep=4,tp=2")}


def _family(cfg: family.FamilyConfig, source: str, target: str) -> str:
    given = paper_source(cfg, PaperMesh.parse(source))
    corr = trace(functools.partial(family.convert, cfg=cfg), given)
    return plan(corr.export_layout_of(given), paper_target(cfg, PaperMesh.parse(target), corr), corr).digest


def large() -> dict[str, str]:
    """Published models at scale; half a minute."""
    return {
        "qwen3-30b-a3b": _family(model("qwen3-30b-a3b"), "fsdp=64", "tp=4,ep=8"),
        "kimi-k2": _family(model("kimi-k2"), "fsdp=256", "tp=8,ep=16"),
    }


if __name__ == "__main__":
    print(json.dumps(small() | (large() if "--large" in sys.argv else {})))
