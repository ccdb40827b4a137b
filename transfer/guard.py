"""What stands before every call of a run's HTTP servers: the run token, and how often one may call."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Any

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxrl_sync.transfer import auth
from jaxrl_sync.transfer.rates import DEFAULT_LIMITS, Buckets, RateLimits
from jaxrl_sync.transfer.refusals import Refusals

PROVEN = "jaxrl_sync.proven"
Deny = Callable[[Scope, int, str], Response]
"""From a request, a status (401, 429) and a message to the answer."""


class Guard:
    """Refuses requests without the token before their body is read, but for the paths in ``public``.

    The comparison takes the same time for any wrong token. A connection that was refused is closed; one that
    has proven the token leaves the lobby (`jaxrl_sync.transfer.impatient`).
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        token: str,
        deny: Deny,
        refusals: Refusals,
        public: Collection[str] = ("/health",),
        limits: RateLimits = DEFAULT_LIMITS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._app, self._token, self._deny, self._refusals = app, token, deny, refusals
        self._public, self._clock = frozenset(public), clock
        self._members = Buckets(limits.client), Buckets(limits.all, 1)
        self._strangers = Buckets(limits.stranger), Buckets(limits.strangers, 1)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        address, now = _address(scope), self._clock()
        proven = self._proves(scope)
        if not proven and scope["path"] not in self._public:
            await self._refuse(scope, address)(scope, receive, send)
            return
        if proven:
            scope.get(PROVEN, _nothing)()
        one, together = self._members if proven else self._strangers
        wait_s = one.take(address, now) or together.take("", now)
        if wait_s:
            self._refusals.note(address, "rate", f"{scope['path']}: too many requests")
            answer = self._deny(scope, 429, "too many requests")
            answer.headers["retry-after"] = str(max(1, round(wait_s)))
            await answer(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _proves(self, scope: Scope) -> bool:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        return len(given) == 1 and auth.check_bearer(given[0].decode("latin-1"), self._token)

    def _refuse(self, scope: Scope, address: str) -> Response:
        named = any(name == b"authorization" for name, _ in scope["headers"])
        self._refusals.note(address, "token", f"{scope['path']}: {'wrong' if named else 'no'} run token")
        answer = self._deny(scope, 401, "missing or wrong run token")
        answer.headers["www-authenticate"] = "Bearer"
        answer.headers["connection"] = "close"  # the body of the refused request is not read
        return answer


def _address(scope: Scope) -> str:
    client: Any = scope.get("client")
    return str(client[0]) if client else "unknown"


def _nothing() -> None:
    """Called where no lobby has to be told."""
