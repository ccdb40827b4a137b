"""Errors of RDMA verbs. The C extension raises these too."""

from __future__ import annotations

from jaxrl_sync.transfer.errors import ResourceError, TransferError


class VerbsError(ResourceError, OSError):
    """A verbs call failed or can't be made here: ``errno`` (0 without one) and what to do about it."""

    def __str__(self) -> str:
        return str(self.args[-1]) if self.args else "verbs failed"


class CompletionError(TransferError):
    """A work request failed. The first error of a queue pair is the cause; its flushes are only counted."""

    def __init__(
        self,
        *,
        peer: str,
        device: str,
        qp_num: int,
        opcode: str,
        status: int,
        text: str,
        seq: int,
        vendor_err: int,
    ) -> None:
        self.peer, self.device, self.qp_num, self.opcode = peer, device, qp_num, opcode
        self.status, self.text, self.seq, self.vendor_err = status, text, seq, vendor_err
        super().__init__(
            f"{opcode} {seq} on queue pair 0x{qp_num:06x} of {device} to {peer} failed: {text} "
            f"(status {status}, vendor error 0x{vendor_err:x})"
        )
