"""Facts about the repository itself: its links, its checkers, its record of long sizes, its documents."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import verification

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("sharding", "transfer", "inference")


@pytest.mark.parametrize("room", ROOMS)
def test_the_links_lead_to_the_rooms_on_top(room: str) -> None:
    link = ROOT / "jaxrl_sync" / room
    assert link.is_symlink() and link.readlink() == Path("..") / room
    found = importlib.util.find_spec(f"jaxrl_sync.{room}")
    assert found is not None and found.origin is not None
    assert Path(found.origin).resolve().parent == ROOT / room


def test_every_test_marked_full_has_a_row_of_its_last_run() -> None:
    rows = verification.parse((ROOT / "docs" / "verification.md").read_text(encoding="utf8"))
    missing = [t for t in verification.full_tests(ROOT / "tests", ROOT) if t not in rows]
    assert missing == [], "run ./dev test --full; docs/verification.md has no row for these"


def test_the_seeded_share_is_fair_and_repeatable() -> None:
    many = {f"tests/x/test_y.py::test_z[{i}]": 0.1 for i in range(20)}
    seeds = [f"seed {n}" for n in range(200)]
    taken = [verification.choose(seed, many) for seed in seeds]
    assert taken == [verification.choose(seed, many) for seed in seeds]
    assert {len(t) for t in taken} == {2}, "of twenty cases a tenth, whatever the seed"
    assert set().union(*taken) == set(many)
    alone = sum(len(verification.choose(seed, {"tests/x/test_y.py::test_w": 0.1})) for seed in seeds)
    assert 5 < alone < 40
    assert not any(verification.choose(seed, dict.fromkeys(many, 0.0)) for seed in seeds)


def test_the_page_of_long_sizes_survives_a_round_trip() -> None:
    row = verification.Row("tests/x/test_y.py::test_z", 12, 3.5, "0123abcd", "seed")
    assert verification.parse(verification.render([row])) == {row.test: row}


def test_full_marks_are_found_in_decorators_and_parameters(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text(
        "@pytest.mark.full\ndef test_one(): ...\n"
        "@pytest.mark.parametrize('n', [1, pytest.param(2, marks=pytest.mark.full)])\ndef test_two(n): ...\n"
        "@pytest.mark.slow\ndef test_three(): ...\n"
    )
    assert verification.full_tests(tmp_path, tmp_path) == ["test_a.py::test_one", "test_a.py::test_two"]


def documents() -> list[Path]:
    tracked = subprocess.run(
        ["git", "ls-files", "--cached", "*.md"], cwd=ROOT, capture_output=True, text=True, timeout=30
    )
    return [ROOT / name for name in tracked.stdout.split() if (ROOT / name).exists()]


@pytest.mark.parametrize("path", documents(), ids=lambda p: str(p.relative_to(ROOT)))
def test_links_between_documents_resolve(path: Path) -> None:
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf8"), flags=re.DOTALL)
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    local = [t.partition("#")[0] for t in targets if "://" not in t and not t.startswith(("#", "mailto:"))]
    assert [t for t in local if not (path.parent / t).exists()] == []


@pytest.mark.slow
@pytest.mark.parametrize("room", ROOMS)
@pytest.mark.parametrize("checker", ["mypy", "pyright"])
def test_the_checkers_see_the_linked_rooms(checker: str, room: str, tmp_path: Path) -> None:
    """A wrong line seeded in a linked room is reported: both checkers can be green and blind to links."""
    command = [str(Path(sys.executable).parent / checker)]
    if not Path(command[0]).exists():
        pytest.skip(f"{checker} is not installed in this environment (extra: dev)")
    tree = tmp_path / "tree"
    tree.mkdir()
    shutil.copy(ROOT / "pyproject.toml", tree)
    (tree / "tests").mkdir()
    (tree / "tests" / "empty.py").write_text("")
    (tree / "jaxrl_sync").mkdir()
    (tree / "jaxrl_sync" / "__init__.py").write_text("")
    for name in ROOMS:
        (tree / name).mkdir()
        (tree / name / "__init__.py").write_text("")
        (tree / "jaxrl_sync" / name).symlink_to(Path("..") / name)
    clean = subprocess.run(command, cwd=tree, capture_output=True, text=True, timeout=120)
    (tree / room / "wrong.py").write_text('x: int = "seeded"\n')
    seeded = subprocess.run(command, cwd=tree, capture_output=True, text=True, timeout=120)
    assert clean.returncode == 0, clean.stdout
    assert seeded.returncode != 0
    assert re.search(rf"{room}/wrong\.py", seeded.stdout)


def test_only_functions_that_ran_whole_get_a_row(tmp_path: Path) -> None:
    """A recorder that saw one of two sizes, a failed size and a passed function records the last alone."""
    recorder = verification.Recorder(tmp_path / "page.md", "seed")
    names = {"whole": 1, "partly": 2, "failed": 1}
    known = verification.full_tests(ROOT / "tests", ROOT)[:3]
    full = dict(zip(names, known, strict=True))
    items = [SimpleNamespace(nodeid=f"{full[n]}[{i}]") for n, count in names.items() for i in range(count)]
    recorder.pytest_collection_finish(SimpleNamespace(items=items))  # type: ignore[arg-type]
    for name, outcome in (("whole", "passed"), ("partly", "passed"), ("failed", "failed")):
        nodeid = f"{full[name]}[0]"
        recorder.pytest_runtest_logreport(
            pytest.TestReport(nodeid, (nodeid, 0, ""), {}, outcome, None, "call", duration=60.0)  # type: ignore[arg-type]
        )
        recorder.pytest_runtest_logfinish(nodeid)
    recorder.pytest_sessionfinish()
    rows = verification.parse((tmp_path / "page.md").read_text())
    assert list(rows) == [full["whole"]]
    assert (rows[full["whole"]].passed, rows[full["whole"]].minutes) == (1, 1.0)


def test_rows_of_another_page_are_merged(tmp_path: Path) -> None:
    """Those that ran elsewhere, in a VM, replace theirs; the others stay."""
    old, kept, new = (
        verification.Row(f"tests/a.py::test_{name}", n, 1.0, "c", "s")
        for name, n in [("x", 1), ("y", 1), ("x", 2)]
    )
    page, others = tmp_path / "page.md", tmp_path / "others.md"
    page.write_text(verification.render([old, kept]))
    others.write_text(verification.render([new]))
    verification.merge(page, others)
    assert verification.parse(page.read_text()) == {new.test: new, kept.test: kept}
