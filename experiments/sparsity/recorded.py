"""What every row of this folder says about its run."""

from __future__ import annotations

import functools
import os
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any


def circumstances() -> dict[str, Any]:
    """Commit (``+`` appended when the tree differs), jax's version and the machine's load."""
    return {
        "commit": commit(),
        "jax": metadata.version("jax"),
        "load": round(os.getloadavg()[0], 1),
    }


@functools.cache
def commit() -> str:
    """The short hash of the checkout, asked for once: rows that a bench writes make the tree differ."""
    git = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    where = Path(__file__).parent
    return subprocess.run(git, cwd=where, capture_output=True, text=True, timeout=20).stdout.strip()
