"""What stands around every call of the engine's server: token, limits, deadlines, errors, disconnects."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jaxrl_sync.inference.errors import EngineError
from jaxrl_sync.inference.openai_types import ApiError

T = TypeVar("T")
log = logging.getLogger("jaxrl_sync.inference.server")

MAX_BODY_BYTES = 8 << 20
BODY_DEADLINE_S = 30.0


class HttpError(Exception):
    """An answer other than 200 that the shell itself decides on."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


class ClientGone(Exception):
    """The client closed its connection before the answer."""


def denied(scope: Scope, status: int, message: str) -> Response:
    """The answer to a request that the guard refuses."""
    named = status == 401
    kind = "AuthenticationError" if named else "RateLimitError"
    advice = f"{message}: send it as 'Authorization: Bearer TOKEN' (api_key)" if named else message
    return error_response(scope["path"], status, kind, advice, "invalid_api_key" if named else None)


class EventStream(Response):
    """Server-sent events of ``events``; ends early when the client goes away.

    ``on_close`` is called in every case, also when no event was ever asked for.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], on_close: Callable[[], None]) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._on_close = on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await while_connected(receive, self._pump(send))
        except (ClientGone, OSError) as error:
            log.info("event stream ended by the client's side: %s", error)
        finally:
            self._on_close()

    async def _pump(self, send: Send) -> None:
        async for event in self._events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def while_connected(receive: Receive, work: Awaitable[T]) -> T:
    """``work``'s result; cancels it and raises ClientGone when the client disconnects first."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone("client disconnected")
    finally:
        for pending in (task, watch):
            pending.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def read_json(request: HttpRequest, max_bytes: int = MAX_BODY_BYTES) -> dict[str, Any]:
    """The body, a JSON object. HttpError 413 over the limit, 408 after BODY_DEADLINE_S, 400 if no object."""
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise HttpError(413, f"body of {declared} bytes, at most {max_bytes} are taken")
    try:
        body = await asyncio.wait_for(_read(request, max_bytes), BODY_DEADLINE_S)
    except TimeoutError:
        raise HttpError(408, f"body not complete after {BODY_DEADLINE_S:g} s") from None
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise HttpError(400, f"body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise HttpError(400, f"body: expected a JSON object, got {type(value).__name__}")
    return value


async def _read(request: HttpRequest, max_bytes: int) -> bytes:
    chunks, size_bytes = [], 0
    async for chunk in request.stream():
        size_bytes += len(chunk)
        if size_bytes > max_bytes:
            raise HttpError(413, f"body of over {max_bytes} bytes, at most {max_bytes} are taken")
        chunks.append(chunk)
    return b"".join(chunks)


def json_response(body: Any, status: int = 200) -> Response:
    """JSON with NaN kept as Python's json does: a broken log-prob must be seen by the client, not hidden."""
    content = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
    return Response(content, status, media_type="application/json")


_OPENAI_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "invalid_request_error",
    429: "rate_limit_error",
}


def error_response(path: str, status: int, kind: str, message: str, code: str | None = None) -> Response:
    """``{"error": {"type", "message"}}``; under ``/v1`` OpenAI's types, with ``param`` and ``code`` too."""
    if path.startswith("/v1/"):
        kind = _OPENAI_KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
        error = {"message": message, "type": kind, "param": None, "code": code}
    else:
        error = {"type": kind, "message": message}
    return json_response({"error": error}, status)


def answering(handler: Callable[[HttpRequest], Awaitable[Response]]) -> Callable[..., Awaitable[Response]]:
    """The handler with every error turned into an answer; an unexpected one is logged and becomes a 500."""

    async def answer(request: HttpRequest) -> Response:
        path = request.url.path
        try:
            return await handler(request)
        except ApiError as error:
            return json_response(error.to_json(), error.status)
        except EngineError as error:
            response = error_response(path, error.status, type(error).__name__, str(error))
            if error.status in (429, 503):
                response.headers["retry-after"] = "1"
            return response
        except HttpError as error:
            kind = "RequestError" if error.status < 500 else "ServerError"
            return error_response(path, error.status, kind, error.message)
        except TimeoutError as error:
            return error_response(path, 504, "DeadlineError", str(error) or "deadline passed")
        except RecursionError:  # JSON that could just be read, and not be shown
            return error_response(path, 400, "RequestError", "body is nested too deeply")
        except (ClientGone, ClientDisconnect):  # before its answer, or in the middle of its body
            return Response(status_code=499)  # nobody reads it; the log tells it from an answer
        except Exception as error:
            log.exception("%s failed", path)
            return error_response(path, 500, "InternalError", f"{type(error).__name__} in the server's log")

    return answer
