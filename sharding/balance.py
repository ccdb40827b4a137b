"""Who sends what of that which several nodes hold: the shares that minimise the largest time of any node.

A linear program with a flow structure: demands (bytes that any of a set of nodes may send) against node
rates. Solved by bisection on the time with a maximum flow per step, in integers: every machine gets the same
shares.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

Holders = tuple[int, ...]

PRECISION = 256
"""The time found is at most 1/256 above the optimum."""


def shares(demand: Mapping[Holders, int], rates: Mapping[int, int]) -> dict[Holders, dict[int, int]]:
    """For each set of nodes, how many bytes of its demand each of them sends."""
    forced = {n: 0 for n in rates}
    for holders, size in demand.items():
        if len(holders) == 1:
            forced[holders[0]] += size
    free = {h: s for h, s in demand.items() if len(h) > 1 and s}
    fixed: dict[Holders, dict[int, int]] = {h: {h[0]: s} for h, s in demand.items() if len(h) == 1}
    if not free:
        return fixed
    scale = max(rates.values())
    total = sum(demand.values())
    low = max(total * scale // sum(rates.values()), max(forced[n] * scale // rates[n] for n in rates))
    high = low + sum(free.values()) * scale // min(rates.values()) + scale
    flow = _flow(free, {n: high * rates[n] // scale + 1 - forced[n] for n in rates})
    while high - low > 1 + low // PRECISION:
        middle = (low + high) // 2
        room = {n: max(0, middle * rates[n] // scale + 1 - forced[n]) for n in rates}
        found = _flow(free, room)
        if sum(sum(row.values()) for row in found.values()) == sum(free.values()):
            high, flow = middle, found
        else:
            low = middle
    return fixed | flow


def _flow(demand: Mapping[Holders, int], room: Mapping[int, int]) -> dict[Holders, dict[int, int]]:
    """A maximum flow from demands to nodes of limited room, by shortest augmenting paths between them."""
    left = dict(demand)
    space = dict(room)
    sent: dict[Holders, dict[int, int]] = {h: {n: 0 for n in h} for h in demand}
    users: dict[int, list[Holders]] = {}
    for h in demand:
        for n in h:
            users.setdefault(n, []).append(h)
    for h in demand:  # most of it needs no detour
        for n in sorted(h, key=lambda n: (-space[n], n)):
            amount = min(left[h], space[n])
            sent[h][n] += amount
            left[h] -= amount
            space[n] -= amount
    for h in demand:
        while left[h]:
            path = _path(h, sent, space, users)
            if path is None:
                break
            amount = min(left[h], space[path[-1][1]])
            for (holders, _), (_, before) in zip(path[1:], path[:-1], strict=True):
                amount = min(amount, sent[holders][before])
            for k, (holders, node) in enumerate(path):
                sent[holders][node] += amount
                if k:
                    sent[holders][path[k - 1][1]] -= amount
            left[h] -= amount
            space[path[-1][1]] -= amount
    return sent


def _path(
    start: Holders,
    sent: dict[Holders, dict[int, int]],
    space: dict[int, int],
    users: dict[int, list[Holders]],
) -> list[tuple[Holders, int]] | None:
    """(demand, node) steps: each demand moves bytes to that node, off the node of the step before."""
    came: dict[int, tuple[Holders, int | None]] = {n: (start, None) for n in start}
    queue = deque(start)
    while queue:
        node = queue.popleft()
        if space[node] > 0:
            path: list[tuple[Holders, int]] = []
            at: int | None = node
            while at is not None:
                holders, before = came[at]
                path.append((holders, at))
                at = before
            return path[::-1]
        for holders in users[node]:
            if sent[holders][node] > 0:
                for other in holders:
                    if other not in came:
                        came[other] = (holders, node)
                        queue.append(other)
    return None
