"""Versions compared on devices give, byte for byte, the frames of those compared on the host."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding

from jaxrl_sync.sharding import Edge, Layout, plan, trace
from jaxrl_sync.transfer.codec.rules import CodingRules
from jaxrl_sync.transfer.delta import ffi
from jaxrl_sync.transfer.delta.buckets import Ladder
from jaxrl_sync.transfer.delta.shards import ShardEncoders
from jaxrl_sync.transfer.exports import copy_of, shards_of
from jaxrl_sync.transfer.lazy import DeviceShards, Reads
from jaxrl_sync.transfer.payload.chain import Chain, Encoded
from jaxrl_sync.transfer.payload.differences import Differences
from jaxrl_sync.transfer.payload.inverse import Inverse
from jaxrl_sync.transfer.payload.settings import PayloadSettings
from jaxrl_sync.transfer.version import Version
from tests.sharding.meshes import P, mesh, random_bits, random_spec
from tests.sharding.programs import program

PLAN = "ab" * 32
NEEDS_FFI = pytest.mark.skipif(not ffi.available(), reason="no FFI kernels in this build")
FORMS = [pytest.param("ffi", marks=NEEDS_FFI), "xla", "pallas"]
# Whether zstd pays is timed: left to choose, two chains may code equal content in different ways.
FEW = CodingRules(zstd="off", whole=False)
RULES = [CodingRules(zstd="off"), CodingRules(positions="rice", values="ulp", zstd="on", whole=False)]
Tree = dict[str, Any]

SHAPES: dict[str, tuple[tuple[int, ...], Any, P]] = {
    "w": ((24, 40), jnp.bfloat16, P("x", "y")),
    "q": ((24, 40), jnp.float8_e4m3fn, P("y")),
    "f": ((12, 20), jnp.float32, P(("x", "y"))),
    "h": ((16, 8), jnp.float16, P(None, "y")),
    "i": ((6, 4, 8), jnp.int8, P("y", "x")),
    "b": ((24,), jnp.bool_, P("x")),
    "kv": ((4, 16), jnp.bfloat16, P("y")),
    "s": ((), jnp.float32, P()),
    "e": ((0, 4), jnp.bfloat16, P()),
    "r": ((300,), jnp.bfloat16, P()),
    "big": ((128, 128), jnp.bfloat16, P("x", "y")),
}


def convert(tree: Tree) -> Tree:
    """Every kind of movement: transposes, a reshape that doesn't nest, flips, broadcasts, stacks, windows."""
    w, i = tree["w"], tree["i"]
    return {
        "same": w,
        "turned": w.T,
        "reshaped": w.reshape(40, 24)[:, ::-1],
        "q": tree["q"].T,
        "f": jnp.flip(tree["f"]),
        "h": tree["h"][::2, 1:],
        "experts": i.transpose(1, 0, 2).reshape(4, 48),
        "mask": jnp.broadcast_to(tree["b"], (3, 24)),
        "kv": jnp.repeat(tree["kv"], 2, axis=0),
        "windows": jnp.take(tree["r"], np.arange(3)[:, None] + np.arange(5)),
        "r": tree["r"],
        "s": tree["s"],
        "e": tree["e"],
        "big": tree["big"].T,
    }


TARGETS: dict[str, P] = {
    "same": P(None, "z"),
    "turned": P("z"),
    "reshaped": P("z"),
    "experts": P("z"),
    "r": P("z"),
}


