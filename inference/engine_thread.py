"""The thread that an engine steps on, beside the one that serves HTTP and the one that waits for the end."""

from __future__ import annotations

import logging
import threading

from jaxrl_sync.inference.engine import Engine
from jaxrl_sync.inference.updater import Record

# The longest span of one timeline row.
SPAN_S = 0.5
log = logging.getLogger("jaxrl_sync.inference.engine_thread")


class Spans:
    """Joins steps without a gap into ``generate`` rows of at most ``SPAN_S``. For one thread."""

    def __init__(self, engine: Engine, record: Record | None) -> None:
        self._engine, self._record = engine, record
        self._span: tuple[float, float] | None = None

    def busy(self, t0: float, t1: float) -> None:
        """A step decoded from ``t0`` to ``t1`` (``time.time()`` seconds)."""
        if self._span is not None and (t0 - self._span[1] > 0.05 or t1 - self._span[0] > SPAN_S):
            self.flush()
        self._span = (self._span[0] if self._span else t0, t1)

    def flush(self) -> None:
        """Record what is open."""
        version = self._engine.version
        if self._span is not None and version is not None and self._record is not None:
            self._record("generate", *self._span, version=version.number)
        self._span = None


class EngineThread:
    """Runs an engine's steps on a thread of its own and records when it generates; ends with ``with``.

    A step that raises ends the thread and closes the engine, so that what waits for it fails at once.
    """

    def __init__(self, engine: Engine, record: Record | None = None) -> None:
        self._engine, self._spans = engine, Spans(engine, record)
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="engine-steps", daemon=True)

    def __enter__(self) -> EngineThread:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(60.0)
        if self._thread.is_alive():
            log.warning("a step still runs 60 s after the engine was told to end; leaving it")

    def check(self) -> None:
        """Raise what ended the thread, if something did."""
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._engine.run(self._stop, self._spans.busy)
        except BaseException as error:
            self._error = error
            self._engine.close()
        self._spans.flush()
