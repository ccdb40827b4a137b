"""What is measured, and what came out."""

from __future__ import annotations

import dataclasses
import re
import statistics
from collections.abc import Sequence
from typing import Any, Literal, get_args

from jaxrl_sync.transfer.errors import ProtocolError, TransferError

Transport = Literal["verbs", "shm", "tcp"]
Through = Literal["queue-pairs", "weights"]
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


class BenchError(TransferError):
    """A bench that can't be run as asked, or whose bytes did not arrive as sent."""


def parse_bytes(text: str) -> int:
    """``4096``, ``64k``, ``1MiB``. ValueError."""
    found = re.fullmatch(r"(\d+)\s*([kmg]?)(?:i?b)?", text.strip().lower())
    if not found:
        raise ValueError(f"size {text!r}, expected a number with k, M or G")
    return int(found[1]) * _UNITS[found[2]]


@dataclasses.dataclass(frozen=True)
class Shape:
    """One measurement.

    ``queue-pairs``: ``iters`` RDMA WRITEs of ``size_bytes``, ``depth`` on their way on each of ``qps``
    queue pairs, one after the other through ``region_bytes`` of memory or ``scattered``, then ``pings`` round
    trips. ``weights``: ``iters`` versions of ``size_bytes`` from a Publisher to a Subscriber over
    ``transport``. ``checked`` messages or versions are compared byte for byte.
    """

    transport: Transport = "verbs"
    through: Through = "queue-pairs"
    size_bytes: int = 1 << 20
    iters: int = 1000
    qps: int = 1
    depth: int = 128
    region_bytes: int = 0
    scattered: bool = False
    pings: int = 200
    checked: int = 64
    seed: int = 0
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        limits = {
            "size_bytes": (1, 1 << 40),
            "iters": (1, 1 << 24),
            "qps": (1, 64),
            "depth": (1, 1 << 15),
            "region_bytes": (0, 1 << 40),
            "pings": (0, 1 << 20),
            "checked": (0, 1 << 16),
            "seed": (0, 1 << 62),
        }
        for name, (low, high) in limits.items():
            value = getattr(self, name)
            if type(value) is not int or not low <= value <= high:
                raise BenchError(f"{name} is {value!r}, expected {low} to {high}")
        if self.transport not in get_args(Transport) or self.through not in get_args(Through):
            raise BenchError(f"{self.transport!r} through {self.through!r} is no bench that there is")
        if self.through == "queue-pairs" and self.transport != "verbs":
            raise BenchError(f"{self.transport} has no queue pairs: it is measured through weights")
        if not isinstance(self.timeout_s, int | float) or not 0 < self.timeout_s < 1e6:
            raise BenchError(f"timeout_s is {self.timeout_s!r}, expected more than 0")

    @property
    def memory_bytes(self) -> int:
        """What each side registers: as asked, at least one message, 16 of them up to 16 MiB by default."""
        default = max(self.size_bytes, min(16 * self.size_bytes, 16 << 20))
        return max(self.region_bytes or default, self.size_bytes)

    def to_json(self) -> dict[str, Any]:
        """For the other side."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: object) -> Shape:
        """What the other side said. ProtocolError, BenchError."""
        names = {field.name for field in dataclasses.fields(cls)}
        if not isinstance(value, dict) or set(value) - names:
            raise ProtocolError(f"a bench is described as {str(value)[:200]!r}, expected {sorted(names)}")
        return cls(**value)


@dataclasses.dataclass(frozen=True)
class Result:
    """``seconds`` for ``messages`` of ``size_bytes``; one-way latencies in microseconds; what was compared.

    ``details`` depend on what was measured: ports and why, counters of the ports that moved, histograms.
    """

    shape: Shape
    messages: int
    seconds: float
    latency_us: dict[str, float]
    compared: dict[str, int]
    details: dict[str, Any]

    @property
    def bytes_per_s(self) -> float:
        """Of payload."""
        return self.messages * self.shape.size_bytes / self.seconds

    def to_json(self) -> dict[str, Any]:
        """One object with everything."""
        return {
            **self.shape.to_json(),
            "messages": self.messages,
            "seconds": self.seconds,
            "bytes_per_s": self.bytes_per_s,
            "messages_per_s": self.messages / self.seconds,
            "latency_us": self.latency_us,
            "compared": self.compared,
            **self.details,
        }

    def lines(self) -> list[str]:
        """For people."""
        shape, late = self.shape, self.latency_us
        how = (
            f"{shape.qps} queue pairs, depth {shape.depth}"
            if shape.through == "queue-pairs"
            else "as weights"
        )
        out = [
            f"{shape.transport:<10} {shape.size_bytes} bytes x {self.messages}, {how}",
            f"bandwidth  {self.bytes_per_s / 1e6:.1f} MB/s, {self.messages / self.seconds:.1f} messages/s",
        ]
        if late:
            out.append("latency    " + ", ".join(f"{name} {value:.1f} us" for name, value in late.items()))
        same = ", ".join(f"{count} {name}" for name, count in self.compared.items())
        out.append(f"compared   {same}: equal")
        out += [f"{name:<10} {self.details[name]}" for name in sorted(self.details)]
        return out


def percentiles(samples_us: Sequence[float]) -> dict[str, float]:
    """Least, median and 99th percentile; empty without samples."""
    if not samples_us:
        return {}
    ordered = sorted(samples_us)
    high = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    return {"min": ordered[0], "median": statistics.median(ordered), "p99": high}
