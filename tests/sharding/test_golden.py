"""Digests are equal on every Python, numpy and jax: committed numbers, here and under other interpreters."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests import interpreters
from tests.sharding import golden

GOLDEN = {
    # Change only together with the version bytes of the formats.
    "layout": "f579631ee9288ad6087ef9a9f3ef3ff3",
    "target": "600211393cddadbf7019fd74e54fba92",
    "correspondence": "ca1b6aa07f3b48052c8a3fe826ed9857",
    "plan": "4bce4e79e70f957ce2d5fa0aa56aecc3",
    "plan by node": "5f6923342e972e0b4be062985e9c3eae",
    "plan of rates": "a96d910949adb0686ce2072d825b3520",
    "experts": "fba3c72c4ab0aa4225f976151878bcd2",
    "qwen3-30b-a3b": "da693034c6eb031e7889636ff90c48f9",
    "kimi-k2": "c222f8dae11f71698edd3cec17927b12",
}
LARGE = ("qwen3-30b-a3b", "kimi-k2")


def test_small_digests_are_the_committed_ones() -> None:
    found = golden.small()
    assert found == {name: GOLDEN[name] for name in found}
    assert set(found) == set(GOLDEN) - set(LARGE) and len(set(found.values())) == len(found)


def _digests(python: str) -> dict[str, str]:
    found: dict[str, str] = json.loads(interpreters.run(python, Path(golden.__file__), "--large"))
    return found


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("which", ["this interpreter", "another version"])
def test_digests_of_published_models_are_the_committed_ones(which: str) -> None:
    pythons = [sys.executable] if which == "this interpreter" else interpreters.others()
    if not pythons:
        pytest.skip("no interpreter of another version has jax; name one in JAXRL_SYNC_OTHER_PYTHONS")
    for python in pythons:
        assert _digests(python) == GOLDEN, python
