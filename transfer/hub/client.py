"""The hub's client: synchronous, thread-safe, without jax. It rides out a restart of the hub.

Calls are retried while the hub doesn't answer, up to ``timeout_s``; every call is idempotent. A hub that
restarted has another epoch and knows nobody: leases then register again by themselves, and their
``on_rejoin`` callbacks say again what the hub must know.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import math
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from jaxrl_sync.transfer import auth, tls
from jaxrl_sync.transfer.errors import AuthError, DeadlineError, PeerLost, ProtocolError
from jaxrl_sync.transfer.hub.lease import Lease as Lease
from jaxrl_sync.transfer.hub.refused import HubRefused as HubRefused
from jaxrl_sync.transfer.hub.state import MemberKey, version_json, version_of
from jaxrl_sync.transfer.version import Version

POLL_S = 20.0
_RETRY_S = (0.02, 0.05, 0.1, 0.2, 0.5)

logger = logging.getLogger("jaxrl_sync.transfer")


def _garbled(response: httpx.Response) -> bool:
    """Whether this is what an HTTP server says of a broken stream, not what a hub says of a call.

    The connection is of no further use; the call didn't arrive or its answer is lost: it is sent again.
    """
    return response.status_code == 400 and "json" not in response.headers.get("content-type", "")


def _at_most(limit: httpx.Timeout, left_s: float) -> httpx.Timeout:
    """The same limits, none of them longer than what is left."""
    return httpx.Timeout(**{k: left_s if v is None else min(v, left_s) for k, v in limit.as_dict().items()})


@dataclasses.dataclass(frozen=True)
class Member:
    """A member as the hub lists it."""

    role: str
    name: str
    rank: int
    size: int
    incarnation: str
    info: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class TraceRows:
    """Rows of `jaxrl_sync.transfer.hub.trace`, the number of the last one, and the hub's life they are of."""

    rows: list[dict[str, Any]]
    seq: int
    epoch: str


@dataclasses.dataclass(frozen=True)
class PublishedVersion:
    """A version that every rank of a publisher announced; ``available`` while they all live."""

    model: str
    version: Version
    nbytes: int
    published_at: float
    available: bool


