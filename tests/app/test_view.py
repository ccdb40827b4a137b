"""What people see: the live table on a real terminal, plain lines elsewhere, the summary at the end."""

from __future__ import annotations

import errno
import io
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jaxrl_sync.launch.summary import describe_summary, histogram
from jaxrl_sync.launch.view import PlainView, describe, open_view

PROGRESS = {
    "step": 7,
    "steps": 20,
    "phase": "running",
    "version": 7,
    "reward": 0.25,
    "eval_accuracy": None,
    "tokens_per_s": 1234.5,
    "staleness_mean": 1.5,
    "inflight": 12,
}


def test_plain_lines_say_what_is_known_and_no_more() -> None:
    line = describe(PROGRESS)
    assert line == "step 7/20  running  version 7  reward 0.250  tokens/s 1234  staleness 1.50  in flight 12"
    assert describe(None) == ""


def test_plain_lines_come_at_most_every_interval_and_only_with_news() -> None:
    out = io.StringIO()
    view = PlainView(out, interval_s=3600.0)
    view.update(None)
    view.update(PROGRESS)
    view.update({**PROGRESS, "step": 8})
    view.note("engine-0: restarted")
    lines = [line.partition(" ")[2] for line in out.getvalue().splitlines()]
    assert lines == [describe(PROGRESS), "engine-0: restarted"]


def test_a_pipe_gets_plain_lines(tmp_path: Path) -> None:
    assert isinstance(open_view(tmp_path, io.StringIO()), PlainView)


def on_a_terminal(columns: int) -> str:
    """What a terminal of that width gets to see, without its escape sequences."""
    program = "import sys, pathlib\nfrom jaxrl_sync.launch.view import LiveView, open_view\n"
    program += "view = open_view(pathlib.Path('runs/x'))\nassert isinstance(view, LiveView)\n"
    program += (
        f"view.update(None)\nview.note('engine-0: [restarted]')\nview.update({PROGRESS!r})\nview.close()\n"
    )
    leader, follower = pty.openpty()
    env = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(columns), "LINES": "30"}
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=follower, stderr=subprocess.PIPE, env=env) as child:
        os.close(follower)
        shown = b"".join(iter(lambda: _more(leader), b""))
        errors = child.communicate(timeout=60)[1]
    os.close(leader)
    assert child.returncode == 0, errors
    return re.sub(r"\x1b\[[?0-9;]*[a-zA-Z]", "", shown.decode())


def _more(leader: int) -> bytes:
    """What came next; nothing once the other side is closed and all of it was read."""
    try:
        return os.read(leader, 65536)
    except OSError as error:
        assert error.errno == errno.EIO
        return b""


def test_a_terminal_gets_the_live_table() -> None:
    text = on_a_terminal(100)
    assert "step 7 of 20   running   runs/x" in text
    assert "tokens/s" in text and "1234" in text and "engine-0: [restarted]" in text


@pytest.mark.parametrize("columns", [24, 100])
def test_every_part_of_the_live_table_has_its_own_lines(columns: int) -> None:
    lines = [line.rstrip() for line in on_a_terminal(columns).splitlines()]
    head = max(i for i, line in enumerate(lines) if line.startswith("step 7 of 20"))
    assert set(lines[head + 1]) <= set("━╸╺ ") and len(lines[head + 1]) <= columns
    assert [line.split()[0] for line in lines[head + 2 : head + 4]] == ["version", "reward"]


def test_the_summary_names_what_the_issue_of_a_run_is() -> None:
    summary = {
        "steps": 160,
        "syncs": 159,
        "wall_s": 100.0,
        "eval": {"before": 0.01, "after": 0.83},
        "tokens_per_s": 1584.2,
        "bytes_per_sync": 253440.0,
        "pause_s": {"median": 0.0005, "p99": 0.011},
        "stall_s": {"median": 0.0014, "p99": 0.01, "total": 0.38},
        "staleness": {"2": 75, "0": 25},
        "multi_version_fraction": 0.25,
    }
    text = "\n".join(describe_summary(summary))
    for part in (
        "eval exact match: before 0.010, after 0.830",
        "tokens/s 1584, bytes per sync 253,440",
        "swap pause: median 0.50 ms, p99 11.00 ms",
        "trainer stall per publish: median 1.40 ms, p99 10.00 ms, in all 0.38 s",
        "staleness of trained samples: 0: 25 (25 %)  2: 75 (75 %)",
        "samples with two or more versions: 25 %",
    ):
        assert part in text


def test_a_summary_with_gaps_is_still_shown() -> None:
    assert "after unknown" in "\n".join(describe_summary({"eval": {"before": None, "after": None}}))
    assert histogram({}) == "none"
