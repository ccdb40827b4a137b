"""The hub's shell: HTTP around the state machine. Starlette and uvicorn on one event loop, no threads.

Every call but ``GET /health`` needs ``Authorization: Bearer <run token>`` (`jaxrl_sync.transfer.guard`), with
TLS where a certificate is given. Bodies are JSON of limited size that must arrive within a deadline; long
polls end after at most ``MAX_POLL_S``. Blobs (layouts and the like) are stored under the sha256 of their
bytes and, as everything here, are forgotten at a restart: their owners register them again.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import secrets
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Scope

from jaxrl_sync.transfer import auth, impatient, wire
from jaxrl_sync.transfer.errors import ResourceError
from jaxrl_sync.transfer.exposition import CONTENT_TYPE, render
from jaxrl_sync.transfer.guard import Guard
from jaxrl_sync.transfer.hub import machine, preflight, views
from jaxrl_sync.transfer.hub.bodies import BadRequest, event_of, member_key, model_name, number, text, version
from jaxrl_sync.transfer.hub.metrics import families
from jaxrl_sync.transfer.hub.room import Room
from jaxrl_sync.transfer.hub.state import HubState, MemberKey, Tag, version_json, version_of
from jaxrl_sync.transfer.hub.trace import Trace
from jaxrl_sync.transfer.rates import DEFAULT_LIMITS, RateLimits
from jaxrl_sync.transfer.refusals import Refusals
from jaxrl_sync.transfer.tls import ServerTls

MAX_BODY_BYTES = 4 << 20
MAX_BLOB_BYTES = 256 << 20
MAX_BLOBS_BYTES = 1 << 30
MAX_BLOBS = 1 << 16
MAX_POLL_S = 30.0
BODY_TIMEOUT_S = 20.0
TICK_S = 0.5
MAX_HOLDINGS = 4096
MAX_MODELS = 1024
_HTTP = {"unknown_round": 410, "round_over": 410}  # others: 409

logger = logging.getLogger("jaxrl_sync.hub")


class Hub:
    """The state, the lock-free loop that changes it, and the blobs. Lives on one event loop."""

    def __init__(self, token: str, run_id: str, ttl_s: float, room: Room) -> None:
        self.token = token
        self.room = room
        self.run_id = run_id
        self.ttl_s = ttl_s
        self.state = HubState(epoch=secrets.token_hex(8))
        self.blobs: dict[str, bytes] = {}
        self.refusals = Refusals(logger, "hub")
        self.trace = Trace()
        self.closing = False
        self._changed = asyncio.Event()

    def close(self) -> None:
        """Let every long poll end now, with what it has."""
        self.closing = True
        self._changed.set()

    def apply(self, event: machine.Event) -> machine.Done | machine.Refused:
        """Apply one event and wake every long poll if anything but a lease changed."""
        before = self.state
        self.state, outcome = machine.step(before, event, time.monotonic())
        self.trace.see(before, self.state, time.time())
        for line in outcome.log if isinstance(outcome, machine.Done) else ():
            logger.info("%s", line)
        renewed = (
            isinstance(event, machine.Heartbeat) and isinstance(outcome, machine.Done) and not outcome.log
        )
        if self.state is not before and not renewed:
            self._changed.set()
            self._changed = asyncio.Event()
        return outcome

    async def poll(self, ask: Callable[[], Any], timeout_s: float) -> Any:
        """Ask again after every change until the answer isn't None or the time is up (then None)."""
        deadline = time.monotonic() + min(max(timeout_s, 0.0), MAX_POLL_S)
        while True:
            changed = self._changed
            result = ask()
            remaining = deadline - time.monotonic()
            if result is not None or remaining <= 0 or self.closing:
                return result
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), remaining)

    async def tick(self) -> None:
        """Let leases and deadlines run out although nobody calls."""
        while True:
            await asyncio.sleep(TICK_S)
            try:
                self.apply(machine.Tick())
            except Exception:  # leases must go on to run out
                logger.exception("a tick of the hub failed")

    def note(self, event: machine.Event, body: dict[str, Any]) -> None:
        """Keep what a rank told beside an event that was taken."""
        now = time.time()
        if isinstance(event, machine.Announce):
            self.trace.published(event.key, event.model, event.version, body, now)
        elif isinstance(event, machine.Advance) and event.to == "installed":
            entry = self.state.closed.get(event.round) or self.state.rounds.get(event.round)
            if entry is not None:
                self.trace.reported(event.key, entry, body.get("report"), now)

    def metrics(self) -> str:
        """All metrics as Prometheus' text."""
        clocks = {"now": time.monotonic(), "t": time.time()}
        blobs_bytes = sum(map(len, self.blobs.values()))
        counts = self.refusals.counts()
        return render(families(self.state, self.trace, **clocks, refused=counts, blobs_bytes=blobs_bytes))

    def put_blob(self, data: bytes) -> None:
        """Keep a blob under its sha256; those put longest ago go where there are too many, or bytes."""
        digest = hashlib.sha256(data).hexdigest()
        self.blobs.pop(digest, None)  # one that is put again is wanted
        self.blobs[digest] = data
        while len(self.blobs) > MAX_BLOBS or sum(map(len, self.blobs.values())) > MAX_BLOBS_BYTES:
            self.blobs.pop(next(iter(self.blobs)))


