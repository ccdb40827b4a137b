"""The bytes of a layout as plain values, without jax: which tensors there are, and who holds what of them."""

from __future__ import annotations

import dataclasses

from jaxrl_sync.sharding import codec
from jaxrl_sync.sharding.errors import MappingError

MAGIC = b"jaxrl.layout\x01"

_LIMIT = 1 << 31
"""Of the numbers of devices and processes."""

Held = tuple[int, int, tuple[int, ...], tuple[int, ...]]
"""Device, process, and the box's start and stop."""


@dataclasses.dataclass(frozen=True)
class Manifest:
    """``placements``: (shape, who holds which box); ``tensors``: path -> (dtype, number of its placement)."""

    placements: tuple[tuple[tuple[int, ...], tuple[Held, ...]], ...]
    tensors: dict[str, tuple[str, int]]

    @classmethod
    def parse(cls, data: bytes) -> Manifest:
        """Reads ``Layout.to_bytes()``; anything else is a `MappingError`."""
        read = codec.Reader(data, MAGIC, "layout")
        placements = []
        for _ in range(read.count()):
            shape = read.shape()
            shards = []
            for _ in range(read.count()):
                device, process = read.integer(), read.integer()
                start = tuple(read.integer() for _ in shape)
                stop = tuple(read.integer() for _ in shape)
                if not (0 <= device < _LIMIT > process >= 0 and all(0 <= i < 1 << 56 for i in start + stop)):
                    raise MappingError(
                        f"layout: impossible shard {start}:{stop} of device {device}, {process}"
                    )
                shards.append((device, process, start, stop))
            placements.append((shape, tuple(shards)))
        tensors = {}
        for _ in range(read.count()):
            path, dtype, index = read.text(), read.text(), read.integer()
            if not 0 <= index < len(placements):
                raise MappingError(f"layout: tensor {path!r} names placement {index} of {len(placements)}")
            tensors[path] = dtype, index
        read.end()
        return cls(tuple(placements), tensors)

    def differences(self, other: Manifest) -> list[str]:
        """In words, where ``other`` differs from this one, by tensor."""
        lines = []
        for path in sorted({*self.tensors, *other.tensors}):
            mine, theirs = self._of(path), other._of(path)
            if theirs is None:
                lines.append(f"{path!r} is missing")
            elif mine is None:
                lines.append(f"{path!r} is not expected")
            elif mine != theirs:
                same = mine[:2] == theirs[:2]
                expected = f"{mine[0]}{list(mine[1])}"
                lines.append(
                    f"{path!r} is {theirs[0]}{list(theirs[1])}"
                    f"{' with other shards' if same else ''}, expected {expected}"
                )
        return lines

    def _of(self, path: str) -> tuple[str, tuple[int, ...], tuple[Held, ...]] | None:
        if path not in self.tensors:
            return None
        dtype, index = self.tensors[path]
        return dtype, *self.placements[index]
