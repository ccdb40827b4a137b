"""The engines the loop knows: who serves, which version each holds, who is reserved; and their HTTP calls.

An engine is *joining* until a swap has brought it the current version, then it *serves*; it is *suspect*
after a failed call until its health answers again, and *gone* once its lease ends or its address changes
(it then comes back as a new engine of the same name).
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import ssl
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Literal

import httpx

from jaxrl_sync.orchestrator.errors import LoopError
from jaxrl_sync.orchestrator.groups import EngineView
from jaxrl_sync.transfer.version import Version

State = Literal["joining", "serving", "suspect", "gone"]
_CONNECT_S = 5.0
_GRACE_S = 10.0


class EngineGoneError(LoopError):
    """An engine can't be reached, or broke the connection in the middle of an answer.

    ``refused``: nobody listens at its address any more.
    """

    exit_code = 4

    def __init__(self, message: str, *, refused: bool = False) -> None:
        super().__init__(message)
        self.refused = refused


class EngineRefusedError(LoopError):
    """An engine answered with an error status; ``status`` is the HTTP one."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


@dataclasses.dataclass(slots=True, eq=False)
class Engine:
    """One incarnation of an engine. ``version`` is what it is known to hold, None before the first swap."""

    name: str
    url: str
    slots: int
    max_len: int
    incarnation: str = ""
    colocated: bool = False
    """It lives with the trainer and can't generate while a step is trained."""
    moves_itself: bool = False
    """It takes versions unasked, so it must be told to hold one that an evaluation is pinned to."""
    state: State = "joining"
    version: Version | None = None
    reserved: object | None = None
    swapping: bool = False
    failures: int = 0
    missing_since: float | None = None
    stood_s: Callable[[], float] = lambda: 0.0
    """How long it has stood still in all, because its devices were the trainer's."""

    @property
    def serves(self) -> bool:
        """Whether new groups may be sent to it."""
        return self.state == "serving" and self.version is not None


class EngineSet:
    """All incarnations that are not gone, by name. No I/O: the watcher feeds it."""

    def __init__(self) -> None:
        self._engines: dict[str, Engine] = {}
        self.lost = 0
        self.training: Callable[[], bool] = lambda: False
        """Whether a step is with the trainer; colocated engines then take no new groups."""
        self.trained_s: Callable[[], float] = lambda: 0.0
        """How long steps were with the trainer in all."""

    def __iter__(self) -> Iterator[Engine]:
        return iter(list(self._engines.values()))

    def __len__(self) -> int:
        return len(self._engines)

    def get(self, name: str) -> Engine | None:
        """The engine of that name, if it is not gone."""
        return self._engines.get(name)

    def serving(self) -> list[EngineView]:
        """Engines that may take new groups now."""
        training = self.training()
        able = [e for e in self if e.serves and not (e.colocated and training)]
        return [EngineView(e.name, e.version, e.slots, e.stood_s()) for e in able if e.version is not None]

    def stood_s(self) -> dict[str, float]:
        """How long each engine that ever stands still has done so in all."""
        return {e.name: e.stood_s() for e in self if e.colocated}

    def any_serves(self) -> bool:
        """Whether one serves, now or after the step in training."""
        return any(e.serves for e in self)

    def at_one_version(self) -> bool:
        """Whether all that serve or join hold the same one; one whose last swap failed, or that does not
        answer, holds up nobody."""
        return len({e.version for e in self if e.state in ("joining", "serving") and not e.failures}) <= 1

    def update(
        self, infos: Mapping[str, Mapping[str, Any]], keep: Collection[str] = ()
    ) -> tuple[list[Engine], list[Engine]]:
        """Take the hub's members (name -> info); returns (joined, gone) incarnations.

        An engine in ``keep`` stays although the hub does not list it (a restarted hub knows nobody yet).
        """
        gone = [e for e in self if _is_gone(e, infos.get(e.name), e.name in keep)]
        for engine in gone:
            self.remove(engine)
        joined = [_engine(name, i) for name, i in sorted(infos.items()) if name not in self._engines]
        for engine in joined:
            if engine.colocated:
                engine.stood_s = lambda: self.trained_s()
            self._engines[engine.name] = engine
        return joined, gone

    def remove(self, engine: Engine) -> None:
        """This incarnation is gone."""
        engine.state = "gone"
        self.lost += 1
        if self._engines.get(engine.name) is engine:
            del self._engines[engine.name]

    def describe(self) -> str:
        """All engines in one line, for error messages."""
        rows = [f"{e.name} {e.state} at {e.version}" for e in self]
        return ", ".join(rows) or "no engine is registered"


def _is_gone(engine: Engine, info: Mapping[str, Any] | None, keep: bool) -> bool:
    return not keep if info is None else _identity(info) != (engine.url, engine.incarnation)


