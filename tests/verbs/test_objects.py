"""Objects of the extension over the fake: life, limits, errors, states."""

from __future__ import annotations

import errno
import gc
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from jaxrl_sync.transfer import _verbs
from jaxrl_sync.transfer.verbs import opened
from jaxrl_sync.transfer.verbs.errors import VerbsError
from jaxrl_sync.transfer.verbs.records import RECORD, new_records
from tests.transfer.models import until
from tests.verbs.fakelib import ANY_CHANCE, Fake
from tests.verbs.pairs import connect, pair, rows, write

FLUSH = 5


def test_records_have_the_layout_of_the_extension() -> None:
    assert RECORD.itemsize == _verbs.RECORD_BYTES


def test_sanitized_run_tests_the_sanitized_extension() -> None:
    folder = os.environ.get("JAXRL_SYNC_SANITIZED")
    if folder is None:
        pytest.skip("not a run under sanitizers")
    assert str(_verbs.__file__).startswith(folder)


def test_lists_devices_and_queries_them(fake: Fake) -> None:
    assert _verbs.load_error() is None
    assert _verbs.device_names() == ["fake0", "fake1"]
    assert _verbs.features() == {"dmabuf": True, "relaxed_ordering": True, "fork_status": True, "ece": True}
    with _verbs.Context("fake1") as context:
        assert context.query_device()["max_qp_wr"] == 4096
        assert context.query_port(1)["active_mtu"] == 3
        assert context.query_gid(1, 1)[-4:] == bytes([10, 77, 0, 2])
        assert context.query_pkey(1, 0) == 0xFFFF
        with pytest.raises(VerbsError, match="GID 9 of port 1: Invalid argument") as caught:
            context.query_gid(1, 9)
        assert caught.value.errno == errno.EINVAL
        with pytest.raises(VerbsError, match="port 7"):
            context.query_port(7)
    assert context.closed
    with pytest.raises(VerbsError, match="this context is closed"):
        context.query_device()
    with pytest.raises(VerbsError, match="RDMA device nothing not found among 2"):
        _verbs.Context("nothing")


@pytest.mark.parametrize(
    ("library", "words"),
    [
        (
            "/nowhere/libibverbs.so",
            r"can't be loaded \(/nowhere/libibverbs.so: cannot open .* choose",
        ),
        ("libc.so.6", "libc.so.6 has no symbol ibv_get_device_list@IBVERBS_1.1"),
    ],
)
def test_without_a_usable_library_import_works_and_use_says_why(library: str, words: str) -> None:
    code = "from jaxrl_sync.transfer import _verbs\ntry: _verbs.device_names()\nexcept OSError as e: print(e)"
    env = {**os.environ, "JAXRL_SYNC_IBVERBS": library}
    run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    assert re.search(words, run.stdout), run.stdout


def test_context_closes_its_children_queue_pairs_first(fake: Fake) -> None:
    with pair(qps=2) as (left, _):
        left.context.close()
        assert left.region.closed and left.cq.closed and all(q.closed for q in left.qps)
        left.context.close()


def test_completion_queue_closes_its_queue_pairs(fake: Fake) -> None:
    with pair() as (left, _):
        left.cq.close()
        assert left.qps[0].closed and not left.region.closed


def test_calls_without_a_result_take_no_reference_to_none(fake: Fake) -> None:
    """Built with headers from 3.12 on they did: after some hundred pairs Python 3.11 had freed it."""
    with pair():  # what the first one imports and keeps
        pass
    before = sys.getrefcount(None)
    for _ in range(50):
        with pair():
            pass
    assert sys.getrefcount(None) > before - 100  # other threads come and go; it were 16 a pair


def test_forgotten_objects_warn_and_are_freed(fake: Fake) -> None:
    context = _verbs.Context("fake0")
    cq = _verbs.CompletionQueue(context, 8)
    with pytest.warns(ResourceWarning, match="unclosed CompletionQueue on fake0"):
        del cq
        gc.collect()
    context.close()


