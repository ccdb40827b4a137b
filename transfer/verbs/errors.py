"""Errors of RDMA verbs. The C extension raises the first one too."""

from __future__ import annotations

from jaxrl_sync.transfer.errors import PeerLost, ResourceError, TransferError

RETRY_EXCEEDED = 12
_HINTS = {
    10: "the peer closed or replaced that memory, or it is smaller than described",
    13: "the peer posts no receives: it hangs, or is much slower than this side",
}


class VerbsError(ResourceError, OSError):
    """A verbs call failed or can't be made here: ``errno`` (0 without one) and what to do about it."""

    def __str__(self) -> str:
        return str(self.args[-1]) if self.args else "verbs failed"


class PortDown(VerbsError, TransferError):
    """A port that would do isn't ACTIVE. Where a link has been before, it is tried again."""


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
        detail: str = "",
    ) -> None:
        self.peer, self.device, self.qp_num, self.opcode = peer, device, qp_num, opcode
        self.status, self.text, self.seq, self.vendor_err = status, text, seq, vendor_err
        hint = "; ".join(words for words in (_HINTS.get(status, ""), detail) if words)
        super().__init__(
            f"{opcode} {seq} on queue pair 0x{qp_num:06x} of {device} to {peer} failed: {text} "
            f"(status {status}, vendor error 0x{vendor_err:x})" + (f": {hint}" if hint else "")
        )


class PeerUnreachable(CompletionError, PeerLost):
    """The peer is gone: nothing answered within the retries, or its connection closed too."""


def completion_error(status: int, gone: bool = False, **facts: object) -> CompletionError:
    """The kind of error that a status is; ``gone``: the peer is known to be."""
    kind = PeerUnreachable if gone or status == RETRY_EXCEEDED else CompletionError
    return kind(status=status, **facts)  # type: ignore[arg-type]