class Side:
    """A trainer's tree on a mesh, versions of it, and the edge to one target layout."""

    def __init__(self, tree: Tree, convert: Callable[[Tree], Tree], target: Tree) -> None:
        self.tree = tree
        self.correspondence = trace(convert, tree, target)
        made = plan(self.correspondence.export_layout, Layout.of(target), self.correspondence)
        self.edges: tuple[Edge, ...] = ()
        if made.source:  # else all that the target has are constants
            self.edges = made.for_rank(0, side="source").edges

    @property
    def exported(self) -> dict[str, jax.Array]:
        """The export of the tree as it is now, in buffers of its own."""
        found: dict[str, jax.Array] = self.correspondence.export(self.tree)
        return found

    def step(self, density: float, rng: np.random.Generator) -> None:
        """Other bits for about this share of the elements."""
        moved = {}
        for path, leaf in self.tree.items():
            fresh = _bits(rng, leaf.shape, leaf.dtype)
            value = np.where(rng.random(leaf.shape) < density, fresh, np.asarray(leaf)).astype(leaf.dtype)
            moved[path] = jax.device_put(value, leaf.sharding)
        self.tree = moved


def _bits(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> Any:
    if np.dtype(dtype) == np.bool_:
        return rng.integers(0, 2, shape).astype(np.bool_)
    return random_bits(rng, shape, dtype)


def few(tree: Tree) -> Tree:
    """Two tensors, for the implementations that take long to compile."""
    return {"turned": tree["w"].T, "big": tree["big"]}


def small_side(rng: np.random.Generator) -> Side:
    """Two tensors on one device."""
    grid, to = mesh((1,), ("x",)), mesh((2,), ("z",), 4)
    tree = {
        path: jax.device_put(_bits(rng, *SHAPES[path][:2]), NamedSharding(grid, P("x")))
        for path in ("w", "big")
    }
    target = {
        path: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(to, P("z")))
        for path, x in jax.eval_shape(few, tree).items()
    }
    return Side(tree, few, target)


def side(rng: np.random.Generator, first: int = 4, width: int = 2) -> Side:
    """The tree of all dtypes on four devices, its target on others."""
    grid, to = mesh((2, 2), ("x", "y")), mesh((width,), ("z",), first)
    tree = {
        path: jax.device_put(_bits(rng, shape, dtype), NamedSharding(grid, spec))
        for path, (shape, dtype, spec) in SHAPES.items()
    }
    target = {
        path: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(to, TARGETS.get(path, P())))
        for path, x in jax.eval_shape(convert, tree).items()
    }
    return Side(tree, convert, target)


class Pair:
    """One edge's chain that compares on the host, and one that asks the devices."""

    def __init__(
        self, edge: Edge, differences: Differences, rules: CodingRules = RULES[0], history: int = 8
    ) -> None:
        made = PayloadSettings("sparse", rules, history=history)
        self.host, self.device = Chain(PLAN, edge, made), Chain(PLAN, edge, made)
        self.differences = differences
        self.reads = Reads()

    def shards(self, exported: dict[str, jax.Array], version: Version) -> DeviceShards:
        """The shards of a version; other pairs that share the differences share them, too."""
        return DeviceShards(version, exported, self.differences, self.reads)

    def anchor(
        self, exported: dict[str, jax.Array], version: Version, shards: DeviceShards | None = None
    ) -> None:
        """A full copy was sent by both."""
        self.host.anchor(version, shards_of(exported))
        self.device.anchor(version, shards or self.shards(exported, version))

    def frame(
        self, base: Version | None, exported: dict[str, jax.Array], version: Version, shards: Any = None
    ) -> Encoded | None:
        """The frame of both, which must be the same."""
        wanted = self.host.frame(base, version, shards_of(exported))
        found = self.device.frame(base, version, shards or self.shards(exported, version))
        assert (found is None) == (wanted is None), (base, version)
        if found is not None and wanted is not None:
            assert found.data == wanted.data and found.digests == wanted.digests
            assert (found.density, found.coding) == (wanted.density, wanted.coding)
            assert (found.compared, wanted.compared) == ("device", "host")
        for one, other in zip(self.host._steps, self.device._steps, strict=True):
            for a, b in zip(one.entries, other.entries, strict=True):
                assert all(x.dtype == y.dtype and np.array_equal(x, y) for x, y in zip(a, b, strict=True))
        return found


def differences(form: Any = None, history: int = 8, ladder: Ladder | None = None) -> Differences:
    """On virtual CPU devices; Pallas kernels are interpreted."""
    return Differences(ShardEncoders(1, form, ladder, interpret=True), history)


