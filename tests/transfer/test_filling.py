"""Devices that don't alias the slot: its content goes there in groups, only what changed, bit for bit.

CPU devices stand in: where they are told not to alias, a version is put on them through ``pinned_host``.
"""

from __future__ import annotations

import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_sync.sharding.paths import leaves_by_path
from jaxrl_sync.transfer import Version, filling
from jaxrl_sync.transfer import slots as slots_module
from jaxrl_sync.transfer.codec.rules import CodingRules
from jaxrl_sync.transfer.errors import MismatchError
from jaxrl_sync.transfer.memory import PrivateMemory
from jaxrl_sync.transfer.payload.settings import PayloadSettings
from jaxrl_sync.transfer.slots import Slot, Target
from tests.sharding.meshes import random_bits
from tests.transfer.models import Rig, convert, engine_target, same_bits, trainer_params

DTYPES = ["bfloat16", "float32", "float16", "float8_e4m3fn", "int8", "bool", "uint16"]


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices don't look at the slot's memory."""
    monkeypatch.setattr(slots_module, "_aliases", lambda arrays, views: False)


def views_of(rng: np.random.Generator, sizes: list[int]) -> dict[tuple[int, str], Any]:
    devices = [d.id for d in jax.devices()[:3]]
    made = {}
    for number, size in enumerate(sizes):
        dtype = DTYPES[number % len(DTYPES)]
        made[devices[number % 3], f"t{number}"] = random_bits(rng, (size,), dtype)
    return made


def test_groups_hold_whole_shards_and_one_that_is_larger_stands_alone() -> None:
    views = {(0, f"t{n}"): np.zeros(size, np.uint8) for n, size in enumerate([3, 4, 0, 9, 2, 6, 1])}
    groups = filling.groups_of(views, views, group_bytes=8)
    assert [[key[1] for key in group] for group in groups] == [
        ["t0", "t1", "t2"],
        ["t3"],
        ["t4", "t5"],
        ["t6"],
    ]
    assert filling.groups_of(views, []) == []


@pytest.mark.parametrize("pinned", [True, False])
def test_what_lies_on_the_devices_is_the_slot_bit_for_bit_and_not_its_memory(
    monkeypatch: pytest.MonkeyPatch, pinned: bool
) -> None:
    if not pinned:
        monkeypatch.setattr(filling, "_has_pinned", lambda device: False)
    views = views_of(np.random.default_rng(0), [64, 1000, 0, 7, 333, 4096, 1, 5000])
    arrays: dict[tuple[int, str], jax.Array] = {}
    moved = filling.fill(views, views, arrays, group_bytes=2048)
    assert moved == sum(v.nbytes for v in views.values()) and arrays.keys() == views.keys()
    before = {key: view.copy() for key, view in views.items()}
    for view in views.values():
        view.view(np.uint8)[...] ^= 0xFF if view.dtype != np.bool_ else 1
    for key, array in arrays.items():
        assert {d.id for d in array.devices()} == {key[0]} and array.sharding.memory_kind == "device"
        assert np.array_equal(np.asarray(array).view(np.uint8), before[key].view(np.uint8)), key


def test_two_groups_are_under_way_and_old_arrays_are_given_up_before_their_new_ones_are_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is on devices beside the arrays themselves doesn't grow with the version."""
    views = views_of(np.random.default_rng(1), [1000] * 12)
    arrays: dict[tuple[int, str], jax.Array] = {}
    filling.fill(views, views, arrays)
    old = {key: weakref.ref(array) for key, array in arrays.items()}
    real_put, real_block = filling._put, jax.block_until_ready
    puts, waited, alive, flying = list[int](), list[int](), list[int](), list[int]()

    def put(values: Any, devices: Any) -> Any:
        puts.append(len(values))
        flying.append(sum(puts) - sum(waited))
        alive.append(sum(ref() is not None for ref in old.values()))
        return real_put(values, devices)

    def block(value: Any) -> Any:
        waited.append(len(jax.tree.leaves(value)))
        return real_block(value)

    monkeypatch.setattr(filling, "_put", put)
    monkeypatch.setattr(jax, "block_until_ready", block)
    filling.fill(views, views, arrays, group_bytes=4000)
    assert len(puts) > 4 and sum(waited) == len(views)
    assert max(flying) <= max(a + b for a, b in zip(puts, puts[1:], strict=False))
    done = 0
    for count, left in zip(puts, alive, strict=True):
        done += count
        assert left == len(views) - done


