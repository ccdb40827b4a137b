"""The control connections of a multi-rank engine, over real sockets in one process."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import numpy as np
import pytest

from jaxrl_sync.inference import group
from jaxrl_sync.inference.errors import RankDiedError
from jaxrl_sync.inference.group import Follower, Leader
from jaxrl_sync.inference.plan import StepPlan
from jaxrl_sync.inference.server import PortInUseError
from jaxrl_sync.transfer.errors import AuthError, PeerLost
from jaxrl_sync.transfer.version import Version

TOKEN, OTHER = "ab" * 32, "cd" * 32


class Pair:
    """A leader and one follower, and what each of them calls dead."""

    def __init__(self, stack: ExitStack) -> None:
        self.leader_saw: queue.Queue[str] = queue.Queue()
        self.follower_saw: queue.Queue[str] = queue.Queue()
        self.prepared = threading.Event()
        self.codes: list[int] = []
        """Exit codes that the follower was to end with."""
        self.leader = Leader(
            "engine-7", TOKEN, "127.0.0.1", 2, lambda cause, code: self.leader_saw.put(cause)
        )
        stack.callback(self.leader.close)
        waiting = threading.Thread(target=self.leader.wait, args=(60,))
        waiting.start()
        host, port = self.leader.address
        self.follower = Follower(
            "engine-7", 1, f"{host}:{port}", TOKEN, self.prepared.set, self._follower_dies
        )
        stack.callback(self.follower.close)
        waiting.join(60)

    def _follower_dies(self, cause: str, code: int) -> None:
        self.codes.append(code)
        self.follower_saw.put(cause)


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    """None of these ends is ever silent, however long this process stands still."""
    monkeypatch.setattr(group, "SILENCE_S", 120.0)
    monkeypatch.setattr(group, "BLAME_S", 60.0)
    with ExitStack() as stack:
        yield Pair(stack)


def test_a_step_that_fails_because_the_leader_died_ends_with_that_cause(pair: Pair) -> None:
    with pytest.raises(RuntimeError, match="a collective"), pair.follower.step():
        threading.Timer(0.3, pair.leader.abandon).start()  # the step's error is there first
        raise RuntimeError("a collective failed")
    assert "rank 0 of this engine died" in pair.follower_saw.get_nowait()


def test_plans_and_prepares_arrive_in_order_and_stop_ends_quietly(pair: Pair) -> None:
    for number in range(5):
        active = np.arange(8) < number
        pair.leader.send_plan(StepPlan(number, active, 2, 16, swap=Version("a", number)))
    pair.leader.prepare()
    for number in range(5):
        plan = pair.follower.next_plan()
        assert plan is not None and plan.number == number and plan.swap == Version("a", number)
        assert plan.active.sum() == number
    assert pair.prepared.wait(20)
    pair.leader.close()
    assert pair.follower.next_plan() is None
    time.sleep(0.1)
    assert pair.follower_saw.empty() and pair.leader_saw.empty()


def test_a_leader_that_is_gone_when_its_stop_is_read_has_not_died(monkeypatch: pytest.MonkeyPatch) -> None:
    """A heartbeat to it failed before its last word was read, and the follower ended as if it had died."""
    monkeypatch.setattr(group, "ALIVE_S", 0.05)
    monkeypatch.setattr(group, "SILENCE_S", 120.0)
    go_on = threading.Event()
    with ExitStack() as stack:
        pair = Pair(stack)
        monkeypatch.setattr(pair.follower, "_on_prepare", lambda: go_on.wait(60))  # the receiver is busy
        pair.leader.prepare()
        pair.leader.close()
        pair.follower._link._threads[1].join(60)
        assert not pair.follower._link._threads[1].is_alive(), "no heartbeat has failed"
        go_on.set()
        assert pair.follower.next_order(60.0) == "stop"
        assert pair.follower_saw.empty() and pair.leader_saw.empty()


def test_each_end_names_the_other_when_it_goes_away(pair: Pair) -> None:
    pair.follower._link._connection.sock.shutdown(socket.SHUT_RDWR)
    assert pair.leader_saw.get(timeout=20).startswith("engine-7 rank 1 of this engine died: ")
    assert pair.follower_saw.get(timeout=20).startswith("engine-7 rank 0 of this engine died: ")


def test_a_leader_that_fails_does_not_tell_its_followers_to_stop(pair: Pair) -> None:
    pair.leader.abandon()
    assert pair.follower_saw.get(timeout=20).startswith("engine-7 rank 0 of this engine died: ")
    assert pair.follower.next_order(0.0) is None
    pair.leader.close()
    assert pair.leader_saw.empty()


@pytest.mark.parametrize(
    ("error", "cause", "code"),
    [
        (PortInUseError("can't listen on h:1:\n in use"), "failed: can't listen on h:1: in use", 3),
        (RankDiedError("engine-7: lease lost"), "failed: engine-7: lease lost", 4),
        (RuntimeError(), "failed: RuntimeError", 1),
    ],
)
def test_followers_end_with_the_error_of_their_leader_and_its_exit_code(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, error: Exception, cause: str, code: int
) -> None:
    """They were told to stop, and ended as if all were well."""
    monkeypatch.setattr(group, "BLAME_S", 0.2)  # so long a follower's death would be waited for
    with pytest.raises(type(error)), pair.leader.telling():
        raise error
    pair.leader.close()
    assert pair.follower_saw.get(timeout=20) == f"engine-7 rank 0 {cause}" and pair.codes == [code]
    assert pair.follower.next_order(0.0) is None, "no stop"
    assert pair.follower_saw.empty() and pair.leader_saw.empty()


def test_an_error_of_a_collective_is_the_death_of_the_follower_that_caused_it(pair: Pair) -> None:
    def dies() -> None:
        pair.follower._link._connection.sock.shutdown(socket.SHUT_RDWR)

    with pytest.raises(RuntimeError), pair.leader.telling():
        threading.Timer(0.3, dies).start()  # the step's error is there first
        raise RuntimeError("a collective failed")
    assert "rank 1 of this engine died" in pair.leader_saw.get(timeout=20)


def test_close_may_come_while_a_leader_leaves(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    link = pair.leader._links[1]
    leave = link.close

    def meanwhile() -> None:
        monkeypatch.setattr(link, "close", leave)
        closing = threading.Thread(target=pair.leader.close)
        closing.start()
        closing.join(10)
        leave()

    monkeypatch.setattr(link, "close", meanwhile)
    pair.leader.abandon()
    assert pair.follower_saw.get(timeout=20).startswith("engine-7 rank 0 of this engine died: ")
    assert pair.leader_saw.empty()


@pytest.mark.parametrize(
    ("op", "payload"), [("plan", b"no plan"), ("failed", b'{"cause": "x", "exit_code": 1e999}')]
)
def test_a_leader_that_sends_nonsense_is_dead_to_its_follower(pair: Pair, op: str, payload: bytes) -> None:
    """The receiving thread ended with it, and no death of the leader was noticed any more."""
    pair.leader._links[1].send(op, payload)
    assert "rank 0 " in pair.follower_saw.get(timeout=20)


def test_a_silent_peer_counts_as_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "ALIVE_S", 30.0)
    monkeypatch.setattr(group, "SILENCE_S", 0.5)
    with ExitStack() as stack:
        pair = Pair(stack)
        assert "rank 1 of this engine died" in pair.leader_saw.get(timeout=20)


def test_heartbeats_keep_idle_ranks_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "ALIVE_S", 0.05)
    monkeypatch.setattr(group, "SILENCE_S", 8.0)  # a slow machine may stand still for a few seconds
    with ExitStack() as stack:
        pair = Pair(stack)
        time.sleep(8.5)
        assert pair.leader_saw.empty() and pair.follower_saw.empty()


def test_missing_ranks_are_named_and_strangers_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    leader = Leader("engine-7", TOKEN, "127.0.0.1", 3, lambda cause, code: None)
    raised: list[BaseException] = []
    wait_for = leader._arrived.wait_for

    def patient(predicate: Callable[[], bool], timeout_s: float) -> bool:
        """The time that it waits begins when rank 2 is there."""
        assert wait_for(lambda: 2 in leader._links, 60)
        return wait_for(predicate, timeout_s)

    monkeypatch.setattr(leader._arrived, "wait_for", patient)

    def wait() -> None:
        try:
            leader.wait(1.0)
        except RankDiedError as error:
            raised.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    host, port = leader.address
    with pytest.raises((AuthError, PeerLost)):
        Follower("engine-7", 1, f"{host}:{port}", OTHER, lambda: None, timeout_s=60)
    follower = Follower("engine-7", 2, f"{host}:{port}", TOKEN, lambda: None, lambda cause, code: None)
    thread.join(60)
    assert str(raised[0]) == "engine-7: ranks [1] did not connect in 1 s"
    leader.close()
    follower.close()
