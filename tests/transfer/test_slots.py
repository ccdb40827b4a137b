"""What is made once per slot: memory, arrays, mappings; what a version costs then, counted and named."""

from __future__ import annotations

import functools
import gc
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_sync.sharding import Edge, SlotLayout
from jaxrl_sync.sharding.native import kernels
from jaxrl_sync.transfer import Version
from jaxrl_sync.transfer.errors import MismatchError, TransferError
from jaxrl_sync.transfer.memory import PrivateMemory, SharedMemory
from jaxrl_sync.transfer.slots import Slot, Target
from jaxrl_sync.transfer.transports.shm import ShmSender
from tests.transfer.models import (
    Rig,
    convert,
    engine_target,
    memory_of,
    mesh,
    same_bits,
    segments,
    take,
    trainer_params,
    until,
)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_slots_arrays_and_mappings_are_made_once_and_nothing_is_compiled_again(
    rig: Rig, token_file: Path, transport: str
) -> None:
    publisher = rig.publisher(trainer_params(), transport)
    subscriber = rig.subscriber(transport=transport)
    decode: Any = jax.jit(lambda t: sum(jnp.sum(x.astype(jnp.float32)) for x in jax.tree.leaves(t)))
    trees, names, mapped = [], set(), set()
    for number in range(6):
        params = trainer_params(seed=number)
        publisher.publish(params, Version("a", number))
        trees.append(take(subscriber)[1])
        assert same_bits(trees[-1], convert(params))
        decode(trees[-1]).block_until_ready()
        names.add(tuple(segments(token_file)))
        (link,) = publisher._listening._links.values()
        if transport == "shm":
            mapped |= {id(memory) for memory, _ in link._sender._open.values()}  # type: ignore[union-attr]
    assert decode._cache_size() == 1
    memory = [memory_of(tree) for tree in trees]
    assert memory[:2] == memory[2:4] == memory[4:] and not memory[0] & memory[1]
    assert len(names) == 1 and len(mapped) == (2 if transport == "shm" else 0)


def test_a_closed_slot_gives_its_memory_back_at_once_unless_its_tree_is_held() -> None:
    target = Target.of(engine_target(), 0)
    gc.disable()  # what is left to the collector stays for as long as it likes
    try:
        slots = [Slot(target, PrivateMemory(target.slot.total_bytes)) for _ in range(2)]
        jax.block_until_ready(slots[0].tree())
        held = slots[1].tree()
        for slot in slots:
            slot.close()
        assert [slot.memory._map.closed for slot in slots] == [True, False]
        assert not any(np.asarray(leaf.addressable_shards[0].data).any() for leaf in jax.tree.leaves(held))
    finally:
        gc.enable()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_report_counts_how_each_byte_moved(rig: Rig, transport: str) -> None:
    publisher = rig.publisher(trainer_params(), transport)
    publisher.publish(trainer_params(), Version("a", 0))
    update = rig.subscriber(transport=transport).poll(60)
    assert update is not None
    report = update.prepare()
    moved = dict(report.moved)
    assert moved.pop("numpy", 0) == (0 if kernels() is not None else sum(moved.values()))
    if transport == "shm":
        assert moved == {"copied": report.nbytes}  # one copy in all, by the sender
    else:
        assert moved["direct"] + moved["packed"] == moved["read"] + moved["scattered"] == report.nbytes


def test_a_slot_of_another_size_is_refused_with_both_sizes() -> None:
    layout = SlotLayout((), 8192, {})
    sender = ShmSender(Edge(0, 0, ()), layout, "slotstest", 1)
    memory = SharedMemory("slotstest", 4096)
    try:
        with pytest.raises(TransferError, match="of 4096 bytes, expected 8192"):
            sender.map(memory.describe())
        with pytest.raises(TransferError, match="has 8192 bytes .*, expected 12288"):  # header and slot
            sender.map({**memory.describe(), "nbytes": 8192})
    finally:
        sender.close()
        memory.close()


@pytest.mark.parametrize("told", [{"segment": 3}, {"segment": {}, "segments": 7}, {"segments": []}])
def test_a_word_about_segments_that_says_nothing_is_refused(told: dict[str, Any]) -> None:
    """A number of segments ended the link with a TypeError and its traceback."""
    sender = ShmSender(Edge(0, 0, ()), SlotLayout((), 8192, {}), "slotstest", 1)
    with pytest.raises(TransferError, match="expected (an object|a list)"):
        sender.send(told, {}, 0.0)


def looked_up(publisher: Any) -> None:
    """Wait until no thread will take up the shards of a version that has been installed."""
    for pool in (publisher._finder, publisher._encoder):
        pool.submit(int).result(60)


def unread(held: Any) -> bool:
    """Whether no thread has the shards of a version any more: beside what holds them only this loop."""
    return [sys.getrefcount(shards) for shards in held._shards.values()] == [3]


def test_exports_lie_in_the_same_buffers_again_unless_a_transfer_still_reads_them(rig: Rig) -> None:
    publisher, subscriber = rig.publisher(trainer_params()), rig.subscriber()

    def publish(number: int) -> tuple[set[int], Any]:
        publisher.publish(trainer_params(seed=number), Version("a", number))
        (held,) = publisher._retained._held
        arrays = [x for kind in held.exports.values() for x in kind.values()]
        return {s.data.unsafe_buffer_pointer() for x in arrays for s in x.addressable_shards}, held

    places = []
    for number in range(6):
        found, held = publish(number)
        places.append(found)
        assert same_bits(take(subscriber)[1], convert(trainer_params(seed=number)))
        looked_up(publisher)
        until(functools.partial(unread, held))
    assert places[5] == places[3] and places[4] == places[2] and places[4] != places[5]
    (kind,) = publisher._kinds
    _, held = publish(6)
    read = held.shards(kind, publisher._kinds[kind])
    before = {key: value.copy() for key, value in read.items()}
    for number in (7, 8):
        publish(number)
    assert all((read[key].view("uint8") == before[key].view("uint8")).all() for key in read)


def test_a_target_that_does_not_divide_over_its_devices_is_named(rig: Rig) -> None:
    halves = jax.sharding.NamedSharding(mesh((2,), ("tp",), 4), jax.sharding.PartitionSpec("tp"))
    uneven = jax.ShapeDtypeStruct((3, 4), jnp.float32, sharding=halves)
    with pytest.raises(MismatchError, match=r"target leaf 'w/odd': .*axis 0 is partitioned 2 times"):
        rig.subscriber(target={"w": {"odd": uneven}})


def test_a_slot_that_jax_makes_no_arrays_over_leaves_no_memory(
    rig: Rig, token_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its segment stayed until the process ended, beside each of those that came after it."""

    def fail(*_: Any) -> Any:
        raise RuntimeError("RESOURCE_EXHAUSTED: made up")

    monkeypatch.setattr("jaxrl_sync.transfer.slots._assemble", fail)
    with pytest.raises(RuntimeError, match="made up"):
        rig.subscriber()
    assert segments(token_file) == []
