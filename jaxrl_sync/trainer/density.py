"""How sparse a run's updates are: every so often one update of the engine's tree is compared bit by bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrl_sync.trainer.axes import Tree
from jaxrl_sync.transfer.density import DensityMeter

Arrays = dict[str, np.ndarray[Any, Any]]


class DensityLog:
    """Writes a row of ``transfer.density`` to a file for every ``every``-th update.

    The trainer waits while it converts and compares: it is for looking, not for speed. All devices of the
    mesh belong to this process. ``overlap`` in a row is with the update measured before it.
    """

    def __init__(self, path: Path, every: int, convert: Callable[[Tree], Tree]) -> None:
        self._path, self._every = path, every
        self._convert = jax.jit(convert)
        self._meter = DensityMeter()
        self._before: tuple[int, Arrays] | None = None

    def observe(self, number: int, source: Tree) -> None:
        """Look at version ``number``, whose weights (the published tree) are ``source``. OSError."""
        before, self._before = self._before, None
        due = number % self._every == 0 and before is not None and before[0] == number - 1
        if not due and (number + 1) % self._every:
            return
        now = self._take(source)
        if due and before is not None:
            row = {"version": number, **self._meter.measure(before[1], now).to_json()}
            with self._path.open("a", encoding="utf8") as file:
                file.write(json.dumps(row) + "\n")
        if (number + 1) % self._every == 0:
            self._before = number, now

    def _take(self, source: Tree) -> Arrays:
        leaves = jax.tree_util.tree_leaves_with_path(self._convert(source))
        return {"/".join(str(k.key) for k in path): np.array(leaf, copy=True) for path, leaf in leaves}
