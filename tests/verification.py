"""The record of the long sizes: ``docs/verification.md`` says for each when it last ran, and how much of it.

One table row per test function: sizes that passed, minutes, commit, seed. Rows are replaced by a run that
includes the test and stay as they are otherwise. A failed size leaves the old row and fails the run.
"""

from __future__ import annotations

import ast
import collections
import dataclasses
import hashlib
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

HEADER = """# Verification: the long sizes

Written by `./dev test --full [ROOM]`, never by hand. A test marked `full` without a row here fails CI.

| test | sizes passed | minutes | commit | seed |
| --- | --- | --- | --- | --- |
"""


@dataclasses.dataclass(frozen=True)
class Row:
    """What was last seen of one test function."""

    test: str
    passed: int
    minutes: float
    commit: str
    seed: str

    def render(self) -> str:
        """The row in Markdown."""
        return f"| {self.test} | {self.passed} | {self.minutes:.1f} | {self.commit} | {self.seed} |"


def is_chosen(seed: str, nodeid: str, share: float) -> bool:
    """Whether the seed takes this test into the share: a hash of both, as a number below 1, is below it."""
    return _draw(seed, nodeid) < share


def choose(seed: str, shares: Mapping[str, float]) -> set[str]:
    """Of these tests (node id to share) those that the seed takes: of each function nearly its share.

    Of a function with n cases ``share * n`` are taken on average, and one more or less at most: the time of a
    run hardly depends on the seed, and each case has its turn.
    """
    cases = collections.defaultdict(list)
    for nodeid in shares:
        cases[function_of(nodeid)].append(nodeid)
    chosen: set[str] = set()
    for function, nodeids in cases.items():
        wanted = int(sum(shares[n] for n in nodeids) + _draw(seed, function))
        chosen.update(sorted(nodeids, key=lambda n: _draw(seed, n))[:wanted])
    return chosen


def _draw(seed: str, text: str) -> float:
    """A number from 0 to below 1."""
    digest = hashlib.sha256(f"{seed}\n{text}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def function_of(nodeid: str) -> str:
    """``tests/a/test_b.py::test_c[4]`` without its parameters."""
    return nodeid.partition("[")[0]


def parse(text: str) -> dict[str, Row]:
    """The rows of a verification page by test."""
    rows = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if len(cells) == 5 and cells[0].startswith("tests/"):
            rows[cells[0]] = Row(cells[0], int(cells[1]), float(cells[2]), cells[3], cells[4])
    return rows


def render(rows: Iterable[Row]) -> str:
    """The page of these rows, sorted by test."""
    return HEADER + "".join(row.render() + "\n" for row in sorted(rows, key=lambda row: row.test))


def full_tests(folder: Path, root: Path) -> list[str]:
    """Every test function below ``folder`` that is marked full (also by a parameter), found in the source."""
    found = []
    for path in sorted(folder.rglob("test_*.py")):
        for node in ast.parse(path.read_text(encoding="utf8")).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                if any("mark.full" in ast.unparse(decorator) for decorator in node.decorator_list):
                    found.append(f"{path.relative_to(root)}::{node.name}")
    return found


class Recorder:
    """A pytest plugin that counts passed sizes and time per test function and writes the page at the end."""

    def __init__(self, path: Path, seed: str) -> None:
        self._path = path
        self._seed = seed
        self._passed: dict[str, int] = {}
        self._seconds: dict[str, float] = {}
        self._failed: set[str] = set()
        self._left: collections.Counter[str] = collections.Counter()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Count the sizes of each function: one that is not through (an interrupted session) gets no row."""
        self._left.update(function_of(item.nodeid) for item in session.items)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """One size is through."""
        self._left[function_of(nodeid)] -= 1

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count one phase of one test."""
        name = function_of(report.nodeid)
        self._seconds[name] = self._seconds.get(name, 0.0) + report.duration
        if report.failed:
            self._failed.add(name)
        elif report.when == "call" and report.passed:
            self._passed[name] = self._passed.get(name, 0) + 1

    def pytest_sessionfinish(self) -> None:
        """Write the rows of what passed; rows of tests that are gone are dropped."""
        root = Path(__file__).resolve().parent.parent
        known = set(full_tests(root / "tests", root))
        rows = parse(self._path.read_text(encoding="utf8")) if self._path.exists() else {}
        commit = commit_of(root)
        for name in self._passed.keys() - self._failed:
            if self._left[name]:
                continue
            minutes = self._seconds[name] / 60
            rows[name] = Row(name, self._passed[name], minutes, commit, self._seed[:12])
        self._path.write_text(render(r for r in rows.values() if r.test in known), encoding="utf8")


def merge(page: Path, others: Path) -> None:
    """Put the rows of another page into one: tests that ran elsewhere (in a VM) have theirs too."""
    rows = parse(page.read_text(encoding="utf8")) if page.exists() else {}
    page.write_text(render({**rows, **parse(others.read_text(encoding="utf8"))}.values()), encoding="utf8")


def commit_of(root: Path) -> str:
    """The short hash of the commit, ``+`` appended when the tree differs from it."""
    hash_ = _git(root, "rev-parse", "--short=12", "HEAD")
    changed = _git(root, "status", "--porcelain", "--untracked-files=no", "--", ":!docs/verification.md")
    return (hash_ or "none") + ("+" if changed else "")


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=30)
    return done.stdout.strip()


if __name__ == "__main__":
    merge(Path(sys.argv[1]), Path(sys.argv[2]))
