"""Which device sits in which node, how fast each node's network is, and what receivers ask for."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from jaxrl_sync.sharding import codec
from jaxrl_sync.sharding.errors import MappingError
from jaxrl_sync.sharding.layout import Layout

GIGABIT = 125_000_000
"""Bytes per second of one Gb/s."""


@dataclasses.dataclass(frozen=True)
class Topology:
    """Nodes of both sides and their network rates.

    ``source_nodes``, ``target_nodes``: device -> node; empty: a node is a process. Rates: bytes per second
    that a node can send (source) or receive (target); a node that is not listed has ``rate``. Only ratios
    matter for the plan, absolute numbers for predicted seconds.
    """

    source_nodes: Mapping[int, int] = dataclasses.field(default_factory=dict)
    target_nodes: Mapping[int, int] = dataclasses.field(default_factory=dict)
    source_rates: Mapping[int, int] = dataclasses.field(default_factory=dict)
    target_rates: Mapping[int, int] = dataclasses.field(default_factory=dict)
    rate: int = 8 * 400 * GIGABIT

    def __post_init__(self) -> None:
        for rates in (self.source_rates, self.target_rates, {-1: self.rate}):
            for node, rate in rates.items():
                if rate <= 0 or int(rate) != rate:
                    raise MappingError(
                        f"node {node}: rate must be a positive integer of bytes/s, found {rate}"
                    )

    def nodes(self, layout: Layout, side: str) -> dict[int, int]:
        """Device -> node for every device of a layout."""
        given = self.source_nodes if side == "source" else self.target_nodes
        missing = sorted(set(layout.devices) - set(given)) if given else []
        if missing:
            raise MappingError(f"topology names no node for {side} devices {missing[:8]}")
        return {d: given[d] if given else process for d, process in layout.devices.items()}

    def rate_of(self, node: int, side: str) -> int:
        """Bytes per second of one node."""
        return (self.source_rates if side == "source" else self.target_rates).get(node, self.rate)

    def write(self, out: codec.Writer) -> None:
        """Canonical form, for a plan's bytes."""
        out.integer(self.rate)
        for table in (self.source_nodes, self.target_nodes, self.source_rates, self.target_rates):
            out.integers(x for item in sorted(table.items()) for x in item)

    @classmethod
    def read(cls, read: codec.Reader) -> Topology:
        """Reads `write`."""
        rate = read.integer()
        tables = []
        for _ in range(4):
            flat = read.integers()
            if len(flat) % 2:
                raise MappingError(f"topology: a table of pairs has {len(flat)} numbers")
            tables.append(dict(zip(flat[::2], flat[1::2], strict=True)))
        return cls(tables[0], tables[1], tables[2], tables[3], rate)


@dataclasses.dataclass(frozen=True)
class Policy:
    """``receivers``: "device" (every device gets its own copy over the network) or "node" (one copy per
    receiving node, spread inside it). ``split_bytes``: replicas share no smaller piece.
    """

    receivers: str = "device"
    split_bytes: int = 64 << 10

    def __post_init__(self) -> None:
        if self.receivers not in ("device", "node"):
            raise MappingError(f'policy receivers must be "device" or "node", found {self.receivers!r}')
        if self.split_bytes < 1:
            raise MappingError(f"policy split_bytes must be positive, found {self.split_bytes}")

    def write(self, out: codec.Writer) -> None:
        """Canonical form, for a plan's bytes."""
        out.text(self.receivers)
        out.integer(self.split_bytes)

    @classmethod
    def read(cls, read: codec.Reader) -> Policy:
        """Reads `write`."""
        return cls(read.text(), read.integer())
