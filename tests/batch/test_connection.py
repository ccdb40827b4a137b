"""The data connection: one step at a time, trained once, acknowledged as often as asked, dead peers named."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from jaxrl_sync.batch.connection import (
    Ack,
    BatchReceiver,
    BatchRefused,
    BatchSender,
    ConnectionConfig,
    TrainerState,
)
from jaxrl_sync.batch.frame import BatchFrame, BatchHeader, FrameLimits, encode_batch
from jaxrl_sync.batch.pack import PackConfig, pack
from jaxrl_sync.transfer import auth, wire
from jaxrl_sync.transfer.errors import AuthError, DeadlineError, PeerLost, ProtocolError, ResourceError
from tests.batch.strategies import make_sample
from tests.ports import free_port

TOKEN = "ab" * 32
FAST = ConnectionConfig(
    heartbeat_s=0.1, silence_s=60.0, transfer_s=60.0, reconnect_s=60.0, handshake_s=60.0, retry_s=0.05
)
"""Signs of life and attempts follow one another fast; nobody is given up who is only slow just now."""

BRIEF = dataclasses.replace(FAST, silence_s=1.0, reconnect_s=1.0, handshake_s=2.0)
"""Where it is the end of patience that is tested."""

LIMIT_S = 60.0
"""What must succeed may take so long."""


def frame_of(step: int, data_rank: int = 0) -> bytes:
    batch = pack([make_sample(5, step * 10 + i) for i in range(6)], PackConfig(1, 2, 16))
    header = BatchHeader(
        step, data_rank, batch.micro_batches, 2, 16, batch.num_valid_tokens, cursor={"position": step}
    )
    return encode_batch(header, batch.for_rank(0))


def receiver_at(
    number: int = 0, config: ConnectionConfig = FAST, port: int = 0, host: str = "127.0.0.1"
) -> BatchReceiver:
    state = TrainerState("lin", number, {"position": number})
    return BatchReceiver(state, token=TOKEN, run_id="run", data_rank=0, config=config, port=port, host=host)


def sender_to(address: str | Callable[[], str], config: ConnectionConfig = FAST) -> BatchSender:
    return BatchSender(address, token=TOKEN, run_id="run", data_rank=0, config=config)


@pytest.mark.parametrize(
    "field", [{"step": float("inf")}, {"version": {"lineage": "a", "number": float("inf")}}]
)
def test_an_acknowledgement_of_no_number_is_a_broken_protocol(field: dict[str, object]) -> None:
    good = Ack(3, "a", 3, {"loss": 1.0}).to_message()
    assert Ack.of_message(good) == Ack(3, "a", 3, {"loss": 1.0})
    with pytest.raises(ProtocolError, match="malformed acknowledgement"):
        Ack.of_message({**good, **field})


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@contextlib.contextmanager
def training(receiver: BatchReceiver, train: Callable[[], object] = bool) -> Iterator[list[BatchFrame]]:
    """A thread that trains what comes, each step by calling ``train``; yields the list of batches trained."""
    trained: list[BatchFrame] = []
    stop = threading.Event()

    def loop() -> None:
        while not stop.is_set():
            try:
                batch = receiver.receive(0.1)
            except PeerLost:
                return
            if batch is not None:
                trained.append(batch)
                train()
                step = batch.header.step
                receiver.commit(Ack(step, "lin", step, {"loss": 0.5 * step}), batch.header.cursor)

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        yield trained
    finally:
        stop.set()
        thread.join(LIMIT_S)
        assert not thread.is_alive()


def test_steps_are_trained_in_order_and_acknowledged_with_version_and_metrics() -> None:
    with receiver_at() as receiver, training(receiver) as trained, sender_to(receiver.address) as sender:
        assert sender.connect() == TrainerState("lin", 0, {"position": 0})
        for step in (1, 2, 3):
            assert sender.send(step, frame_of(step), LIMIT_S) == Ack(step, "lin", step, {"loss": 0.5 * step})
        assert [b.header.step for b in trained] == [1, 2, 3]
        assert sender.resends == 0
        with sender_to(receiver.address) as later:
            assert later.connect() == TrainerState("lin", 3, {"position": 3})


def test_a_committed_step_is_acknowledged_again_and_not_trained_again() -> None:
    with receiver_at(5) as receiver, training(receiver) as trained, sender_to(receiver.address) as sender:
        assert sender.send(6, frame_of(6), LIMIT_S).metrics == {"loss": 3.0}
        assert sender.send(6, frame_of(6), LIMIT_S) == Ack(6, "lin", 6, {"loss": 3.0})
        assert sender.send(4, frame_of(4), LIMIT_S) == Ack(4, "lin", 4, {})
        assert [b.header.step for b in trained] == [6]


def test_a_break_while_training_resends_the_same_bytes_and_trains_once() -> None:
    def cut() -> None:
        broken = receiver._connection
        assert broken is not None
        broken.sock.shutdown(socket.SHUT_RDWR)
        wait_until(lambda: receiver._connection not in (None, broken))

    with receiver_at() as receiver, training(receiver, cut) as trained:
        with sender_to(receiver.address) as sender:
            ack = sender.send(1, frame_of(1), LIMIT_S)
        assert (ack.step, ack.number, sender.resends) == (1, 1, 1)
        assert len(trained) == 1


def test_an_acknowledgement_lost_on_the_way_is_given_again() -> None:
    done = threading.Event()
    with receiver_at() as receiver, training(receiver, lambda: done.wait(LIMIT_S)) as trained:
        with sender_to(receiver.address) as first:
            with pytest.raises(DeadlineError, match="did not commit step 1 before the deadline"):
                first.send(1, frame_of(1), 1.0)
            done.set()
            wait_until(lambda: receiver._state.number == 1)
            assert first.send(1, frame_of(1), LIMIT_S) == Ack(1, "lin", 1, {"loss": 0.5})
        assert len(trained) == 1


@pytest.mark.invariant(18)
def test_a_slow_trainer_is_no_dead_one_but_a_silent_one_is() -> None:
    impatient = dataclasses.replace(FAST, silence_s=1.0)
    with receiver_at() as receiver, sender_to(receiver.address, impatient) as sender:
        with training(receiver, lambda: time.sleep(2 * impatient.silence_s)):
            assert sender.send(1, frame_of(1), LIMIT_S).step == 1

    with wire.listen("127.0.0.1") as silent:  # takes connections into its backlog, never answers
        host, port = silent.getsockname()
        config = ConnectionConfig(handshake_s=0.3, reconnect_s=0.5, retry_s=0.05)
        with sender_to(f"{host}:{port}", config) as sender, pytest.raises(PeerLost, match="within 0.5 s"):
            sender.send(1, frame_of(1), 60)


def test_nobody_there_is_named_within_the_reconnect_bound() -> None:
    with (
        sender_to(f"127.0.0.1:{free_port()}", BRIEF) as sender,
        pytest.raises(PeerLost, match="no connection to trainer data rank 0 within 1 s"),
    ):
        sender.connect()


def test_a_wrong_token_run_or_rank_is_refused_at_once() -> None:
    with receiver_at() as receiver:
        for token, run_id, rank in (("cd" * 32, "run", 0), (TOKEN, "other", 0), (TOKEN, "run", 1)):
            wrong = BatchSender(receiver.address, token=token, run_id=run_id, data_rank=rank, config=FAST)
            with wrong, pytest.raises(AuthError):
                wrong.connect()
        with training(receiver) as trained, sender_to(receiver.address) as sender:
            sender.send(1, frame_of(1), LIMIT_S)
        wait_until(lambda: receiver.refused_connections >= 3)  # counted after the answer
        assert receiver.refused_connections == 3 and len(trained) == 1


def test_steps_out_of_order_and_frames_for_others_are_refused_by_name() -> None:
    with receiver_at(3) as receiver, sender_to(receiver.address) as sender:
        with pytest.raises(BatchRefused, match="has committed step 3, expected at least 5 to send step 6"):
            sender.send(6, frame_of(6), LIMIT_S)
        with pytest.raises(BatchRefused, match="step 6, expected 4"):
            sender.send(4, frame_of(6), LIMIT_S)
        with pytest.raises(BatchRefused, match="data rank 1, expected 0"):
            sender.send(4, frame_of(4, data_rank=1), LIMIT_S)
        damaged = bytearray(frame_of(4))
        damaged[-1] ^= 1
        with pytest.raises(BatchRefused, match="frame digest"):
            sender.send(4, bytes(damaged), LIMIT_S)
        with training(receiver) as trained:
            assert sender.send(4, frame_of(4), LIMIT_S).number == 4
        assert len(trained) == 1


def test_a_frame_above_the_limit_is_not_taken() -> None:
    state = TrainerState("lin", 0)
    limits = FrameLimits(header_bytes=256, payload_bytes=256)
    with BatchReceiver(state, token=TOKEN, run_id="run", data_rank=0, config=FAST, limits=limits) as receiver:
        with (
            sender_to(receiver.address) as sender,
            pytest.raises(BatchRefused, match="576"),
        ):
            sender.send(1, frame_of(1), LIMIT_S)
        assert receiver.receive(0.05) is None


def test_a_restarted_trainer_at_a_new_port_gets_the_step_again() -> None:
    first = receiver_at()
    address = [first.address]
    with sender_to(lambda: address[0]) as sender:
        sender.connect()
        results: list[Ack] = []
        thread = threading.Thread(target=lambda: results.append(sender.send(1, frame_of(1), LIMIT_S)))
        thread.start()
        assert first.receive(LIMIT_S) is not None  # received, never committed
        second = receiver_at()
        with second, training(second) as trained:
            address[0] = second.address
            first.close()
            thread.join(LIMIT_S)
            assert [a.step for a in results] == [1]
            assert len(trained) == 1


def test_another_lineage_after_a_restart_is_refused() -> None:
    first = receiver_at()
    address = [first.address]
    with sender_to(lambda: address[0]) as sender:
        sender.connect()
        first.close()
        state = TrainerState("other", 0)
        with BatchReceiver(state, token=TOKEN, run_id="run", data_rank=0, config=FAST) as second:
            address[0] = second.address
            with pytest.raises(BatchRefused, match="came back with lineage other, expected lin"):
                sender.send(1, frame_of(1), LIMIT_S)


def test_the_trainer_notices_an_orchestrator_that_is_gone() -> None:
    with receiver_at(config=BRIEF) as receiver:
        assert receiver.receive(0.05) is None  # nobody came yet: that is the caller's deadline, not a loss
        sender = sender_to(receiver.address)
        sender.connect()
        sender.close()
        with pytest.raises(PeerLost, match="did not come back within 1 s"):
            receiver.receive(60)


def test_commits_that_were_not_received_are_errors() -> None:
    with receiver_at() as receiver:
        with pytest.raises(ValueError, match="expected step None of lineage lin"):
            receiver.commit(Ack(1, "lin", 1), {})


def test_hostile_bytes_leave_the_receiver_working() -> None:
    with receiver_at() as receiver, training(receiver) as trained:
        for junk in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 4096, b"\0" * 64):
            with wire.dial(receiver.address, LIMIT_S) as sock:
                sock.sendall(junk)
        idle = [wire.dial(receiver.address, LIMIT_S) for _ in range(20)]  # more than may shake hands at once
        for sock in idle:
            sock.close()
        with sender_to(receiver.address) as sender:
            assert sender.send(1, frame_of(1), LIMIT_S).step == 1
        assert len(trained) == 1


def test_frames_that_lie_cost_a_proven_sender_its_connection_and_no_more() -> None:
    deep = b"[" * 200_000
    lies = {
        "payload of 9223372036854775808 bytes": struct.pack("<4sIQ", b"jxs1", 2, 1 << 63) + b"{}",
        "isn't JSON": struct.pack("<4sIQ", b"jxs1", len(deep), 0) + deep,
        "at most": struct.pack("<4sIQ", b"jxs1", (1 << 32) - 1, 0),
    }
    with receiver_at() as receiver, training(receiver) as trained:
        for words, lie in lies.items():
            sock = wire.dial(receiver.address, LIMIT_S)
            auth.connect(sock, TOKEN, "run", {"purpose": "batch", "data_rank": 0}, LIMIT_S)
            with wire.Connection(sock, "receiver") as connection:
                wire.send_all(sock, [lie], time.monotonic() + LIMIT_S)
                answer, _ = connection.recv(LIMIT_S)
                assert answer["kind"] == "refused" and words in answer["message"]
                with pytest.raises(PeerLost):
                    connection.recv(LIMIT_S)
        with sender_to(receiver.address) as sender:
            assert sender.send(1, frame_of(1), LIMIT_S).step == 1
        assert len(trained) == 1


def test_strangers_and_listeners_for_everyone_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    with receiver_at(host="0.0.0.0") as receiver:
        address = receiver.address_towards("http://127.0.0.1:1")
        assert address.startswith("127.0.0.1:")
        sock = wire.dial(address, LIMIT_S)
        with sock, pytest.raises((AuthError, PeerLost)):
            auth.connect(sock, "cd" * 32, "run", {"purpose": "batch", "data_rank": 0}, LIMIT_S)
        wait_until(lambda: "batch port refused 127.0.0.1" in caplog.text)  # it is counted before it is said
        assert receiver.refused_connections == 1
    assert "BATCHES ARE TAKEN UNENCRYPTED" in caplog.text


def test_a_port_in_use_is_a_named_error() -> None:
    with receiver_at() as receiver:
        port = int(receiver.address.rpartition(":")[2])
        with pytest.raises(ResourceError, match=f"can't listen for batches on 127.0.0.1:{port}") as e:
            receiver_at(port=port)
        assert e.value.exit_code == 3


def test_close_ends_a_send_in_progress_and_all_threads() -> None:
    before = set(threading.enumerate())
    receiver = receiver_at()
    sender = sender_to(receiver.address)
    errors: list[BaseException] = []

    def send() -> None:
        try:
            sender.send(1, frame_of(1), 60)
        except PeerLost as e:
            errors.append(e)

    thread = threading.Thread(target=send)
    thread.start()
    assert receiver.receive(LIMIT_S) is not None
    sender.close()
    thread.join(LIMIT_S)
    assert len(errors) == 1
    receiver.close()
    wait_until(lambda: set(threading.enumerate()) <= before)


TRAINER = """
import sys, time
from jaxrl_sync.batch.connection import *
receiver = BatchReceiver(TrainerState("lin", 0), token=sys.argv[1], run_id="run", data_rank=0,
                         config=ConnectionConfig(heartbeat_s=0.1))
