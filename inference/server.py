"""The engine's HTTP server: the control calls of the loop, and OpenAI's calls for everyone else.

The server owns a listening socket, an event loop and a thread for them. Engine calls never wait for the
device (``EngineFront``); futures come back through ``bridge``. Every wait has a deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from jaxrl_sync.inference import metrics
from jaxrl_sync.inference.bridge import TokenBridge, settled
from jaxrl_sync.inference.errors import NotServingError, RequestError
from jaxrl_sync.inference.front import EngineFront
from jaxrl_sync.inference.generation import ENGINE_GRACE_S, Generation, Job
from jaxrl_sync.inference.http_shell import (
    EventStream,
    HttpError,
    answering,
    denied,
    error_response,
    json_response,
    read_json,
    while_connected,
)
from jaxrl_sync.inference.openai_api import OpenAIModel
from jaxrl_sync.inference.openai_format import event_stream, whole_answer
from jaxrl_sync.inference.request import GroupResult, PauseMode, Request
from jaxrl_sync.sharding.errors import UserError
from jaxrl_sync.transfer import exposition, impatient, wire
from jaxrl_sync.transfer.guard import Guard
from jaxrl_sync.transfer.refusals import Refusals
from jaxrl_sync.transfer.tls import ServerTls
from jaxrl_sync.transfer.version import Version

log = logging.getLogger("jaxrl_sync.inference.server")

# Prepares ``version`` or a later one of its lineage, pauses as the mode says and swaps, within ``timeout_s``;
# the future ends with the answer of ``POST /swap``, or with an EngineError.
Swap = Callable[[Version, float, PauseMode], Future[dict[str, Any]]]

PAUSE_MODES = ("keep", "wait", "abort")


class PortInUseError(UserError):
    """The address to listen on is taken or not ours."""

    exit_code = 3


@dataclasses.dataclass(frozen=True)
class ServerConfig:
    """Where and as whom the server answers; times in seconds.

    tls: the certificate to speak HTTPS with; without one, plain HTTP. port: 0 takes a free one. name: of the
    replica, in answers. max_generate_s: deadline of a ``/generate`` without a ``timeout_s``, and the most
    that any call may ask for. max_control_s: deadline of ``/pause``, ``/resume``, and of a ``/swap`` without
    a ``timeout_s``. max_connections: more are answered 503. metrics_open: ``/metrics`` needs no token.
    """

    host: str = "127.0.0.1"
    port: int = 0
    name: str = "engine-0"
    max_generate_s: float = 3600.0
    max_control_s: float = 600.0
    max_connections: int = 4096
    tls: ServerTls | None = None
    metrics_open: bool = False


class EngineServer:
    """Serves one engine over HTTP from its own thread, from construction until ``close``.

    Every call but ``GET /health`` needs ``token``. Without ``swap`` there is no ``/swap``, without
    ``openai`` no ``/v1``. ``extra_stats`` adds entries to ``/stats``. ``slept_s``: how long a colocated
    engine has slept in all; that time doesn't count for ``/generate``. Raises PortInUseError.
    """

    def __init__(
        self,
        front: EngineFront,
        *,
        token: str,
        config: ServerConfig | None = None,
        openai: OpenAIModel | None = None,
        swap: Swap | None = None,
        extra_stats: Callable[[], Mapping[str, Any]] | None = None,
        slept_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._config = config or ServerConfig()
        tls = self._config.tls
        context = tls.context() if tls is not None else None
        self._refusals = Refusals(log, self._config.name)
        listener = listen(self._config.host, self._config.port)
        if tls is None and not wire.is_loopback(self._config.host):
            log.warning(
                "%s LISTENS ON %s WITHOUT TLS: WHO CAN READ THAT NETWORK LEARNS THE RUN TOKEN (see hub.tls)",
                self._config.name,
                self._config.host,
            )
        self._address: tuple[str, int] = listener.getsockname()[:2]
        self._calls = _Calls(front, self._config, openai, swap, extra_stats, self._refusals, slept_s)
        public = ("/health", "/metrics") if self._config.metrics_open else ("/health",)
        app = Guard(
            _application(self._calls), token=token, deny=denied, refusals=self._refusals, public=public
        )
        self._uvicorn, self._socket = impatient.server(
            app,
            self._refusals,
            listener,
            tls=context,
            lifespan="off",
            timeout_graceful_shutdown=5,
            limit_concurrency=self._config.max_connections,
        )
        self._thread = threading.Thread(
            target=self._uvicorn.run, kwargs={"sockets": [self._socket]}, name="engine-http", daemon=True
        )
        self._thread.start()

    @property
    def url(self) -> str:
        """``http://host:port`` (or https) of the listening socket, which takes connections at once."""
        host, port = self._address
        scheme = "http" if self._config.tls is None else "https"
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

    def close(self, drain_s: float = 10.0) -> None:
        """Refuses new generations (503), lets running ones end for ``drain_s``, aborts the rest, and ends.

        Idempotent; blocks for at most ``drain_s`` and some seconds.
        """
        end = time.monotonic() + drain_s
        self._calls.draining = True
        while self._calls.open_generations and time.monotonic() < end and self._thread.is_alive():
            time.sleep(0.01)
        self._calls.abort_all()
        self._uvicorn.should_exit = True
        self._thread.join(timeout=15.0)
        if self._thread.is_alive():
            log.warning("HTTP thread still runs 15 s after it was told to end; leaving it")
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(0.0 if kind else 10.0)


