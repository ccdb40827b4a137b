"""Room for entries: jitted encoders have static shapes, so capacities come from a short ladder of levels.

A level is a share of the elements. All tensors of a layout use one level, so that an encoder compiles once
per level; a tensor with more changes than its room is encoded again on a higher level, or sent whole.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

LEAST_ROOM = 256
ROUND = 256


@dataclasses.dataclass(frozen=True)
class Ladder:
    """Shares of a tensor's elements that the levels have room for; denser tensors are sent whole.

    With bf16 and overwrite an entry costs about 3 bytes, so above a quarter a delta saves little.
    """

    shares: tuple[float, ...] = (1 / 256, 1 / 64, 1 / 16, 1 / 4)

    def __post_init__(self) -> None:
        if not self.shares or list(self.shares) != sorted(set(self.shares)) or not 0 < self.shares[0]:
            raise ValueError(f"shares must ascend from above 0 to at most 1, found {self.shares}")
        if self.shares[-1] > 1:
            raise ValueError(f"shares must ascend from above 0 to at most 1, found {self.shares}")

    def capacity(self, elements: int, level: int) -> int:
        """Entries that a buffer of ``elements`` has room for on a level."""
        room = max(LEAST_ROOM, -(-int(elements * self.shares[level]) // ROUND) * ROUND)
        return min(elements, room)

    def level_for(self, elements: int, count: int) -> int | None:
        """The lowest level with room for ``count`` entries; None: too dense, send it whole."""
        for level in range(len(self.shares)):
            if count <= self.capacity(elements, level):
                return level
        return None

    def next_level(
        self, elements: Mapping[str, int], counts: Mapping[str, int], headroom: float = 1.5
    ) -> int:
        """The level for a layout's next version: where tensors with most of the elements fit, with headroom.

        A few dense tensors don't drag the others up: they are encoded again on their own.
        """
        total, below = sum(elements.values()), 0
        for level in range(len(self.shares)):
            below = sum(
                n for path, n in elements.items() if counts[path] * headroom <= self.capacity(n, level)
            )
            if below * 10 >= total * 9:
                return level
        return len(self.shares) - 1
