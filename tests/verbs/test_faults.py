"""Random faults of the fake against the promises: no byte lost, no completion missed or told twice."""

from __future__ import annotations

import errno
import threading
import time

import numpy as np
import numpy.typing as npt
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxrl_sync.transfer.verbs.errors import VerbsError
from jaxrl_sync.transfer.verbs.events import event_of
from tests.verbs.fakelib import Fake
from tests.verbs.pairs import End, connect, pair, write

FLUSH = 5
EXAMPLES = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)

Rows = npt.NDArray[np.uint64]


def cut(rng: np.random.Generator, nbytes: int, pieces: int) -> Rows:
    """Disjoint pieces of 1 B up that cover ``nbytes``, in random order, to the same offset at the peer."""
    edges = np.sort(rng.choice(np.arange(1, nbytes), pieces - 1, replace=False))
    starts = np.concatenate([[0], edges]).astype(np.uint64)
    lengths = np.diff(np.concatenate([starts, [nbytes]]).astype(np.uint64))
    table = np.stack([starts, starts, lengths], axis=1)
    return np.ascontiguousarray(rng.permutation(table))


def drive(left: End, right: End, shares: list[Rows], signal_every: int, imm: int) -> npt.NDArray[np.void]:
    """Post all shares, each on its queue pair, closing with an immediate; every record that comes back."""
    at = [0] * len(shares)
    parts = []
    end = time.monotonic() + 30
    while any(a <= len(s) for a, s in zip(at, shares, strict=True)) or any(q.in_flight for q in left.qps):
        assert time.monotonic() < end, [(q.posted, q.retired) for q in left.qps]
        for i, share in enumerate(shares):
            if at[i] <= len(share) and not left.qps[i].failed:
                try:
                    at[i] += write(left, right, share, i, start=at[i], signal_every=signal_every, imm=imm + i)
                except VerbsError as error:  # the fake refused all of it while nothing was in flight
                    assert error.errno == errno.ENOMEM and not left.qps[i].in_flight
            elif left.qps[i].failed:
                at[i] = len(share) + 1
        parts.append(left.poll(7))
        if not len(parts[-1]):
            left.cq.wait(0.01)
            parts.append(left.poll(7))
    while len(parts[-1]):  # what a wait found is accounted for and still to be polled
        parts.append(left.poll())
    return np.concatenate(parts)


def check_fates(end: End, records: npt.NDArray[np.void]) -> None:
    """Each work request of each queue pair has exactly one fate, in order."""
    for qp in end.qps:
        mine = records[(records["token"] == qp.token) & (records["receive"] == 0)]
        assert (np.diff(mine["seq"].astype(np.int64)) > 0).all()
        assert int(mine["retires"].sum()) == qp.posted == qp.retired
        failed = mine[mine["status"] != 0]
        assert (failed["status"][1:] == FLUSH).all(), "after the first error everything is flushed"
        if len(failed):
            assert failed["seq"].tolist() == list(range(int(failed["seq"][0]), qp.posted + 1))
        assert (qp.failed, qp.flushed, qp.lost) == (min(1, len(failed)), max(0, len(failed) - 1), 0)


def settled(end: End) -> npt.NDArray[np.void]:
    """What has completed, with nothing held back any more."""
    parts = [end.poll()]
    while len(parts[-1]):
        parts.append(end.poll())
    return np.concatenate(parts)


@EXAMPLES
@given(
    seed=st.integers(0, 2**32 - 1),
    qps=st.integers(1, 4),
    depth=st.integers(1, 80),
    pieces=st.integers(1, 300),
    signal_every=st.integers(1, 100),
    partial=st.sampled_from([0, 8000, 40000]),
    duplicate=st.sampled_from([0, 20000]),
    delay=st.sampled_from([0, 30000]),
    late=st.sampled_from([0, 30000, 60000]),
    rnr=st.sampled_from([0, 40000]),
    short_poll=st.sampled_from([0, 1, 3]),
    fail_at=st.one_of(st.just(0), st.integers(1, 300)),
    fail_status=st.integers(1, 23).filter(lambda s: s != FLUSH),
)
def test_no_byte_is_lost_and_no_completion_told_twice(
    fake: Fake,
    seed: int,
    qps: int,
    depth: int,
    pieces: int,
    signal_every: int,
    partial: int,
    duplicate: int,
    delay: int,
    late: int,
    rnr: int,
    short_poll: int,
    fail_at: int,
    fail_status: int,
) -> None:
    rng = np.random.default_rng(seed)
    nbytes = 20000
    table = cut(rng, nbytes, pieces)
    shares = [np.ascontiguousarray(table[i::qps]) for i in range(qps)]
    fake.set()
    # Duplicates take room that no device would give them: the queue gets some.
    with pair(nbytes, qps=qps, depth=depth, receives=4 + depth * (duplicate > 0)) as (left, right):
        left.memory[:] = rng.integers(1, 256, nbytes, dtype=np.uint8)
        for qp in right.qps:
            qp.receive(4)
        fake.set(
            seed=seed,
            chance_partial=partial,
            partial_errno=errno.ENOMEM,
            chance_duplicate=duplicate,
            chance_delay=delay,
            chance_late=late,
            chance_rnr=rnr,
            chance_event=1000,
            short_poll=short_poll,
            fail_at=fail_at,
            fail_status=fail_status,
        )
        records = drive(left, right, shares, signal_every, imm=100)
        fake.set()
        check_fates(left, records)
        names = {event_of(row).name for row in left.context.async_events()}
        assert names <= {"COMM_EST", "PORT_ACTIVE", "LID_CHANGE", "PKEY_CHANGE", "GID_CHANGE"}
        arrived = settled(right)
        arrived = arrived[arrived["status"] == 0]
        whole = [i for i, qp in enumerate(left.qps) if not qp.failed]
        assert sorted(arrived["imm"].tolist()) == [100 + i for i in whole]
        for i, (qp, share) in enumerate(zip(left.qps, shares, strict=True)):
            mine = records[(records["token"] == qp.token) & (records["status"] != 0)]
            good = int(mine["seq"][0]) - 1 if len(mine) else len(share)
            for n, (start, _, length) in enumerate(share.tolist()):
                got = right.memory[start : start + length]
                want = left.memory[start : start + length] if n < good else 0
                assert (got == want).all(), (i, n, good)


