"""Which replica of a source box sends: the one with the least to send so far."""

from __future__ import annotations


class Loads:
    """Bytes given to each source device up to now. Deterministic: ties go to the lowest device number."""

    def __init__(self) -> None:
        self.bytes: dict[int, int] = {}

    def take(self, holders: list[int], size_bytes: int) -> int:
        """Gives ``size_bytes`` to one of the holders and returns it."""
        device = min(holders, key=lambda d: (self.bytes.get(d, 0), d))
        self.bytes[device] = self.bytes.get(device, 0) + size_bytes
        return device
