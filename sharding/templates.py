"""Templates: the moves of one class of tensors, senders chosen so that no node is the bottleneck."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

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


@dataclasses.dataclass
class _Moves:
    """The moves of one draft as they are found: those without a choice in bulk, the others one by one."""

    bulk: tuple[IntArray, IntArray, IntArray]  # source device, target device, pair
    single: list[tuple[int, int, IntArray, IntArray, tuple[int, ...]]] = dataclasses.field(
        default_factory=list
    )


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
        demand: dict[Holders, int] = {}
        needs: list[_Need] = []
        moves = []
        for i, (draft, found) in enumerate(zip(drafts, pairs, strict=True)):
            forced = self._forced(draft, found)
            moves.append(_Moves(self._bulk(draft, found, forced, counts[i], demand)))
            needs += self._needs(i, draft, found, counts[i], np.flatnonzero(~forced))
        for need in needs:
            demand[need.holders] = demand.get(need.holders, 0) + need.total_bytes
        demand.pop((CONSTANT_NODE,), None)  # constants never touch the network
        quota = shares(demand, {n: self._rates[n] for h in demand for n in h}) if demand else {}
        quota[(CONSTANT_NODE,)] = {CONSTANT_NODE: 0}
        for need in sorted(needs, key=lambda n: (-n.total_bytes, n.draft, n.pair, n.receiver)):
            self._assign(need, drafts[need.draft], pairs[need.draft], counts[need.draft], quota, moves)
        return tuple(_template(d, p, m) for d, p, m in zip(drafts, pairs, moves, strict=True))

    def _forced(self, draft: Draft, pairs: Pairs) -> npt.NDArray[np.bool_]:
        """Pairs whose source box one device alone holds, so that there is nothing to choose."""
        alone = np.array([len(shards) == 1 for shards in draft.source.by_box.values()], bool)
        if self._policy.receivers != "device":
            return np.zeros(len(pairs.source), bool)
        return np.asarray(alone[pairs.source], bool)

    def _bulk(
        self,
        draft: Draft,
        pairs: Pairs,
        forced: npt.NDArray[np.bool_],
        count: int,
        demand: dict[Holders, int],
    ) -> tuple[IntArray, IntArray, IntArray]:
        """All forced moves of a draft at once; their bytes are added to ``demand`` and to the devices."""
        holder = np.array([shards[0].device for shards in draft.source.by_box.values()], np.int64)
        takers = [np.array([s.device for s in shards], np.int64) for shards in draft.target.by_box.values()]
        rows = np.flatnonzero(forced)
        repeat = np.array([len(t) for t in takers], np.int64)[pairs.target[rows]]
        who = [takers[t] for t in pairs.target[rows].tolist()]
        receivers = np.concatenate(who) if who else np.zeros(0, np.int64)
        rows = np.repeat(rows, repeat)
        senders = holder[pairs.source[rows]]
        sizes = volumes(pairs.low, pairs.high)[rows]
        for device in np.unique(senders).tolist():
            size = int(sizes[senders == device].sum()) * draft.itemsize * count
            key = (self._nodes[device],)
            demand[key] = demand.get(key, 0) + size
            self._sent[device] = self._sent.get(device, 0) + size
        return senders, receivers, rows

    def _needs(
        self, number: int, draft: Draft, pairs: Pairs, count: int, rows: npt.NDArray[np.intp]
    ) -> list[_Need]:
        takers = [[s.device for s in shards] for shards in draft.target.by_box.values()]
        holders = [
            tuple(sorted({self._nodes[s.device] for s in shards})) for shards in draft.source.by_box.values()
        ]
        sizes = volumes(pairs.low, pairs.high) * draft.itemsize * count
        needs = []
        for row in rows.tolist():
            s, t, size = int(pairs.source[row]), int(pairs.target[row]), int(sizes[row])
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
        moves: list[_Moves],
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
            moves[need.draft].single.append((device, need.receiver, low.copy(), end, need.fanout))
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


def _template(draft: Draft, pairs: Pairs, moves: _Moves) -> Template:
    axes = len(draft.block.links)
    single = moves.single
    senders = np.concatenate([moves.bulk[0], np.array([r[0] for r in single], np.int64)])
    receivers = np.concatenate([moves.bulk[1], np.array([r[1] for r in single], np.int64)])
    low = np.concatenate(
        [pairs.low[moves.bulk[2]], np.array([r[2] for r in single], np.int64).reshape(len(single), axes)]
    )
    high = np.concatenate(
        [pairs.high[moves.bulk[2]], np.array([r[3] for r in single], np.int64).reshape(len(single), axes)]
    )
    order = np.lexsort((senders, *low.T[::-1], receivers))  # the last key is the first to sort by
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    given = len(moves.bulk[0])
    fanout = sorted((int(place[given + i]), r[1], to) for i, r in enumerate(single) for to in r[4])

    def column(k: int) -> IntArray:
        return np.array([f[k] for f in fanout], np.int64)

    return Template(
        draft.source, draft.target, draft.itemsize, draft.block, senders[order], receivers[order], low[order],
        high[order], column(1), column(2), column(0),
    )  # fmt: skip
