"""A folder as a channel of weight versions: anchors and deltas, for whoever comes later or sits elsewhere.

Names load on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxrl_sync.transfer.files.config import FileReaderConfig as FileReaderConfig
    from jaxrl_sync.transfer.files.config import FileWriterConfig as FileWriterConfig
    from jaxrl_sync.transfer.files.reader import FileSubscriber as FileSubscriber
    from jaxrl_sync.transfer.files.writer import FilePublisher as FilePublisher

_HOME = {
    "FilePublisher": "writer",
    "FileReaderConfig": "config",
    "FileSubscriber": "reader",
    "FileWriterConfig": "config",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value
