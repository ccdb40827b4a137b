"""RDMA verbs: devices, memory, queues. libibverbs is opened on first use, not at import.

Every object has ``close()`` (idempotent), works in ``with``, keeps its parents alive, and is closed with its
parent. ``close()`` raises BufferError while another thread is inside a call on the object. A failed call
raises ``VerbsError`` with the errno. One thread at a time posts on a queue pair; another one may poll.
"""

from types import TracebackType
from typing import Any, Self, TypeAlias, final

import numpy.typing as npt
from typing_extensions import Buffer

_Memory: TypeAlias = Buffer | npt.NDArray[Any]

RECORD_BYTES: int

def load_error() -> str | None:
    """None if libibverbs loads, else the loader's words. JAXRL_SYNC_IBVERBS names another library."""

def library_name() -> str:
    """What the loader is asked for."""

def features() -> dict[str, bool]:
    """Which optional calls libibverbs has: ``dmabuf``, ``relaxed_ordering``, ``fork_status``, ``ece``."""

def device_names() -> list[str]:
    """RDMA devices of this machine; empty where the kernel has no RDMA modules."""

def status_text(status: int, /) -> str:
    """The library's words for a completion status."""

@final
class Context:
    """An open device with one protection domain. Parent of regions, completion queues and queue pairs."""

    name: str
    registrations: int
    registered_bytes: int
    registration_ns: int
    def __new__(cls, device: str) -> Self: ...
    @property
    def closed(self) -> bool: ...
    @property
    def async_fd(self) -> int:
        """Readable when ``async_events`` has something to return; for select and poll."""

    def close(self) -> None:
        """Close children (queue pairs first), protection domain and device."""

    def query_device(self) -> dict[str, Any]:
        """Limits and firmware, as the device said when it was opened."""

    def query_port(self, port: int, /) -> dict[str, int]:
        """State of one port, in the codes of the ABI. Codes 1 to 5 of an MTU are 256 to 4096 bytes."""

    def query_gid(self, port: int, index: int, /) -> bytes:
        """One entry of the GID table, 16 bytes. VerbsError where it can't be read."""

    def query_pkey(self, port: int, index: int, /) -> int:
        """One P_Key."""

    def dmabuf_supported(self) -> bool:
        """Whether library, kernel and device register dmabufs (asked with a descriptor that can't be)."""

    def async_events(self, timeout_s: float = 0.0, /) -> list[tuple[int, str, str, int]]:
        """Events since the last call, acknowledged: (type, text, kind of object, its number).

        Kinds are qp, cq, srq, port and device. Waits for the first one for ``timeout_s`` at most,
        without the GIL.
        """

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...