def listen(host: str, port: int) -> socket.socket:
    """A listening TCP socket. Raises PortInUseError, in one line, when the address can't be had."""
    try:
        return wire.listen(host, port, backlog=1024)
    except OSError as error:
        raise PortInUseError(f"can't listen on {host}:{port}: {error.strerror or error}") from None


class _Calls:
    """The handlers. All run on the server's loop; ``draining`` and ``abort_all`` come from other threads."""

    def __init__(
        self,
        front: EngineFront,
        config: ServerConfig,
        openai: OpenAIModel | None,
        swap: Swap | None,
        extra_stats: Callable[[], Mapping[str, Any]] | None,
        refusals: Refusals,
        slept_s: Callable[[], float],
    ) -> None:
        self._refusals = refusals
        self._slept_s = slept_s
        self._front = front
        self._config = config
        self._openai = openai
        self._swap = swap
        self._extra_stats = extra_stats
        self._bridge: TokenBridge | None = None
        self._open: list[tuple[str, ...]] = []
        self.draining = False

    @property
    def open_generations(self) -> int:
        """Generations that a client waits for."""
        return len(self._open)

    def abort_all(self) -> None:
        """Aborts every open generation; their clients get what there is."""
        self._front.abort([i for ids in list(self._open) for i in ids])

    async def generate(self, http: HttpRequest) -> Response:
        request = Request.from_json(await read_json(http))
        limit_s = self._config.max_generate_s
        timeout_s = min(request.timeout_s or limit_s, limit_s)
        request = dataclasses.replace(request, timeout_s=timeout_s)
        with self._admitted((request.request_id,)):
            handle = self._front.submit(request)
            try:
                work = self._awaited(handle.future, timeout_s + ENGINE_GRACE_S)
                result = await while_connected(http.receive, work)
            finally:
                if not handle.future.done():
                    self._front.abort([request.request_id])
        return json_response(result.to_json(self._config.name))

    async def _awaited(self, future: Future[GroupResult], left_s: float) -> GroupResult:
        """A group's result, within ``left_s`` in which the engine didn't sleep. TimeoutError."""
        while True:
            slept_s = self._slept_s()
            try:
                return await settled(future, left_s)
            except TimeoutError:
                left_s = self._slept_s() - slept_s
                if left_s <= 0:
                    raise

    async def abort(self, http: HttpRequest) -> Response:
        ids = (await read_json(http)).get("request_ids")
        if not isinstance(ids, list) or not all(isinstance(i, str) for i in ids):
            raise RequestError(f"request_ids: expected a list of strings, got {str(ids)[:80]!r}")
        return json_response({"aborted": self._front.abort(ids)})

    async def pause(self, http: HttpRequest) -> Response:
        mode = _pause_mode(await read_json(http), None)
        return json_response({"state": await settled(self._front.pause(mode), self._config.max_control_s)})

    async def resume(self, http: HttpRequest) -> Response:
        return json_response({"state": await settled(self._front.resume(), self._config.max_control_s)})

    async def swap(self, http: HttpRequest) -> Response:
        if self._swap is None:
            raise HttpError(404, "this engine has no hub to take versions from")
        limits_s = (self._config.max_control_s, self._config.max_generate_s)
        version, timeout_s, mode = _swap_request(await read_json(http), *limits_s)
        return json_response(await settled(self._swap(version, timeout_s, mode), timeout_s + ENGINE_GRACE_S))

    async def hold(self, http: HttpRequest) -> Response:
        version, seconds, _ = _swap_request(await read_json(http), 60.0, self._config.max_generate_s)
        self._front.hold(version, seconds)
        return json_response({"held": True})

    async def release(self, http: HttpRequest) -> Response:
        self._front.release()
        return json_response({"held": False})

    async def stats(self, http: HttpRequest) -> Response:
        return json_response(self._stats())

    async def metrics(self, http: HttpRequest) -> Response:
        text = exposition.render(metrics.families(self._stats(), self._refusals.counts()))
        return Response(text, media_type=exposition.CONTENT_TYPE)

    def _stats(self) -> dict[str, Any]:
        extra = dict(self._extra_stats()) if self._extra_stats else {}
        stats = {"engine": self._config.name, **self._front.stats().to_json(), **extra}
        return {"prepared": None, **stats}

    async def health(self, http: HttpRequest) -> Response:
        version = self._front.version
        shown = dataclasses.asdict(version) if version else None
        return json_response({"state": self._front.state, "version": shown})

    async def models(self, http: HttpRequest) -> Response:
        return json_response(self._model().listing())

    async def model(self, http: HttpRequest) -> Response:
        return json_response(self._model().description(http.path_params["name"]))

    async def completions(self, http: HttpRequest) -> Response:
        body = await read_json(http)
        return await self._answer(http, await asyncio.to_thread(self._model().completion_job, body))

    async def chat_completions(self, http: HttpRequest) -> Response:
        body = await read_json(http)
        return await self._answer(http, await asyncio.to_thread(self._model().chat_job, body))

    async def _answer(self, http: HttpRequest, job: Job) -> Response:
        fingerprint = str(self._front.version)
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._admitted(tuple(r.request_id for r in job.requests)))
            generation = Generation(self._front, self._loop_bridge(), self._model().tokenizer, job)
            stack.callback(generation.close)
            if job.options.stream:
                return EventStream(event_stream(generation, fingerprint), stack.pop_all().close)
            return json_response(await while_connected(http.receive, whole_answer(generation, fingerprint)))

    def _model(self) -> OpenAIModel:
        if self._openai is None:
            raise HttpError(404, "this engine has no tokenizer, so it serves token ids only (POST /generate)")
        return self._openai

    def _loop_bridge(self) -> TokenBridge:
        if self._bridge is None:
            self._bridge = TokenBridge(asyncio.get_running_loop())
        return self._bridge

    @contextlib.contextmanager
    def _admitted(self, request_ids: tuple[str, ...]) -> Iterator[None]:
        """Counts a generation while it is open; refuses it when the server drains."""
        if self.draining:
            raise NotServingError("engine is shutting down")
        self._open.append(request_ids)  # a list: a refused twin must not hide the one that runs
        try:
            yield
        finally:
            self._open.remove(request_ids)


