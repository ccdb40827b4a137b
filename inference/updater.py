"""From the hub's offer to the serving weights: prepare beside decoding, then swap between two steps.

``Updater`` lives on rank 0 with a thread of its own; it decides when a version is taken: the first one as
soon as it is on offer, later ones when ``swap`` asks for them (``approved``) or at once (``auto``). The
other ranks have a ``Shadow``, which prepares what the leader prepares and hands it out at the swap's step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, Literal, Protocol, TypeVar

from jaxrl_sync.inference.errors import EngineError, NotServingError, SwapTimeoutError
from jaxrl_sync.inference.front import EngineState, SwapReport
from jaxrl_sync.inference.pending import fail, settle
from jaxrl_sync.inference.request import PauseMode
from jaxrl_sync.transfer.errors import TransferError
from jaxrl_sync.transfer.files.reader import FileSubscriber, FileUpdate
from jaxrl_sync.transfer.subscriber import Prepared, Subscriber, Update
from jaxrl_sync.transfer.version import Version

T = TypeVar("T")
AnySubscriber = Subscriber | FileSubscriber
AnyUpdate = Update | FileUpdate
SwapPolicy = Literal["approved", "auto"]
"""``approved``: a version is taken when somebody asks for it (push); ``auto``: when it is on offer (pull)."""
FIRST_TIMEOUT_S = 3600.0
AUTO_TIMEOUT_S = 60.0
_POLL_S = 0.2
_OLD_OFFER_S = 0.02
log = logging.getLogger("jaxrl_sync.inference.updater")


class Record(Protocol):
    """A row of the process's timeline; times are ``time.time()`` seconds."""

    def __call__(self, kind: str, t0: float, t1: float, *, version: int | None = None) -> None: ...


class Swappable(Protocol):
    """The part of the engine that an updater drives."""

    @property
    def version(self) -> Version | None: ...

    @property
    def state(self) -> EngineState: ...

    def pause(self, mode: PauseMode) -> Future[EngineState]: ...

    def resume(self) -> Future[EngineState]: ...

    def poison(self, reason: str) -> None: ...

    def refuse_pins(self) -> bool: ...

    def stand(self) -> Future[EngineState]: ...

    def go_on(self) -> None: ...

    def request_swap(
        self, version: Version, take: Callable[[], Any], timeout_s: float = ...
    ) -> Future[SwapReport]: ...


@dataclasses.dataclass(frozen=True)
class _Request:
    """Somebody wants ``version`` to serve by ``deadline`` (``time.monotonic()`` seconds)."""

    version: Version
    deadline: float
    mode: PauseMode
    future: Future[dict[str, Any]]


