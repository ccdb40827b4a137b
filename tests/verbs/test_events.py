"""Asynchronous events by name over the fake: each is told once, acknowledged, and says what it means."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time

import numpy as np
import pytest

from jaxrl_sync.transfer.verbs import opened
from jaxrl_sync.transfer.verbs.errors import VerbsError
from jaxrl_sync.transfer.verbs.events import NAMES, AsyncEvent, EventWatcher, event_of
from tests.verbs.fakelib import ANY_CHANCE, Fake
from tests.verbs.pairs import pair, rows, write


class Told:
    """What a watcher said, and waiting for so many of them."""

    def __init__(self) -> None:
        self.events: list[AsyncEvent] = []
        self._arrived = threading.Condition()

    def __call__(self, event: AsyncEvent) -> None:
        with self._arrived:
            self.events.append(event)
            self._arrived.notify_all()

    def wait(self, count: int) -> list[AsyncEvent]:
        """The events, once there are ``count``."""
        with self._arrived:
            assert self._arrived.wait_for(lambda: len(self.events) >= count, 20)
        return self.events


def test_port_down_device_fatal_and_queue_pair_fatal_have_names(fake: Fake) -> None:
    told = Told()
    with pair() as (left, _), EventWatcher(left.context, told):
        number = left.qps[0].qp_num
        for kind, thing in [(10, 1), (9, 1), (8, 0), (1, number), (3, number), (18, 1), (4, number)]:
            fake.async_event(number, kind, thing)
        events = told.wait(7)
    assert [(e.name, e.kind, e.number, e.meaning) for e in events] == [
        ("PORT_ERR", "port", 1, "changed"),
        ("PORT_ACTIVE", "port", 1, "changed"),
        ("DEVICE_FATAL", "device", 0, "fatal"),
        ("QP_FATAL", "qp", number, "fatal"),
        ("QP_ACCESS_ERR", "qp", number, "fatal"),
        ("GID_CHANGE", "port", 1, "changed"),
        ("COMM_EST", "qp", number, "information"),
    ]
    assert str(events[0]) == "PORT_ERR of port 1: port error"
    assert str(events[3]).startswith(f"QP_FATAL of queue pair 0x{number:06x}: local work queue")


def test_names_follow_the_numbers_of_the_abi() -> None:
    assert [NAMES[i] for i in (0, 8, 10, 16, 19)] == [
        "CQ_ERR",
        "DEVICE_FATAL",
        "PORT_ERR",
        "QP_LAST_WQE_REACHED",
        "WQ_FATAL",
    ]
    assert event_of((77, "new", "port", 1)).name == "EVENT_77"


def test_watcher_closes_while_nothing_happens_and_twice(fake: Fake) -> None:
    with pair() as (left, _):
        watcher = EventWatcher(left.context, Told())
        started = time.monotonic()
        watcher.close()
        watcher.close()
        assert time.monotonic() - started < 30
        left.context.close()


def descriptors() -> set[tuple[str, str]]:
    """What this process has open: number and target (a pipe's has its inode)."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # of the listing itself
            found.add((name, os.readlink(f"/proc/self/fd/{name}")))
    return found


@pytest.mark.parametrize("missing", ["descriptor", "thread"])
def test_a_device_whose_events_nobody_can_await_is_named_and_closed(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    """An error of the system's own ended the link, for good, as if the layouts didn't fit."""

    def none(*_: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    def no_more(_: object) -> None:
        raise RuntimeError("can't start new thread")

    before = descriptors()
    with monkeypatch.context() as patched:
        if missing == "descriptor":
            patched.setattr(os, "eventfd", none)
        else:
            patched.setattr(threading.Thread, "start", no_more)
        with pytest.raises(VerbsError, match=f"no {missing} for events of fake0: "):
            opened.open_device("native", "fake0")
    assert fake.counts.contexts == 0 and descriptors() <= before  # those of other tests may end meanwhile
    opened.open_device("native", "fake0").give_back()


def test_events_in_the_middle_of_traffic_disturb_nothing(fake: Fake) -> None:
    told = Told()
    with pair(1 << 16, qps=2) as (left, right), EventWatcher(left.context, told):
        fake.set(chance_event=ANY_CHANCE // 8, chance_delay=20000, seed=3)
        left.memory[:] = np.arange(1 << 16) % 251
        table = rows(*[(at, at, 256) for at in range(0, 1 << 16, 256)])
        done, end = 0, time.monotonic() + 60
        while done < len(table):
            assert time.monotonic() < end
            done += write(left, right, table, start=done, qp=done % 2)
            left.cq.wait(0.01)
            left.poll()
        while left.qps[0].in_flight + left.qps[1].in_flight:
            assert left.cq.wait(10.0)
            left.poll()
        raised = fake.counts.events
        fake.set()
        assert (right.memory == left.memory).all()
        assert raised > 0
