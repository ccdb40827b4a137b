"""Sources that die in the middle: the receiver goes on from another one with the tensors that it lacks."""

from __future__ import annotations

import signal
import time
from typing import Any

import pytest

from tests.transfer.test_processes import Cast, Peer, cast, reach  # noqa: F401

pytestmark = pytest.mark.slow

CHUNKS = {"chunk_bytes": 4096}
LAYERS = 24


def fleet(made: Cast, transport: str, fanout: str = "chain") -> tuple[Peer, Peer, Peer]:
    """A trainer and two engines that relay; both have version 0."""
    common: dict[str, Any] = {"transport": transport, "layers": LAYERS, "timeout_s": 20.0}
    trainer = made.trainer("a", config={**CHUNKS, "fanout": fanout, "keep_versions": 2}, **common)
    # One lane: of several, one may not have sent anything yet when half of the bytes are out.
    options = {**CHUNKS, "relay": True, "connections": 1}
    engines = [made.engine(name, config=options, **common) for name in ("a", "b")]
    for peer in (trainer, *engines):
        peer.expect("ready")
    expected = trainer.publish(0)
    for engine in engines:
        assert reach(engine, "a:0")["digest"] == expected
    return trainer, engines[0], engines[1]


def sent_by(trainer: Peer) -> int:
    """Bytes that the trainer has counted as sent."""
    trainer.tell(stats=1)
    return int(trainer.expect("bytes_sent")["bytes_sent"])


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.invariant(32)
def test_a_relay_killed_at_half_costs_only_the_other_half_again(cast: Cast, transport: str) -> None:  # noqa: F811
    trainer, relay, reader = fleet(cast, transport)
    relay.tell(halt="b")
    relay.expect("armed")
    reader.kill(signal.SIGSTOP)
    expected = trainer.publish(1)
    reach(relay, "a:1")
    reader.kill(signal.SIGCONT)
    relay.expect("halfway")
    relay.kill()
    seen = reach(reader, "a:1")
    assert seen["digest"] == expected
    assert seen["source"] == "publisher.trainer"
    whole = seen["nbytes"] + seen["resumed_bytes"]
    assert 0.25 < seen["resumed_bytes"] / whole < 0.75
    deadline = time.monotonic() + 60  # the reader may be ahead of the trainer's counters
    while sent_by(trainer) % whole != seen["nbytes"]:  # whole copies of others, and that half
        assert time.monotonic() < deadline, (sent_by(trainer), seen)
        time.sleep(0.1)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_trainer_killed_at_half_is_replaced_by_an_engine(cast: Cast, transport: str) -> None:  # noqa: F811
    trainer, relay, reader = fleet(cast, transport, "star")
    reader.kill(signal.SIGSTOP)
    trainer.tell(publish=1, halt="b")
    expected = trainer.expect("published")["expected"]
    assert reach(relay, "a:1")["digest"] == expected
    reader.kill(signal.SIGCONT)
    trainer.expect("halfway")
    trainer.kill()
    seen = reach(reader, "a:1")
    assert (seen["digest"], seen["source"]) == (expected, "relay.a")
    assert 0.25 < seen["resumed_bytes"] / (seen["nbytes"] + seen["resumed_bytes"]) < 0.75
