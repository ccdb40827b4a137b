"""What people see while a run goes on: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

_FIELDS = (
    ("version", "version", "{:.0f}"),
    ("reward", "reward", "{:.3f}"),
    ("eval_accuracy", "eval accuracy", "{:.3f}"),
    ("tokens_per_s", "tokens/s", "{:.0f}"),
    ("staleness_mean", "staleness", "{:.2f}"),
    ("inflight", "in flight", "{:.0f}"),
)


class PlainView:
    """One line per ``interval_s`` at most, for logs and pipes."""

    def __init__(self, out: TextIO, interval_s: float = 5.0) -> None:
        self._out = out
        self._interval_s = interval_s
        self._last_t = -interval_s
        self._last_text = ""

    def update(self, progress: Mapping[str, Any] | None) -> None:
        """Show the newest progress, if it changed and the last line is old enough."""
        text = describe(progress)
        now = time.monotonic()
        if text and text != self._last_text and now - self._last_t >= self._interval_s:
            self._last_t, self._last_text = now, text
            self._write(text)

    def note(self, text: str) -> None:
        """Show one event at once."""
        self._write(text)

    def close(self) -> None:
        """Nothing to close; the stream stays the caller's."""

    def _write(self, text: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} {text}", file=self._out, flush=True)


class LiveView:
    """A progress bar and a table that are redrawn in place; notes scroll above them."""

    def __init__(self, run_dir: Path) -> None:
        from rich.live import Live

        self._title = str(run_dir)
        self._live = Live(auto_refresh=False, transient=True)
        self._live.start()

    def update(self, progress: Mapping[str, Any] | None) -> None:
        """Redraw."""
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        progress = progress or {}
        step, steps = progress.get("step", 0), progress.get("steps") or 1
        table = Table.grid(padding=(0, 3))
        for key, label, form in _FIELDS:
            if progress.get(key) is not None:
                table.add_row(label, form.format(progress[key]))
        head = f"step {step} of {steps}   {progress.get('phase', 'starting')}   {self._title}"
        bar = Table.grid()  # a bare bar ends no line
        bar.add_row(ProgressBar(total=steps, completed=step, width=min(60, self._live.console.width)))
        title = Text(head, no_wrap=True, overflow="ellipsis")
        self._live.update(Group(title, bar, table), refresh=True)

    def note(self, text: str) -> None:
        """Print one event above the table."""
        self._live.console.print(text, markup=False)

    def close(self) -> None:
        """Give the terminal back."""
        self._live.stop()


def open_view(run_dir: Path, out: TextIO | None = None) -> PlainView | LiveView:
    """The live view on a terminal, plain lines otherwise."""
    stream: TextIO = sys.stdout if out is None else out
    return LiveView(run_dir) if stream.isatty() else PlainView(stream)


def describe(progress: Mapping[str, Any] | None) -> str:
    """Progress in one line; empty without any."""
    if not progress:
        return ""
    parts = [f"step {progress.get('step', 0)}/{progress.get('steps', '?')}", str(progress.get("phase", ""))]
    for key, label, form in _FIELDS:
        if progress.get(key) is not None:
            parts.append(f"{label} {form.format(progress[key])}")
    return "  ".join(part for part in parts if part)