async def _body(request: Request, limit_bytes: int) -> bytes:
    """The whole body, limited in size and time."""
    parts: list[bytes] = []
    total = 0
    async with asyncio.timeout(BODY_TIMEOUT_S):
        async for part in request.stream():
            total += len(part)
            if total > limit_bytes:
                raise BadRequest(f"the body exceeds {limit_bytes} bytes")
            parts.append(part)
    return b"".join(parts)


async def _json(request: Request) -> dict[str, Any]:
    try:
        body = json.loads(await _body(request, MAX_BODY_BYTES) or b"{}")
    except RecursionError as error:
        raise BadRequest("the body is nested too deeply") from error
    if not isinstance(body, dict):
        raise BadRequest(f"the body is {type(body).__name__}, expected an object")
    return body


class Routes:
    """The HTTP calls of one hub."""

    def __init__(self, hub: Hub) -> None:
        self.hub = hub

    def table(self) -> list[Route]:
        """All routes."""
        calls = [
            ("/v1/event/{kind}", self.event, ["POST"]),
            ("/v1/watch", self.watch, ["POST"]),
            ("/v1/round", self.round, ["POST"]),
            ("/v1/newest", self.newest, ["POST"]),
            ("/v1/members", self.members, ["POST"]),
            ("/v1/pinned", self.pinned, ["POST"]),
            ("/v1/pin", self.pin, ["POST"]),
            ("/v1/unpublished", self.unpublished, ["POST"]),
            ("/v1/preflight", self.preflight, ["POST"]),
            ("/v1/status", self.status, ["GET"]),
            ("/v1/trace", self.trace, ["POST"]),
            ("/metrics", self.metrics, ["GET"]),
            ("/v1/blob", self.put_blob, ["POST"]),
            ("/v1/blob/{digest}", self.get_blob, ["GET"]),
        ]
        routes = [Route(path, self._answering(call), methods=methods) for path, call, methods in calls]
        return [*routes, Route("/health", self.health, methods=["GET"])]

    def _answering(self, call: Callable[[Request], Any]) -> Callable[[Request], Any]:
        async def answering(request: Request) -> Response:
            try:
                response: Response = await call(request)
                return response
            except (BadRequest, ValueError) as error:
                message = str(error).encode("utf8", "backslashreplace").decode()  # it may quote the body
                return JSONResponse({"error": "bad_request", "message": message}, 400)
            except ClientDisconnect:
                logger.info("%s went away in the middle of %s", request.client, request.url.path)
                return Response(status_code=400)
            except TimeoutError:
                return JSONResponse({"error": "slow", "message": "the body took too long"}, 408)

        return answering

    def _answer(self, result: dict[str, Any] | machine.Refused) -> JSONResponse:
        if isinstance(result, machine.Refused):
            body = {"error": result.code, "message": result.message, "epoch": self.hub.state.epoch}
            return JSONResponse(body, _HTTP.get(result.code, 409))
        return JSONResponse({**result, "epoch": self.hub.state.epoch, "run_id": self.hub.run_id})

    async def health(self, _: Request) -> Response:
        """Whether the hub is up; needs no token and tells nothing else."""
        return JSONResponse({"state": "ready"})

    async def event(self, request: Request) -> Response:
        """One change of state."""
        body = await _json(request)
        event = event_of(request.path_params["kind"], body, self.hub.ttl_s)
        self._check_room(event)
        outcome = self.hub.apply(event)
        if isinstance(outcome, machine.Done):
            self.hub.note(event, body)
        return self._answer(outcome if isinstance(outcome, machine.Refused) else outcome.reply)

    def _check_room(self, event: machine.Event) -> None:
        """What one member, or all of them, may have the hub remember."""
        state = self.hub.state
        if isinstance(event, machine.Register):
            refusal = self.hub.room.refusal(len(state.members))
            if refusal is not None and event.key not in state.members:
                raise BadRequest(refusal)
        elif isinstance(event, (machine.Announce, machine.Hold, machine.Unpublish)):
            if len(state.holdings.get(event.key, {})) >= MAX_HOLDINGS:
                raise BadRequest(f"{event.key} holds {MAX_HOLDINGS} versions, no more are taken")
            models = {**state.newest, **state.fanouts}
            if len(models) >= MAX_MODELS and event.model not in models:
                raise BadRequest(f"{len(models)} models are known, no more are taken")

    async def watch(self, request: Request) -> Response:
        """Long poll of a subscriber rank: answers when publishers or its offer differ from what it knows.

        With ``begin_s`` the rank takes whatever is offered, at once: another round than it knows is begun
        for it, with that deadline, in the same breath.
        """
        body = await _json(request)
        key, incarnation = member_key(body), text(body, "incarnation")
        known_round, known_publishers = body.get("round"), body.get("publishers")

        def ask() -> dict[str, Any] | machine.Refused | None:
            seen = machine.watch(self.hub.state, key, incarnation)
            if isinstance(seen, machine.Refused):
                return seen
            offered = seen["offer"]["round"] if seen["offer"] else None
            publishers = [p["incarnation"] for p in seen["publishers"]]
            changed = offered != known_round or publishers != known_publishers
            return seen if changed else None

        begin_s = number(body, "begin_s", 0.0)
        result = await self.hub.poll(ask, number(body, "timeout_s", MAX_POLL_S))
        if begin_s > 0 and isinstance(result, dict) and result["offer"] is not None:
            if result["offer"]["round"] != known_round and not await request.is_disconnected():
                result = self._begun(key, incarnation, result, begin_s)
        return self._answer(result if result is not None else {"unchanged": True})

    def _begun(
        self, key: MemberKey, incarnation: str, seen: dict[str, Any], begin_s: float
    ) -> dict[str, Any]:
        """What a rank was going to be told, with the round begun; as it is where that can't be."""
        begun = machine.Advance(key, incarnation, seen["offer"]["round"], "begun", begin_s)
        outcome = self.hub.apply(begun)
        if isinstance(outcome, machine.Refused):
            return seen
        return {**seen, "offer": {**outcome.reply["offer"], "begun": True}}

    async def round(self, request: Request) -> Response:
        """Long poll of a rank that is prepared: answers when every rank is, or when the round is over."""
        body = await _json(request)
        round_id = text(body, "round")

        def ask() -> dict[str, Any] | machine.Refused | None:
            seen = machine.round_status(self.hub.state, round_id)
            waiting = (
                not isinstance(seen, machine.Refused) and seen["state"] == "open" and not seen["prepared"]
            )
            return None if waiting else seen

        result = await self.hub.poll(ask, number(body, "timeout_s", MAX_POLL_S))
        return self._answer(
            result if result is not None else {"state": "open", "prepared": False, "reason": ""}
        )

    async def newest(self, request: Request) -> Response:
        """The newest version of a model; with ``after`` a long poll for another one than that."""
        body = await _json(request)
        model, after = model_name(body), version_of(body.get("after"))

        def ask() -> dict[str, Any] | None:
            entry = self.hub.state.newest.get(model)
            if entry is None or not machine.accepts(after, entry.version):
                return None
            return machine.newest_version(self.hub.state, model)

        return self._answer({"newest": await self.hub.poll(ask, number(body, "timeout_s", 0.0))})

    async def members(self, request: Request) -> Response:
        """Members of a role; a long poll until there are ``count`` of them."""
        body = await _json(request)
        role, count = body.get("role"), int(number(body, "count", 0))

        def listed() -> list[dict[str, Any]]:
            return [m.public() for m in self.hub.state.members.values() if role in (None, m.key.role)]

        def ask() -> list[dict[str, Any]] | None:
            return found if len(found := listed()) >= count else None

        found = await self.hub.poll(ask, number(body, "timeout_s", 0.0))
        return self._answer({"members": listed() if found is None else found})

    async def pinned(self, request: Request) -> Response:
        """Long poll of a publisher: answers when other versions are pinned than it knows of."""
        body = await _json(request)
        key, incarnation = member_key(body), text(body, "incarnation")
        model, known = model_name(body), body.get("known")

        def seen() -> dict[str, Any] | machine.Refused:
            refused = views.unknown(self.hub.state, key, incarnation)
            return refused or {"pinned": [version_json(v) for v in views.pinned(self.hub.state, model)]}

        def ask() -> dict[str, Any] | machine.Refused | None:
            found = seen()
            return None if isinstance(found, dict) and found["pinned"] == known else found

        found = await self.hub.poll(ask, number(body, "timeout_s", 0.0))
        return self._answer(seen() if found is None else found)

    async def pin(self, request: Request) -> Response:
        """Long poll of who pinned a version: answers when a publisher has confirmed it, or nobody can."""
        body = await _json(request)
        tag = Tag(model_name(body), version(body))

        def ask() -> dict[str, Any] | None:
            seen = views.pin_state(self.hub.state, tag)
            return None if seen["held"] and seen["pinned"] and not seen["confirmed"] else seen

        found = await self.hub.poll(ask, number(body, "timeout_s", 0.0))
        return self._answer(views.pin_state(self.hub.state, tag) if found is None else found)

    async def unpublished(self, request: Request) -> Response:
        """Long poll of who withdraws a version: answers when nobody reads it there any more, or when this hub
        doesn't know (any more) that it is withdrawn."""
        body = await _json(request)
        key, tag = member_key(body), Tag(model_name(body), version(body))
        incarnation = text(body, "incarnation")

        def seen() -> dict[str, Any] | machine.Refused:
            refused = views.unknown(self.hub.state, key, incarnation)
            return refused or views.unpublished(self.hub.state, key, tag)

        def ask() -> dict[str, Any] | machine.Refused | None:
            found = seen()
            waiting = isinstance(found, dict) and found["withdrawn"] and not found["drained"]
            return None if waiting else found

        found = await self.hub.poll(ask, number(body, "timeout_s", 0.0))
        return self._answer(seen() if found is None else found)

    async def preflight(self, request: Request) -> Response:
        """Whether the members of a model fit each other, with every difference by name."""
        model, blobs = model_name(await _json(request)), dict(self.hub.blobs)
        return self._answer(await asyncio.to_thread(preflight.compare, self.hub.state, model, blobs))

    async def status(self, _: Request) -> Response:
        """The whole state."""
        now, state = time.monotonic(), self.hub.state
        leases = {str(m.key): round(m.expires - now, 3) for m in state.members.values()}
        return self._answer(machine.status(state) | {"leases": leases, "refused": self.hub.refusals.counts()})

    async def trace(self, request: Request) -> Response:
        """Rows of the trace after number ``after``; a long poll for the next one."""
        body = await _json(request)
        after = int(number(body, "after", 0))

        def ask() -> list[dict[str, Any]] | None:
            return self.hub.trace.since(after) or None

        rows = await self.hub.poll(ask, number(body, "timeout_s", 0.0))
        return self._answer({"rows": rows or [], "seq": self.hub.trace.seq})

    async def metrics(self, _: Request) -> Response:
        """For Prometheus."""
        return Response(self.hub.metrics(), media_type=CONTENT_TYPE)

    async def put_blob(self, request: Request) -> Response:
        """Keep the body under its sha256."""
        data = await _body(request, MAX_BLOB_BYTES)
        self.hub.put_blob(data)
        return self._answer({"digest": hashlib.sha256(data).hexdigest()})

    async def get_blob(self, request: Request) -> Response:
        """A blob's bytes."""
        data = self.hub.blobs.get(request.path_params["digest"])
        if data is None:
            return JSONResponse({"error": "unknown_blob", "message": "no such blob"}, 404)
        return Response(data, media_type="application/octet-stream")