@pytest.mark.invariant(39)
@pytest.mark.parametrize(
    ("form", "rules"),
    [
        pytest.param("ffi", RULES[0], marks=NEEDS_FFI),
        pytest.param("ffi", RULES[1], marks=NEEDS_FFI),
        ("xla", RULES[1]),
        ("pallas", RULES[1]),
    ],
    ids=lambda x: x if isinstance(x, str) else x.positions,
)
def test_frames_are_those_of_the_host_through_skips_and_lineages(form: Any, rules: CodingRules) -> None:
    rng, dice = np.random.default_rng(1), random.Random(1)
    trainer = side(rng) if form == "ffi" else small_side(rng)
    (edge,) = trainer.edges
    pair, frames, lineage, serving = Pair(edge, differences(form), rules, history=3), 0, "a", None
    for number in range(1, 25 if form != "pallas" else 9):
        if dice.random() < 0.08:
            lineage += "a"
        trainer.step(dice.choice([0.0, 0.001, 0.02, 0.1] if form == "ffi" else [0.01, 0.014]), rng)
        version = Version(lineage, number)
        if dice.random() < 0.3:
            continue  # nobody asks for this one
        exported = trainer.exported
        bases = [serving, dice.choice([serving, None, Version("a", 1)])]  # a slow receiver, one that joins
        for base in bases[: dice.randint(1, 2)]:
            if pair.frame(base, exported, version) is None:
                pair.anchor(exported, version)
            else:
                frames += 1
        serving = version
        if dice.random() < 0.5:
            for chain in (pair.host, pair.device):
                chain.confirm("somebody", version)
    assert frames > (8 if form != "pallas" else 2)


@pytest.mark.parametrize("share", [0.3, 1.0])
def test_tensors_that_are_too_dense_are_read_whole_and_only_they(share: float) -> None:
    rng = np.random.default_rng(2)
    trainer = side(rng)
    (edge,) = trainer.edges
    for ladder in (None, Ladder((1 / 256,))):
        pair = Pair(edge, differences(ladder=ladder), FEW)
        pair.anchor(trainer.exported, Version("a", 0))
        before = pair.reads.shards
        for number in range(1, 4):
            trainer.step(0.01 if number == 2 else share, rng)
            frame = pair.frame(Version("a", number - 1), trainer.exported, Version("a", number))
            assert frame is not None
        assert pair.reads.shards > before


def test_the_whole_of_a_section_can_be_sent() -> None:
    rng = np.random.default_rng(3)
    trainer = side(rng)
    (edge,) = trainer.edges
    pair = Pair(edge, differences())
    pair.anchor(trainer.exported, Version("a", 0))
    trainer.step(1.0, rng)
    frame = pair.frame(Version("a", 0), trainer.exported, Version("a", 1))
    assert frame is not None and "all" in frame.coding


@pytest.mark.parametrize("form", FORMS)
def test_no_shard_is_read_in_the_steady_state(form: Any) -> None:
    rng = np.random.default_rng(4)
    trainer = side(rng) if form == "ffi" else small_side(rng)
    (edge,) = trainer.edges
    pair = Pair(edge, differences(form), FEW)
    pair.anchor(trainer.exported, Version("a", 0))
    read = pair.reads.shards
    used = {(c.source_device, c.source_path) for c in edge.copies}
    assert read == len(used)
    if form == "ffi":
        assert read < len(shards_of(trainer.exported))  # of replicas only what the edge reads
    for number in range(1, 5):
        trainer.step(0.02, rng)
        assert pair.frame(Version("a", number - 1), trainer.exported, Version("a", number)) is not None
    assert pair.reads.shards == read and pair.device.baseline_bytes == 0
    assert pair.differences.compares == 4


