"""Lossless sparse deltas: bitwise compare, compaction and apply, jitted on the devices and in C on the host.

docs/payloads.md describes the parts. Names load on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxrl_sync.transfer.delta.bits import DeltaError as DeltaError
    from jaxrl_sync.transfer.delta.buckets import Ladder as Ladder
    from jaxrl_sync.transfer.delta.decode import Applier as Applier
    from jaxrl_sync.transfer.delta.encode import Encoded as Encoded
    from jaxrl_sync.transfer.delta.encode import Encoder as Encoder
    from jaxrl_sync.transfer.delta.masks import cast_with_mask as cast_with_mask
    from jaxrl_sync.transfer.delta.snapshot import DeviceSnapshot as DeviceSnapshot
    from jaxrl_sync.transfer.delta.snapshot import HostSnapshot as HostSnapshot
    from jaxrl_sync.transfer.delta.sparse import Delta as Delta
    from jaxrl_sync.transfer.delta.sparse import apply_into as apply_into
    from jaxrl_sync.transfer.delta.sparse import compare as compare

_HOME = {
    "Applier": "decode",
    "Delta": "sparse",
    "DeltaError": "bits",
    "DeviceSnapshot": "snapshot",
    "Encoded": "encode",
    "Encoder": "encode",
    "HostSnapshot": "snapshot",
    "Ladder": "buckets",
    "apply_into": "sparse",
    "cast_with_mask": "masks",
    "compare": "sparse",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value