@final
class MemoryRegion:
    """Registered memory. Holds ``buffer`` (contiguous, writable) for its life.

    With ``dmabuf_fd`` it registers ``length`` bytes at ``offset`` of a dmabuf under the address ``iova``
    (equal to ``offset`` within a page); the descriptor may be closed afterwards. ``relaxed_ordering`` is
    granted where library and device can (see the attribute), else the region is registered without: with it
    only completions say that data is in place. One region has at most ``query_device()["max_mr_size"]``
    bytes. An error for lack of locked memory states the limit and the need.
    """

    relaxed_ordering: bool
    in_flight: int
    def __new__(
        cls,
        context: Context,
        buffer: _Memory | None = None,
        *,
        remote_write: bool = False,
        relaxed_ordering: bool = False,
        dmabuf_fd: int = -1,
        offset: int = 0,
        length: int = 0,
        iova: int = 0,
    ) -> Self: ...
    @property
    def closed(self) -> bool: ...
    @property
    def lkey(self) -> int: ...
    @property
    def rkey(self) -> int:
        """What a peer needs to write here, beside ``address``."""

    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    def close(self) -> None:
        """Deregister and release the buffer. BufferError while work requests in flight read it."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...

@final
class CompletionQueue:
    """Completions of the queue pairs attached to it. It can't overrun: they reserve their worst case."""

    depth: int
    reserved: int
    polled: int
    errors: int
    strays: int
    def __new__(cls, context: Context, depth: int) -> Self: ...
    @property
    def closed(self) -> bool: ...
    def statuses(self) -> dict[int, int]:
        """How many completions of each status were taken, successes (0) and flushes (5) too."""

    def poll(self, out: _Memory, /) -> int:
        """Fill ``out`` with records of RECORD_BYTES (see transfer/verbs/records.py); returns how many.

        Never waits. A record is there exactly once. A successful one accounts for all unsignalled
        work requests
        before it (``retires``). Completions of nothing in flight (late, duplicate) are dropped and counted in
        ``strays``.
        """

    def wait(self, timeout_s: float, spin_s: float = 0.0) -> bool:
        """Whether there is something to poll; sleeps without the GIL until then or for ``timeout_s`` at most.

        Looks for ``spin_s`` without sleeping first.
        """

    def close(self) -> None:
        """Close its queue pairs, then destroy it."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...

@final
class QueuePair:
    """A reliable connection, made in state RESET. ``peer`` names the other side in messages.

    ``max_inline`` is what was granted (0 where the provider refuses inline data).
    """

    qp_num: int
    token: int
    peer: str
    max_send: int
    max_recv: int
    max_inline: int
    max_message: int
    posted: int
    retired: int
    failed: int
    flushed: int
    lost: int
    post_calls: int
    def __new__(
        cls,
        context: Context,
        cq: CompletionQueue,
        *,
        max_send: int = 128,
        max_recv: int = 128,
        max_inline: int = 64,
        max_message_bytes: int = 1 << 30,
        peer: str = "?",
    ) -> Self: ...
    @property
    def closed(self) -> bool: ...
    @property
    def in_flight(self) -> int:
        """Work requests posted and not accounted for."""

    @property
    def receives(self) -> int:
        """Receives posted and unused."""

    def to_init(self, port: int = 1, pkey_index: int = 0) -> None:
        """RESET to INIT; the peer may write remotely. Receives may be posted from here on."""

    def to_rtr(
        self,
        qp_num: int,
        psn: int,
        mtu: int,
        *,
        port: int = 1,
        gid: bytes | None = None,
        gid_index: int = 0,
        lid: int = 0,
        hop_limit: int = 64,
        traffic_class: int = 0,
        sl: int = 0,
        min_rnr_timer: int = 12,
        flow_label: int = 0,
    ) -> None:
        """INIT to RTR. ``qp_num``, ``psn``, ``gid`` and ``lid`` are the peer's, ``mtu`` the smaller code.

        With another ``flow_label`` (20 bits) per queue pair, RoCE devices use other UDP ports and switches
        other paths.
        """

    def to_rts(self, psn: int, *, timeout: int = 14, retries: int = 6, rnr_retries: int = 6) -> None:
        """RTR to RTS. A silent peer is reported after about 4.096 us * 2**timeout * (retries + 1).

        7 ``rnr_retries`` wait for ever, and so do 7 ``retries`` on soft-RoCE.
        """

    def to_error(self) -> None:
        """To ERR: everything in flight is flushed and completes with an error."""

    def query(self) -> dict[str, Any]:
        """As the device sees it: ``state`` (RESET, INIT, RTR, RTS, SQD, SQE, ERR), ``port``, ``pkey_index``,
        ``mtu``, ``peer_qp_num``, ``timeout``, ``retries``, ``rnr_retries``, ``traffic_class``, ``sl``,
        ``max_inline``, ``max_send``. VerbsError where it can't be asked."""

    def query_ece(self) -> tuple[int, int, int] | None:
        """Options (vendor, options, mask) of enhanced connection establishment; None without such options."""

    def set_ece(self, vendor: int, options: int, mask: int, /) -> bool:
        """Use what the peer offered, before RTR. False where this device knows nothing of it."""

    def latency(self) -> dict[str, list[int]]:
        """Histograms: entry i counts what took 2**i to 2**(i+1) ns. ``post``: doorbells; ``done``: calls of
        ``write`` from posting to their last completion."""

    def reset(self, timeout_s: float = 2.0, /) -> int:
        """To ERR, drain, then RESET, from where it can be connected again. Returns what never completed.

        Flushes are counted in ``flushed`` and not polled; other completions stay to be polled.
        """

    def write(
        self,
        region: MemoryRegion,
        entries: _Memory,
        remote_address: int,
        remote_bytes: int,
        rkey: int,
        *,
        start: int = 0,
        signal_every: int = 16,
        imm: int | None = None,
    ) -> int:
        """Post RDMA WRITEs; returns how many entries were accepted, 0 to all of them. Never waits.

        ``entries``: rows of three uint64 (offset in ``region``, offset at the peer, bytes), all checked
        against both regions (ValueError) before any is posted. With ``imm``, a WRITE_WITH_IMM without data
        closes the call and counts as one entry more. Continue with ``start`` when fewer were accepted: the
        queue was full. Chains of 64 share a doorbell, one in ``signal_every`` and the last complete
        visibly. VerbsError when
        the device refuses and nothing in flight could make room.
        """

    def receive(self, count: int, /) -> int:
        """Post receives without data, for immediates; returns how many fitted."""

    def close(self, timeout_s: float = 2.0, /) -> None:
        """To ERR, drain, destroy. What isn't drained in time is counted in ``lost``."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...
