"""docs/invariants.md lists all invariants with the tests that carry their marks."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


def _generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("invariants_page", ROOT / "tests" / "invariants.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_committed_page_is_what_the_tests_say() -> None:
    text = _generator().render(ROOT / "tests")
    found = (ROOT / "docs" / "invariants.md").read_text(encoding="utf8")
    assert found == text, "docs/invariants.md is stale: run python tests/invariants.py"


def test_all_invariants_are_listed_once() -> None:
    module = _generator()
    numbers = [n for section in module.SECTIONS.values() for n in section]
    assert numbers == list(range(1, 67)) == sorted(module.INVARIANTS)


def test_marks_are_read_from_sources_and_unmarked_invariants_are_open(tmp_path: Path) -> None:
    module = _generator()
    source = "import pytest\n@pytest.mark.invariant(3)\n@pytest.mark.invariant(9)\ndef test_a(): pass\n"
    (tmp_path / "test_x.py").write_text(source)
    text = module.render(tmp_path)
    assert f"3. {module.INVARIANTS[3]}\n   - `test_x.py::test_a`" in text
    assert f"4. {module.INVARIANTS[4]}\n   - open" in text
    assert "2 of 66 invariants have a test." in text


def test_an_unknown_number_is_named(tmp_path: Path) -> None:
    (tmp_path / "test_x.py").write_text("import pytest\n@pytest.mark.invariant(67)\ndef test_a(): pass\n")
    with pytest.raises(SystemExit, match="test_a marks invariant 67"):
        _generator().render(tmp_path)
