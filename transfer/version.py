"""Versions of the weights: (lineage, number)."""

from __future__ import annotations

import dataclasses
import uuid

from jaxrl_sync.transfer.errors import TransferError


@dataclasses.dataclass(frozen=True)
class Version:
    """One committed state of the weights.

    ``number`` counts committed optimizer updates; ``lineage`` names one uninterrupted training history.
    Two versions are the same only if both agree; only versions of one lineage have an order.
    """

    lineage: str
    number: int

    def __post_init__(self) -> None:
        if not self.lineage or self.number < 0:
            raise ValueError(f"version needs a lineage and number >= 0, got {self.lineage!r}, {self.number}")

    def __str__(self) -> str:
        return f"{self.lineage}:{self.number}"

    def follows(self, other: Version) -> bool:
        """Whether this version is a later one of the same lineage."""
        return self.lineage == other.lineage and self.number > other.number


def expect_version(given: object) -> None:
    """TransferError for what is no version, before it gets anywhere."""
    if not isinstance(given, Version):
        raise TransferError(f"{given!r:.200} is a {type(given).__name__}, expected Version(lineage, number)")


def new_lineage() -> str:
    """A fresh lineage name: 12 hexadecimal digits."""
    return uuid.uuid4().hex[:12]
