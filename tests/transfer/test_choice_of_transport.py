"""Which transport an edge gets under `auto`, and what is logged of the choice."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest

from jaxrl_sync.transfer import Version, holding
from jaxrl_sync.transfer.memory import SHM_DIR, SharedMemory
from jaxrl_sync.transfer.wire import Connection
from tests.transfer.models import Rig, convert, same_bits, take, trainer_params


class Hidden(SharedMemory):
    """Shared memory that nobody else finds."""

    def __init__(self, run_id: str, nbytes: int) -> None:
        super().__init__(run_id, nbytes)
        os.unlink(SHM_DIR / self.name)


def test_auto_takes_shm_where_memory_is_shared_and_tcp_where_it_is_not(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "jaxrl_sync.transfer")
    params = trainer_params()
    publisher = rig.publisher(params)
    publisher.publish(params, Version("a", 0))
    first = rig.subscriber("x").poll(60)
    assert first is not None and first.prepare().transport == "shm"
    monkeypatch.setattr(holding, "SharedMemory", Hidden)
    second = rig.subscriber("y").poll(60)
    assert second is not None and second.prepare().transport == "tcp"
    assert same_bits(second.swap(), convert(params))
    for end in ("to x.0", "from trainer.0"):
        assert f"edge {end}: shm (its nonce in " in caplog.text
    for end in ("to y.0", "from trainer.0"):
        assert re.search(f"edge {end}: tcp \\(shared memory .* can't be opened here", caplog.text)


def test_an_answer_that_is_no_nonce_is_another_memory_and_not_the_end_of_every_link(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A publisher's nonsense counted as layouts that don't fit, which is for good."""
    real, told = Connection.send, list[str]()

    def send(self: Connection, header: dict[str, Any], *payload: Any, timeout_s: float) -> None:
        if header.get("kind") == "opened" and not told:
            told.append(header["kind"])
            header = {**header, "answer": "no nonce"}
        real(self, header, *payload, timeout_s=timeout_s)

    monkeypatch.setattr(Connection, "send", send)
    params = trainer_params()
    publisher = rig.publisher(params, "shm")
    publisher.publish(params, Version("a", 0))
    assert take(rig.subscriber(transport="shm"))[0] == Version("a", 0) and told
