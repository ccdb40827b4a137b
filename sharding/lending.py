"""Destination memory that results borrow: what nothing holds any more is written again, the rest left alone.

A result without a pool of the caller's own is an ordinary, unchanging tree of arrays. Their memory comes from
pools that the plan keeps, and goes back when neither an array, nor a view of one, nor a computation that is
still running has it: jax holds the numpy array that a buffer aliases for exactly so long, so a weak reference
to it tells.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np

from jaxrl_sync.sharding.native import flat_bytes
from jaxrl_sync.sharding.planning import Plan
from jaxrl_sync.sharding.pool import Pool, global_arrays, shards_over


@dataclasses.dataclass(eq=False)
class _Loan:
    pool: Pool
    taken: bool = True  # a call fills it: nothing has borrowed it yet, and yet it isn't free
    borrowed: list[weakref.ref[Any]] = dataclasses.field(default_factory=list)

    @property
    def is_back(self) -> bool:
        return all(ref() is None for ref in self.borrowed)


class Lender:
    """The pools of one plan, for any number of threads.

    There are as many as results were alive or in the making at once, and those that jax had yet to let go.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._loans: list[_Loan] = []
        self._lock = threading.Lock()

    @property
    def num_pools(self) -> int:
        """Copies of the target that there is memory for."""
        return len(self._loans)

    @contextlib.contextmanager
    def take(self) -> Iterator[Pool]:
        """A pool whose memory nothing holds, one that came back or a new one, for this caller alone.

        It is filled and lent inside of the ``with``; one that was not lent is free again after it.
        """
        loan = self._free()
        try:
            yield loan.pool
        finally:
            loan.taken = False

    def _free(self) -> _Loan:
        with self._lock:
            for loan in self._loans:
                if not loan.taken and loan.is_back:
                    loan.taken = True
                    return loan
        loan = _Loan(Pool(self._plan))
        with self._lock:
            self._loans.append(loan)
        return loan

    def lend(self, pool: Pool) -> dict[str, Any]:
        """Path -> array over the memory of a pool that was taken and filled."""
        loan = next(loan for loan in self._loans if loan.pool is pool)
        fresh = {
            k: np.frombuffer(flat_bytes(v).data, np.uint8)  # through a memoryview: numpy would skip an array
            for k, v in pool.views.items()
            if v.nbytes
        }
        views = {k: fresh[k].view(v.dtype).reshape(v.shape) if v.nbytes else v for k, v in pool.views.items()}
        loan.borrowed = [weakref.ref(v) for v in fresh.values()]
        return global_arrays(self._plan.target, shards_over(self._plan.target, views), pool.shardings)


def lender(plan: Plan) -> Lender:
    """The plan's own lender; its memory lives as long as the plan or the last result."""
    made: Lender = plan.kept.get("lender") or plan.kept.setdefault("lender", Lender(plan))
    return made
