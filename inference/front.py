"""The engine as its clients see it: what a server, a worker or a test may call from any thread.

``Engine`` (``inference.engine``) is the implementation; a server is written against this protocol.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any, Literal, Protocol

from jaxrl_sync.inference.config import EngineConfig
from jaxrl_sync.inference.request import GroupResult, PauseMode, Request, TokenChunk
from jaxrl_sync.sharding.presets.qwen3 import DecoderConfig
from jaxrl_sync.transfer.version import Version

EngineState = Literal["starting", "ready", "paused", "sleeping", "poisoned", "closed"]
OnTokens = Callable[[TokenChunk], None]


@dataclasses.dataclass(frozen=True)
class Handle:
    """One submitted group. ``future`` ends with the result also after abort and timeout: with what there is.

    The future fails with PoisonedError or NotServingError when the engine can't go on with the group.
    """

    request_id: str
    future: Future[GroupResult]

    def result(self, timeout_s: float) -> GroupResult:
        """Block until the group is finished; TimeoutError after ``timeout_s``."""
        return self.future.result(timeout_s)


@dataclasses.dataclass(frozen=True)
class SwapReport:
    """A swap that happened: ``step`` is the first decode step on ``version``, ``pause_s`` the time decoding
    stood still for it (0 for a version that was installed already)."""

    version: Version
    step: int
    pause_s: float


@dataclasses.dataclass(frozen=True)
class EngineStats:
    """Counters and state of one engine; times in seconds."""

    state: EngineState
    version: Version | None
    running: int
    waiting: int
    slots: int
    steps: int
    dispatches: int
    prefills: int
    tokens_generated: int
    samples_finished: int
    decode_step_s_median: float
    swaps: int
    mixed_version_steps: int
    poison_reason: str | None

    def to_json(self) -> dict[str, Any]:
        """The stats as plain JSON values."""
        return dataclasses.asdict(self)


class EngineFront(Protocol):
    """Thread-safe calls. None of them waits for the device; futures end on the engine's thread."""

    @property
    def config(self) -> EngineConfig: ...

    @property
    def model(self) -> DecoderConfig: ...

    @property
    def state(self) -> EngineState: ...

    @property
    def version(self) -> Version | None:
        """The version that the next step uses; None before the first install."""

    def submit(self, request: Request, on_tokens: OnTokens | None = None) -> Handle:
        """Queue a group. ``on_tokens`` is called on the engine's thread and must not block.

        Raises RequestError (too long, unknown token), VersionMismatchError (pin), NotServingError (no
        version yet, closing), PoisonedError, QueueFullError; all have ``.status`` for HTTP.
        """
        ...

    def abort(self, request_ids: Iterable[str]) -> int:
        """End these groups between two steps; their futures get what there is. Returns how many it knew."""
        ...

    def pause(self, mode: PauseMode) -> Future[EngineState]:
        """Stop decoding: ``keep`` freezes running samples, ``wait`` ends them first, ``abort`` cuts them off.

        Idempotent. The future ends with the state once the engine stands still (or was resumed meanwhile).
        """
        ...

    def resume(self) -> Future[EngineState]:
        """Go on decoding, idempotent."""
        ...

    def request_swap(
        self, version: Version, take: Callable[[], Any], timeout_s: float = 60.0
    ) -> Future[SwapReport]:
        """Serve ``take()`` (an engine tree) as ``version`` from a step boundary on.

        Waits for pinned groups; fails with SwapTimeoutError after ``timeout_s``, state unchanged. ``take``
        runs on the engine's thread when every output of the last step is ready. An installed version
        answers at once.
        """
        ...

    def install(self, tree: Any, version: Version) -> Future[SwapReport]:
        """``request_swap`` with a tree at hand."""
        ...

    def hold(self, version: Version, seconds: float) -> None:
        """Keep ``version`` serving for a series of pinned requests: no swap for ``seconds`` or until
        ``release``; a second hold replaces the first. Raises VersionMismatchError if it does not serve."""
        ...

    def release(self) -> None:
        """End a hold; without one nothing happens."""
        ...

    def poison(self, reason: str) -> None:
        """Refuse everything, and fail what runs, until the next swap: the weights are incomplete."""
        ...

    def stats(self) -> EngineStats:
        """A consistent snapshot."""
        ...