def test_all_layouts_and_replicas_share_one_comparison_per_version() -> None:
    rng = np.random.default_rng(5)
    trainer, shared = side(rng), differences()
    pairs = [Pair(side(rng, 4, 4).edges[0], shared), Pair(side(rng, 6).edges[0], shared)]
    for number in range(8):
        trainer.step(0.01, rng)
        version, exported = Version("a", number), trainer.exported
        shards = pairs[0].shards(exported, version)
        for pair, every in zip(pairs, (1, 3), strict=True):
            if number == 0:
                pair.anchor(exported, version, shards)
            elif number % every == 0:  # one of them skips versions that the other one asks for
                for _ in range(16):
                    assert pair.frame(Version("a", number - every), exported, version, shards) is not None
    assert shared.compares == 7
    assert [pair.device.encoded for pair in pairs] == [7, 2]
    for pair in pairs:
        pair.device.close()
    assert shared.head is None and shared.step_bytes == 0  # who needs nothing keeps nothing alive


def test_who_lags_too_far_behind_gets_an_anchor_and_then_frames_again() -> None:
    rng = np.random.default_rng(6)
    trainer, shared = side(rng), differences(history=2)
    fast, slow = (Pair(trainer.edges[0], shared, FEW) for _ in range(2))
    versions = [Version("a", n) for n in range(8)]
    for pair in (fast, slow):
        pair.anchor(trainer.exported, versions[0])
    for before, after in zip(versions[:5], versions[1:6], strict=True):
        trainer.step(0.01, rng)
        assert fast.frame(before, trainer.exported, after) is not None
    exported = trainer.exported
    assert slow.device.frame(versions[0], versions[5], slow.shards(exported, versions[5])) is None
    slow.anchor(exported, versions[5])
    slow.host = Chain(PLAN, trainer.edges[0], PayloadSettings("sparse", FEW))
    slow.host.anchor(versions[5], shards_of(exported))
    trainer.step(0.01, rng)
    for pair in (fast, slow):
        assert pair.frame(versions[5], trainer.exported, versions[6]) is not None


def test_a_layout_that_joins_late_is_compared_from_its_anchor_on() -> None:
    rng = np.random.default_rng(7)
    trainer, shared = side(rng), differences()
    first, late = Pair(trainer.edges[0], shared), Pair(side(rng, 4, 4).edges[0], shared)
    first.anchor(trainer.exported, Version("a", 0))
    for number in range(1, 5):
        trainer.step(0.01, rng)
        version, exported = Version("a", number), trainer.exported
        if number == 2:
            late.anchor(exported, version)  # the comparison that this version needs is made for the first one
        for pair in (first, late) if number > 2 else (first,):
            assert pair.frame(Version("a", number - 1), exported, version) is not None
    assert shared.compares == 4


def test_copies_in_host_memory_take_the_place_of_an_export() -> None:
    rng = np.random.default_rng(8)
    trainer = side(rng)
    chain = Chain(PLAN, trainer.edges[0], PayloadSettings("sparse", FEW))
    shared, reads = differences(), Reads()

    def on_devices(version: Version) -> DeviceShards:
        return DeviceShards(version, trainer.exported, shared, reads)

    chain.anchor(Version("a", 0), on_devices(Version("a", 0)))
    trainer.step(0.01, rng)
    offloaded = copy_of(shards_of(trainer.exported))
    assert chain.frame(Version("a", 0), Version("a", 1), offloaded) is None
    chain.anchor(Version("a", 1), offloaded)
    assert chain.baseline_bytes == trainer.edges[0].total_bytes and shared.head is None
    trainer.step(0.01, rng)
    wanted = Chain(PLAN, trainer.edges[0], PayloadSettings("sparse", FEW))
    wanted.anchor(Version("a", 1), offloaded)
    expected = wanted.frame(Version("a", 1), Version("a", 2), shards_of(trainer.exported))
    found = chain.frame(Version("a", 1), Version("a", 2), on_devices(Version("a", 2)))
    assert found is not None and expected is not None and found.data == expected.data
    assert found.compared == "host" and chain.baseline_bytes == 0 and shared.head == Version("a", 2)
    read = reads.shards
    trainer.step(0.01, rng)
    expected = wanted.frame(Version("a", 2), Version("a", 3), shards_of(trainer.exported))
    found = chain.frame(Version("a", 2), Version("a", 3), on_devices(Version("a", 3)))
    assert found is not None and expected is not None and found.data == expected.data
    assert found.compared == "device" and reads.shards == read  # no shard is read any more


