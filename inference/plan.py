"""The step plan: everything the ranks of an engine need to do the same step. Numbers and small arrays only.

The scheduler decides it on rank 0; every rank executes it. ``to_bytes`` is its wire form (no pickle).
"""

from __future__ import annotations

import dataclasses
import json
import struct
from typing import Any

import numpy as np

from jaxrl_sync.transfer.version import Version

# Columns of Prefill.ints; stop ids follow, -1 where unused.
TOKEN, POSITION, REMAINING, TOP_K, SEED, HASH, SAMPLE = range(7)
NUM_INTS = 7
# Columns of Prefill.floats.
TEMPERATURE, TOP_P = range(2)
NUM_FLOATS = 2

RUNNING, STOPPED, FULL = range(3)  # a slot's status after a dispatch


@dataclasses.dataclass(frozen=True, eq=False)
class Prefill:
    """One call of the jitted prefill: rows of prompt tokens, and the slots that take a copy of a row.

    tokens: int32 ``[P, T]``. A row holds a sequence without its last token, zero padded: the decode step
        computes the last one, so there is one place that samples.
    row: int32 ``[S]``, the row that slot s takes, -1 for slots that are left alone.
    ints, floats: ``[S, 7 + stop ids]`` int32 and ``[S, 2]`` float32, the state of slots with a row: last
        token, its position, tokens left, top_k, seed and request hash (uint32 bits), sample index;
        temperature, top_p.
    """

    tokens: np.ndarray
    row: np.ndarray
    ints: np.ndarray
    floats: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class StepPlan:
    """One engine step, in this order: swap, warm-up, prefills, up to ``steps`` decode steps in one dispatch.

    number: of the dispatch, from 0. swap: the version to install first. warm_up: compile all shapes then.
    active: bool ``[S]``, the slots that decode. attend: the cache length that decode is compiled for.
    """

    number: int
    active: np.ndarray
    steps: int
    attend: int
    prefills: tuple[Prefill, ...] = ()
    swap: Version | None = None
    warm_up: bool = False

    @property
    def empty(self) -> bool:
        """Whether there is nothing to execute."""
        return self.steps == 0 and not self.prefills and self.swap is None

    def to_bytes(self) -> bytes:
        """Header length (u32, little endian), JSON header, then the arrays' bytes in header order."""
        arrays = [self.active, *(a for p in self.prefills for a in (p.tokens, p.row, p.ints, p.floats))]
        header = {
            "number": self.number,
            "steps": self.steps,
            "attend": self.attend,
            "prefills": len(self.prefills),
            "swap": dataclasses.asdict(self.swap) if self.swap else None,
            "warm_up": self.warm_up,
            "arrays": [[a.dtype.str, list(a.shape)] for a in arrays],
        }
        text = json.dumps(header).encode()
        return b"".join([struct.pack("<I", len(text)), text, *(a.tobytes() for a in arrays)])

    @staticmethod
    def from_bytes(data: bytes) -> StepPlan:
        """The plan of ``to_bytes``; raises ValueError when lengths don't add up."""
        (size,) = struct.unpack_from("<I", data)
        header: dict[str, Any] = json.loads(data[4 : 4 + size])
        arrays, offset = [], 4 + size
        for dtype, shape in header["arrays"]:
            count = int(np.prod(shape))
            array = np.frombuffer(data, np.dtype(dtype), count, offset).reshape(shape)
            arrays.append(array)
            offset += array.nbytes
        if offset != len(data) or len(arrays) != 1 + 4 * header["prefills"]:
            raise ValueError(f"step plan: expected {offset} bytes for {len(arrays)} arrays, got {len(data)}")
        swap = header["swap"]
        return StepPlan(
            number=header["number"],
            active=arrays[0],
            steps=header["steps"],
            attend=header["attend"],
            prefills=tuple(Prefill(*arrays[i : i + 4]) for i in range(1, len(arrays), 4)),
            swap=Version(**swap) if swap else None,
            warm_up=header["warm_up"],
        )


@dataclasses.dataclass(frozen=True, eq=False)
class StepOutput:
    """What a dispatch gave, on the host.

    tokens: int32 ``[K, S]``, -1 where a slot drew none. logprobs: float32 ``[K, S]``. extras: named float32
    ``[K, S]``. status: int32 ``[S]``, RUNNING, STOPPED (stop token) or FULL (no tokens left). steps: decode
    steps that ran. stamps: least and greatest version stamp of the pass, None without the probe.
    prefill_s, decode_s, pause_s: seconds in prefill, decode and swap.
    """

    tokens: np.ndarray
    logprobs: np.ndarray
    extras: dict[str, np.ndarray]
    status: np.ndarray
    steps: int
    stamps: tuple[int, int] | None
    swapped: Version | None
    prefill_s: float
    decode_s: float
    pause_s: float
