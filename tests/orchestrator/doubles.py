"""Fault injectors around the real loop: an engine over HTTP, a trainer over its data connection, a real hub.

The engine double speaks the engine's HTTP contract on a real port and makes tokens from the request id
alone; the trainer double uses the product's own ``BatchReceiver`` and announces versions at the product's
own hub.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from jaxrl_sync.batch.connection import Ack, BatchReceiver, ConnectionConfig, TrainerState
from jaxrl_sync.batch.frame import BatchFrame
from jaxrl_sync.transfer import auth
from jaxrl_sync.transfer.errors import TransferError
from jaxrl_sync.transfer.hub.client import HubClient
from jaxrl_sync.transfer.hub.server import run_hub
from jaxrl_sync.transfer.version import Version

LINEAGE = "abc"


@dataclasses.dataclass
class EngineBehaviour:
    """How an engine double acts; changed while it runs."""

    token_s: float = 0.002
    tokens: int = 3
    swap_s: float = 0.01
    swap_hangs: Callable[[int], bool] = lambda number: False
    eval_s: float = 0.0
    status: int = 0
    hang: Callable[[dict[str, Any]], bool] = lambda body: False
    """Asked again and again: a request goes on once it says no."""
    finish: Callable[[dict[str, Any], int], str] = lambda body, index: "stop"
    swap_status: int = 0
    release_s: float = 0.0
    stuck: Callable[[dict[str, Any], int], bool] = lambda body, position: False
    """A request comes to no token at that position while it says yes, unless it is aborted."""
    asleep: Callable[[], bool] = lambda: False
    """While it sleeps it decodes nothing, and no request's time runs."""
    colocated: bool = False
    moves_itself: bool = False
    """Takes every version it sees at the hub, unless one is held (``sync.initiator = "pull"``)."""
    extras: dict[str, Callable[[int], float | int]] = dataclasses.field(default_factory=dict)
    """Named per-token arrays of the answers, each a function of the token."""


