"""Preflight: what members of a model tell is compared before the first byte, and each difference named."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxrl_sync.sharding import Edge, Layout
from jaxrl_sync.sharding.manifest import Manifest
from jaxrl_sync.transfer.config import PublisherConfig, SubscriberConfig
from jaxrl_sync.transfer.errors import MismatchError
from jaxrl_sync.transfer.hub import machine, preflight
from jaxrl_sync.transfer.hub.state import HubState, MemberKey
from jaxrl_sync.transfer.pairing import compare_layouts
from jaxrl_sync.transfer.payload.comparing import Comparing
from jaxrl_sync.transfer.payload.settings import PayloadSettings
from jaxrl_sync.transfer.registration import edges_info, publisher_memory
from jaxrl_sync.transfer.version import Version
from tests.transfer.models import CONFIG, Rig, engine_target, take, trainer_params, until

PUB = {"model": "policy", "source": "s", "source_digest": "S"}
FRAMES = {"baselines": "host"}
EDGES = {"edges": {"0": 4 << 20}, "rings": {"0": 100}}
SUB = {"model": "policy", "target": "t", "correspondence": "c", "source_digest": "S", "plan": "p"}


def state_of(*members: tuple[str, str, int, int, dict[str, Any]]) -> HubState:
    state = HubState("e")
    for role, name, rank, size, info in members:
        event = machine.Register(MemberKey(role, name, rank), size, "i", info, 10.0)
        state, outcome = machine.step(state, event, 0.0)
        assert isinstance(outcome, machine.Done)
    return state


def found(*members: tuple[str, str, int, int, dict[str, Any]], **blobs: bytes) -> list[str]:
    seen = preflight.compare(state_of(*members), "policy", blobs)
    assert seen["ok"] == (not seen["differences"] and not seen["unknown"])
    return [str(preflight.Difference(**row)) for row in seen["differences"]]


def test_what_fits_is_ok() -> None:
    members = ("publisher", "trainer", 0, 1, PUB), ("subscriber", "x", 0, 1, SUB)
    assert preflight.compare(state_of(*members), "policy", {}) == {
        "ok": True,
        "differences": [],
        "unknown": [],
        "publishers": ["trainer"],
        "engines": ["x"],
    }


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        ([("subscriber", "x", 0, 1, SUB)], "model 'policy': publishers is none"),
        (
            [("publisher", "trainer", 0, 2, PUB)],
            "publisher trainer: ranks registered is [0], expected all of",
        ),
        (
            [("publisher", "trainer", 0, 1, PUB), ("subscriber", "x", 0, 1, SUB | {"source_digest": "old"})],
            "subscriber x.0: source layout that it planned with is old, expected S",
        ),
        (
            [("publisher", "trainer", 0, 1, PUB), ("subscriber", "x", 0, 1, SUB | {"source_digest": [1]})],
            "subscriber x.0: source layout that it planned with is [1], expected S",
        ),
        (
            [
                ("publisher", "trainer", 0, 1, PUB),
                ("subscriber", "x", 0, 1, SUB),
                ("subscriber", "y", 0, 1, SUB | {"plan": "other"}),
            ],
            "subscriber y.0: plan digest is other, expected p as subscriber x.0 has",
        ),
        (
            [
                ("publisher", "trainer", 0, 1, PUB),
                ("subscriber", "x", 0, 2, SUB),
                ("subscriber", "x", 1, 2, SUB | {"correspondence": "d", "plan": "q"}),
            ],
            "subscriber x.1: conversion (its correspondence) is d, expected c as subscriber x.0 has",
        ),
        (
            [
                ("publisher", "trainer", 0, 1, PUB),
                ("subscriber", "x", 0, 1, SUB | {"slot_bytes": 300, "ring_bytes": 5, "free_bytes": 304}),
            ],
            "subscriber x.0: memory is 304 bytes free, expected 305 (300 slot + 5 ring)",
        ),
        (
            [("publisher", "trainer", 0, 1, PUB | {"export_bytes": 10, "free_bytes": 9})],
            "publisher trainer.0: memory is 9 bytes free, expected 10 (10 export)",
        ),
        (  # two equal replicas share a baseline, each link has a ring
            [
                ("publisher", "trainer", 0, 1, PUB | FRAMES | {"export_bytes": 10, "free_bytes": 6 << 20}),
                ("subscriber", "x", 0, 1, SUB | EDGES),
                ("subscriber", "y", 0, 1, SUB | EDGES),
            ],
            f"publisher trainer.0: memory at most is {6 << 20} bytes free, expected {10 + 200 + (6 << 20)} "
            f"(10 export + 200 ring + {4 << 20} baseline + {2 << 20} step)",
        ),
        (
            [
                ("publisher", "trainer", 0, 1, PUB | FRAMES),
                ("subscriber", "x", 0, 1, SUB | EDGES | {"slot_bytes": 7, "free_bytes": 9}),
            ],
            f"subscriber x.0: memory is 9 bytes free, expected {107 + (1 << 20)} "
            f"(7 slot + 100 ring + {1 << 20} step)",
        ),
        (  # enough for what is sure
            [
                ("publisher", "trainer", 0, 1, PUB | FRAMES),
                ("subscriber", "x", 0, 1, SUB | EDGES | {"slot_bytes": 7, "free_bytes": 107}),
            ],
            f"subscriber x.0: memory at most is 107 bytes free, expected {107 + (1 << 20)} "
            f"(7 slot + 100 ring + {1 << 20} step)",
        ),
        (  # a relay may hand on the frames by which each of its slots was filled
            [
                ("publisher", "trainer", 0, 1, PUB | FRAMES),
                (
                    "subscriber",
                    "x",
                    0,
                    1,
                    SUB | EDGES | {"slot_bytes": 16 << 20, "slots": 2, "relay": True, "free_bytes": 9},
                ),
            ],
            f"subscriber x.0: memory is 9 bytes free, expected {100 + (21 << 20)} "
            f"({16 << 20} slot + 100 ring + {1 << 20} step + {4 << 20} frame)",
        ),
    ],
)
def test_each_difference_is_named(members: Any, expected: str) -> None:
    assert [line for line in found(*members) if line.startswith(expected)], found(*members)


def test_what_edges_take_counts_only_where_it_is_sure_and_told_in_earnest() -> None:
    tight = PUB | {"export_bytes": 1, "free_bytes": 1}
    engine = ("subscriber", "x", 0, 1, SUB | {"edges": EDGES["edges"]})
    assert found(("publisher", "trainer", 0, 1, tight), engine) == []
    assert found(("publisher", "trainer", 0, 1, tight | {"baselines": "device"}), engine) == []
    for nonsense in ([1], {"x": 3}, {"0": -1}, {"0": True}, {"0": "9"}, {"-1": 5}, {"9" * 5000: 5}, 7, None):
        liar = ("subscriber", "x", 0, 1, SUB | {"edges": nonsense, "rings": nonsense})
        assert found(("publisher", "trainer", 0, 1, tight | FRAMES), liar) == []


@pytest.mark.parametrize(
    ("transport", "kind", "baselines"),
    [
        ("tcp", "sparse", "host"),
        ("auto", "bitmap", "host"),
        ("verbs", "auto", "host"),
        ("auto", "auto", ""),
        ("shm", "auto", ""),
        ("tcp", "full", ""),
    ],
)
def test_a_publisher_tells_of_baselines_that_it_will_surely_keep(
    transport: Any, kind: Any, baselines: str
) -> None:
    config = PublisherConfig(transport=transport, payload=PayloadSettings(kind))
    told = publisher_memory(config, 10, "host")
    assert (told["baselines"], told["export_bytes"]) == (baselines, 10)
    assert publisher_memory(config, 10, "device")["baselines"] == ("device" if baselines else "")


@pytest.mark.parametrize(
    ("platform", "kind", "compare", "count"),
    [
        ("cpu", "full", "auto", 3),
        ("cpu", "sparse", "auto", 3),
        ("cpu", "sparse", "device", 4),
        ("gpu", "sparse", "auto", 1),  # they stay on the GPU
        ("gpu", "sparse", "host", 3),
        ("gpu", "full", "auto", 3),
    ],
)
def test_exports_are_told_where_they_lie_in_host_memory(
    platform: str, kind: Any, compare: Any, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax, "local_devices", lambda: [SimpleNamespace(id=0, platform=platform)])
    settings = PayloadSettings(kind, compare=compare)
    assert Comparing(settings, [0], 1).host_exports(keep_versions=2) == count


def test_the_baselines_and_rings_that_are_told_are_those_that_are_made(rig: Rig) -> None:
    """What preflight counts for a frame's edges is what the publisher then holds."""
    params = trainer_params()
    publisher = rig.publisher(params, "tcp", payload=PayloadSettings("sparse"))
    subscriber, client = rig.subscriber("x", "tcp"), rig.hub_client()
    for number in range(2):
        publisher.publish(params, Version("a", number))
        take(subscriber)
    (engine,) = client.members("subscriber")
    (member,) = client.members("publisher")
    assert member.info["baselines"] == "host" and engine.info["rings"] == {}
    assert sum(engine.info["edges"].values()) == publisher.stats()["baseline_bytes"] > 0
    verbs = edges_info(SubscriberConfig(transport="verbs"), [Edge(0, 0, ())])
    assert verbs == {"edges": {"0": 0}, "rings": {"0": 1 << 20}}
    state = state_of(
        ("publisher", "trainer", 0, 1, {**member.info, "free_bytes": 0}),
        ("subscriber", "x", 0, 1, engine.info),
    )
    (row,) = preflight.compare(state, "policy", {})["differences"]
    assert f"{sum(engine.info['edges'].values())} baseline" in row["expected"]


