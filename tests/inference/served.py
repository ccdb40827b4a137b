"""An engine behind its HTTP server, for tests."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from jaxrl_sync.inference.config import EngineConfig
from jaxrl_sync.inference.tokenizer import CharTokenizer

TOKEN = "0123456789abcdef" * 2
CONFIG = EngineConfig(
    slots=4, max_len=48, prefill_lengths=(16,), prefill_rows=2, max_stop_ids=6, max_waiting=3
)
DIGITS = CharTokenizer("0123456789+= ", size=24)


def eventually(condition: Callable[[], bool], timeout_s: float = 120.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "condition not reached"
        time.sleep(0.01)


def generate_body(request_id: str, **sampling: Any) -> dict[str, Any]:
    return {"request_id": request_id, "prompt": [4, 5, 6], "sampling": {"max_tokens": 5, **sampling}}