class EngineDouble:
    """One engine on a port of its own, in a thread of its own. ``kill()`` breaks all its connections."""

    def __init__(
        self, name: str, hub_url: str, token_file: Path, behaviour: EngineBehaviour | None = None
    ) -> None:
        self.name, self.behaviour = name, behaviour or EngineBehaviour()
        self._token = auth.load_token(token_file)
        self.version: Version | None = None
        self.requests: list[dict[str, Any]] = []
        self.log: list[tuple[float, str, Any]] = []
        self.pins: list[Version] = []
        self.swap_modes: list[str] = []
        self.held: Version | None = None
        self._moving = threading.Lock()
        self._abort: dict[str, asyncio.Event] = {}
        self._sock = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._sock.getsockname()[1]}"
        routes = [
            Route("/generate", self._generate, methods=["POST"]),
            Route("/abort", self._abort_call, methods=["POST"]),
            Route("/swap", self._swap, methods=["POST"]),
            Route("/hold", self._hold, methods=["POST"]),
            Route("/release", self._release, methods=["POST"]),
            Route("/health", self._health),
        ]
        config = uvicorn.Config(
            Starlette(routes=routes), log_level="critical", lifespan="off", timeout_graceful_shutdown=1
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        self._hub = HubClient(hub_url, token_file, timeout_s=2.0)
        info = {"url": self.url, "replica": 0, "slots": 16, "max_len": 64}
        info["moves_itself"] = self.behaviour.moves_itself
        info["colocated"] = self.behaviour.colocated
        self._lease = self._hub.register("engine", name, info=info, ttl_s=30.0)
        self._closing = threading.Event()
        if self.behaviour.moves_itself:
            threading.Thread(target=self._follow, daemon=True).start()

    def _serve(self) -> None:
        asyncio.run(self._run())

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        await self._server.serve(sockets=[self._sock])

    def _break(self) -> None:
        """A server that is told to exit may still answer 500 to what it was at."""
        for listener in self._server.servers:
            listener.close()
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()

    def _follow(self) -> None:
        with contextlib.suppress(TransferError):
            while not self._closing.is_set():
                found = self._hub.wait_version(self.version, 0.5)
                with self._moving:  # a hold that was granted during the wait is honoured
                    if found is not None and self.held is None:
                        self.log.append((time.monotonic(), "took", found.version.number))
                        self.version = found.version
                time.sleep(0.01)

    def kill(self) -> None:
        """As SIGKILL: no answer, no farewell; the lease ends by itself, or with who takes its place."""
        self._closing.set()
        self._lease._closed.set()
        self._loop.call_soon_threadsafe(self._break)
        self._server.force_exit = self._server.should_exit = True
        self._thread.join(5.0)
        self._sock.close()

    def close(self) -> None:
        """End it in order."""
        self._closing.set()
        self._hub.close()
        self._server.force_exit = self._server.should_exit = True
        self._thread.join(5.0)
        self._sock.close()

    def _authorised(self, request: Request) -> bool:
        return auth.check_bearer(request.headers.get("authorization"), self._token)

    async def _generate(self, request: Request) -> Response:
        if not self._authorised(request):
            return JSONResponse({"error": "token"}, 401)
        body = await request.json()
        self.requests.append(body)
        self.log.append((time.monotonic(), "generate", body["request_id"]))
        if self.behaviour.status:
            return JSONResponse({"error": "injected"}, self.behaviour.status)
        if self.version is None:
            return JSONResponse({"error": "no version"}, 503)
        if body["version"] is not None:
            pin = Version(**body["version"])
            self.pins.append(pin)
            if pin != self.version:
                return JSONResponse({"error": f"pin {pin}, serves {self.version}"}, 409)
        aborted = self._abort.setdefault(body["request_id"], asyncio.Event())
        try:
            samples = await self._decode(body, aborted)
        finally:
            self._abort.pop(body["request_id"], None)
        timing = {"queue_s": 0.0, "prefill_s": 0.0, "decode_s": self.behaviour.token_s}
        return JSONResponse(
            {
                "request_id": body["request_id"],
                "engine": self.name,
                "samples": samples,
                "lineages": [self.version.lineage],
                "timing": timing,
            }
        )

    async def _decode(self, body: dict[str, Any], aborted: asyncio.Event) -> list[dict[str, Any]]:
        length = min(self.behaviour.tokens, body["sampling"]["max_tokens"])
        samples: list[dict[str, Any]] = [
            {
                "tokens": [],
                "logprobs": [],
                "versions": [],
                "finish_reason": "",
                "extras": {name: [] for name in self.behaviour.extras},
            }
            for _ in range(body["n"])
        ]
        began = time.monotonic()
        if body["request_id"].startswith("eval-"):
            await asyncio.sleep(self.behaviour.eval_s)
        hang = self.behaviour.hang  # of now: what a test changes is for those that come later
        while hang(body) and not aborted.is_set() and time.monotonic() - began < body["timeout_s"]:
            await asyncio.sleep(0.01)
        for position in range(length):
            await asyncio.sleep(self.behaviour.token_s)
            slept = time.monotonic()
            while self.behaviour.asleep() and not aborted.is_set():
                await asyncio.sleep(0.01)
            while self.behaviour.stuck(body, position) and not aborted.is_set():
                await asyncio.sleep(0.01)
            began += time.monotonic() - slept
            if aborted.is_set():
                break
            assert self.version is not None
            for index, sample in enumerate(samples):
                sample["tokens"].append(_token(body["request_id"], index, position))
                sample["logprobs"].append(-1.5)
                sample["versions"].append(self.version.number)
                for name, value in self.behaviour.extras.items():
                    sample["extras"][name].append(value(sample["tokens"][-1]))
        for index, sample in enumerate(samples):
            over = time.monotonic() - began >= body["timeout_s"]
            reason = (
                "abort" if aborted.is_set() else "timeout" if over else self.behaviour.finish(body, index)
            )
            sample["finish_reason"] = reason
        return samples

    async def _abort_call(self, request: Request) -> Response:
        ids = (await request.json())["request_ids"]
        self.log.append((time.monotonic(), "abort", tuple(ids)))
        for request_id in ids:
            if request_id in self._abort:
                self._abort[request_id].set()
        return JSONResponse({"aborted": len(ids)})

    async def _swap(self, request: Request) -> Response:
        body = await request.json()
        if self.behaviour.swap_status:
            return JSONResponse({"error": "injected"}, self.behaviour.swap_status)
        self.log.append((time.monotonic(), "swap", body["number"]))
        self.swap_modes.append(body["mode"])
        if self.behaviour.moves_itself:
            while self.version is None or self.version.number < body["number"]:
                await asyncio.sleep(0.005)
            return self._swapped()
        await asyncio.sleep(self.behaviour.swap_s)
        while self.behaviour.swap_hangs(body["number"]):
            await asyncio.sleep(0.01)
        if body["mode"] == "abort":
            for aborted in self._abort.values():
                aborted.set()
        self.version = Version(body["lineage"], body["number"])
        return self._swapped()

    async def _hold(self, request: Request) -> Response:
        body = await request.json()
        wanted = Version(body["lineage"], body["number"])
        self.log.append((time.monotonic(), "hold", wanted.number))
        with self._moving:
            if self.version != wanted:
                return JSONResponse({"error": f"serves {self.version}"}, 409)
            self.held = wanted
        self.log.append((time.monotonic(), "held", wanted.number))
        return JSONResponse({"held": True})

    async def _release(self, request: Request) -> Response:
        await asyncio.sleep(self.behaviour.release_s)
        self.held = None
        self.log.append((time.monotonic(), "released", None))
        return JSONResponse({"held": False})

    def _swapped(self) -> Response:
        assert self.version is not None
        return JSONResponse(
            {
                "lineage": self.version.lineage,
                "number": self.version.number,
                "pause_s": 0.001,
                "step": 1,
                "bytes": 1000,
                "prepare_s": self.behaviour.swap_s,
                "verify_s": 0.0,
                "transport": "double",
            }
        )

    async def _health(self, request: Request) -> Response:
        version = None if self.version is None else dataclasses.asdict(self.version)
        return JSONResponse({"state": "ready" if version else "starting", "version": version})


def _token(request_id: str, index: int, position: int) -> int:
    """A token that depends on nothing but the request, the sample and the position."""
    return zlib.crc32(f"{request_id}/{index}/{position}".encode()) % 10


class TrainerDouble:
    """Takes batches through the real ``BatchReceiver``, announces each version at the real hub."""

    def __init__(
        self,
        hub_url: str,
        token_file: Path,
        *,
        number: int = 0,
        cursor: dict[str, Any] | None = None,
        train_s: float = 0.02,
        publish_every: int = 1,
        lineage: str = LINEAGE,
        hub_stop: threading.Event | None = None,
        ttl_s: float = 30.0,
    ) -> None:
        token = auth.load_token(token_file)
        self.train_s, self.publish_every, self.lineage = train_s, publish_every, lineage
        self.frames: list[BatchFrame] = []
        self.training: int | None = None
        self.freeze = threading.Event()
        self.gate: Callable[[int], bool] = lambda step: True
        """Asked again and again: a step is trained once it says yes."""
        self.die_at: int | None = None
        self.hub_stop = hub_stop or threading.Event()
        self._hub = HubClient(hub_url, token_file, timeout_s=2.0)
        self._publisher = self._hub.register("publisher", "trainer", info={"model": "policy"}, ttl_s=60.0)
        self._state = TrainerState(lineage, number, cursor or {})
        self._token, self._run_id = token, auth.run_id_of(token)
        self._config = ConnectionConfig(heartbeat_s=0.2, silence_s=3.0)
        self.receiver = self._listen()
        self._announce(number)
        info = {"data_url": self.receiver.address, "data_rank": 0, "data_ranks": 1, "rows": 4, "seq_len": 64}
        self._lease = self._hub.register("trainer", "trainer-0", info=info, ttl_s=ttl_s)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self._thread.start()

    def _listen(self) -> BatchReceiver:
        return BatchReceiver(
            self._state, token=self._token, run_id=self._run_id, data_rank=0, config=self._config
        )

    def _announce(self, number: int) -> None:
        version = {"lineage": self.lineage, "number": number}
        self._publisher.call("/v1/event/announce", {"model": "policy", "version": version, "bytes": 8})

    def _loop(self) -> None:
        while not self._stop.is_set():
            try:
                frame = self.receiver.receive(0.1)
            except TransferError:
                return
            if frame is None:
                continue
            if frame.header.step == self.die_at:
                self.receiver.close()
                return
            self.training = frame.header.step
            step = frame.header.step
            while (self.freeze.is_set() or not self.gate(step)) and not self._stop.is_set():
                time.sleep(0.01)
            time.sleep(self.train_s)
            self.training = None
            self.frames.append(frame)
            try:
                if frame.header.step % self.publish_every == 0 or frame.header.last:
                    self._announce(frame.header.step)
            except TransferError:
                return
            metrics = {"loss": 0.5, "publish_s": 0.001}
            self.receiver.commit(
                Ack(frame.header.step, self.lineage, frame.header.step, metrics), frame.header.cursor
            )

    def kill(self) -> None:
        """As SIGKILL: no answer, no farewell; its leases run out by themselves."""
        for lease in (self._lease, self._publisher):
            lease._closed.set()
        self._stop.set()
        self.receiver.close()

    def close(self) -> None:
        """End threads and sockets."""
        self._stop.set()
        self.receiver.close()
        self._thread.join(5.0)
        self._hub.close()


@contextlib.contextmanager
def hub(token_file: Path, stop: threading.Event) -> Iterator[str]:
    """A real hub in a thread until ``stop`` is set; yields its address."""
    urls: list[str] = []
    up = threading.Event()

    def announce(url: str) -> None:
        urls.append(url)
        up.set()

    thread = threading.Thread(
        target=lambda: run_hub("127.0.0.1", 0, token_file, stop=stop, announce=announce, ttl_s=2.0),
        daemon=True,
    )
    thread.start()
    assert up.wait(20.0)
    try:
        yield urls[0]
    finally:
        stop.set()
        thread.join(10.0)