class Updater:
    """Owns the updating thread of rank 0, from ``start`` to ``close``; the subscriber stays the caller's.

    ``on_prepare`` runs right before this rank prepares (the leader tells its followers). ``ready`` is set
    once the first version serves. ``error`` is what ended the thread, None while all is well.
    ``auto_mode`` is the pause mode of versions that nobody asked for; who asks for one of them afterwards
    gets its report.
    """

    def __init__(
        self,
        engine: Swappable,
        subscriber: AnySubscriber,
        policy: SwapPolicy,
        *,
        record: Record,
        on_prepare: Callable[[], None] = lambda: None,
        auto_mode: PauseMode = "keep",
    ) -> None:
        self._engine, self._subscriber, self._policy = engine, subscriber, policy
        self._auto_mode: PauseMode = auto_mode
        self._unreported: dict[str, Any] | None = None
        self._record, self._on_prepare = record, on_prepare
        self._requests: queue.SimpleQueue[_Request | None]
        self._requests = queue.SimpleQueue()
        self._held: tuple[AnyUpdate, Prepared] | None = None
        self._overwriting = self._paused = False
        self._closing = threading.Event()
        self.ready = threading.Event()
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="updater", daemon=True)

    def start(self) -> None:
        """Start taking versions."""
        self._thread.start()

    @property
    def prepared(self) -> Version | None:
        """The version that lies verified in the shadow slot and doesn't serve yet."""
        held = self._held
        return held[0].version if held else None

    def swap(self, version: Version, timeout_s: float, mode: PauseMode = "keep") -> Future[dict[str, Any]]:
        """Serve ``version`` or a later one of its lineage; the future ends with the ``/swap`` answer.

        ``mode`` says what becomes of running samples: ``keep`` lets them go on over the swap, ``wait`` lets
        them end before it, ``abort`` cuts them off. The engine generates until the version is prepared.
        SwapTimeoutError after ``timeout_s``, with the state unchanged.
        """
        future: Future[dict[str, Any]] = Future()
        self._requests.put(_Request(version, time.monotonic() + timeout_s, mode, future))
        if self._closing.is_set() or self.error is not None:
            self._refuse_rest()
        return future

    def close(self, timeout_s: float = 10.0) -> None:
        """Stop taking versions; waits for the thread."""
        self._closing.set()
        self._requests.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    # The thread.

    def _run(self) -> None:
        try:
            self._take(None, time.monotonic() + FIRST_TIMEOUT_S)
            self.ready.set()
            while not self._closing.is_set():
                self._serve_one() if self._policy == "approved" else self._take_newest()
        except BaseException as error:
            if not self._closing.is_set():
                self.error = error
        self._refuse_rest()

    def _serve_one(self) -> None:
        try:
            request = self._requests.get(timeout=_POLL_S)
        except queue.Empty:
            return
        if request is None:
            return
        future = request.future
        try:
            settle(future, self._take(request.version, request.deadline, request.mode))
        except (EngineError, TransferError) as error:
            closing = self._closing.is_set()
            fail(future, NotServingError("the engine is closing") if closing else error)
        except Exception as error:
            fail(future, error)
            raise

    def _take_newest(self) -> None:
        """Policy auto: take what is on offer, then answer those who asked for it."""
        if self._held is not None or self._subscriber.poll(_POLL_S) is not None:  # what is held isn't offered
            try:
                deadline = time.monotonic() + AUTO_TIMEOUT_S
                self._unreported = self._take(None, deadline, self._auto_mode)
            except SwapTimeoutError as error:
                log.warning("%s", error)
        while not self._requests.empty() and not self._closing.is_set():
            self._serve_one()

    def _take(self, wanted: Version | None, deadline: float, mode: PauseMode = "keep") -> dict[str, Any]:
        """Prepare and swap to ``wanted`` or later, None for whatever is on offer; the ``/swap`` answer."""
        serving = self._engine.version
        if wanted is not None and serving is not None and _serves(serving, wanted):
            told, self._unreported = self._unreported, None
            return told or _answer(SwapReport(serving, 0, 0.0), None)
        with self._going_on_afterwards():
            return self._take_new(wanted, deadline, mode)

    def _take_new(self, wanted: Version | None, deadline: float, mode: PauseMode) -> dict[str, Any]:
        update, prepared = self._prepared_update(wanted, deadline, mode)
        self._held = (update, prepared)
        t0, began = time.time(), time.monotonic()
        try:
            with self._standing_still(mode, deadline):
                remaining = max(0.0, deadline - time.monotonic())
                report = self._wait(self._engine.request_swap(update.version, update.swap, remaining))
        except (EngineError, TransferError) as error:
            if not isinstance(error, SwapTimeoutError):  # after a timeout it is still good
                self._drop_held(f"its swap failed: {error}")
            raise
        self._held = None
        if mode != "keep":
            report = dataclasses.replace(report, pause_s=time.monotonic() - began)
        self._record("swap", time.time() - report.pause_s, time.time(), version=report.version.number)
        self._record("wait", t0, time.time() - report.pause_s, version=report.version.number)
        return _answer(report, prepared)

    @contextlib.contextmanager
    def _standing_still(self, mode: PauseMode, deadline: float) -> Iterator[None]:
        """Generation stands still inside, but for ``keep``; a pause that somebody else asked for stays."""
        if mode == "keep" or self._engine.state != "ready":
            yield
            return
        try:
            self._end_pins(deadline)
            self._wait(self._engine.pause(mode), deadline, f"samples still run, pause mode {mode}")
            yield
        finally:
            self._engine.go_on()
            self._engine.resume()

    def _end_pins(self, deadline: float) -> None:
        """What needs the serving version ends before anything is paused, which would keep it from ending."""
        while not self._engine.refuse_pins():
            if self._closing.is_set():
                raise NotServingError("the engine is closing")
            if time.monotonic() > deadline:
                raise SwapTimeoutError("the serving version is pinned or held")
            time.sleep(_OLD_OFFER_S)

    @contextlib.contextmanager
    def _going_on_afterwards(self) -> Iterator[None]:
        """A version that overwrites what serves stopped the engine: what it serves afterwards is whole."""
        try:
            yield
        finally:
            if self._overwriting:
                if getattr(self._subscriber, "poisoned", False):
                    self._engine.poison("a version was written over the serving one and not swapped in")
                self._engine.go_on()
            if self._paused:
                self._engine.resume()
            self._overwriting = self._paused = False

    def _stand_still_for(self, update: AnyUpdate, mode: PauseMode, timeout_s: float) -> None:
        """No step may run while the memory that it reads is overwritten, whoever pauses or resumes."""
        state = self._engine.state
        if not getattr(update, "in_place", False) or self._overwriting or state not in ("ready", "paused"):
            return
        deadline, self._overwriting = time.monotonic() + timeout_s, True
        self._end_pins(deadline)
        what = f"samples still run, pause mode {mode}"
        if mode != "keep" and state == "ready":
            self._paused = True
            self._wait(self._engine.pause(mode), deadline, what)
        self._wait(self._engine.stand(), deadline, what)

    def _wait(self, future: Future[T], deadline: float = math.inf, what: str = "") -> T:
        """What the engine says; the engine's own deadline ends the wait, or ours, or our closing."""
        while True:
            try:
                return future.result(_POLL_S)
            except TimeoutError:
                if self._closing.is_set():
                    raise NotServingError("the engine is closing") from None
                if time.monotonic() > deadline:
                    raise SwapTimeoutError(what) from None

    def _prepared_update(
        self, wanted: Version | None, deadline: float, mode: PauseMode
    ) -> tuple[AnyUpdate, Prepared]:
        """An update that is verified in the shadow slot, prepared again as long as there is time."""
        if self._held is not None:
            if wanted is None or _serves(self._held[0].version, wanted):
                return self._held
            self._drop_held(f"{wanted} is wanted")
        cause: Exception | None = None
        while not self._closing.is_set():
            left = deadline - time.monotonic()
            if left <= 0:
                raise SwapTimeoutError(f"swap to {wanted}: {cause or 'no such version was offered in time'}")
            update = self._subscriber.poll(min(left, _POLL_S))
            if update is None:
                continue
            if wanted is not None and not _serves(update.version, wanted):
                time.sleep(_OLD_OFFER_S)
                continue
            try:
                self._stand_still_for(update, mode, left)
                return update, self._prepare(update, left)
            except TransferError as error:
                log.warning("preparing %s: %s", update.version, error)
                cause = error
        raise NotServingError("the engine is closing")

    def _drop_held(self, reason: str) -> None:
        held, self._held = self._held, None
        if held is not None:
            held[0].discard(reason)

    def _prepare(self, update: AnyUpdate, timeout_s: float) -> Prepared:
        self._on_prepare()
        t0 = time.time()
        prepared = update.prepare(timeout_s)
        self._record("prepare", t0, time.time(), version=prepared.version.number)
        return prepared

    def _refuse_rest(self) -> None:
        """Nobody may wait for a thread that has ended."""
        with contextlib.suppress(queue.Empty):
            while True:
                request = self._requests.get_nowait()
                if request is not None:
                    fail(request.future, NotServingError("the engine takes no versions any more"))


