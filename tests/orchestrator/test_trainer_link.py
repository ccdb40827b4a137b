"""Frames to several trainer processes over real sockets: rows by data rank, resends, contradictions."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from jaxrl_sync.batch.connection import Ack, BatchReceiver, BatchRefused, ConnectionConfig, TrainerState
from jaxrl_sync.batch.frame import BatchFrame, BatchHeader
from jaxrl_sync.batch.pack import PackConfig, unpack
from jaxrl_sync.batch.rollout import Sample
from jaxrl_sync.orchestrator.train_sink import encode_frames
from jaxrl_sync.orchestrator.trainer_link import TrainerInfo, TrainerLink, TrainerMismatchError
from jaxrl_sync.transfer import auth

CONFIG = ConnectionConfig(heartbeat_s=0.1, silence_s=2.0, reconnect_s=3.0)


def _sample(index: int) -> Sample:
    length = 3 + index
    return Sample(
        uid=str(index),
        group_id="g",
        tokens=np.arange(index, index + length, dtype=np.int32),
        loss_mask=np.arange(length) >= 2,
        logprobs=np.full(length, -0.5),
        versions=np.zeros(length, np.int32),
        reward=1.0,
        advantage=0.5,
        dispatch_version=0,
        index=index,
    )


def _frames(step: int, ranks: int) -> list[bytes]:
    header = BatchHeader(step, 0, 1, 2, 16, 0, cursor={"position": step})
    return encode_frames([_sample(i) for i in range(6)], PackConfig(ranks, 2, 16), header)


class _Rank:
    """One trainer process: a real receiver that commits what it gets; ``trip`` breaks the first delivery."""

    def __init__(
        self, token: str, rank: int, *, number: int = 0, lineage: str = "a", trip: bool = False
    ) -> None:
        state = TrainerState(lineage, number)
        self.receiver = BatchReceiver(
            state, token=token, run_id=auth.run_id_of(token), data_rank=rank, config=CONFIG
        )
        self.frames: list[BatchFrame] = []
        self.trip, self.lineage = trip, lineage
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self._thread.start()

    def _loop(self) -> None:
        while not self._stop.is_set():
            frame = self.receiver.receive(0.05)
            if frame is None:
                continue
            self.frames.append(frame)
            if self.trip:
                self.trip = False
                connection = self.receiver._connection
                assert connection is not None
                connection.close()
                time.sleep(0.3)
            step = frame.header.step
            self.receiver.commit(Ack(step, self.lineage, step, {"loss": 1.0}), frame.header.cursor)

    def close(self) -> None:
        self._stop.set()
        self._thread.join(5.0)
        self.receiver.close()


def _link(token: str, ranks: list[_Rank]) -> TrainerLink:
    infos = {
        f"trainer-{r}": TrainerInfo(f"trainer-{r}", rank.receiver.address, r, len(ranks), 2, 16)
        for r, rank in enumerate(ranks)
    }
    return TrainerLink(
        list(infos.values()), infos.__getitem__, token=token, run_id=auth.run_id_of(token), config=CONFIG
    )


@pytest.fixture
def token(tmp_path: Path) -> str:
    return auth.create_token(tmp_path / "token")


@pytest.mark.invariant(49)
def test_each_process_gets_its_rows_and_the_global_denominator(token: str) -> None:
    ranks = [_Rank(token, 0), _Rank(token, 1)]
    link = _link(token, ranks)

    async def case() -> None:
        assert (await link.connect()).number == 0
        for step in (1, 2):
            ack = await link.send(step, _frames(step, 2), 30.0)
            assert (ack.step, ack.number) == (step, step)

    try:
        asyncio.run(case())
    finally:
        link.close()
        for rank in ranks:
            rank.close()
    assert [f.header.step for f in ranks[0].frames] == [f.header.step for f in ranks[1].frames] == [1, 2]
    assert {f.header.num_valid_tokens for r in ranks for f in r.frames} == {sum(1 + i for i in range(6))}
    segments = [unpack(r.frames[0].fields) for r in ranks]
    assert all(segments), "no rank is left without a row"
    assert sorted(len(s["tokens"]) for part in segments for s in part) == [3, 4, 5, 6, 7, 8]


def test_a_broken_connection_brings_the_same_bytes_again_and_nothing_is_trained_twice(token: str) -> None:
    rank = _Rank(token, 0, trip=True)
    link = _link(token, [rank])

    async def case() -> None:
        await link.connect()
        assert (await link.send(1, _frames(1, 1), 30.0)).number == 1
        assert (await link.send(2, _frames(2, 1), 30.0)).number == 2

    try:
        asyncio.run(case())
    finally:
        link.close()
        rank.close()
    assert [f.header.step for f in rank.frames] == [1, 2]


def test_processes_that_contradict_each_other_are_named(token: str) -> None:
    ranks = [_Rank(token, 0, number=3), _Rank(token, 1, number=4)]
    link = _link(token, ranks)
    try:
        with pytest.raises(TrainerMismatchError, match=r"different versions: \[\('a', 3\), \('a', 4\)\]"):
            asyncio.run(link.connect())
    finally:
        link.close()
        for rank in ranks:
            rank.close()
    a = TrainerInfo("t0", "x:1", 0, 2, 2, 16)
    with pytest.raises(TrainerMismatchError, match=r"serve data ranks \[0\], expected 0 to 1"):
        TrainerLink([a], lambda name: a, token=token, run_id="r")
    with pytest.raises(TrainerMismatchError, match="disagree on"):
        TrainerLink([a, TrainerInfo("t1", "x:1", 1, 2, 4, 16)], lambda name: a, token=token, run_id="r")


def test_a_trainer_that_lacks_earlier_steps_refuses_a_later_one(token: str) -> None:
    rank = _Rank(token, 0, number=0)
    link = _link(token, [rank])

    async def case() -> None:
        await link.connect()
        with pytest.raises(BatchRefused, match="committed step 0, expected at least 4"):
            await link.send(5, _frames(5, 1), 30.0)

    try:
        asyncio.run(case())
    finally:
        link.close()
        rank.close()
