"""Advantages of one group: rewards centred on the survivors, optionally scaled (GRPO)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


def group_advantages(rewards: Sequence[float], *, normalize_std: bool) -> npt.NDArray[np.float32]:
    """(R - mean) or (R - mean) / std over the survivors of one group, [len(rewards)] float32.

    A lone survivor and a group of equal rewards give zeros (there is nothing to compare). The result of a
    sample depends on the set of rewards only: sums are exact, so any order of the members gives the same
    bits.
    """
    values = np.asarray(rewards, np.float64)
    if len(values) < 2 or is_uniform(rewards):
        return np.zeros(len(values), np.float32)
    centred = values - np.sort(values).mean()
    if normalize_std:
        centred = centred / np.sqrt(np.sort(centred**2).mean())
    return np.asarray(centred, np.float32)


def is_uniform(rewards: Sequence[float]) -> bool:
    """Whether all rewards are equal: such a group has no gradient."""
    return len(set(rewards)) <= 1
