"""Anchors: a whole version as a folder that orbax restores, written without orbax.

The layout is orbax's with ``use_ocdbt=False``: per tensor a folder with zarr metadata and one file per chunk,
plain row-major bytes, so numpy, zarr and tensorstore read it too. A chunk is a box (see `stored`). Orbax
takes a folder for a checkpoint once ``_METADATA`` is there, which is written last.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxrl_sync.sharding.layout import dtype_of
from jaxrl_sync.sharding.native import flat_bytes
from jaxrl_sync.transfer.files.folder import Folder
from jaxrl_sync.transfer.files.seal import Seal
from jaxrl_sync.transfer.files.stored import Key, Slab, Stored, StoredTensor

_HANDLER = "orbax.checkpoint._src.handlers.pytree_checkpoint_handler.PyTreeCheckpointHandler"


def write_chunks(
    folder: Folder,
    stored: Stored,
    slabs: Iterable[Slab],
    boxes: Mapping[Key, npt.NDArray[Any]],
    seal: Seal,
    sync: bool = True,
) -> tuple[tuple[str, ...], int]:
    """Write the boxes that these slabs (all of each box) make up: (digest of each slab, bytes)."""
    digests, total = list[str](), 0
    by_box: dict[Key, list[Slab]] = {}
    for slab in slabs:
        by_box.setdefault(slab.key, []).append(slab)
    for key, pieces in by_box.items():
        memory = flat_bytes(boxes[key])
        parts = [memory[s.offset : s.offset + s.nbytes] for s in pieces]
        digests += [seal.of_object(part) for part in parts]
        with folder.child(stored.tensors[key[1]].folder, create=True) as below:
            total += below.write(pieces[0].chunk, parts, sync=sync)
            if sync:
                below.sync()
    return tuple(digests), total


def finish(folder: Folder, stored: Stored, sync: bool = True) -> None:
    """Write what makes the folder a checkpoint; every chunk is there already."""
    for tensor in stored.tensors.values():
        with folder.child(tensor.folder, create=True) as below:
            below.write(".zarray", [json.dumps(_zarray(tensor)).encode()], sync=sync)
            if sync:
                below.sync()
    now_ns = time.time_ns()
    about = {
        "item_handlers": _HANDLER,
        "metrics": {},
        "performance_metrics": {},
        "init_timestamp_nsecs": now_ns,
        "commit_timestamp_nsecs": now_ns,
        "custom_metadata": {},
    }
    folder.write("_CHECKPOINT_METADATA", [json.dumps(about).encode()], sync=sync)
    folder.write("_METADATA", [json.dumps(_tree(stored)).encode()], sync=sync)
    if sync:
        folder.sync()


def _tree(stored: Stored) -> dict[str, Any]:
    rows = {}
    for tensor in stored.tensors.values():
        keys = [{"key": k, "key_type": 2} for k in tensor.keys]
        kind = {"value_type": "np.ndarray", "skip_deserialize": False}  # else orbax asks for a sharding
        rows[str(tensor.keys)] = {"key_metadata": keys, "value_metadata": kind}
    return {
        "tree_metadata": rows,
        "use_ocdbt": False,
        "use_zarr3": False,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": None,
    }


def _zarray(tensor: StoredTensor) -> dict[str, Any]:
    dtype = dtype_of(tensor.dtype)
    return {
        "chunks": [max(1, n) for n in tensor.chunk],
        "compressor": None,
        "dimension_separator": ".",
        "dtype": dtype.str if np.dtype(dtype.str) == dtype else tensor.dtype,
        "fill_value": None,
        "filters": None,
        "order": "C",
        "shape": list(tensor.shape),
        "zarr_format": 2,
    }
