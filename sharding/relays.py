"""Many engine replicas: who passes the weights on to whom, pipelined by chunk, and how long that takes.

The trainer sends each byte once (or to a few replicas); a replica forwards chunks while it receives the next.
Times are those of store-and-forward pipelines over equal links: with C chunks and depth d, a chain takes
(C + d - 1) chunk times, a tree of degree k the same with its smaller depth but k sends per chunk.
"""

from __future__ import annotations

import dataclasses
import math

from jaxrl_sync.sharding.errors import MappingError

TRAINER = -1


@dataclasses.dataclass(frozen=True)
class Relay:
    """``parents[r]``: whence replica r gets its chunks (-1: the trainer). ``seconds``: until all have all."""

    shape: str
    parents: tuple[int, ...]
    num_chunks: int
    seconds: float

    @property
    def depth(self) -> int:
        """Links from the trainer to the furthest replica."""
        deep = 0
        for r in range(len(self.parents)):
            steps, at = 0, r
            while at != TRAINER:
                at, steps = self.parents[at], steps + 1
            deep = max(deep, steps)
        return deep


def relay(
    num_replicas: int, payload_bytes: int, source_rate: int, replica_rate: int, shape: str = "best",
    chunk_bytes: int = 64 << 20,
) -> Relay:  # fmt: skip
    """A schedule for ``num_replicas`` copies of ``payload_bytes``.

    Rates are bytes per second of the whole trainer and of one whole replica (all nodes of it). ``shape``:
    "direct" (the trainer sends to all), "chain", "tree" (binary) or "best" of the three.
    """
    if num_replicas < 1:
        raise MappingError(f"replicas must be at least 1, found {num_replicas}")
    made = {
        name: _schedule(name, num_replicas, payload_bytes, source_rate, replica_rate, chunk_bytes)
        for name in ("direct", "chain", "tree")
    }
    if shape == "best":
        return min(made.values(), key=lambda r: r.seconds)
    if shape not in made:
        raise MappingError(f"relay shape must be direct, chain, tree or best, found {shape!r}")
    return made[shape]


def _schedule(name: str, n: int, payload: int, source_rate: int, replica_rate: int, chunk: int) -> Relay:
    chunks = max(1, math.ceil(payload / chunk))
    one = payload / min(source_rate, replica_rate)
    if name == "direct":
        return Relay(name, (TRAINER,) * n, chunks, max(n * payload / source_rate, payload / replica_rate))
    if name == "chain":
        parents = tuple(range(-1, n - 1))
        slowest, degree = max(one, payload / replica_rate if n > 1 else 0.0), 1
    else:
        parents = tuple(TRAINER if r == 0 else (r - 1) // 2 for r in range(n))
        degree = max(parents.count(p) for p in set(parents))
        slowest = max(one, degree * payload / replica_rate if n > 1 else 0.0)
    shaped = Relay(name, parents, chunks, 0.0)
    return dataclasses.replace(shaped, seconds=slowest * (chunks + (shaped.depth - 1) * degree) / chunks)