print(receiver.address, flush=True)
while True:
    batch = receiver.receive(60)
    print("got", batch.header.step, flush=True)
    if batch.header.step == 2:
        time.sleep(60)
    receiver.commit(Ack(batch.header.step, "lin", batch.header.step), {})
"""


@pytest.mark.invariant(19)
@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP])
def test_a_killed_or_stopped_trainer_process_is_noticed_within_the_bound(sign: signal.Signals) -> None:
    brief = dataclasses.replace(BRIEF, silence_s=3.0, reconnect_s=8.0, handshake_s=8.0)
    with subprocess.Popen(
        [sys.executable, "-c", TRAINER, TOKEN], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().strip()
            with sender_to(address) as sender:
                assert sender.send(1, frame_of(1), LIMIT_S).step == 1
                assert process.stdout.readline() == "got 1\n"
            with sender_to(address, brief) as sender:
                errors: list[BaseException] = []

                def send() -> None:
                    try:
                        sender.send(2, frame_of(2), 120)
                    except PeerLost as e:
                        errors.append(e)

                thread = threading.Thread(target=send)
                thread.start()
                assert process.stdout.readline() == "got 2\n"
                os.kill(process.pid, sign)
                thread.join(60)  # half of the step's own deadline
                assert len(errors) == 1
        finally:
            process.kill()