def test_where_page_locked_memory_runs_out_a_group_goes_as_it_lies(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    views = views_of(np.random.default_rng(2), [100, 200, 300])
    real = jax.device_put

    def put(values: Any, where: Any = None, **options: Any) -> Any:
        kinds = {s.memory_kind for s in where} if isinstance(where, list) else set()
        if "pinned_host" in kinds:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no page-locked memory")
        return real(values, where, **options)

    monkeypatch.setattr(jax, "device_put", put)
    arrays: dict[tuple[int, str], jax.Array] = {}
    filling.fill(views, views, arrays)
    assert "no pinned_host memory for a group, so it goes as it lies: RESOURCE_EXHAUSTED" in caplog.text
    for key, view in views.items():
        assert np.array_equal(np.asarray(arrays[key]).view(np.uint8), view.view(np.uint8))


def filled_slot() -> Slot:
    target = Target.of(engine_target(), 0)
    slot = Slot(target, PrivateMemory(target.slot.total_bytes))
    rng = np.random.default_rng(3)
    for view in slot.views.values():
        view[...] = random_bits(rng, view.shape, view.dtype)
    assert slot.fill_devices() == sum(v.nbytes for v in slot.views.values())
    return slot


def same_as_slot(slot: Slot) -> bool:
    found = {
        (shard.device.id, path): np.asarray(shard.data)
        for path, leaf in leaves_by_path(slot.tree()).items()
        for shard in leaf.addressable_shards
    }
    return all(np.array_equal(found[k].view(np.uint8), v.view(np.uint8)) for k, v in slot.views.items())


def test_only_what_changed_is_put_on_the_devices_again(apart: None) -> None:
    slot = filled_slot()
    path = next(p for _, p in slot.views)
    changed = {key: view for key, view in slot.views.items() if key[1] == path}
    kept = {key: array for key, array in slot._arrays.items() if key[1] != path}
    for view in changed.values():
        view.view(np.uint8)[...] ^= 1
    assert slot.unsettle()
    assert slot.fill_devices({path}) == sum(v.nbytes for v in changed.values())
    assert all(slot._arrays[key] is array for key, array in kept.items()) and same_as_slot(slot)
    slot.close()


def test_what_a_user_deleted_is_put_there_again(apart: None) -> None:
    slot = filled_slot()
    jax.tree.map(lambda x: x.delete(), slot.tree())
    assert slot.fill_devices(frozenset()) == sum(v.nbytes for v in slot.views.values())
    assert same_as_slot(slot)
    slot.close()


def test_after_a_fill_that_failed_everything_is_put_there(
    apart: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    slot = filled_slot()
    real, small, calls = filling._put, filling.groups_of, list[int]()

    def put(values: Any, devices: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
        return real(values, devices)

    assert slot.unsettle()
    with monkeypatch.context() as patched:
        patched.setattr(filling, "_put", put)
        patched.setattr(filling, "groups_of", lambda views, keys, nbytes: small(views, keys, 4096))
        with pytest.raises(jax.errors.JaxRuntimeError):
            slot.fill_devices()
    assert not slot.unsettle()
    assert slot.fill_devices() == sum(v.nbytes for v in slot.views.values()) and same_as_slot(slot)
    slot.close()


SPARSE = PayloadSettings("sparse", CodingRules(whole=False))  # a slow machine may choose it: all would move


def some_changed(params: Any, paths: int, seed: int) -> Any:
    """Other bits in a few elements of so many leaves."""
    leaves, tree = jax.tree.flatten(params)
    for number in range(paths):
        at = (seed + number) % len(leaves)
        x = leaves[at]
        mask = jnp.arange(x.size).reshape(x.shape) % 97 == seed % 97
        leaves[at] = jnp.where(mask, x * 1.5 + 1, x)
    return jax.tree.unflatten(tree, leaves)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.invariant(39)
def test_frames_put_only_the_tensors_on_devices_that_they_or_the_catching_up_changed(
    rig: Rig, apart: None, transport: str
) -> None:
    params = trainer_params()
    publisher = rig.publisher(params, transport, payload=SPARSE)
    subscriber = rig.subscriber(transport=transport)
    whole, moved = 0, list[int]()
    for number in range(12):
        if number:
            params = some_changed(params, 0 if number == 7 else 1 + number % 2, number)
        publisher.publish(params, Version("b" if number >= 9 else "a", number))
        update = subscriber.poll(60)
        assert update is not None
        report = update.prepare()
        assert same_bits(update.swap(), convert(params)), number
        whole = whole or report.moved["devices"]
        moved.append(report.moved["devices"])
        assert report.payload == ("full" if number in (0, 9) else "frame") and report.seconds["fill"] > 0
    assert moved[0] == moved[1] == moved[9] == moved[10] == whole  # each slot's first, and anchors
    steady = moved[2:9] + moved[11:]
    assert 0 < min(steady) and max(steady) < whole / 2, moved


def test_a_failed_round_leaves_nothing_on_devices_that_is_taken_for_the_slots_content(
    rig: Rig, apart: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from jaxrl_sync.transfer.payload.shadow import Shadow

    params = trainer_params()
    publisher = rig.publisher(params, "tcp", payload=SPARSE)
    subscriber = rig.subscriber(transport="tcp")
    real, break_it = Shadow.apply, [False]

    def apply(self: Shadow, data: Any, slot: Any, *rest: Any) -> Any:
        found = real(self, data, slot, *rest)
        if break_it[0]:
            next(iter(slot.views.values())).view(np.uint8)[...] ^= 1
            raise MismatchError("made up")
        return found

    monkeypatch.setattr(Shadow, "apply", apply)
    for number in range(8):
        params = some_changed(params, 1, number)
        publisher.publish(params, Version("a", number))
        update = subscriber.poll(60)
        assert update is not None
        break_it[0] = number == 4
        if break_it[0]:
            with pytest.raises(MismatchError, match="made up"):
                update.prepare()
            continue
        update.prepare()
        assert same_bits(update.swap(), convert(params)), number
