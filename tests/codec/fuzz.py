"""Coverage-guided fuzzing of the frame decoder by libFuzzer: ``python -m tests.codec.fuzz [its options]``.

Needs atheris. The decoder's modules are instrumented; the sizes and the
digest of mutations are made right, so that what lies behind those checks is reached.
"""

from __future__ import annotations

import importlib
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

atheris: Any = importlib.import_module("atheris")

with atheris.instrument_imports(include=["jaxrl_sync.transfer.codec"]):
    from tests.codec import hostile


def mutate(data: bytes, max_size: int, seed: int) -> bytes:
    """libFuzzer's own mutation, or one of ours; most of them resealed."""
    rng = random.Random(seed)
    changed = atheris.Mutate(data, max_size) if rng.random() < 0.6 else hostile.mutated(data, rng)
    return hostile.resealed(changed)[:max_size] if rng.random() < 0.9 else changed[:max_size]


def one(data: bytes) -> None:
    """One input."""
    hostile.take(data)


def main(arguments: list[str]) -> None:
    """Start from the sound frames."""
    with tempfile.TemporaryDirectory() as folder:
        for number, data in enumerate(hostile.sound_frames()):
            (Path(folder) / str(number)).write_bytes(data)
        options: list[Any] = [
            "fuzz",
            folder,
            "-max_len=8192",
            "-timeout=60",
            "-rss_limit_mb=2048",
            *arguments,
        ]
        atheris.Setup(options, one, custom_mutator=mutate)
        atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1:])
