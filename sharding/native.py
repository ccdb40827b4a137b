"""The C kernels where they were built; None and one log line where not."""

from __future__ import annotations

import functools
import logging
import types
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

AnyArray = npt.NDArray[Any]


@functools.cache
def kernels() -> types.ModuleType | None:
    """The module ``_kernels``, or None if it was not built (numpy then does the same, slower)."""
    try:
        from jaxrl_sync.sharding import _kernels
    except ImportError as error:
        logging.getLogger(__name__).warning("no C kernels, numpy does the copies: %s", error)
        return None
    return _kernels


def flat_bytes(buffer: Any) -> npt.NDArray[np.uint8]:
    """A one-dimensional byte view of a C-contiguous array or buffer, without a copy."""
    if not isinstance(buffer, np.ndarray):
        return np.frombuffer(buffer, np.uint8)
    if not buffer.flags.c_contiguous:
        raise ValueError(
            f"buffer must be C-contiguous, found strides {buffer.strides} of shape {buffer.shape}"
        )
    return buffer.reshape(-1).view(np.uint8)


def addresses(buffers: Sequence[npt.NDArray[np.uint8]]) -> npt.NDArray[np.uint64]:
    """The address of the first byte of each buffer."""
    return np.array([b.__array_interface__["data"][0] for b in buffers], np.uint64)
