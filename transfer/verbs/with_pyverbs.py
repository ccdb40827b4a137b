"""The verbs backend over rdma-core's Python bindings: the objects of ``_verbs``, one call per request.

For machines where the C extension wasn't built, and an independent implementation to test it against. It is
slow and simple: it polls instead of waiting for events, and doesn't guard against closing from another
thread.
"""
# pyright: reportMissingImports=false

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxrl_sync.transfer.verbs.errors import VerbsError
from jaxrl_sync.transfer.verbs.records import SUCCESS

try:
    import pyverbs.enums as e
    from pyverbs.addr import GID, AHAttr, GlobalRoute
    from pyverbs.cq import CQ
    from pyverbs.device import Context as Device
    from pyverbs.mr import MR
    from pyverbs.pd import PD
    from pyverbs.pyverbs_error import PyverbsError, PyverbsRDMAError
    from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
    from pyverbs.wr import SGE, RecvWR, SendWR
except ImportError as error:
    raise VerbsError(
        0,
        f"pyverbs can't be imported ({error}): Debian's python3-pyverbs serves the system's Python (a "
        "virtual environment of the same version sees it in PYTHONPATH=/usr/lib/python3/dist-packages); "
        "`pip install 'jaxrl-sync[pyverbs]'` builds one that needs an rdma-core of its own version; "
        "sync.verbs.backend = 'native' needs neither",
    ) from error

_RECEIVE = 1 << 63
_PAUSE_S = 2e-4
_OPCODES = {False: 0, True: 1}  # of a write; with an immediate


@contextlib.contextmanager
def _named(what: str) -> Iterator[None]:
    """VerbsError for what pyverbs raises."""
    try:
        yield
    except (PyverbsError, PyverbsRDMAError) as error:
        raise VerbsError(getattr(error, "error_code", 0) or 0, f"{what}: {error}") from error


def status_text(status: int) -> str:
    """Words for a completion status."""
    from pyverbs.cq import cqe_status_to_str

    return str(cqe_status_to_str(status))


class Context:
    """See ``_verbs.Context``."""

    def __init__(self, device: str) -> None:
        self.name = device
        with _named(f"opening RDMA device {device}"):
            self.device = Device(name=device)
            self.pd = PD(self.device)
        self.children: dict[Any, None] = {}

    def query_device(self) -> dict[str, int]:
        """The limits that an endpoint needs."""
        with _named(f"querying RDMA device {self.name}"):
            found = self.device.query_device()
        return {name: getattr(found, name) for name in ("max_mr_size", "max_qp_wr", "max_cqe")}

    def query_port(self, port: int) -> dict[str, int]:
        """The fields that an endpoint needs."""
        with _named(f"querying port {port}"):
            found = self.device.query_port(port)
        mtu, largest = found.active_mtu, found.max_msg_sz
        return {"state": found.state, "active_mtu": mtu, "max_message_bytes": largest}

    def async_events(self, timeout_s: float = 0.0) -> list[tuple[int, str, str, int]]:
        """None: pyverbs waits for events without a limit."""
        return []

    def close(self) -> None:
        """Children in reverse order, then the device. Idempotent."""
        while self.children:
            next(reversed(self.children)).close()
        self.pd.close()
        self.device.close()


class MemoryRegion:
    """See ``_verbs.MemoryRegion``."""

    relaxed_ordering = False  # this backend does without

    def __init__(
        self, context: Context, buffer: Any, *, remote_write: bool = False, relaxed_ordering: bool = False
    ) -> None:
        self._hold = (ctypes.c_char * len(buffer)).from_buffer(buffer)
        self.address, self.nbytes = ctypes.addressof(self._hold), len(buffer)
        access = e.IBV_ACCESS_LOCAL_WRITE | (e.IBV_ACCESS_REMOTE_WRITE if remote_write else 0)
        with _named(f"registering {self.nbytes} bytes"):
            self._mr = MR(context.pd, self.nbytes, access, address=self.address)
        self.lkey, self.rkey = self._mr.lkey, self._mr.rkey
        context.children[self] = None
        self._context = context

    def close(self) -> None:
        """Deregister. Idempotent."""
        if self._context.children.pop(self, self) is None:
            self._mr.close()
            del self._hold  # the buffer may be closed now


