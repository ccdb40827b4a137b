"""Asynchronous events of a device by name, and what each means for what runs over the device."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import select
import threading
from collections.abc import Callable
from typing import Any, Literal

from jaxrl_sync.transfer.verbs.errors import VerbsError

NAMES = (
    "CQ_ERR",
    "QP_FATAL",
    "QP_REQ_ERR",
    "QP_ACCESS_ERR",
    "COMM_EST",
    "SQ_DRAINED",
    "PATH_MIG",
    "PATH_MIG_ERR",
    "DEVICE_FATAL",
    "PORT_ACTIVE",
    "PORT_ERR",
    "LID_CHANGE",
    "PKEY_CHANGE",
    "SM_CHANGE",
    "SRQ_ERR",
    "SRQ_LIMIT_REACHED",
    "QP_LAST_WQE_REACHED",
    "CLIENT_REREGISTER",
    "GID_CHANGE",
    "WQ_FATAL",
)
"""Of the ABI, by number."""

FATAL = frozenset(
    {"CQ_ERR", "QP_FATAL", "QP_REQ_ERR", "QP_ACCESS_ERR", "DEVICE_FATAL", "SRQ_ERR", "WQ_FATAL"}
)
CHANGED = frozenset(
    {"PORT_ACTIVE", "PORT_ERR", "LID_CHANGE", "PKEY_CHANGE", "SM_CHANGE", "CLIENT_REREGISTER", "GID_CHANGE"}
)
CLOSE_S = 5.0


@dataclasses.dataclass(frozen=True)
class AsyncEvent:
    """``name`` as in NAMES, ``text`` the library's words, and the object: qp, cq, srq, port or device.

    ``meaning``: fatal (the object is lost), changed (look at port, GID and route again) or information.
    """

    name: str
    text: str
    kind: str
    number: int
    meaning: Literal["fatal", "changed", "information"]

    def __str__(self) -> str:
        where = {"qp": f"queue pair 0x{self.number:06x}", "device": "the device"}
        return f"{self.name} of {where.get(self.kind, f'{self.kind} {self.number}')}: {self.text}"


def event_of(row: tuple[int, str, str, int]) -> AsyncEvent:
    """A row of ``Context.async_events``."""
    code, text, kind, number = row
    name = NAMES[code] if 0 <= code < len(NAMES) else f"EVENT_{code}"
    meaning: Literal["fatal", "changed", "information"] = "information"
    if name in FATAL:
        meaning = "fatal"
    elif name in CHANGED:
        meaning = "changed"
    return AsyncEvent(name, text, kind, number, meaning)


class EventWatcher:
    """A thread that takes every event of a device as it comes, acknowledges it and hands it to ``tell``.

    Owns the thread only; close it before the context. ``tell`` runs in the thread and must not raise.
    """

    def __init__(self, context: Any, tell: Callable[[AsyncEvent], None]) -> None:
        """VerbsError where there is no descriptor or no thread for it."""
        self._context, self._tell = context, tell
        name = f"events of {context.name}"
        try:
            self._wake = os.eventfd(0)
        except OSError as error:
            raise VerbsError(error.errno or 0, f"no descriptor for {name}: {error.strerror}") from error
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            os.close(self._wake)
            raise VerbsError(0, f"no thread for {name}: {error}") from error

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._context.async_fd, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        while self._wake not in {fd for fd, _ in poll.poll()}:
            for row in self._context.async_events():
                self._tell(event_of(row))

    def close(self) -> None:
        """End the thread; what came until now has been told. Idempotent, blocks until it is out."""
        if self._wake < 0:
            return
        os.eventfd_write(self._wake, 1)
        self._thread.join(CLOSE_S)
        with contextlib.suppress(OSError):
            os.close(self._wake)
        self._wake = -1

    def __enter__(self) -> EventWatcher:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()
