"""Staged edges over TCP: chunks on one or more lanes, checked by xxh3-128 and then scattered into the slot.

Both sides cut the packed edge into the same windows; chunk i travels on lane i modulo the number of lanes.
Packing and scattering of one lane overlap with the sending of the others.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Sequence
from typing import Any

import xxhash

from jaxrl_sync.sharding import CopyTable, Edge
from jaxrl_sync.transfer.errors import ProtocolError
from jaxrl_sync.transfer.transports.base import Shards, remaining
from jaxrl_sync.transfer.wire import Connection


class _Lanes:
    """Connections with one thread each but the first, which the caller's thread drives."""

    def __init__(self, connections: Sequence[Connection], windows: list[CopyTable]) -> None:
        self.windows = windows
        self.connections = list(connections)[: max(1, len(windows))]
        self._extra = list(connections)[1:]
        largest = max((w.total_bytes for w in windows), default=0)
        self.staging = [memoryview(bytearray(largest)) for _ in self.connections]
        workers = len(self.connections) - 1
        self._pool = concurrent.futures.ThreadPoolExecutor(workers, "lane") if workers else None

    def run(self, work: Callable[[int, int], None]) -> None:
        """``work(lane, chunk)`` for every chunk, lanes side by side; the first error of any lane is raised.

        When a lane fails, all of them are closed, so that the others end too.
        """
        errors: list[BaseException] = []

        def lane(index: int) -> None:
            try:
                for chunk in range(index, len(self.windows), len(self.connections)):
                    work(index, chunk)
            except BaseException as error:
                errors.append(error)
                for connection in self.connections:
                    connection.close()

        futures = [self._pool.submit(lane, i) for i in range(1, len(self.connections))] if self._pool else []
        lane(0)
        concurrent.futures.wait(futures)
        if errors:
            raise errors[0]

    def close(self) -> None:
        for connection in self._extra:
            connection.close()
        if self._pool:
            self._pool.shutdown(wait=False, cancel_futures=True)


class TcpSender:
    """Packs, hashes and sends. Owns the lanes but the first, which is the link's own connection."""

    name = "tcp"

    def __init__(self, edge: Edge, lanes: Sequence[Connection], chunk_bytes: int) -> None:
        self._lanes = _Lanes(lanes, CopyTable.pack(edge.copies).windows(chunk_bytes))

    def send(self, ready: dict[str, Any], sources: Shards, deadline: float) -> None:
        """Send every chunk; returns when the kernel has taken all of them."""
        round_id = ready.get("round")
        self._lanes.run(lambda lane, chunk: self._send_chunk(lane, chunk, round_id, sources, deadline))

    def _send_chunk(self, lane: int, chunk: int, round_id: object, sources: Shards, deadline: float) -> None:
        lanes, table = self._lanes, self._lanes.windows[chunk]
        packed = lanes.staging[lane][: table.total_bytes]
        table.execute(sources, packed)
        digest = xxhash.xxh3_128_hexdigest(packed)
        header = {"kind": "chunk", "round": round_id, "chunk": chunk, "xxh3": digest}
        lanes.connections[lane].send(header, packed, timeout_s=remaining(deadline))

    def close(self) -> None:
        """Close the extra lanes; idempotent."""
        self._lanes.close()


class TcpReceiver:
    """Receives into staging, checks, scatters into the slot: only this process ever writes it."""

    name = "tcp"

    def __init__(self, edge: Edge, lanes: Sequence[Connection], chunk_bytes: int) -> None:
        self._lanes = _Lanes(lanes, CopyTable.scatter(edge.copies).windows(chunk_bytes))
        self._round = ""

    def ready(self, slot: Any) -> dict[str, Any]:
        """Nothing: the bytes come over the lanes."""
        return {}

    def expect(self, round_id: str) -> None:
        """Chunks of any other round are refused."""
        self._round = round_id

    def receive(self, views: Shards, deadline: float) -> None:
        """Take every chunk. ProtocolError on a wrong chunk, round or digest, before it is written."""
        lanes = self._lanes

        def work(lane: int, chunk: int) -> None:
            table, connection = lanes.windows[chunk], lanes.connections[lane]
            packed = lanes.staging[lane][: table.total_bytes]
            header = connection.recv_into([packed], remaining(deadline))
            found = header.get("kind"), header.get("round"), header.get("chunk")
            if found != ("chunk", self._round, chunk):
                raise ProtocolError(
                    f"{connection.peer} sent {found}, expected chunk {chunk} of {self._round}"
                )
            if header.get("xxh3") != xxhash.xxh3_128_hexdigest(packed):
                raise ProtocolError(
                    f"chunk {chunk} from {connection.peer} has another frame digest than sent"
                )
            table.execute(packed, views)

        lanes.run(work)

    def close(self) -> None:
        """Close the extra lanes; idempotent."""
        self._lanes.close()