def test_query_shows_state_and_attributes(fake: Fake) -> None:
    with _verbs.Context("fake0") as context:
        cq = _verbs.CompletionQueue(context, 64)
        qp = _verbs.QueuePair(context, cq, max_send=8, max_recv=8)
        assert qp.query()["state"] == "RESET"
        qp.to_init(1, 2)
        qp.to_rtr(0xABC, 1, 3, gid=bytes(16), gid_index=1, traffic_class=106, sl=3, flow_label=0x12345)
        qp.to_rts(1, timeout=15, retries=5, rnr_retries=4)
        found = qp.query()
        assert found == {
            **{"state": "RTS", "port": 1, "pkey_index": 2, "mtu": 3, "peer_qp_num": 0xABC, "timeout": 15},
            **{"retries": 5, "rnr_retries": 4, "traffic_class": 106, "sl": 3, "max_inline": 256},
            "max_send": 8,
        }
        qp.to_error()
        assert qp.query()["state"] == "ERR"
        fake.knobs.gone = 1
        with pytest.raises(VerbsError, match="querying queue pair .*Input/output error"):
            qp.query()


def test_ece_options_are_negotiated_where_both_have_them(fake: Fake) -> None:
    with pair() as (left, right):
        a, b = left.qps[0], right.qps[0]
        offered = a.query_ece()
        assert offered is not None and offered == (0x15B3, 7, 0)
        assert b.set_ece(0x15B3, 5, 0) and b.query_ece() == (0x15B3, 5, 0)
        assert not b.set_ece(0xABC, 1, 0), "another vendor's options"
        fake.knobs.without_ece = 1
        assert a.query_ece() is None and not a.set_ece(*offered)


def test_histograms_count_doorbells_and_batches(fake: Fake) -> None:
    with pair(1 << 16, depth=256) as (left, right):
        write(left, right, rows(*[(0, 0, 100)] * 130))
        left.collect(130)
        found = left.qps[0].latency()
        assert sum(found["post"]) == left.qps[0].post_calls == 3
        assert sum(found["done"]) == 1
        assert left.cq.statuses()[0] == left.cq.polled
        fake.set(fail_at=1, fail_status=10)
        write(left, right, rows(*[(0, 0, 100)] * 4))
        left.collect(4)
        statuses = left.cq.statuses()
        assert (statuses[10], statuses[FLUSH]) == (1, 3)


def test_dead_device_loses_everything_and_frees_everything(fake: Fake) -> None:
    """Nothing completes, every call fails: close() still ends, and what never completed is counted."""
    with pair(depth=32) as (left, right):
        fake.knobs.hold = 1
        write(left, right, rows(*[(0, 0, 100)] * 5))
        fake.knobs.gone = 1
        fake.async_event(left.qps[0].qp_num, 8, 0)
        with pytest.raises(
            VerbsError, match="posting 1 writes on queue pair 0x.* to peer of fake0: Input/output"
        ):
            write(left, right, rows((0, 0, 100)))
        assert [(kind, where) for kind, _, where, _ in left.context.async_events(1.0)] == [(8, "device")]
        assert not left.cq.wait(0.05)
        left.qps[0].close()
        assert left.qps[0].lost == 5


