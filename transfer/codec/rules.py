"""Which codings may be chosen for a payload."""

from __future__ import annotations

import dataclasses
from typing import Literal

PositionChoice = Literal["auto", "bitmap", "u32", "gap16", "gap8", "rice"]
ValueChoice = Literal["auto", "overwrite", "xor", "ulp"]
ZstdChoice = Literal["auto", "on", "off"]


@dataclasses.dataclass(frozen=True)
class CodingRules:
    """What may be chosen: a coding by name, or ``auto``. ``values = "auto"`` allows what isn't idempotent."""

    positions: PositionChoice = "auto"
    values: ValueChoice = "overwrite"
    zstd: ZstdChoice = "auto"
    whole: bool = True

    def __post_init__(self) -> None:
        if self.positions not in ("auto", "bitmap", "u32", "gap16", "gap8", "rice"):
            raise ValueError(f"positions={self.positions!r}, expected auto, bitmap, u32, gap16, gap8 or rice")
        if self.values not in ("auto", "overwrite", "xor", "ulp"):
            raise ValueError(f"values={self.values!r}, expected auto, overwrite, xor or ulp")
        if self.zstd not in ("auto", "on", "off"):
            raise ValueError(f"zstd={self.zstd!r}, expected auto, on or off")