class CompletionQueue:
    """See ``_verbs.CompletionQueue``."""

    def __init__(self, context: Context, depth: int) -> None:
        with _named(f"creating a completion queue of {depth} entries"):
            self.queue = CQ(context.device, depth)
        self.pairs: dict[int, QueuePair] = {}
        self._backlog: list[Any] = []
        context.children[self] = None
        self._context = context

    def poll(self, out: npt.NDArray[np.void]) -> int:
        """Fill ``out``; returns how many."""
        while len(self._backlog) < len(out):
            with _named("polling a completion queue"):
                count, found = self.queue.poll(16)
            self._backlog += found
            if count == 0:
                break
        filled = 0
        while self._backlog and filled < len(out):
            completion = self._backlog.pop(0)
            pair = self.pairs.get(completion.qp_num)
            row = pair.account(completion) if pair is not None else None
            if row is not None:
                out[filled] = row
                filled += 1
        return filled

    def wait(self, timeout_s: float, spin_s: float = 0.0) -> bool:
        """Whether there is something to poll."""
        end = time.monotonic() + timeout_s
        while not self._backlog:
            with _named("polling a completion queue"):
                self._backlog += self.queue.poll(16)[1]
            if self._backlog or time.monotonic() >= end:
                break
            time.sleep(_PAUSE_S)
        return bool(self._backlog)

    def close(self) -> None:
        """Destroy it with its queue pairs. Idempotent."""
        for pair in list(self.pairs.values()):
            pair.close()
        if self._context.children.pop(self, self) is None:
            self.queue.close()


