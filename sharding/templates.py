"""Templates: the moves of one class of tensors, senders chosen so that no node is the bottleneck."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxrl_sync.sharding.balance import Holders, shares
from jaxrl_sync.sharding.layout import Placement
from jaxrl_sync.sharding.matching import Block, IntArray, Pairs, match, reduce, volumes
from jaxrl_sync.sharding.topology import Policy

CONSTANT_NODE = -1


@dataclasses.dataclass(frozen=True)
class Draft:
    """A block between two placements and how often it occurs, before anybody was chosen to send."""

    source: Placement
    target: Placement
    itemsize: int
    block: Block
    name: str


@dataclasses.dataclass(frozen=True, eq=False)
class Template:
    """Moves of one block between two placements: per move two devices and an axis-space box.

    ``fanout_from``, ``fanout_to``, ``fanout_move``: copies inside receiving nodes, of that move's box.
    """

    source: Placement
    target: Placement
    itemsize: int
    block: Block
    source_device: IntArray
    target_device: IntArray
    low: IntArray
    high: IntArray
    fanout_from: IntArray
    fanout_to: IntArray
    fanout_move: IntArray

    @property
    def volumes(self) -> IntArray:
        """Elements per move."""
        return volumes(self.low, self.high)


@dataclasses.dataclass
class _Need:
    """One pair and one receiver: bytes (over all instances) that one of the holders' nodes must send."""

    draft: int
    pair: int
    receiver: int
    fanout: tuple[int, ...]
    holders: Holders
    total_bytes: int


class Builder:
    """Makes the templates of all drafts at once, since they share senders."""

    def __init__(
        self,
        source_nodes: dict[int, int],
        target_nodes: dict[int, int],
        rates: dict[int, int],
        policy: Policy,
    ) -> None:
        self._nodes, self._target_nodes, self._rates, self._policy = source_nodes, target_nodes, rates, policy
        self._sent: dict[int, int] = {}
        self._received: dict[int, int] = {}

    def build(self, drafts: Sequence[Draft], counts: Sequence[int]) -> tuple[Template, ...]:
        """Templates in the order of the drafts; ``counts``: instances of each."""
        pairs = [match(d.block, reduce(d.target, True), reduce(d.source, False), d.name) for d in drafts]
        needs = [n for i, d in enumerate(drafts) for n in self._needs(i, d, pairs[i], counts[i])]
        demand: dict[Holders, int] = {}
        for need in needs:
            demand[need.holders] = demand.get(need.holders, 0) + need.total_bytes
        local = {h: {h[0]: s} for h, s in demand.items() if h == (CONSTANT_NODE,)}  # never on the network
        wire = {h: s for h, s in demand.items() if h not in local}
        quota = local | (shares(wire, {n: self._rates[n] for h in wire for n in h}) if wire else {})
        moves: list[list[tuple[int, int, IntArray, IntArray, tuple[int, ...]]]] = [[] for _ in drafts]
        for need in sorted(needs, key=lambda n: (-n.total_bytes, n.draft, n.pair, n.receiver)):
            self._assign(need, drafts[need.draft], pairs[need.draft], counts[need.draft], quota, moves)
        return tuple(_template(d, rows) for d, rows in zip(drafts, moves, strict=True))

    def _needs(self, number: int, draft: Draft, pairs: Pairs, count: int) -> list[_Need]:
        takers = [[s.device for s in shards] for shards in draft.target.by_box.values()]
        holders = [
            tuple(sorted({self._nodes[s.device] for s in shards})) for shards in draft.source.by_box.values()
        ]
        sizes = volumes(pairs.low, pairs.high) * draft.itemsize * count
        needs = []
        for row, (s, t) in enumerate(zip(pairs.source.tolist(), pairs.target.tolist(), strict=True)):
            size = int(sizes[row])
            for receiver, fanout in self._receivers(takers[t], size):
                needs.append(_Need(number, row, receiver, fanout, holders[s], size))
        return needs

    def _receivers(self, devices: list[int], size: int) -> list[tuple[int, tuple[int, ...]]]:
        """Who takes a box from the network, and to whom it hands it on."""
        if self._policy.receivers == "device":
            return [(d, ()) for d in devices]
        groups: dict[int, list[int]] = {}
        for d in devices:
            groups.setdefault(self._target_nodes[d], []).append(d)
        found = []
        for group in groups.values():
            first = min(group, key=lambda d: (self._received.get(d, 0), d))
            self._received[first] = self._received.get(first, 0) + size
            found.append((first, tuple(d for d in group if d != first)))
        return found

    def _assign(
        self,
        need: _Need,
        draft: Draft,
        pairs: Pairs,
        count: int,
        quota: dict[Holders, dict[int, int]],
        moves: list[list[tuple[int, int, IntArray, IntArray, tuple[int, ...]]]],
    ) -> None:
        """Gives one need to the nodes with quota left, cut along its longest axis where one is not enough."""
        shards = list(draft.source.by_box.values())[int(pairs.source[need.pair])]
        low, high = pairs.low[need.pair].copy(), pairs.high[need.pair].copy()
        mine = quota[need.holders]
        left = need.total_bytes
        while True:
            node = max(need.holders, key=lambda n: (mine[n], -n))
            axis = _cut_axis(high - low)
            rows = int(high[axis] - low[axis]) if len(low) else 1
            small = left < 2 * self._policy.split_bytes * max(1, count) or rows < 2
            take = rows if small or not 0 < mine[node] < left else max(1, mine[node] * rows // left)
            part = left * take // rows
            device = min(
                (s.device for s in shards if self._nodes[s.device] == node),
                key=lambda d: (self._sent.get(d, 0), d),
            )
            self._sent[device] = self._sent.get(device, 0) + part
            mine[node] -= part
            end = high.copy()
            if take < rows:
                end[axis] = low[axis] + take
            moves[need.draft].append((device, need.receiver, low.copy(), end, need.fanout))
            if take >= rows:
                return
            left -= part
            low[axis] = end[axis]


def _cut_axis(sizes: IntArray) -> int:
    """The outermost axis that is long enough to be cut finely, so that runs stay long; else the longest."""
    long = np.flatnonzero(sizes >= 64)
    if len(long):
        return int(long[0])
    return int(np.argmax(sizes)) if len(sizes) else 0


def _template(draft: Draft, rows: list[tuple[int, int, IntArray, IntArray, tuple[int, ...]]]) -> Template:
    axes = len(draft.block.links)
    rows = sorted(rows, key=lambda r: (r[1], r[2].tolist(), r[0]))
    fanout = [(r[1], to, i) for i, r in enumerate(rows) for to in r[4]]

    def column(values: list[int]) -> IntArray:
        return np.array(values, np.int64)

    return Template(
        draft.source, draft.target, draft.itemsize, draft.block,
        column([r[0] for r in rows]), column([r[1] for r in rows]),
        np.array([r[2] for r in rows], np.int64).reshape(len(rows), axes),
        np.array([r[3] for r in rows], np.int64).reshape(len(rows), axes),
        column([f[0] for f in fanout]), column([f[1] for f in fanout]), column([f[2] for f in fanout]),
    )  # fmt: skip
