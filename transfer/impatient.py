"""uvicorn's HTTP/1.1 protocol with the deadlines that it lacks; every HTTP server of a run speaks it."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

HEADERS_DEADLINE_S = 20.0
SEND_DEADLINE_S = 60.0
KEEP_ALIVE_S = 75.0


class ImpatientProtocol(H11Protocol):
    """Ends a connection, unsent bytes included, that does not finish a request's headers in
    ``HEADERS_DEADLINE_S`` (an idle one may stay ``KEEP_ALIVE_S`` longer), and one whose reader lets its
    answer stand for ``SEND_DEADLINE_S``."""

    _stalled: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Give the first request its time."""
        super().connection_made(transport)
        self._headers_due = self.loop.call_later(HEADERS_DEADLINE_S, self._end_idle)

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is due any more."""
        self._headers_due.cancel()
        self._reading_again()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """Give the next request its time, on top of the time that a connection may idle."""
        super().on_response_complete()
        self._headers_due.cancel()
        self._headers_due = self.loop.call_later(HEADERS_DEADLINE_S + KEEP_ALIVE_S, self._end_idle)

    def pause_writing(self) -> None:
        """The transport's buffer is full: from now on the reader is on the clock."""
        super().pause_writing()
        self._stalled = self.loop.call_later(SEND_DEADLINE_S, self.transport.abort)

    def resume_writing(self) -> None:
        """The reader took enough of it."""
        self._reading_again()
        super().resume_writing()

    def _reading_again(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    def _end_idle(self) -> None:
        busy = self.cycle is not None and not self.cycle.response_complete
        if not busy:
            self.transport.abort()
