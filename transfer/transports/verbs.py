"""Staged edges over RDMA verbs: chunks are written into the receiver's registered ring, then scattered.

Both sides cut the packed edge into the same windows. Chunk i lies in place i modulo the ring's size on both
sides and travels on queue pair i modulo their number, with an immediate behind it that names the round and
the chunk; the receiver answers each chunk with an immediate of its own, after which its place is free.
Nothing depends on the order in which queue pairs deliver.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

from jaxrl_sync.sharding import CopyTable, Edge
from jaxrl_sync.transfer.errors import PeerLost, ProtocolError, TransferError
from jaxrl_sync.transfer.transports.base import Shards
from jaxrl_sync.transfer.verbs.endpoint import Endpoint, check_description
from jaxrl_sync.transfer.verbs.settings import VerbsSettings
from jaxrl_sync.transfer.wire import Connection

MAX_CHUNKS = 1 << 24
_WRITTEN, _ANSWERED = 1, 2
_INDEX = MAX_CHUNKS - 1


def watch_connection(connection: Connection) -> Callable[[], None]:
    """Looks whether the link's connection is still there: PeerLost if not. Takes nothing from it."""

    def look() -> None:
        try:
            seen = connection.closed or connection.sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError as error:
            raise PeerLost(f"{connection.peer} is gone: {error}") from error
        if seen is True or not seen:
            raise PeerLost(f"the connection to {connection.peer} was closed during a transfer over verbs")

    return look


class VerbsSender:
    """Packs into its ring and writes to the receiver's. Owns the endpoint."""

    name = "verbs"

    def __init__(
        self, edge: Edge, settings: VerbsSettings, other: dict[str, Any], connection: Connection
    ) -> None:
        """Open a device and connect to what the receiver described. VerbsError, ProtocolError."""
        pairs = other.get("pairs") if isinstance(other, dict) else None
        count = len(pairs) if isinstance(pairs, list) else 0
        layer = other.get("link_layer", "") if isinstance(other, dict) else ""
        check_description(other, layer, min(max(count, 1), 64))
        self._windows = CopyTable.pack(edge.copies).windows(other["chunk_bytes"])
        _check_count(len(self._windows))
        self._endpoint = Endpoint(settings, connection.peer, other["chunk_bytes"], other["ring"], count)
        try:
            self._endpoint.connect(other)
        except BaseException:
            self._endpoint.close()
            raise
        self.reason = self._endpoint.chosen.reason
        self._watch = watch_connection(connection)

    def describe(self) -> dict[str, Any]:
        """What the receiver connects to."""
        return self._endpoint.describe()

    def send(self, ready: dict[str, Any], sources: Shards, deadline: float) -> None:
        """Write every chunk; returns when the receiver took all of them. CompletionError, DeadlineError."""
        tag = ready.get("tag")
        if type(tag) is not int or not 0 <= tag < 256:
            raise ProtocolError(f"ready names the tag {tag!r}, expected 0 to 255")
        endpoint, windows = self._endpoint, self._windows
        flying: dict[tuple[int, int], int] = {}  # (queue pair, work request) -> chunk
        open_ends: dict[
            int, int
        ] = {}  # chunk -> what is still to come: our completion, the receiver's answer
        for index, window in enumerate(windows):
            while index - endpoint.ring in open_ends:
                self._settle(tag, flying, open_ends, deadline)
            packed = endpoint.chunk(index, window.total_bytes)
            window.execute(sources, packed)
            key = endpoint.write_chunk(index, window.total_bytes, tag << 24 | index, deadline)
            flying[key] = index
            open_ends[index] = _WRITTEN | _ANSWERED
        while open_ends:
            self._settle(tag, flying, open_ends, deadline)

    def _settle(
        self, tag: int, flying: dict[tuple[int, int], int], open_ends: dict[int, int], deadline: float
    ) -> None:
        """Take completions; a chunk is over when both its ends are."""
        what = f"sending chunk {min(open_ends)} of {len(self._windows)}"
        for record in self._endpoint.events(deadline, self._watch, what):
            if record["receive"]:
                index, end = _chunk_of(int(record["imm"]), tag, self._endpoint.peer), _ANSWERED
            else:
                found = flying.pop((int(record["token"]), int(record["seq"])), None)
                if found is None:
                    continue  # the data in front of its immediate
                index, end = found, _WRITTEN
            if not open_ends.get(index, 0) & end:
                raise ProtocolError(f"{self._endpoint.peer} answered chunk {index}, which isn't on its way")
            open_ends[index] &= ~end
            if not open_ends[index]:
                del open_ends[index]

    def close(self) -> None:
        """Destroy queue pairs and registration; idempotent."""
        self._endpoint.close()


class VerbsReceiver:
    """Takes chunks out of its ring into the slot, which only this process writes. Owns the endpoint."""

    name = "verbs"

    def __init__(self, edge: Edge, settings: VerbsSettings, connection: Connection) -> None:
        """Open a device and register the ring. VerbsError."""
        self._windows = CopyTable.scatter(edge.copies).windows(settings.chunk_bytes)
        _check_count(len(self._windows))
        pairs = max(1, min(settings.queue_pairs, len(self._windows)))
        self._endpoint = Endpoint(settings, connection.peer, settings.chunk_bytes, settings.ring, pairs)
        self._tag = 0
        self.reason = self._endpoint.chosen.reason
        self._watch = watch_connection(connection)

    def describe(self) -> dict[str, Any]:
        """What the sender connects to."""
        return self._endpoint.describe()

    def connect(self, other: dict[str, Any]) -> None:
        """Connect to the sender. VerbsError, ProtocolError."""
        self._endpoint.connect(other)

    def ready(self, slot: Any) -> dict[str, Any]:
        """The tag of the round's immediates: none of another round is taken for one of this."""
        self._tag = (self._tag + 1) % 256
        return {"tag": self._tag}

    def receive(self, views: Shards, deadline: float) -> None:
        """Take every chunk, in whatever order they come. CompletionError, ProtocolError, DeadlineError."""
        endpoint, missing = self._endpoint, set(range(len(self._windows)))
        while missing:
            what = f"receiving chunk {min(missing)} of {len(self._windows)}"
            for record in endpoint.events(deadline, self._watch, what):
                if not record["receive"]:
                    continue  # our own answers
                imm = int(record["imm"])
                index = _chunk_of(imm, self._tag, endpoint.peer)
                if index not in missing:
                    raise ProtocolError(f"{endpoint.peer} sent chunk {index} of {len(self._windows)} again")
                window = self._windows[index]
                window.execute(endpoint.chunk(index, window.total_bytes), views)
                missing.remove(index)
                endpoint.say(index, imm, deadline)

    def close(self) -> None:
        """Destroy queue pairs and registration; idempotent."""
        self._endpoint.close()


def _check_count(count: int) -> None:
    if count >= MAX_CHUNKS:
        raise TransferError(
            f"the edge has {count} chunks, expected fewer than {MAX_CHUNKS}: larger chunk_bytes"
        )


def _chunk_of(imm: int, tag: int, peer: str) -> int:
    if imm >> 24 != tag:
        raise ProtocolError(f"{peer} sent an immediate of round tag {imm >> 24}, expected {tag}")
    return imm & _INDEX