class HubClient:
    """Calls to one hub. Owns its connections: ``close()`` or ``with``. Any thread may call it."""

    def __init__(self, url: str, token_file: str | Path, timeout_s: float = 60.0) -> None:
        self.url, trust = tls.split_url(url)
        self.token = auth.load_token(token_file)
        self.timeout_s = timeout_s
        self.epoch = ""
        self._run_id = ""
        self._closed = threading.Event()
        self._leases: list[Lease] = []
        self._pins: dict[tuple[str, Version, str], Lease | None] = {}
        self._http = httpx.Client(
            base_url=self.url,
            headers=auth.bearer_headers(self.token),
            trust_env=False,
            verify=trust.context() if self.url.startswith("https:") else True,
            timeout=httpx.Timeout(10.0),
            limits=httpx.Limits(max_connections=64, max_keepalive_connections=16, keepalive_expiry=60),
        )

    @property
    def run_id(self) -> str:
        """The run's public name, as the hub tells it; blocks for the hub the first time."""
        if not self._run_id:
            self.status()
        return self._run_id

    def call(
        self,
        path: str,
        body: dict[str, Any],
        timeout_s: float | None = None,
        until: threading.Event | None = None,
        within_s: float = math.inf,
    ) -> dict[str, Any]:
        """POST one call and return its answer, retried while the hub is away and ``until`` isn't set.

        ``timeout_s`` is how long the call itself may poll. PeerLost after ``self.timeout_s`` without the hub
        (``within_s`` where that is less), AuthError for a wrong token, HubRefused, ProtocolError.
        """
        limit = httpx.Timeout(min(10.0, within_s), read=min((timeout_s or 0.0) + 15.0, within_s))
        response = self._send("POST", path, limit, until, within_s, json=body)
        return self._decode(response)

    def _send(
        self,
        method: str,
        path: str,
        limit: httpx.Timeout,
        until: threading.Event | None = None,
        within_s: float = math.inf,
        **kwargs: Any,
    ) -> httpx.Response:
        until = until or self._closed
        patience_s = min(self.timeout_s, within_s)
        start = time.monotonic()
        deadline = start + patience_s
        attempt = 0
        while True:
            cause: Exception | None = None
            left_s = max(0.1, start + within_s - time.monotonic())
            try:
                response = self._http.request(method, path, timeout=_at_most(limit, left_s), **kwargs)
                if response.status_code < 500 and response.status_code != 429 and not _garbled(response):
                    return response
                found = f"HTTP {response.status_code}: {response.text[:200]!r}"  # overloaded, or a proxy
            except httpx.RequestError as error:
                if (why := tls.why_untrusted(error)) is not None:
                    raise AuthError(f"hub {self.url} isn't trusted: {why}") from error
                found, cause = repr(error), error
            except RuntimeError as error:  # httpx: the client has been closed
                raise PeerLost("the hub client was closed") from error
            if self._closed.is_set() or until.is_set():
                raise PeerLost("the hub client was closed") from cause
            if time.monotonic() > deadline:
                raise PeerLost(f"hub {self.url} didn't answer for {patience_s:g} s: {found}") from cause
            until.wait(_RETRY_S[min(attempt, len(_RETRY_S) - 1)])
            attempt += 1

    def _decode(self, response: httpx.Response) -> dict[str, Any]:
        try:
            body = response.json()
        except (ValueError, RecursionError) as error:
            raise ProtocolError(f"hub {self.url} answered {response.status_code} without JSON") from error
        if response.status_code == 401:
            raise AuthError(f"hub {self.url} refused the run token")
        if not isinstance(body, dict):
            raise ProtocolError(f"hub {self.url} answered {type(body).__name__}, expected an object")
        self._saw_epoch(str(body.get("epoch", "")))
        if response.status_code >= 400:
            code, message = body.get("error", "error"), body.get("message", response.status_code)
            raise HubRefused(str(code), str(message))
        if "epoch" not in body or "run_id" not in body:
            raise ProtocolError(f"{self.url} answered {str(body)[:200]}, expected a hub's epoch and run_id")
        self._run_id = str(body["run_id"])
        return body

    def _saw_epoch(self, epoch: str) -> None:
        if epoch and epoch != self.epoch:
            first, self.epoch = not self.epoch, epoch
            if not first:
                logger.info("hub %s restarted; registering again", self.url)
                for lease in list(self._leases):
                    lease.wake()

    def register(
        self,
        role: str,
        name: str,
        rank: int = 0,
        size: int = 1,
        info: dict[str, Any] | None = None,
        ttl_s: float = 10.0,
        *,
        on_lost: Callable[[str], None] | None = None,
        on_rejoin: Callable[[], None] | None = None,
        installed: Callable[[], Version | None] | None = None,
    ) -> Lease:
        """Join the directory and keep the lease alive from a thread of its own; returns the Lease.

        ``on_lost(reason)`` is called once when the lease is lost for good (replaced by another process, or
        the hub away for ``timeout_s``); ``on_rejoin()`` after each new registration with a restarted hub.
        """
        lease = Lease(
            self, MemberKey(role, name, rank), size, info or {}, ttl_s, on_lost, on_rejoin, installed
        )
        self._leases.append(lease)
        lease.start()
        return lease

    def members(self, role: str | None = None) -> list[Member]:
        """Members now registered, of one role or of all."""
        return self._members({"role": role}, 0.0)

    def wait_members(self, role: str, count: int, timeout_s: float) -> list[Member]:
        """Wait until at least ``count`` members have ``role``. DeadlineError names how many there are."""
        deadline = time.monotonic() + timeout_s
        while True:
            left = max(0.0, min(POLL_S, deadline - time.monotonic()))
            found = self._members({"role": role, "count": count, "timeout_s": left}, left)
            if len(found) >= count:
                return found
            if time.monotonic() >= deadline:
                raise DeadlineError(f"{len(found)} of {count} members {role!r} after {timeout_s:g} s")

    def _members(self, body: dict[str, Any], timeout_s: float) -> list[Member]:
        rows = self.call("/v1/members", body, timeout_s)["members"]
        return [Member(**row) for row in rows]

    def newest(self, model: str = "policy") -> PublishedVersion | None:
        """The newest published version, or None before the first."""
        return self._newest({"model": model}, 0.0)

    def wait_version(
        self, after: Version | None = None, timeout_s: float = POLL_S, model: str = "policy"
    ) -> PublishedVersion | None:
        """Wait for a later number than ``after`` or another lineage; None when the time is up."""
        deadline = time.monotonic() + timeout_s
        while True:
            left = max(0.0, min(POLL_S, deadline - time.monotonic()))
            body = {"model": model, "after": version_json(after), "timeout_s": left}
            found = self._newest(body, left)
            if found is not None or time.monotonic() >= deadline:
                return found

    def _newest(self, body: dict[str, Any], timeout_s: float) -> PublishedVersion | None:
        row = self.call("/v1/newest", body, timeout_s)["newest"]
        if row is None:
            return None
        version = version_of(row["version"])
        assert version is not None
        return PublishedVersion(row["model"], version, row["bytes"], row["published_at"], row["available"])

    def pin(
        self,
        version: Version,
        by: str,
        model: str = "policy",
        timeout_s: float = 10.0,
        lease: Lease | None = None,
    ) -> None:
        """Have ``version`` kept until ``unpin``, or as long as ``lease`` lives; ``by`` names who wants that.

        Returns once a publisher has confirmed that it keeps it: from then on late engines get it, however
        many versions are published meanwhile. HubRefused("unavailable") when nobody holds it (any more),
        DeadlineError after ``timeout_s``: the wish stands all the same. Repeating it changes nothing.
        """
        deadline = time.monotonic() + timeout_s
        about = {"model": model, "version": version_json(version)}
        self.call("/v1/event/pin", {**about, "by": by, **(lease.identity if lease is not None else {})})
        self._pins[(model, version, by)] = lease
        while True:
            left = max(0.0, min(POLL_S, deadline - time.monotonic()))
            seen = self.call("/v1/pin", {**about, "timeout_s": left}, left)
            if seen["confirmed"] and seen["pinned"]:
                return
            if not seen["pinned"]:  # a hub that has restarted, or forgot the lease, is being told again
                self._closed.wait(_RETRY_S[2])
            if not seen["held"]:
                self.unpin(version, by, model)
                raise HubRefused("unavailable", f"nobody holds version {version} of {model} any more")
            if time.monotonic() >= deadline:
                raise DeadlineError(f"no publisher confirmed within {timeout_s:g} s that it keeps {version}")

    def _pin_again(self, lease: Lease) -> None:
        """A restarted hub knows no pins: say those of ``lease``, and those of nobody, again."""
        for (model, version, by), owner in list(self._pins.items()):
            if owner in (lease, None):
                about = {"model": model, "version": version_json(version), "by": by, "again": True}
                self.call("/v1/event/pin", {**about, **(lease.identity if owner is lease else {})})

    def unpin(self, version: Version, by: str, model: str = "policy") -> None:
        """``by`` needs ``version`` no longer. Idempotent."""
        self._pins.pop((model, version, by), None)
        self.call("/v1/event/unpin", {"model": model, "version": version_json(version), "by": by})

    def preflight(self, model: str = "policy") -> dict[str, Any]:
        """{"ok", "differences": [{"who", "what", "found", "expected"}], "unknown": [who has no plan yet],
        "publishers", "engines": [names]}."""
        return self.call("/v1/preflight", {"model": model}, 30.0)

    def status(self) -> dict[str, Any]:
        """The hub's whole state as JSON."""
        return self._decode(self._send("GET", "/v1/status", httpx.Timeout(10.0)))

    def trace(self, after: int = 0, timeout_s: float = 0.0) -> TraceRows:
        """Rows of the hub's trace with a higher number than ``after``; waits up to ``timeout_s`` for one.

        A restarted hub counts from 1 again: its ``epoch`` is another one.
        """
        answer = self.call("/v1/trace", {"after": after, "timeout_s": timeout_s}, timeout_s)
        return TraceRows(answer["rows"], int(answer["seq"]), str(answer["epoch"]))

    def put_blob(self, data: bytes) -> str:
        """Store bytes with the hub; returns their sha256."""
        limit = httpx.Timeout(30.0)
        return str(self._decode(self._send("POST", "/v1/blob", limit, content=data))["digest"])

    def get_blob(self, digest: str) -> bytes:
        """Bytes by their sha256. HubRefused("unknown_blob") while their owner hasn't registered them."""
        response = self._send("GET", f"/v1/blob/{digest}", httpx.Timeout(30.0))
        if response.status_code != 200:
            self._decode(response)
            raise ProtocolError(f"hub {self.url} answered {response.status_code} for a blob")
        if hashlib.sha256(response.content).hexdigest() != digest:
            raise ProtocolError(f"hub {self.url} sent other bytes than blob {digest[:12]}")
        return response.content

    def close(self) -> None:
        """Close every lease and connection. Idempotent."""
        for lease in list(self._leases):
            lease.close()
        self._closed.set()
        self._http.close()

    def __enter__(self) -> HubClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
