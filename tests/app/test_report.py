"""The report of finished, unfinished and empty runs; it reads files only and never loads jax."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxrl_sync.cli import main
from jaxrl_sync.launch.summary import describe_summary
from jaxrl_sync.report import density, figures
from jaxrl_sync.report.data import read_run
from jaxrl_sync.report.page import SECTIONS, render
from jaxrl_sync.report.rounds import rounds
from jaxrl_sync.transfer.density import DensityMeter
from jaxrl_sync.transfer.hub.trace import PHASES


def step_row(step: int) -> dict[str, Any]:
    engines = [
        {"engine": e, "version": step, "pause_s": 1e-3, "bytes": 1000, "transport": "shm"} for e in ("a", "b")
    ]
    return {
        "kind": "step",
        "step": step,
        "version": step,
        "reward": 0.1 * step,
        "staleness": {"0": 1, "2": 3},
        "trainer": {"mismatch_k3": 1e-4 * step, "loss": 0.1},
        "sync": {"swaps": 2, "engines": engines},
    }


def round_rows() -> list[dict[str, Any]]:
    """Two engines take a version, the second from the first; a third round was never begun."""
    fixed: dict[str, Any] = {"kind": "round", "version": 1, "opened": 11.0, "repair": "none", "why": ""}
    rows: list[dict[str, Any]] = [
        {
            "engine": "engine-0",
            "source": "publisher trainer",
            "state": "committed",
            "begun": 11.1,
            "ended": 11.4,
        },
        {"engine": "engine-1", "source": "relay engine-0", "state": "failed", "begun": 11.2, "ended": 11.5},
        {
            "engine": "engine-1",
            "source": "relay engine-0",
            "state": "superseded",
            "begun": None,
            "ended": 11.6,
        },
    ]
    seconds = {f"seconds_{phase}": 0.01 for phase in PHASES}
    edge = {
        "kind": "edge",
        "version": 1,
        "engine": "engine-0",
        "transport": "shm",
        "payload": "full",
        **seconds,
    }
    return [*({**fixed, **row} for row in rows), edge]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "config.toml").write_text("[run]\nname = 'x <&> y'\n")
    return tmp_path


def fill(run_dir: Path) -> None:
    rows = [step_row(1), step_row(2), {"kind": "eval", "version": 2, "accuracy": 0.5}, *round_rows()]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows) + '{"kind": "st')
    (run_dir / "timeline").mkdir()
    spans = [
        {"t0": 10.0, "t1": 11.0, "kind": "train", "step": 1},
        {"t0": 11.0, "t1": 11.5, "kind": "publish"},
    ]
    (run_dir / "timeline" / "trainer-0.jsonl").write_text("".join(json.dumps(r) + "\n" for r in spans))
    meter = DensityMeter()
    weights: list[dict[str, Any]]
    weights = [{"layers/0/w": np.arange(n, n + 64, dtype=np.float32), "norm": np.ones(4)} for n in (0, 1, 1)]
    found = [meter.measure(weights[0], weights[1]), meter.measure(weights[1], weights[2])]
    measured = [{"version": 2 * i, **row.to_json()} for i, row in enumerate(found, 1)]
    (run_dir / "density.jsonl").write_text("".join(json.dumps(r) + "\n" for r in measured))
    (run_dir / "events.jsonl").write_text(
        json.dumps({"t": 1.0, "event": "restart", "process": "engine-0", "detail": "<killed>"}) + "\n"
    )


def test_the_rows_of_a_run_and_not_its_torn_last_line(run_dir: Path) -> None:
    fill(run_dir)
    run = read_run(run_dir)
    assert [row["step"] for row in run.steps] == [1, 2] and len(run.evals) == 1
    assert run.staleness() == {0: 2, 2: 6}
    assert [(s["step"], s["engine"]) for s in run.syncs()] == [(1, "a"), (1, "b"), (2, "a"), (2, "b")]
    assert not run.finished


def test_the_page_has_every_section_with_a_picture_inside(run_dir: Path) -> None:
    fill(run_dir)
    page = render(read_run(run_dir))
    assert re.findall(r"<h2>(\w+)", page) == ["Learning", "Staleness", "Timeline", "Mismatch", "Weight"] + [
        "Rounds",
        "Density",
        "Processes",
        "Config",
    ]
    assert len(re.findall(r'<img alt="[^"]+" src="data:image/(?:svg\+xml|png);base64,', page)) == len(
        SECTIONS
    )
    assert "&lt;killed&gt;" in page and "x &lt;&amp;&gt; y" in page
    assert "(not finished)" in page
    assert not re.search(r'(?:src|href)="?http', page)


def test_the_picture_of_density_shows_overlap_and_entropies(run_dir: Path) -> None:
    meter, weights = DensityMeter(), [{"w": np.zeros(8, np.float32)}]
    for first in (0, 2, 2):  # four elements change, of which the second update hits two again, the third all
        weights.append({"w": weights[-1]["w"].copy()})
        weights[-1]["w"][first : first + 4] += [1, 2, 2, 4]
    found = [meter.measure(a, b) for a, b in itertools.pairwise(weights)]
    rows = [{"version": 3 + i, **row.to_json()} for i, row in enumerate(found)]
    (run_dir / "density.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    figure = density.density(read_run(run_dir))
    assert figure is not None
    lines = {
        str(line.get_label()): (list(line.get_xdata()), list(line.get_ydata()))  # type: ignore[arg-type]
        for axes in figure.axes
        for line in axes.get_lines()
    }
    assert lines["measured"] == ([4, 5], [0.5, 1.0]) and lines["by chance"] == ([4, 5], [0.5, 0.5])
    versions, entropies = lines["new bits"]
    assert versions == [3, 4, 5] and entropies == [row["entropy_bits"]["new"] for row in rows]
    assert entropies[0] == 1.5 and lines["positions, H(p)/p"][1] == [2.0] * 3  # of 1, 2, 2, 4; of a half


def test_a_run_that_has_only_begun_still_has_a_page(run_dir: Path) -> None:
    page = render(read_run(run_dir))
    assert page.count("Nothing recorded yet.") == len(SECTIONS)


def test_a_finished_run_shows_its_summary(run_dir: Path) -> None:
    (run_dir / "summary.json").write_text('{"steps": 7, "eval": {"before": 0.0, "after": 0.75}}')
    page = render(read_run(run_dir))
    assert "(finished)" in page and "before: 0, after: 0.75" in page
    (run_dir / "summary.json").write_text('{"cause": "InterruptedRunError: asked to stop", "steps": 7}')
    assert "(not finished)" in render(read_run(run_dir))


def test_a_mix_of_tasks_is_shown_task_by_task(run_dir: Path) -> None:
    scores = {"sums": {"accuracy": 0.25}, "words": {"accuracy": 0.75}}
    row = {"kind": "eval", "version": 2, "accuracy": 0.5, "tasks": scores}
    (run_dir / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    figure = figures.learning(read_run(run_dir))
    assert figure is not None
    lines = {str(line.get_label()): list(line.get_ydata()) for line in figure.axes[0].get_lines()}  # type: ignore[arg-type]
    assert lines["eval accuracy of sums"] == [0.25] and lines["eval accuracy of words"] == [0.75]
    tasks = {"sums": {"weight": 0.25, "share": 0.2, "groups": 2}, "words": {"weight": 0.75, "share": 0.8}}
    text = describe_summary({"tasks": tasks, "evals": [row]})
    assert "  sums: 20 % of the trained groups (weight 25 %), exact match 0.250" in text
    assert not any("weight" in line for line in describe_summary({"tasks": {"sums": tasks["sums"]}}))


def test_the_command_writes_the_page_without_jax(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(run_dir)
    program = f"import sys; from jaxrl_sync.cli import main\ncode = main(['report', {str(run_dir)!r}])\n"
    program += "assert 'jax' not in sys.modules; sys.exit(code)\n"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, str(run_dir / "report.html")), done.stderr
    assert main(["report", str(run_dir), "--out", str(run_dir / "other.html")]) == 0
    assert (run_dir / "other.html").stat().st_size > 10_000


def test_a_directory_that_is_not_a_run_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_picture_of_rounds_has_a_lane_per_engine_and_source(run_dir: Path) -> None:
    fill(run_dir)
    run = read_run(run_dir)
    assert [row["state"] for row in run.rounds] == ["committed", "failed", "superseded"]
    assert len(run.edges) == 1
    figure = rounds(run)
    assert figure is not None
    lanes = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert lanes == ["trainer", "engine-0", "engine-1"]
    assert figure.axes[0].get_legend() is not None
    run.rounds[:] = [row for row in run.rounds if row["begun"] is None]
    assert rounds(run) is None