def _identity(info: Mapping[str, Any]) -> tuple[str, str]:
    return str(info["url"]).rstrip("/"), str(info.get("incarnation", ""))


def _engine(name: str, info: Mapping[str, Any]) -> Engine:
    url, incarnation = _identity(info)
    slots, max_len = int(info.get("slots", 1)), int(info.get("max_len", 1 << 30))
    colocated, moves = bool(info.get("colocated", False)), bool(info.get("moves_itself", False))
    return Engine(name, url, slots, max_len, incarnation, colocated, moves)


class EngineClient:
    """HTTP calls to engines. Admin calls have a pool of their own: long generations can't starve them."""

    def __init__(self, token: str, *, connections: int, verify: ssl.SSLContext | bool = True) -> None:
        headers = {"Authorization": f"Bearer {token}"}
        limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)
        self._work = httpx.AsyncClient(headers=headers, limits=limits, trust_env=False, verify=verify)
        self._admin = httpx.AsyncClient(headers=headers, trust_env=False, verify=verify)

    async def generate(self, engine: Engine, request: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """One whole group's answer; the engine itself ends the request at its ``timeout_s``.

        A colocated one may sleep meanwhile, which doesn't count: whoever opened the group ends it in time.
        """
        limit_s = None if engine.colocated else timeout_s + _GRACE_S
        return await self._post(self._work, engine, "/generate", request, limit_s)

    async def abort(self, engine: Engine, request_ids: Sequence[str], timeout_s: float) -> None:
        """Stop these requests; what they have is answered to their own callers."""
        await self._post(self._admin, engine, "/abort", {"request_ids": list(request_ids)}, timeout_s)

    async def swap(self, engine: Engine, version: Version, timeout_s: float, mode: str) -> dict[str, Any]:
        """Bring ``engine`` to ``version`` or a later one; the engine gives up after ``timeout_s``.

        ``mode``: what becomes of running samples (``LoopConfig.pause_mode``).
        """
        body = {**dataclasses.asdict(version), "timeout_s": timeout_s, "mode": mode}
        return await self._post(self._admin, engine, "/swap", body, timeout_s + _GRACE_S)

    async def hold(self, engine: Engine, version: Version, seconds: float, timeout_s: float) -> None:
        """Keep ``version`` on an engine that takes versions by itself; refused (409) if it has moved on."""
        body = {**dataclasses.asdict(version), "timeout_s": seconds}
        await self._post(self._admin, engine, "/hold", body, timeout_s)

    async def release(self, engine: Engine, timeout_s: float) -> None:
        """End a hold."""
        await self._post(self._admin, engine, "/release", {}, timeout_s)

    async def health(self, engine: Engine, timeout_s: float) -> dict[str, Any]:
        """``{"state", "version"}`` of the engine."""
        return await self._call(self._admin, engine, "GET", "/health", None, timeout_s)

    async def stats(self, engine: Engine, timeout_s: float) -> dict[str, Any]:
        """The engine's counters."""
        return await self._call(self._admin, engine, "GET", "/stats", None, timeout_s)

    async def close(self) -> None:
        """Close both pools."""
        await self._work.aclose()
        await self._admin.aclose()

    async def _post(
        self,
        client: httpx.AsyncClient,
        engine: Engine,
        path: str,
        body: Mapping[str, Any],
        timeout_s: float | None,
    ) -> dict[str, Any]:
        return await self._call(client, engine, "POST", path, body, timeout_s)

    async def _call(
        self,
        client: httpx.AsyncClient,
        engine: Engine,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        timeout_s: float | None,
    ) -> dict[str, Any]:
        what = f"{engine.name} {method} {path}"
        limit_s = math.inf if timeout_s is None else timeout_s
        timeout = httpx.Timeout(timeout_s, connect=min(_CONNECT_S, limit_s))
        try:
            async with asyncio.timeout(None if timeout_s is None else timeout_s + 1.0):
                answer = await client.request(method, engine.url + path, json=body, timeout=timeout)
        except (httpx.HTTPError, TimeoutError) as error:
            refused = isinstance(error, httpx.ConnectError)
            raise EngineGoneError(
                f"{what}: {type(error).__name__} {error}".rstrip(), refused=refused
            ) from error
        if answer.status_code >= 400:
            raise EngineRefusedError(
                f"{what}: HTTP {answer.status_code} {answer.text[:200]}", answer.status_code
            )
        try:
            value = answer.json()
        except ValueError as error:
            raise EngineGoneError(f"{what}: the answer is not JSON: {answer.text[:80]!r}") from error
        if not isinstance(value, dict):
            raise EngineGoneError(f"{what}: the answer is a {type(value).__name__}, expected an object")
        return value
