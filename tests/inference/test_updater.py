"""When versions are taken, against a subscriber and an engine that do exactly what a test says."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from jaxrl_sync.inference import updater
from jaxrl_sync.inference.errors import EngineError, NotServingError, SwapTimeoutError
from jaxrl_sync.inference.front import EngineState, SwapReport
from jaxrl_sync.inference.request import PauseMode
from jaxrl_sync.inference.updater import Shadow, SwapPolicy, Updater
from jaxrl_sync.transfer.errors import MismatchError, TransferError
from jaxrl_sync.transfer.subscriber import Prepared
from jaxrl_sync.transfer.version import Version


def v(number: int, lineage: str = "a") -> Version:
    return Version(lineage, number)


class Offers:
    """A subscriber: offers ``newest`` until it is prepared; the first ``failures`` prepares fail."""

    def __init__(self) -> None:
        self.newest: Version | None = None
        self.installed: Version | None = None
        self.prepared: Version | None = None
        self.in_place = self.poisoned = False
        self.failures = 0
        self.on_failure: Callable[[], object] = lambda: None
        self.log: list[str] = []

    def poll(self, timeout_s: float = 0.0) -> Offered | None:
        if self.newest is None or self.newest in (self.installed, self.prepared):
            time.sleep(min(timeout_s, 0.01))
            return None
        return Offered(self, self.newest)


class Offered:
    """An update of ``Offers``; its tree is its number."""

    def __init__(self, offers: Offers, version: Version) -> None:
        self._offers, self.version = offers, version
        self.in_place = offers.in_place

    def prepare(self, timeout_s: float | None = None) -> Prepared:
        self._offers.log.append(f"prepare {self.version.number}")
        self._offers.poisoned = self.in_place
        if self._offers.failures:
            self._offers.failures -= 1
            self._offers.on_failure()
            raise MismatchError("bits differ")
        self._offers.prepared = self.version
        return Prepared(self.version, 100, 0.1, 0.2, 0.3, "shm")

    def swap(self) -> int:
        self._offers.installed, self._offers.poisoned = self.version, False
        return self.version.number

    def discard(self, reason: str) -> None:
        self._offers.prepared = None
        self._offers.log.append(f"discard {self.version.number}")


class EngineDouble:
    """Swaps at once, unless ``pinned``: then it gives up at the deadline."""

    def __init__(self) -> None:
        self.version: Version | None = None
        self.state: EngineState = "ready"
        self.trees: list[Any] = []
        self.pinned = self.endless = self.tied = False
        self.on_tied: Callable[[], object] = lambda: None
        self.broken: TransferError | None = None
        self.log: list[str] = []

    def pause(self, mode: PauseMode) -> Future[EngineState]:
        self.log.append(f"pause {mode}")
        future: Future[EngineState] = Future()
        if not self.endless:
            future.set_result("paused")
        return future

    def resume(self) -> Future[EngineState]:
        self.log.append("resume")
        return Future()

    def refuse_pins(self) -> bool:
        if self.tied:
            self.on_tied()
        return not self.tied

    def stand(self) -> Future[EngineState]:
        self.log.append("stand")
        future: Future[EngineState] = Future()
        future.set_result("sleeping")
        return future

    def go_on(self) -> None:
        if self.log and self.log[-1] in ("stand", "poison"):
            self.log.append("go on")

    def poison(self, reason: str) -> None:
        self.log.append("poison")

    def request_swap(
        self, version: Version, take: Callable[[], Any], timeout_s: float = 60.0
    ) -> Future[SwapReport]:
        future: Future[SwapReport] = Future()
        if self.pinned:
            future.set_exception(SwapTimeoutError("pinned groups were still running"))
            return future
        if self.broken is not None:
            future.set_exception(self.broken)
            return future
        self.log.append(f"swap {version.number}")
        self.trees.append(take())
        self.version = version
        future.set_result(SwapReport(version, 5, 0.25))
        return future


class Rig:
    def __init__(self, policy: SwapPolicy, auto_mode: PauseMode = "keep") -> None:
        self.offers, self.engine, self.rows = Offers(), EngineDouble(), list[tuple[str, int | None]]()
        self.updater = Updater(
            self.engine,
            self.offers,  # type: ignore[arg-type]
            policy,
            record=self._record,
            auto_mode=auto_mode,
        )
        self.updater.start()

    def _record(self, kind: str, t0: float, t1: float, *, version: int | None = None) -> None:
        self.rows.append((kind, version))

    def first(self, number: int = 0) -> None:
        self.offers.newest = v(number)
        assert self.updater.ready.wait(120)


class Clock:
    """The updater's clock, which a test sets ahead: a deadline passes after what it is to follow, never
    before, however long this process stands still."""

    ahead = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead

    def pass_deadline(self) -> None:
        self.ahead += 250.0  # of 600: at the third time

    time, sleep = staticmethod(time.time), staticmethod(time.sleep)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(updater, "time", made)
    return made


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig("approved")
    yield made
    made.updater.close()


@pytest.mark.invariant(35)
def test_the_first_version_is_taken_by_itself_and_later_ones_wait_for_approval(rig: Rig) -> None:
    assert not rig.updater.ready.is_set()
    rig.first(4)
    rig.offers.newest = v(5)
    time.sleep(0.1)
    assert rig.engine.trees == [4] and rig.rows[0] == ("prepare", 4)
    assert rig.updater.swap(v(5), 60).result(120) == {
        "lineage": "a",
        "number": 5,
        "pause_s": 0.25,
        "step": 5,
        "bytes": 100,
        "prepare_s": 0.3,
        "verify_s": 0.2,
        "transport": "shm",
        "payload": "full",
        "coding": "",
        "density": 1.0,
        "moved": {},
    }
    assert rig.engine.trees == [4, 5] and ("swap", 5) in rig.rows


def test_an_installed_or_older_version_answers_at_once(rig: Rig) -> None:
    rig.first(4)
    for number in (4, 2):
        answer = rig.updater.swap(v(number), 60).result(120)
        assert (answer["number"], answer["pause_s"], answer["bytes"]) == (4, 0.0, 0)
    assert rig.engine.trees == [4]


def test_an_offer_that_is_too_old_or_of_another_lineage_is_waited_out(rig: Rig) -> None:
    rig.first(0)
    rig.offers.newest = v(1)
    asked = rig.updater.swap(v(2), 60)
    time.sleep(0.1)
    assert not asked.done() and rig.engine.trees == [0]
    rig.offers.newest = v(3)
    assert asked.result(120)["number"] == 3
    rig.offers.newest = v(0, "b")
    assert rig.updater.swap(v(0, "b"), 60).result(120)["lineage"] == "b"


def test_a_version_that_never_comes_is_a_named_timeout(rig: Rig) -> None:
    rig.first(0)
    with pytest.raises(SwapTimeoutError, match="swap to a:9: no such version was offered in time"):
        rig.updater.swap(v(9), 0.2).result(20)
    assert rig.updater.error is None


@pytest.mark.invariant(32)
def test_a_prepare_that_fails_is_tried_again_and_named_at_the_deadline(clock: Clock, rig: Rig) -> None:
    rig.first(0)
    rig.offers.newest, rig.offers.failures = v(1), 2
    assert rig.updater.swap(v(1), 60).result(120)["number"] == 1
    rig.offers.on_failure = clock.pass_deadline
    rig.offers.newest, rig.offers.failures = v(2), 10**6
    with pytest.raises(SwapTimeoutError, match="swap to a:2: bits differ"):
        rig.updater.swap(v(2), 600.0).result(120)
    assert rig.engine.version == v(1)


def test_a_prepared_version_is_kept_over_a_failed_swap_and_dropped_for_a_later_one(rig: Rig) -> None:
    rig.first(0)
    rig.offers.newest, rig.engine.pinned = v(1), True
    for _ in range(2):
        with pytest.raises(SwapTimeoutError, match="pinned"):
            rig.updater.swap(v(1), 60).result(120)
    assert rig.updater.prepared == v(1) and rig.offers.log.count("prepare 1") == 1
    rig.engine.pinned, rig.offers.newest = False, v(2)
    assert rig.updater.swap(v(2), 60).result(120)["number"] == 2
    assert rig.offers.log[-2:] == ["discard 1", "prepare 2"] and rig.updater.prepared is None


@pytest.mark.invariant(33)
@pytest.mark.parametrize("mode", ["wait", "abort"])
def test_generation_stands_still_for_the_swap_alone_and_goes_on_whatever_comes_of_it(
    rig: Rig, mode: PauseMode
) -> None:
    rig.first()
    rig.offers.log = rig.engine.log  # one log: what is prepared before the pause
    rig.engine.log.clear()
    rig.offers.newest = v(1)
    answer = rig.updater.swap(v(1), 60, mode).result(120)
    assert rig.engine.log == ["prepare 1", f"pause {mode}", "swap 1", "resume"]
    assert 0 < answer["pause_s"] != 0.25, "the whole pause, not what the engine reports of the swap"
    rig.engine.log.clear()
    rig.offers.newest, rig.engine.pinned = v(2), True
    with pytest.raises(SwapTimeoutError):
        rig.updater.swap(v(2), 60, mode).result(120)
    rig.engine.endless = True
    with pytest.raises(SwapTimeoutError, match=f"pause mode {mode}"):
        rig.updater.swap(v(2), 0.3, mode).result(20)
    assert rig.engine.log == ["prepare 2", f"pause {mode}", "resume", f"pause {mode}", "resume"]


@pytest.mark.invariant(32)
def test_what_is_overwritten_in_place_serves_no_step_and_is_poisoned_unless_it_is_swapped_in(
    clock: Clock, rig: Rig
) -> None:
    rig.first()
    rig.offers.in_place = True
    rig.engine.log.clear()
    rig.offers.newest = v(1)
    assert rig.updater.swap(v(1), 60).result(120)["number"] == 1
    assert rig.engine.log == ["stand", "swap 1"]
    rig.engine.log.clear()
    rig.offers.on_failure = clock.pass_deadline
    rig.offers.newest, rig.offers.failures = v(2), 1 << 60  # as fast as they may come
    with pytest.raises(SwapTimeoutError, match="bits differ"):
        rig.updater.swap(v(2), 600.0).result(120)
    assert rig.engine.log == ["stand", "poison", "go on"]
    rig.engine.log.clear()
    rig.offers.newest, rig.offers.failures, rig.engine.state = v(3), 0, "paused"
    assert rig.updater.swap(v(3), 60, "abort").result(120)["number"] == 3
    assert rig.engine.log == ["stand", "swap 3"], "a pause of somebody else's stays"


@pytest.mark.invariant(33)
@pytest.mark.parametrize(("in_place", "mode"), [(True, "keep"), (True, "abort"), (False, "wait")])
def test_nothing_is_paused_or_overwritten_while_the_serving_version_is_pinned(
    clock: Clock, rig: Rig, in_place: bool, mode: PauseMode
) -> None:
    rig.first()
    rig.engine.on_tied = clock.pass_deadline
    rig.offers.in_place, rig.engine.tied = in_place, True
    rig.engine.log.clear()
    rig.offers.newest = v(1)
    with pytest.raises(SwapTimeoutError, match="the serving version is pinned or held"):
        rig.updater.swap(v(1), 600.0, mode).result(120)
    assert not {"stand", "poison", f"pause {mode}"} & set(rig.engine.log)
    assert ("prepare 1" in rig.offers.log) != in_place
    rig.engine.tied = False
    assert rig.updater.swap(v(1), 60, mode).result(120)["number"] == 1


def test_what_could_not_be_swapped_in_is_prepared_again(rig: Rig) -> None:
    rig.first()
    rig.offers.newest, rig.engine.broken = v(1), TransferError("version a:1 isn't prepared")
    with pytest.raises(TransferError, match="isn't prepared"):
        rig.updater.swap(v(1), 60).result(120)
    assert rig.updater.prepared is None and rig.engine.version == v(0)
    rig.engine.broken = None
    assert rig.updater.swap(v(1), 60).result(120)["number"] == 1
    assert rig.offers.log == ["prepare 0", "prepare 1", "discard 1", "prepare 1"]


def test_a_pause_that_somebody_else_asked_for_outlives_a_swap(rig: Rig) -> None:
    rig.first()
    rig.engine.state, rig.offers.newest = "paused", v(1)
    rig.updater.swap(v(1), 60, "abort").result(120)
    assert rig.engine.trees == [0, 1] and "resume" not in rig.engine.log


def test_policy_auto_takes_what_comes() -> None:
    rig = Rig("auto")
    rig.first(0)
    for number in (1, 2):
        rig.offers.newest = v(number)
        deadline = time.monotonic() + 120
        while rig.engine.version != v(number):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    told = rig.updater.swap(v(2), 60).result(120)
    assert told["number"] == 2 and told["pause_s"] == 0.25, "who asks first gets its report"
    assert rig.updater.swap(v(2), 60).result(120)["pause_s"] == 0.0
    rig.updater.close()


def test_policy_auto_tries_again_what_pins_have_kept_from_being_swapped_in() -> None:
    rig = Rig("auto")
    rig.first(0)
    rig.engine.pinned, rig.offers.newest = True, v(1)
    deadline = time.monotonic() + 120
    while rig.updater.prepared is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(0.1)  # some attempts fail
    rig.engine.pinned = False
    while rig.engine.version != v(1):
        assert time.monotonic() < deadline, "nothing was tried until the next version"
        time.sleep(0.01)
    rig.updater.close()


def test_policy_auto_swaps_in_the_pause_mode_that_it_is_given() -> None:
    rig = Rig("auto", auto_mode="wait")
    rig.first(0)
    rig.offers.newest = v(1)
    deadline = time.monotonic() + 120
    while "resume" not in rig.engine.log:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert rig.engine.log == ["swap 0", "pause wait", "swap 1", "resume"]
    rig.updater.close()


def test_what_ends_the_thread_is_kept_and_nobody_waits_for_it(rig: Rig) -> None:
    rig.first(0)

    def broken(timeout_s: float = 0.0) -> Offered | None:
        raise ValueError("no such layout")

    rig.offers.poll = broken  # type: ignore[method-assign]
    asked, queued = rig.updater.swap(v(1), 5), rig.updater.swap(v(1), 5)
    with pytest.raises((NotServingError, ValueError)):
        asked.result(20)
    with pytest.raises(NotServingError):
        queued.result(20)
    assert isinstance(rig.updater.error, ValueError)
    with pytest.raises(NotServingError):
        rig.updater.swap(v(1), 60).result(120)


def test_closing_ends_a_wait(rig: Rig) -> None:
    rig.first(0)
    asked = rig.updater.swap(v(9), 60)
    time.sleep(0.05)
    rig.updater.close()
    with pytest.raises(NotServingError):
        asked.result(20)


def test_a_follower_hands_out_only_what_the_plan_names() -> None:
    offers, rows = Offers(), list[str]()

    def record(kind: str, t0: float, t1: float, *, version: int | None = None) -> None:
        rows.append(kind)

    hasty = Shadow(offers, record=record, timeout_s=0.2)  # type: ignore[arg-type]
    with pytest.raises(EngineError, match="swap to a:1: this rank has prepared None"):
        hasty.take(v(1))
    hasty.close()
    shadow = Shadow(offers, record=record, timeout_s=60.0)  # type: ignore[arg-type]
    offers.newest = v(1)
    late = threading.Timer(0.1, shadow.prepare)
    late.start()
    assert shadow.take(v(1)) == 1 and rows == ["prepare"]
    offers.newest = v(2)
    shadow.prepare()
    deadline = time.monotonic() + 60
    while shadow._held is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    shadow._timeout_s = 0.2  # what it holds stays the wrong one however long it is waited for
    with pytest.raises(EngineError, match="swap to a:3: this rank has prepared a:2"):
        shadow.take(v(3))
    shadow._timeout_s = 60.0
    offers.newest = v(3)
    shadow.prepare()
    assert shadow.take(v(3)) == 3 and offers.log == ["prepare 1", "prepare 2", "discard 2", "prepare 3"]
    shadow.close()