class Shadow:
    """What a follower has prepared. ``prepare`` and ``take`` are called from different threads."""

    def __init__(self, subscriber: AnySubscriber, *, record: Record, timeout_s: float = 60.0) -> None:
        self._subscriber, self._record, self._timeout_s = subscriber, record, timeout_s
        self._asked: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._held: AnyUpdate | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="shadow", daemon=True)
        self._thread.start()

    def prepare(self) -> None:
        """Prepare what the hub offers, in the background."""
        self._asked.put(True)

    def take(self, version: Version) -> Any:
        """The tree of ``version``; waits up to ``timeout_s`` for it, EngineError without it."""
        deadline = time.monotonic() + self._timeout_s
        with self._changed:
            while self._held is None or self._held.version != version:
                left = deadline - time.monotonic()
                if left <= 0:
                    found = self._held.version if self._held else None
                    raise EngineError(f"swap to {version}: this rank has prepared {found}")
                self._changed.wait(left)
            update, self._held = self._held, None
        return update.swap()

    def close(self) -> None:
        """End the thread."""
        self._asked.put(False)
        self._thread.join(5.0)

    def _run(self) -> None:
        while self._asked.get():
            with self._changed:
                stale, self._held = self._held, None
            if stale is not None:
                stale.discard("the leader prepares again")
            try:
                update = self._subscriber.poll(self._timeout_s)
                if update is None:
                    continue
                t0 = time.time()
                update.prepare(self._timeout_s)
            except TransferError as error:
                log.warning("preparing: %s", error)
                continue
            self._record("prepare", t0, time.time(), version=update.version.number)
            with self._changed:
                self._held = update
                self._changed.notify_all()


def _serves(found: Version, wanted: Version) -> bool:
    return found == wanted or found.follows(wanted)


def _answer(report: SwapReport, prepared: Prepared | None) -> dict[str, Any]:
    return {
        "lineage": report.version.lineage,
        "number": report.version.number,
        "pause_s": report.pause_s,
        "step": report.step,
        "bytes": prepared.nbytes if prepared else 0,
        "prepare_s": prepared.prepare_s if prepared else 0.0,
        "verify_s": prepared.verify_s if prepared else 0.0,
        "transport": prepared.transport if prepared else "none",
        "payload": prepared.payload if prepared else "none",
        "coding": prepared.coding if prepared else "",
        "density": prepared.density if prepared else 0.0,
        "moved": dict(prepared.moved) if prepared else {},
    }