def test_another_process_opens_devices_of_its_own(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a parent opened is of no use to a child that it forks."""
    mine = opened.open_device("native", "fake0")
    assert opened.open_device("native", "fake0") is mine
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: -1)
        child = opened.open_device("native", "fake0")
        assert child is not mine
        child.give_back()
    mine.give_back()
    mine.give_back()


def test_queue_reserves_the_worst_case(fake: Fake) -> None:
    with _verbs.Context("fake0") as context:
        cq = _verbs.CompletionQueue(context, 40)
        first = _verbs.QueuePair(context, cq, max_send=16, max_recv=8)
        with pytest.raises(VerbsError, match="may need 24 completion entries, its queue has 16 of 40 left"):
            _verbs.QueuePair(context, cq, max_send=16, max_recv=8)
        first.close()
        _verbs.QueuePair(context, cq, max_send=16, max_recv=8)
        with pytest.raises(VerbsError, match="the device takes 1 to 16384"):
            _verbs.CompletionQueue(context, 1 << 20)
        fake.knobs.create_errno = errno.ENOMEM
        with pytest.raises(VerbsError, match=r"completion queue \(is memlock too low\?\)"):
            _verbs.CompletionQueue(context, 8)


def test_provider_without_inline_data(fake: Fake) -> None:
    fake.knobs.refuse_inline = 1
    with pair() as (left, right):
        assert left.qps[0].max_inline == 0
        left.memory[:5] = 9
        write(left, right, rows((0, 50, 5)))
        left.collect(1)
        assert right.memory[50:55].tolist() == [9] * 5


def test_refused_transitions_name_state_and_attributes(fake: Fake) -> None:
    with _verbs.Context("fake0") as context:
        cq = _verbs.CompletionQueue(context, 64)
        qp = _verbs.QueuePair(context, cq, max_send=8, max_recv=8)
        with pytest.raises(VerbsError, match=r"to RTS \(timeout 14, retries 6\): Invalid argument"):
            qp.to_rts(1)
        qp.to_init()
        with pytest.raises(VerbsError, match=r"to RTR \(peer's 0x00abcd, MTU code 9, GID index 1, port 1\)"):
            qp.to_rtr(0xABCD, 1, 9, gid=bytes(16), gid_index=1)
        with pytest.raises(ValueError, match="16 bytes, got 3"):
            qp.to_rtr(1, 1, 3, gid=b"abc")
        fake.set(modify_errno=errno.ETIMEDOUT, modify_state=6)
        with pytest.raises(VerbsError, match="to ERR: Connection timed out"):
            qp.to_error()


def test_events_are_returned_and_acknowledged(fake: Fake) -> None:
    with pair() as (left, _):
        number = left.qps[0].qp_num
        fake.async_event(number, 1, number)
        fake.async_event(number, 10, 1)
        events = left.context.async_events(1.0)
        assert [(kind, name, n) for kind, _, name, n in events] == [(1, "qp", number), (10, "port", 1)]
        assert events[1][1] == "port error"
        started = time.monotonic()
        assert left.context.async_events(0.05) == []
        assert time.monotonic() - started > 0.04


def test_wait_keeps_its_deadline_and_close_refuses_meanwhile(fake: Fake) -> None:
    with pair() as (left, right):
        started = time.monotonic()
        assert not left.cq.wait(0.2) and time.monotonic() - started > 0.1
        outcome, before = list[bool](), fake.counts.arms
        fake.set(hold=1)
        write(left, right, rows((0, 0, 100)))
        waiter = threading.Thread(target=lambda: outcome.append(left.cq.wait(60.0)))
        waiter.start()
        until(lambda: fake.counts.arms > before)  # it waits
        with pytest.raises(BufferError, match="in use by a call in another thread"):
            left.cq.close()
        fake.set()
        waiter.join()
        assert outcome == [True]


def test_wait_wakes_up_for_a_completion(fake: Fake) -> None:
    with pair() as (left, right):
        fake.knobs.hold = 1
        write(left, right, rows((0, 0, 100)))
        threading.Timer(0.1, lambda: setattr(fake.knobs, "hold", 0)).start()
        assert left.cq.wait(60.0), "not woken before the deadline"
        assert len(left.poll()) == 1
        assert not left.cq.wait(0.0, spin_s=0.01)


def test_poll_wants_room_for_a_record(fake: Fake) -> None:
    with pair() as (left, _):
        with pytest.raises(ValueError, match="at least 48 bytes"):
            left.cq.poll(bytearray(40))
        assert left.cq.poll(new_records(3)) == 0


def test_peer_that_is_gone_is_one_error_and_flushes(fake: Fake) -> None:
    with pair(depth=32) as (left, right):
        fake.kill(right.qps[0].qp_num)
        fake.knobs.hold = 1
        assert write(left, right, rows(*[(0, 0, 64)] * 10), signal_every=4) == 10
        fake.knobs.hold = 0
        seen = left.collect(10)
        assert seen["status"].tolist() == [12] + [FLUSH] * 9
        assert seen["seq"].tolist() == list(range(1, 11))
        assert seen["opcode"].tolist() == [0] * 10 and seen["vendor_err"][0] == 0xFA
        assert (left.qps[0].failed, left.qps[0].flushed, left.qps[0].lost) == (1, 9, 0)
        assert _verbs.status_text(12) == "transport retry counter exceeded"


def test_recovers_after_an_error(fake: Fake) -> None:
    with pair() as (left, right):
        write(left, right, rows((0, 0, 8)))
        assert left.collect(1)["status"].tolist() == [0]  # before the next one is to fail
        fake.set(fail_at=1, fail_status=10)
        write(left, right, rows((0, 0, 8)))
        assert left.collect(1)["status"].tolist() == [10]
        a, b = left.qps[0], right.qps[0]
        assert a.reset() == 0 and b.reset() == 0
        connect(a, b, left, right)
        connect(b, a, right, left)
        left.memory[:8] = 3
        write(left, right, rows((0, 8, 8)))
        assert left.collect(1)["seq"].tolist() == [3]
        assert right.memory[8:16].tolist() == [3] * 8


def test_reset_writes_off_what_never_completes(fake: Fake) -> None:
    with pair() as (left, right):
        fake.set(hold=1, lossy_reset=1)
        write(left, right, rows(*[(0, 0, 100)] * 5))
        assert left.qps[0].reset(0.1) == 5
        assert left.qps[0].in_flight == 0
        left.region.close()


def test_close_leaves_other_completions_to_be_polled(fake: Fake) -> None:
    with pair(qps=2) as (left, right):
        left.memory[0] = 1
        write(left, right, rows((0, 0, 8)), qp=1)
        until(lambda: right.memory[0] == 1)  # it is done, and nobody has polled it
        fake.knobs.hold = 1
        write(left, right, rows((0, 0, 8), (8, 8, 8)), qp=0)
        left.qps[0].close()
        assert (left.qps[0].flushed, left.qps[0].lost) == (2, 0)
        assert left.poll()["token"].tolist() == [left.qps[1].token]


@pytest.mark.parametrize("retries", [2, 7])
def test_immediate_without_a_receive(fake: Fake, retries: int) -> None:
    with pair(rnr_retries=retries) as (left, right):
        write(left, right, rows(), imm=5)
        if retries == 7:  # for ever: the application's deadline must end it
            assert not left.cq.wait(0.1)
            right.qps[0].receive(1)
            assert left.collect(1)["status"].tolist() == [0]
        else:
            record = left.collect(1)[0]
            assert (record["status"], record["opcode"]) == (13, 1)


def test_every_status_reaches_python(fake: Fake) -> None:
    for status in range(1, 24):
        fake.set()
        with pair() as (left, right):
            fake.set(fail_at=1, fail_status=status)
            write(left, right, rows((0, 0, 8), (0, 0, 8)))
            assert left.collect(2)["status"].tolist() == [status, FLUSH]


def test_refused_post_is_an_error_only_when_nothing_is_in_flight(fake: Fake) -> None:
    with pair() as (left, right):
        fake.set(chance_partial=ANY_CHANCE, partial_errno=errno.EINVAL, seed=1)
        with pytest.raises(VerbsError, match="posting 1 writes on queue pair 0x.* to peer of fake0"):
            write(left, right, rows((0, 0, 8)))
        fake.set(hold=1)
        write(left, right, rows((0, 0, 100)))
        fake.set(hold=1, chance_partial=ANY_CHANCE, partial_errno=errno.ENOMEM)
        assert write(left, right, rows((0, 0, 100))) == 0
        fake.set()
        left.collect(1)


def test_calls_that_a_full_queue_refuses_hold_nothing(fake: Fake) -> None:
    with pair(depth=8) as (left, right):
        fake.set(hold=1)
        write(left, right, rows((0, 0, 100)))
        fake.set(hold=1, chance_partial=ANY_CHANCE, partial_errno=errno.ENOMEM)
        for _ in range(20):  # more often than the queue is deep
            assert write(left, right, rows((0, 0, 100))) == 0
        assert left.region.in_flight == 1
        fake.set()
        left.collect(1)
        assert left.region.in_flight == 0 and sum(left.qps[0].latency()["done"]) == 1


@pytest.mark.parametrize("waiting", ["completions", "events"])
def test_the_handler_of_a_signal_cannot_close_what_waits(fake: Fake, waiting: str) -> None:
    with pair() as (left, _):

        def looks() -> int:
            return int(fake.counts.arms if waiting == "completions" else fake.counts.asks)

        def strike(begun: int = looks()) -> None:
            until(lambda: looks() > begun)  # it waits
            signal.pthread_kill(main, signal.SIGUSR1)

        thing = left.cq if waiting == "completions" else left.context
        main, striker = threading.get_ident(), threading.Thread(target=strike)
        before = signal.signal(signal.SIGUSR1, lambda *_: thing.close())
        striker.start()
        try:
            with pytest.raises(BufferError, match="in use"):
                left.cq.wait(60.0) if waiting == "completions" else left.context.async_events(60.0)
        finally:
            striker.join()
            signal.signal(signal.SIGUSR1, before)


def test_headers_of_this_machine_agree(tmp_path: Path) -> None:
    if not Path("/usr/include/infiniband/verbs.h").exists():
        pytest.skip("needs libibverbs-dev")
    here = Path(__file__).parent
    command = [
        "gcc",
        "-std=gnu11",
        f"-I{here.parents[1] / 'cext' / 'verbs'}",
        "-c",
        str(here / "abi_check.c"),
    ]
    subprocess.run([*command, "-o", str(tmp_path / "abi.o")], check=True, timeout=60)


def test_entries_are_numpy_rows() -> None:
    assert rows((1, 2, 3)).dtype == np.uint64
