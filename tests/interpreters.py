"""Other interpreters with other versions of jax, for tests of what must be equal under all of them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def others() -> list[str]:
    """Interpreters of other versions that have jax: those of JAXRL_SYNC_OTHER_PYTHONS, or on PATH."""
    named = os.environ.get("JAXRL_SYNC_OTHER_PYTHONS", "").split(os.pathsep)
    on_path = [shutil.which(f"python3.{minor}") for minor in (11, 12, 13)]
    found: dict[str, str] = {}
    for python in [p for p in (*named, *on_path) if p]:
        words = [python, "-c", "import sys, jax; print(sys.version_info[:2])"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=120)
        if done.returncode == 0 and done.stdout.strip() != str(tuple(sys.version_info[:2])):
            found.setdefault(done.stdout.strip(), python)
    return list(found.values())


def run(python: str, script: Path, *arguments: str, limit_s: float = 900) -> str:
    """What a script prints under an interpreter, with this checkout's packages."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    words = [python, str(script), *arguments]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=limit_s)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout
