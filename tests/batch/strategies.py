"""Random samples and pack configs for property tests."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from jaxrl_sync.batch.pack import PackConfig
from jaxrl_sync.batch.rollout import Sample


def make_sample(length: int, seed: int, name: str = "") -> Sample:
    """A valid sample of ``length`` tokens; the mask keeps token 0 out."""
    rng = np.random.default_rng(seed)
    mask = rng.random(length) < 0.6
    mask[0] = False
    return Sample(
        uid=name or f"u{seed}",
        group_id=f"g{seed}",
        tokens=rng.integers(0, 1000, length).astype(np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, -rng.random(length), 0).astype(np.float32),
        versions=np.sort(rng.integers(3, 6, length)).astype(np.int32),
        reward=float(rng.normal()),
        advantage=float(np.float32(rng.normal())),
        dispatch_version=3,
    )


@st.composite
def samples_and_config(draw: st.DrawFn) -> tuple[list[Sample], PackConfig]:
    """Up to 40 samples that fit the rows of a small config."""
    seq_len = draw(st.integers(1, 24))
    lengths = draw(st.lists(st.integers(1, seq_len), min_size=1, max_size=40))
    config = PackConfig(
        data_ranks=draw(st.integers(1, 3)),
        rows=draw(st.integers(1, 4)),
        seq_len=seq_len,
        min_micro_batches=draw(st.integers(1, 3)),
    )
    seed = draw(st.integers(0, 2**20))
    return [make_sample(n, seed + i) for i, n in enumerate(lengths)], config
