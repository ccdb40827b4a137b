"""Two connected queue pairs for tests, over the fake or over real devices."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from jaxrl_sync.transfer import _verbs
from jaxrl_sync.transfer.verbs.records import new_records

Bytes = npt.NDArray[np.uint8]


@dataclasses.dataclass
class End:
    """One side: a device, memory, a completion queue and queue pairs."""

    context: _verbs.Context
    memory: Bytes
    region: _verbs.MemoryRegion
    cq: _verbs.CompletionQueue
    qps: list[_verbs.QueuePair]
    gid_index: int = 1
    mtu: int = 3

    def poll(self, room: int = 64) -> npt.NDArray[np.void]:
        """What has completed."""
        out = new_records(room)
        return out[: self.cq.poll(out)]

    def collect(self, count: int, timeout_s: float = 20.0) -> npt.NDArray[np.void]:
        """Records that retire ``count`` work requests, waiting for them."""
        parts, retired, end = [new_records(0)], 0, time.monotonic() + timeout_s
        while retired < count:
            assert self.cq.wait(max(0.0, end - time.monotonic())), f"{retired} of {count} after {timeout_s} s"
            parts.append(self.poll())
            retired += int(parts[-1]["retires"].sum())
        return np.concatenate(parts)


def open_end(device: str, nbytes: int, qps: int, depth: int, receives: int = 16, **options: int) -> End:
    """Context, zeroed memory, queue and queue pairs in RESET."""
    context = _verbs.Context(device)
    memory = np.zeros(nbytes, np.uint8)
    region = _verbs.MemoryRegion(context, memory, remote_write=True)
    cq = _verbs.CompletionQueue(context, qps * (depth + receives))
    made = [
        _verbs.QueuePair(context, cq, max_send=depth, max_recv=receives, peer=f"peer of {device}", **options)
        for _ in range(qps)
    ]
    return End(context, memory, region, cq, made)


def connect(mine: _verbs.QueuePair, theirs: _verbs.QueuePair, end: End, other: End, **timers: int) -> None:
    """RESET to RTS, one direction of the handshake."""
    mine.to_init()
    gid = other.context.query_gid(1, other.gid_index)
    mine.to_rtr(theirs.qp_num, 7, min(end.mtu, other.mtu), gid=gid, gid_index=end.gid_index)
    mine.to_rts(7, **timers)


@contextlib.contextmanager
def pair(
    nbytes: int = 1 << 16,
    *,
    qps: int = 1,
    depth: int = 64,
    receives: int = 16,
    devices: tuple[str, str] = ("fake0", "fake1"),
    mtu: int = 3,
    rnr_retries: int = 6,
    timeout: int = 14,
    **options: int,
) -> Iterator[tuple[End, End]]:
    """Two ends, each queue pair connected to its counterpart. Closed at the end."""
    left = open_end(devices[0], nbytes, qps, depth, receives, **options)
    right = open_end(devices[1], nbytes, qps, depth, receives, **options)
    left.mtu = right.mtu = mtu
    try:
        for a, b in zip(left.qps, right.qps, strict=True):
            connect(a, b, left, right, rnr_retries=rnr_retries, timeout=timeout)
            connect(b, a, right, left, rnr_retries=rnr_retries, timeout=timeout)
        yield left, right
    finally:
        left.context.close()
        right.context.close()


def rows(*entries: tuple[int, int, int]) -> npt.NDArray[np.uint64]:
    """Entries of a write: (local offset, remote offset, bytes)."""
    return np.array(entries, np.uint64).reshape(-1, 3)


def write(end: End, other: End, entries: npt.NDArray[np.uint64], qp: int = 0, **options: int) -> int:
    """One call of QueuePair.write into the other end's memory."""
    target = other.region
    return end.qps[qp].write(
        end.region,
        entries,
        target.address,
        target.nbytes,
        target.rkey,
        **options,
    )