@pytest.mark.invariant(39)
def test_a_comparison_that_came_to_nothing_asks_for_an_anchor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The devices are a version ahead of the chain then: its next step would leave that version out."""
    rng = np.random.default_rng(10)
    trainer = side(rng)
    pair = Pair(trainer.edges[0], differences(), FEW)
    pair.anchor(trainer.exported, Version("a", 0))

    def full(*_: Any) -> Any:
        raise MemoryError

    for number in range(1, 5):
        trainer.step(0.02, rng)
        exported, base, version = trainer.exported, Version("a", number - 1), Version("a", number)
        if number == 1:
            with monkeypatch.context() as patched, pytest.raises(MemoryError):
                patched.setattr(Inverse, "entries", full)
                pair.device.frame(base, version, pair.shards(exported, version))
        elif number == 2:
            base = Version("a", 0)  # what the receiver still has
            assert pair.device.frame(base, version, pair.shards(exported, version)) is None
            pair.device.anchor(version, pair.shards(exported, version))
            pair.host = Chain(PLAN, trainer.edges[0], PayloadSettings("sparse", FEW))
            pair.host.anchor(version, shards_of(exported))
        else:
            assert pair.frame(base, exported, version) is not None


def test_a_device_that_can_not_compare_leaves_it_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    from jaxrl_sync.transfer.delta.encode import Encoder

    rng = np.random.default_rng(9)
    trainer = side(rng)
    pair = Pair(trainer.edges[0], differences(), FEW)
    pair.anchor(trainer.exported, Version("a", 0))

    def full(*_: Any) -> Any:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    for number, broken in enumerate((True, False, True), 1):
        trainer.step(0.02, rng)
        with monkeypatch.context() as patched:
            if broken:
                patched.setattr(Encoder, "start", full)
            assert pair.frame(Version("a", number - 1), trainer.exported, Version("a", number)) is not None


def check_program(number: int, form: Any = None) -> None:
    """Three versions of a random conversion between random meshes."""
    convert, shapes = program(number)
    rng = np.random.default_rng(number)
    grids = [((2, 2), ("x", "y")), ((4,), ("x",)), ((1, 3), ("x", "y")), ((2,), ("x",))]
    on, to = (mesh(*grids[int(rng.integers(0, 4))], first=first) for first in (0, 4))
    dtype = str(rng.choice(["bfloat16", "float32", "int8", "float64"]))
    with jax.enable_x64(dtype == "float64"):
        tree = {
            k: jax.device_put(random_bits(rng, s, dtype), NamedSharding(on, random_spec(rng, s, on)))
            for k, s in shapes.items()
        }
        target = {
            k: jax.ShapeDtypeStruct(
                x.shape, x.dtype, sharding=NamedSharding(to, random_spec(rng, x.shape, to))
            )
            for k, x in jax.eval_shape(convert, tree).items()
        }
        trainer = Side(tree, convert, target)
        for edge in trainer.edges:
            pair = Pair(edge, differences(form), RULES[number % 2])
            pair.anchor(trainer.exported, Version("a", 0))
            for version in range(1, 4):
                trainer.step([0.05, 0.6, 0.0][version - 1], rng)
                assert (
                    pair.frame(Version("a", version - 1), trainer.exported, Version("a", version)) is not None
                )


QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large]


@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=QUIET)
@given(st.integers(0, (1 << 32) - 1))
def test_random_conversions_between_random_meshes(number: int) -> None:
    check_program(number)


@pytest.mark.slow
def test_more_random_conversions() -> None:
    for number in range(24):
        check_program(number, "xla" if number % 6 == 0 else None)