@EXAMPLES
@given(
    seed=st.integers(0, 2**32 - 1),
    depth=st.integers(2, 64),
    fail_every=st.integers(3, 60),
    status=st.sampled_from([1, 4, 9, 10, 11, 12, 13, 21]),
    late=st.sampled_from([0, 40000]),
    lossy=st.booleans(),
)
def test_every_byte_arrives_over_connections_that_fail_again_and_again(
    fake: Fake, seed: int, depth: int, fail_every: int, status: int, late: int, lossy: bool
) -> None:
    """After each error the queue pairs are reset and connected anew; what has no success is written again.

    A lossy device flushes nothing: what it owes is counted as lost, and written again too.
    """
    rng = np.random.default_rng(seed)
    nbytes = 8000
    fake.set()
    with pair(nbytes, depth=depth, receives=4) as (left, right):
        left.memory[:] = rng.integers(1, 256, nbytes, dtype=np.uint8)
        todo, qp, told = cut(rng, nbytes, 90), left.qps[0], 0
        end = time.monotonic() + 60
        while len(todo):
            assert time.monotonic() < end
            fake.set(seed=seed + told, fail_at=fail_every, fail_status=status, chance_late=late)
            first = qp.posted + 1
            accepted = write(left, right, todo, signal_every=3)
            good = 0
            while qp.in_flight and not qp.failed - told:
                assert left.cq.wait(20.0)
                records = left.poll()
                good += int(records["retires"][records["status"] == 0].sum())
                told_now = records[records["status"] != 0]
                if len(told_now):  # what is before the failed one was done, signalled or not
                    good = int(told_now["seq"][0]) - first
            todo = todo[min(good, accepted) :]
            if qp.failed > told:
                told = qp.failed
                fake.set(lossy_reset=int(lossy))
                qp.reset(0.05)
                right.qps[0].reset(0.05)
                settled(left)
                fake.set()
                connect(qp, right.qps[0], left, right)
                connect(right.qps[0], qp, right, left)
        np.testing.assert_array_equal(right.memory, left.memory)
        assert qp.posted == qp.retired and left.region.in_flight == 0


def test_posting_and_polling_in_two_threads(fake: Fake) -> None:
    nbytes, rounds = 1 << 16, 4
    table = cut(np.random.default_rng(5), nbytes, 900)
    with pair(nbytes, depth=64) as (left, right):
        fake.set(seed=9, chance_delay=20000, chance_partial=5000, partial_errno=errno.ENOMEM)
        seen: list[npt.NDArray[np.void]] = []
        total = rounds * len(table)

        def poller() -> None:
            retired = 0
            while retired < total:
                assert left.cq.wait(20.0)
                seen.append(left.poll())
                retired += int(seen[-1]["retires"].sum())

        thread = threading.Thread(target=poller)
        thread.start()
        for number in range(rounds):
            left.memory[:] = number + 1
            at, end = 0, time.monotonic() + 30
            while at < len(table):
                try:
                    at += write(left, right, table, start=at)
                except VerbsError as error:  # the fake refused all of it while nothing was in flight
                    assert error.errno == errno.ENOMEM and not left.qps[0].in_flight
                assert time.monotonic() < end
            while left.qps[0].in_flight:
                time.sleep(0.0005)
        thread.join()
        check_fates(left, np.concatenate(seen))
        assert (right.memory == rounds).all()


def post_until_refused(left: End, right: End, table: Rows, outcome: list[str]) -> None:
    """Post and poll for ever; the error that ends it goes into ``outcome``."""
    try:
        while True:
            write(left, right, table)
            left.poll()
            time.sleep(0.0002)  # else the one who closes gets the GIL only inside of calls
    except (OSError, BufferError) as error:
        outcome.append(str(error))


def test_closing_from_another_thread_is_refused_or_complete(fake: Fake) -> None:
    """Whatever the timing: BufferError while a call runs, afterwards a clear error, never a crash."""
    table = cut(np.random.default_rng(1), 1 << 14, 800)
    for attempt in range(10):
        with pair(1 << 14, depth=1000, receives=1) as (left, right):
            outcome: list[str] = []
            thread = threading.Thread(target=post_until_refused, args=(left, right, table, outcome))
            thread.start()
            time.sleep(0.001 * (attempt % 4))
            end = time.monotonic() + 20
            while not left.context.closed:
                assert time.monotonic() < end
                try:
                    left.context.close()
                except BufferError:
                    time.sleep(0.0001)
            thread.join(20)
            assert not thread.is_alive()
            assert "closed" in outcome[0] or "in use" in outcome[0], outcome
