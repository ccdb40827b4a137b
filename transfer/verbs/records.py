"""Completions as the C extension writes them: one numpy record each."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

SUCCESS = 0
FLUSHED = 5

RECORD = np.dtype(
    [
        ("token", np.uint64),  # QueuePair.token
        ("seq", np.uint64),  # number of the work request on its queue pair, from 1, sends and receives apart
        ("qp_num", np.uint32),
        ("status", np.uint32),
        ("opcode", np.uint32),  # what was posted, also where the device has none to say
        ("byte_len", np.uint32),  # of a receive
        ("imm", np.uint32),
        ("vendor_err", np.uint32),
        ("retires", np.uint32),  # work requests accounted for, itself included
        ("receive", np.uint32),
    ]
)

_OPCODES = {0: "RDMA WRITE", 1: "RDMA WRITE with immediate", 128: "receive", 129: "receive of an immediate"}


def new_records(count: int) -> npt.NDArray[np.void]:
    """Room for ``count`` completions."""
    return np.zeros(count, RECORD)


def opcode_name(opcode: int) -> str:
    """In words."""
    return _OPCODES.get(opcode, f"opcode {opcode}")