def _deny(scope: Scope, status: int, message: str) -> Response:
    return JSONResponse({"error": "unauthorized" if status == 401 else "busy", "message": message}, status)


def run_hub(
    host: str,
    port: int,
    token_file: str | Path,
    *,
    stop: threading.Event | None = None,
    announce: Callable[[str], None] | None = None,
    ttl_s: float = 10.0,
    run_id: str | None = None,
    tls: ServerTls | None = None,
    limits: RateLimits = DEFAULT_LIMITS,
    metrics_open: bool = False,
) -> None:
    """Serve until ``stop`` is set; ``announce(url)`` is called once the hub answers.

    Binds to ``host``; anything but loopback without ``tls`` draws a loud warning: the run token travels in
    every request. With ``tls`` the URL pins its certificate. ResourceError when the port is taken or the
    certificate can't be used. ``ttl_s`` is the lease of members that don't ask for another. With
    ``metrics_open`` even strangers get ``/metrics``.
    """
    token = auth.load_token(token_file)
    context = tls.context() if tls is not None else None
    if not wire.is_loopback(host) and tls is None:
        logger.warning(
            "THE HUB LISTENS ON %s WITHOUT TLS: WHO CAN READ THAT NETWORK LEARNS THE RUN TOKEN (see hub.tls)",
            host,
        )
    try:
        sock = wire.listen(host, port, backlog=1024)
    except OSError as error:
        raise ResourceError(f"can't listen on {host}:{port}: {error.strerror or error}") from error
    with contextlib.closing(sock):
        room = Room.here()
        hub = Hub(token, run_id or auth.run_id_of(token), ttl_s, room)
        public = ("/health", "/metrics") if metrics_open else ("/health",)
        app = Starlette(routes=Routes(hub).table(), lifespan=_ticking(hub))
        guard = Guard(app, token=token, deny=_deny, refusals=hub.refusals, public=public, limits=limits)
        server, door = impatient.server(
            guard,
            hub.refusals,
            sock,
            tls=context,
            limit_concurrency=room.connections,
            timeout_graceful_shutdown=1,
            lifespan="on",
        )
        with contextlib.closing(door):
            url = _url(door, tls)
            asyncio.run(_serve(server, door, hub, stop or threading.Event(), url, announce))


def _ticking(hub: Hub) -> Callable[[Starlette], contextlib.AbstractAsyncContextManager[None]]:
    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        ticking = asyncio.create_task(hub.tick())
        yield
        ticking.cancel()

    return lifespan


async def _serve(
    server: uvicorn.Server,
    sock: socket.socket,
    hub: Hub,
    stop: threading.Event,
    url: str,
    announce: Callable[[str], None] | None,
) -> None:
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    serving = asyncio.create_task(server._serve(sockets=[sock]))
    while not server.started and not serving.done():
        await asyncio.sleep(0.01)
    if announce is not None and not serving.done():
        announce(url)
    while not stop.is_set() and not serving.done():
        await asyncio.sleep(0.1)
    hub.close()
    server.should_exit = True
    await serving


def _url(sock: socket.socket, tls: ServerTls | None) -> str:
    """Under which URL the hub is reached, with the pin of its certificate."""
    host, port = sock.getsockname()[:2]
    place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return f"http://{place}" if tls is None else tls.vouched(f"https://{place}")
