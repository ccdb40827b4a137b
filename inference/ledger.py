"""What every running slot has drawn so far, as host arrays: one vectorised append per dispatch."""

from __future__ import annotations

import numpy as np

from jaxrl_sync.inference.plan import StepOutput
from jaxrl_sync.inference.request import FinishReason, Sample, TokenChunk
from jaxrl_sync.transfer.version import Version


class Ledger:
    """Owns ``[slots, max_len]`` arrays of tokens, log-probs, versions, lineages and named extras."""

    def __init__(self, slots: int, max_len: int, extras: tuple[str, ...]) -> None:
        shape = (slots, max_len)
        self._tokens = np.zeros(shape, np.int32)
        self._logprobs = np.zeros(shape, np.float32)
        self._versions = np.zeros(shape, np.int64)
        self._lineages = np.zeros(shape, np.int32)
        self._extras = {name: np.zeros(shape, np.float32) for name in extras}
        self._count = np.zeros(slots, np.int64)
        self._lineage_names: list[str] = []

    def append(self, output: StepOutput, version: Version) -> None:
        """Add the tokens of a dispatch, all drawn from ``version``."""
        lineage = self._lineage_index(version.lineage)
        for k in range(output.steps):
            slots = np.flatnonzero(output.tokens[k] >= 0)
            at = self._count[slots]
            self._tokens[slots, at] = output.tokens[k, slots]
            self._logprobs[slots, at] = output.logprobs[k, slots]
            self._versions[slots, at] = version.number
            self._lineages[slots, at] = lineage
            for name, values in self._extras.items():
                values[slots, at] = output.extras[name][k, slots]
            self._count[slots] = at + 1

    def tokens(self, slot: int) -> tuple[int, ...]:
        """The tokens that the slot's sample has drawn."""
        return tuple(self._tokens[slot, : self._count[slot]].tolist())

    def lineages(self, slot: int) -> tuple[str, ...]:
        """Lineages of the slot's tokens, in order of appearance."""
        indices = dict.fromkeys(self._lineages[slot, : self._count[slot]].tolist())
        return tuple(self._lineage_names[i] for i in indices)

    def chunk(self, slot: int, sample: int, last: int, reason: FinishReason | None) -> TokenChunk:
        """The slot's ``last`` newest tokens as a chunk of ``sample``."""
        n = int(self._count[slot])
        part = slice(n - last, n)
        return TokenChunk(
            sample,
            tuple(self._tokens[slot, part].tolist()),
            tuple(self._logprobs[slot, part].tolist()),
            tuple(self._versions[slot, part].tolist()),
            reason,
        )

    def take(self, slot: int, reason: FinishReason) -> Sample:
        """The slot's sample, finished; the slot is empty afterwards."""
        part = slice(0, int(self._count[slot]))
        self._count[slot] = 0
        return Sample(
            tuple(self._tokens[slot, part].tolist()),
            tuple(self._logprobs[slot, part].tolist()),
            tuple(self._versions[slot, part].tolist()),
            reason,
            {name: tuple(values[slot, part].tolist()) for name, values in self._extras.items()},
        )

    def _lineage_index(self, name: str) -> int:
        if name not in self._lineage_names:
            self._lineage_names.append(name)
        return self._lineage_names.index(name)
