"""Long sizes: many more random frames and packings than the plain tests try."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_sync.batch.frame import FrameError, decode_batch
from jaxrl_sync.batch.pack import PackConfig, pack, unpack
from tests.batch.strategies import make_sample, samples_and_config
from tests.batch.test_frame import batch_frame, forge, json_values
from tests.batch.test_pack import Case, content, contents


@pytest.mark.full
@settings(max_examples=5000)
@given(st.data())
def test_frames_with_several_changed_bytes_never_decode(data: st.DataObject) -> None:
    frame = bytearray(batch_frame())
    changes = st.dictionaries(st.integers(0, len(frame) - 1), st.integers(1, 255), min_size=1, max_size=8)
    for at, change in data.draw(changes).items():
        frame[at] ^= change
    with pytest.raises(FrameError):
        decode_batch(frame)


@pytest.mark.full
@settings(max_examples=5000)
@given(json_values, st.binary(max_size=400))
def test_hostile_headers_with_right_digests_never_decode(header: object, payload: bytes) -> None:
    with pytest.raises(FrameError):
        decode_batch(forge(header, payload))


@pytest.mark.full
@settings(max_examples=3000)
@given(samples_and_config())
def test_nothing_is_lost_or_doubled_in_many_packings(case: Case) -> None:
    samples, config = case
    batch = pack(samples, config)
    assert sorted(contents(batch)) == sorted(map(content, samples))
    assert batch.num_valid_tokens == sum(s.num_loss_tokens for s in samples)


@pytest.mark.full
def test_a_large_batch_of_a_real_size_is_packed_whole() -> None:
    lengths = np.random.default_rng(0).lognormal(6.5, 0.8, 4096).clip(2, 8192).astype(int)
    samples = [make_sample(int(n), i) for i, n in enumerate(lengths)]
    batch = pack(samples, PackConfig(8, 4, 8192))
    assert len(unpack(batch.fields)) == len(samples)
    assert batch.fields["loss_mask"].sum() == batch.num_valid_tokens
    assert batch.fill > 0.9
