"""One build of the FFI handlers under every jax that is supported: the same file, the same bits."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from jaxrl_sync.transfer.delta import ffi
from tests import interpreters

SCRIPT = Path(__file__).with_name("ffi_smoke.py")


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.skipif(not ffi.available(), reason="no FFI kernels in this build")
def test_one_build_serves_other_pythons_and_jax_versions() -> None:
    pythons = interpreters.others()
    if not pythons:
        pytest.skip("no interpreter of another version has jax; name one in JAXRL_SYNC_OTHER_PYTHONS")
    mine, *others = (json.loads(interpreters.run(p, SCRIPT, limit_s=400)) for p in (sys.executable, *pythons))
    for other in others:
        assert other["python"] != mine["python"]
        assert (other["library"], other["results"]) == (mine["library"], mine["results"]), (other, mine)