def _application(calls: _Calls) -> Starlette:
    table = [
        ("/generate", "POST", calls.generate),
        ("/abort", "POST", calls.abort),
        ("/pause", "POST", calls.pause),
        ("/resume", "POST", calls.resume),
        ("/swap", "POST", calls.swap),
        ("/hold", "POST", calls.hold),
        ("/release", "POST", calls.release),
        ("/stats", "GET", calls.stats),
        ("/metrics", "GET", calls.metrics),
        ("/health", "GET", calls.health),
        ("/v1/models", "GET", calls.models),
        ("/v1/models/{name:path}", "GET", calls.model),
        ("/v1/completions", "POST", calls.completions),
        ("/v1/chat/completions", "POST", calls.chat_completions),
    ]
    routes = [Route(path, answering(handler), methods=[method]) for path, method, handler in table]
    return Starlette(routes=routes, exception_handlers={HTTPException: _no_such_call})


async def _no_such_call(http: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{http.method} {http.url.path}: {error.detail}"
    return error_response(http.url.path, error.status_code, "RequestError", message)


def _pause_mode(body: Mapping[str, Any], default: str | None) -> PauseMode:
    mode = body.get("mode", default)
    if mode not in PAUSE_MODES:
        raise RequestError(f"mode: expected {' or '.join(PAUSE_MODES)}, got {mode!r}")
    known: PauseMode = mode
    return known


def _swap_request(
    body: Mapping[str, Any], default_s: float, most_s: float
) -> tuple[Version, float, PauseMode]:
    lineage, number = body.get("lineage"), body.get("number")
    timeout_s = body.get("timeout_s", default_s)
    if not isinstance(lineage, str) or not lineage or type(number) is not int or number < 0:
        raise RequestError(
            f"swap: expected lineage (string) and number (integer >= 0), got {lineage!r}, {number!r}"
        )
    if type(timeout_s) not in (int, float) or not 0 < timeout_s <= most_s:
        raise RequestError(f"timeout_s: expected above 0 and at most {most_s:g}, got {timeout_s!r}")
    return Version(lineage, number), float(timeout_s), _pause_mode(body, "keep")