def test_layouts_are_compared_by_tensor() -> None:
    params = trainer_params()
    wide = trainer_params(config=dataclasses.replace(CONFIG, d_ff=128))
    short = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    short.pop("embed")
    blobs = {name: Layout.of(tree).to_bytes() for name, tree in (("s", params), ("w", wide), ("h", short))}
    two = [("publisher", "trainer", rank, 2, PUB | {"source": s}) for rank, s in ((0, "s"), (1, "w"))]
    lines = found(*two, **blobs)
    assert lines and all("source layout" in x and "as publisher trainer.0 has it" in x for x in lines)
    assert any("[2, 32, 128], expected float32[2, 32, 64]" in line for line in lines)
    worlds = [("publisher", n, 0, 1, PUB | {"source": s}) for n, s in (("a", "s"), ("b", "h"))]
    lines = found(*worlds, **blobs)
    assert any("is missing" in line for line in lines) and any("bfloat16" in line for line in lines)
    assert "unreadable" in found(*two, s=blobs["s"], w=b"nonsense")[0]


def test_a_manifest_says_what_the_layout_says() -> None:
    layout, other = Layout.of(trainer_params()), Layout.of(engine_target())
    manifest = Manifest.parse(layout.to_bytes())
    assert {p: (d, manifest.placements[n][0]) for p, (d, n) in manifest.tensors.items()} == {
        path: (tensor.dtype, tensor.shape) for path, tensor in layout.items()
    }
    assert Layout.from_bytes(layout.to_bytes()).digest == layout.digest
    lines = manifest.differences(Manifest.parse(other.to_bytes()))
    with pytest.raises(MismatchError) as error:
        compare_layouts(layout, other, "it")
    assert "; ".join(lines[:5]) in str(error.value)  # the same words with and without jax


def test_real_members_fit_and_one_that_does_not_is_named(rig: Rig) -> None:
    params = trainer_params()
    client = rig.hub_client()
    assert client.preflight()["differences"][0]["what"] == "publishers"
    rig.publisher(params)
    rig.subscriber("x")
    rig.subscriber("y", target=engine_target(6))
    until(lambda: client.preflight()["unknown"] == [])
    assert client.preflight()["ok"], client.preflight()
    liar = {"model": "policy", "target": "?", "correspondence": "?", "plan": "?", "source_digest": "?"}
    client.register("subscriber", "liar", info=liar)
    seen = client.preflight()
    assert not seen["ok"] and {row["who"] for row in seen["differences"]} == {"subscriber liar.0"}
