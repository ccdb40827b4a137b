"""What trainer and engine of this experiment agree on: decoder, batch, versions, JSON lines."""

from __future__ import annotations

import json
import queue
import sys
import threading
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxrl_sync.inference.config import EngineConfig
from jaxrl_sync.inference.process import engine_convert
from jaxrl_sync.sharding.presets.qwen3 import DecoderConfig
from jaxrl_sync.transfer.version import Version

MODELS = {
    "100M": DecoderConfig(16384, 12, 768, num_heads=12, num_kv_heads=4, head_dim=64, d_ff=2304),
    "small": DecoderConfig(512, 2, 128, num_heads=4, num_kv_heads=2, head_dim=32, d_ff=256),
}
DTYPE = "float32"  # of weights and of the arithmetic: bfloat16 makes a decode step on CPU four times slower
PROMPT, MAX_LEN, SLOTS = 48, 256, 4
LIMIT_S = 300.0


def engine_config(kv_policy: Any) -> EngineConfig:
    """A fixed batch; one decode step per dispatch, so that every step has its time."""
    return EngineConfig(
        slots=SLOTS,
        max_len=MAX_LEN,
        prefill_lengths=(PROMPT + 16,),
        prefill_rows=SLOTS,
        decode_steps_per_dispatch=1,
        compute_dtype=DTYPE,
        kv_policy=kv_policy,
    )


def conversion(model: DecoderConfig, kv_policy: Any) -> Callable[[Any], Any]:
    """From the trainer's tree to the engine's, the same function for every way."""
    return engine_convert(model, engine_config(kv_policy), 1, DTYPE)


def version(number: int) -> Version:
    """Versions of all ways count up together."""
    return Version("stall", number)


def checksum(leaves: list[Any]) -> int:
    """CRC-32 over the bits of all arrays, in order."""
    found = 0
    for leaf in leaves:
        found = zlib.crc32(np.ascontiguousarray(np.asarray(leaf)).view(np.uint8).reshape(-1), found)
    return found


def say(**message: Any) -> None:
    """One line to the bench."""
    print(json.dumps(message), flush=True)


def commands() -> queue.SimpleQueue[dict[str, Any] | None]:
    """The bench's lines as they come; None when it is gone."""
    lines: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            lines.put(json.loads(line))
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    return lines