class QueuePair:
    """See ``_verbs.QueuePair``."""

    _tokens = 0

    def __init__(
        self,
        context: Context,
        cq: CompletionQueue,
        *,
        max_send: int = 128,
        max_recv: int = 128,
        max_message_bytes: int = 1 << 30,
        peer: str = "?",
    ) -> None:
        QueuePair._tokens += 1
        self.token, self.peer, self.max_send, self.max_recv = QueuePair._tokens, peer, max_send, max_recv
        self._largest = max_message_bytes
        cap = QPCap(max_send_wr=max_send, max_recv_wr=max_recv, max_send_sge=1, max_recv_sge=1)
        with _named(f"creating a queue pair of {max_send} sends and {max_recv} receives"):
            self._qp = QP(context.pd, QPInitAttr(qp_type=e.IBV_QPT_RC, scq=cq.queue, rcq=cq.queue, cap=cap))
        self.qp_num: int = self._qp.qp_num
        self._scratch = MR(context.pd, 64, e.IBV_ACCESS_LOCAL_WRITE)  # pyverbs wants an entry in each receive
        self.posted = self.retired = self._received = self._receives = 0
        self._opcodes: dict[int, int] = {}
        self._cq = cq
        cq.pairs[self.qp_num] = self
        context.children[self] = None
        self._context = context

    def _modify(self, attr: Any, mask: int, state: str) -> None:
        with _named(f"moving queue pair 0x{self.qp_num:06x} to {state}"):
            self._qp.modify(attr, mask)

    def to_init(self, port: int = 1, pkey_index: int = 0) -> None:
        """RESET to INIT."""
        attr = QPAttr(qp_state=e.IBV_QPS_INIT, port_num=port)
        attr.pkey_index = pkey_index
        attr.qp_access_flags = e.IBV_ACCESS_REMOTE_WRITE
        mask = e.IBV_QP_STATE | e.IBV_QP_PKEY_INDEX | e.IBV_QP_PORT | e.IBV_QP_ACCESS_FLAGS
        self._modify(attr, mask, "INIT")

    def query_ece(self) -> None:
        """No options: this backend connects without."""

    def set_ece(self, vendor: int, options: int, mask: int) -> bool:
        """Nothing of them is used."""
        return False

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
        """INIT to RTR."""
        attr = QPAttr(qp_state=e.IBV_QPS_RTR, port_num=port)
        attr.path_mtu, attr.dest_qp_num, attr.rq_psn = mtu, qp_num, psn
        attr.max_dest_rd_atomic, attr.min_rnr_timer = 1, min_rnr_timer
        if gid is None:
            attr.ah_attr = AHAttr(dlid=lid, sl=sl, port_num=port)
        else:
            text = ":".join(gid.hex()[i : i + 4] for i in range(0, 32, 4))
            route = GlobalRoute(
                dgid=GID(text),
                sgid_index=gid_index,
                flow_label=flow_label,
                hop_limit=hop_limit,
                traffic_class=traffic_class,
            )
            attr.ah_attr = AHAttr(dlid=lid, sl=sl, port_num=port, is_global=1, gr=route)
        mask = e.IBV_QP_STATE | e.IBV_QP_AV | e.IBV_QP_PATH_MTU | e.IBV_QP_DEST_QPN | e.IBV_QP_RQ_PSN
        self._modify(attr, mask | e.IBV_QP_MAX_DEST_RD_ATOMIC | e.IBV_QP_MIN_RNR_TIMER, "RTR")

    def to_rts(self, psn: int, *, timeout: int = 14, retries: int = 6, rnr_retries: int = 6) -> None:
        """RTR to RTS."""
        attr = QPAttr(qp_state=e.IBV_QPS_RTS)
        attr.sq_psn, attr.timeout, attr.retry_cnt, attr.rnr_retry = psn, timeout, retries, rnr_retries
        attr.max_rd_atomic = 1
        mask = e.IBV_QP_STATE | e.IBV_QP_SQ_PSN | e.IBV_QP_TIMEOUT | e.IBV_QP_RETRY_CNT | e.IBV_QP_RNR_RETRY
        self._modify(attr, mask | e.IBV_QP_MAX_QP_RD_ATOMIC, "RTS")

    def write(
        self,
        region: MemoryRegion,
        entries: npt.NDArray[np.uint64],
        remote_address: int,
        remote_bytes: int,
        rkey: int,
        *,
        start: int = 0,
        signal_every: int = 16,
        imm: int | None = None,
    ) -> int:
        """Post writes one by one while there is room; returns how many entries were accepted."""
        total = len(entries) + (imm is not None)
        accepted = 0
        for index in range(start, total):
            if self.posted - self.retired >= self.max_send:
                break
            signalled = index + 1 == total or (self.posted + 1) % signal_every == 0
            flags = e.IBV_SEND_SIGNALED if signalled else 0
            if index < len(entries):
                local, remote, nbytes = (int(v) for v in entries[index])
                fits = local + nbytes <= region.nbytes and remote + nbytes <= remote_bytes
                if not fits or not 0 < nbytes <= self._largest:
                    raise ValueError(
                        f"write of {nbytes} bytes at {local} to {remote}: regions have {region.nbytes} and "
                        f"{remote_bytes} bytes, a message at most {self._largest}"
                    )
                sges = [SGE(region.address + local, nbytes, region.lkey)]
                opcode = e.IBV_WR_RDMA_WRITE
            else:
                remote, sges, opcode = 0, [SGE(region.address, 0, region.lkey)], e.IBV_WR_RDMA_WRITE_WITH_IMM
            request = SendWR(self.posted + 1, opcode=opcode, num_sge=1, sg=sges, send_flags=flags)
            request.set_wr_rdma(rkey, remote_address + remote)
            if index == len(entries):
                request.imm_data = int.from_bytes(int(imm or 0).to_bytes(4, "big"), "little")
            with _named(f"posting a write on queue pair 0x{self.qp_num:06x} to {self.peer}"):
                self._qp.post_send(request)
            self.posted += 1
            self._opcodes[self.posted] = _OPCODES[index == len(entries)]
            accepted += 1
        return accepted

    def receive(self, count: int) -> int:
        """Post receives for immediates; returns how many fitted."""
        fitting = min(count, self.max_recv - (self._receives - self._received))
        for _ in range(fitting):
            entry = SGE(self._scratch.buf, 0, self._scratch.lkey)
            request = RecvWR(_RECEIVE | (self._receives + 1), num_sge=1, sg=[entry])
            with _named(f"posting a receive on queue pair 0x{self.qp_num:06x}"):
                self._qp.post_recv(request)
            self._receives += 1
        return fitting

    def account(self, found: Any) -> tuple[int, ...] | None:
        """A record of a completion, None if it was seen before."""
        receive, seq = bool(found.wr_id & _RECEIVE), found.wr_id & ~_RECEIVE
        before = self._received if receive else self.retired
        if not before < seq <= (self._receives if receive else self.posted):
            return None
        good = found.status == SUCCESS
        opcode = (found.opcode if good else 128) if receive else self._opcodes[seq]
        if receive:
            self._received = seq
        else:
            self.retired = seq
            for done in range(before + 1, seq + 1):
                self._opcodes.pop(done, None)
        imm = int.from_bytes(int(found.imm_data).to_bytes(4, "little"), "big") if good and receive else 0
        length, vendor = (found.byte_len if good and receive else 0), (0 if good else found.vendor_err)
        retires = seq - before
        return (
            self.token,
            seq,
            self.qp_num,
            found.status,
            opcode,
            length,
            imm,
            vendor,
            retires,
            int(receive),
        )

    def close(self) -> None:
        """Destroy it. Idempotent."""
        if self._context.children.pop(self, self) is None:
            self._cq.pairs.pop(self.qp_num, None)
            self._qp.close()
            self._scratch.close()
