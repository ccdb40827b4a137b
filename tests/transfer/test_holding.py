"""Slots that others read while rounds begin and fail: nobody writes under a reader."""

from __future__ import annotations

import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_sync.transfer import SubscriberConfig, Version, holding
from jaxrl_sync.transfer.errors import PeerLost, ResourceError
from jaxrl_sync.transfer.holding import Holding
from jaxrl_sync.transfer.progress import Progress
from jaxrl_sync.transfer.slots import Target

A1, A2 = Version("a", 1), Version("a", 2)
EDGES = [{"w", "v"}]
NONE = frozenset[str]()


def made(drain_s: float = 0.05) -> Holding:
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    leaf = jax.ShapeDtypeStruct((4,), jnp.float32, sharding=sharding)
    config = SubscriberConfig(transport="tcp", relay=True, drain_s=drain_s)
    found = Holding(Target.of({"v": leaf, "w": leaf}, 0), config, "run")
    found.allocate()
    return found


def fill(held: Holding, value: float) -> None:
    for view in held.slots[0].views.values():
        np.copyto(view, np.float32(value))


def deadline() -> float:
    return time.monotonic() + 60


def full(_: int) -> Any:
    raise ResourceError("no memory")


def test_the_next_round_waits_for_readers_of_the_one_that_failed() -> None:
    held = made(drain_s=120.0)
    held.begin(0, A1, EDGES, NONE)
    fill(held, 1.0)
    held.progress(0).arrived(["w"])
    reading = held.read(A1, deadline())
    assert not isinstance(reading, str)
    reading.wait(["w"], deadline())  # and is copied from here on
    assert held.give_up(0, A1, keep=True)
    with pytest.raises(PeerLost):
        reading.wait(["w"], deadline())
    assert isinstance(held.read(A1, time.monotonic()), str)  # nobody new reads what was given up
    begun = threading.Event()
    next_round = threading.Thread(
        target=lambda: begun.set() if held.begin(0, A2, EDGES, NONE) == NONE else None
    )
    next_round.start()
    assert not begun.wait(0.2)
    reading.close()
    assert begun.wait(60)
    next_round.join()
    held.close()


def test_a_reader_of_a_failed_round_that_stays_keeps_the_old_memory() -> None:
    held = made()
    held.begin(0, A1, EDGES, NONE)
    fill(held, 1.0)
    held.progress(0).arrived(["w"])
    reading = held.read(A1, deadline())
    assert not isinstance(reading, str)
    held.give_up(0, A1, keep=True)
    assert held.begin(0, A1, EDGES, frozenset({"w"})) == {"w"}
    assert all(np.all(v == (1.0 if k[1] == "w" else 0.0)) for k, v in held.slots[0].views.items())
    fill(held, 2.0)
    assert all(np.all(v == 1.0) for v in reading.shards.values())
    held.close()


def test_what_is_not_moved_along_is_not_believed_to_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    held = made()
    held.begin(0, A1, EDGES, NONE)
    held.progress(0).arrived(["w"])
    reading = held.read(A1, deadline())
    assert not isinstance(reading, str)
    held.give_up(0, A1, keep=True)
    monkeypatch.setattr(held, "_copied", lambda *_: None)  # no room for two
    assert held.begin(0, A1, EDGES, frozenset({"w"})) == NONE
    assert held.progress(0).complete == NONE
    assert not held.give_up(0, A1, keep=True)
    held.close()


def test_a_slot_that_found_no_memory_gets_it_in_a_later_round(monkeypatch: pytest.MonkeyPatch) -> None:
    held = made()
    held.adopt(0, A1)
    reading = held.read(A1, deadline())
    assert not isinstance(reading, str)
    with monkeypatch.context() as patched:
        patched.setattr(holding, "PrivateMemory", full)
        with pytest.raises(ResourceError, match="no memory"):
            held.begin(0, A2, EDGES, NONE)
        assert held.slots[0].closed
    assert held.begin(0, A2, EDGES, frozenset({"w"})) == NONE
    assert not held.slots[0].closed and len(held.slots[0].views) == 2
    held.close()


def test_a_tensor_of_two_edges_is_complete_when_both_have_brought_it_however_often_one_says_so() -> None:
    progress = Progress(A1, [{"w"}, {"w", "v"}])
    first, second = progress.edge({"w"}), progress.edge({"w", "v"})
    for _ in range(3):
        first(["w", "v"])  # v isn't its own
    assert progress.complete == NONE
    second(["w"])
    assert progress.complete == {"w"}
