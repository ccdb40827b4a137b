"""The choice of a quantised engine tree; ``presets.quantized`` has the functions. No jax here."""

from __future__ import annotations

import dataclasses
from typing import Literal

Format = Literal["fp8", "int8"]
BlockShape = Literal["128x128", "1x128"]


@dataclasses.dataclass(frozen=True)
class Quantization:
    """How the matrices of an engine tree are held.

    format: ``fp8`` (float8_e4m3fn) or ``int8``, both symmetric.
    block: ``128x128`` or ``1x128`` (128 along the contraction, one output). A dimension whose part on one
        device is no multiple of 128 takes the largest power of two that divides that part instead, so that
        no block lies on two devices.
    """

    format: Format
    block: BlockShape = "128x128"

    def __post_init__(self) -> None:
        if self.format not in ("fp8", "int8"):
            raise ValueError(f"quantization format: expected fp8 or int8, got {self.format!r}")
        if self.block not in ("128x128", "1x128"):
            raise ValueError(f"quantization block: expected 128x128 or 1x128, got {self.block!r}")
