"""One HTML page about a run, with everything inside it: no scripts, no network."""

from __future__ import annotations

import base64
import html
import time
from collections.abc import Callable
from pathlib import Path

from matplotlib.figure import Figure

from jaxrl_sync.report import density, figures, rounds
from jaxrl_sync.report.data import RunData, read_run

SECTIONS: tuple[tuple[str, str, Callable[[RunData], Figure | None], str], ...] = (
    ("Learning", "Reward of trained samples and evaluations pinned to one version.", figures.learning, "svg"),
    (
        "Staleness",
        "Updates between dispatch and training, of every trained sample.",
        figures.staleness,
        "svg",
    ),
    ("Timeline", "What each process did when.", figures.timeline, "png"),
    ("Mismatch", "How far engine and trainer log-probs are apart.", figures.mismatch, "svg"),
    ("Weight sync", "Bytes and pause of every swap.", figures.sync_cost, "svg"),
    (
        "Rounds",
        "Who took which version from whom and when (grey: on offer), how long decoding stood for a swap, "
        "and what the phases of an edge took.",
        rounds.rounds,
        "png",
    ),
    (
        "Density",
        "Changed share of every class of tensors, how much of it the measured update before had changed too, "
        "entropy of values and positions; bytes of the last measured update by coding, and its gaps "
        "(sync.density_every_steps).",
        density.density,
        "svg",
    ),
)

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2.2rem; border-bottom: 1px solid #ddd }
img { max-width: 100% } pre { background: #f6f6f4; padding: .8rem; overflow-x: auto; font-size: 12.5px }
table { border-collapse: collapse }
td, th { text-align: left; padding: .15rem 1.2rem .15rem 0; vertical-align: top }
.none { color: #888 }
"""


def write_report(run_dir: Path, out: Path | None = None) -> Path:
    """Write the page of the run in ``run_dir`` (default: ``RUN_DIR/report.html``); returns its path."""
    run = read_run(run_dir)
    path = out or run_dir / "report.html"
    path.write_text(render(run), encoding="utf8")
    return path


def render(run: RunData) -> str:
    """The page as HTML text."""
    state = "finished" if run.finished else "not finished"
    title = f"Run {run.run_dir.name} ({state})"
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{html.escape(title)}</title>",
        f"<style>{STYLE}</style><h1>{html.escape(title)}</h1>",
        f"<p>Read {time.strftime('%Y-%m-%d %H:%M:%S')}.</p>",
        _facts(run),
        *(_section(run, *section) for section in SECTIONS),
        _events(run),
        f"<h2>Config</h2><pre>{html.escape(run.config_text)}</pre></html>",
    ]
    return "\n".join(parts)


def _section(
    run: RunData, name: str, caption: str, draw: Callable[[RunData], Figure | None], form: str
) -> str:
    figure = draw(run)
    head = f"<h2>{name}</h2><p>{caption}</p>"
    if figure is None:
        return head + "<p class=none>Nothing recorded yet.</p>"
    mime = {"svg": "image/svg+xml", "png": "image/png"}[form]
    data = base64.b64encode(figures.to_image(figure, form)).decode()
    return f'{head}<img alt="{name}" src="data:{mime};base64,{data}">'


def _facts(run: RunData) -> str:
    facts = run.summary or run.progress
    rows = "".join(f"<tr><th>{html.escape(k)}<td>{html.escape(_text(v))}" for k, v in facts.items())
    return f"<table>{rows}</table>" if rows else "<p class=none>No progress recorded yet.</p>"


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, dict):
        return ", ".join(f"{key}: {_text(item)}" for key, item in value.items())
    if isinstance(value, list):
        return "; ".join(_text(item) for item in value)
    return str(value)


def _events(run: RunData) -> str:
    rows = "".join(
        f"<tr><td>{time.strftime('%H:%M:%S', time.localtime(float(row.get('t', 0))))}"
        f"<td>{html.escape(str(row.get('process', '')))}<td>{html.escape(str(row.get('event', '')))}"
        f"<td>{html.escape(str(row.get('detail', '')))}"
        for row in run.events
    )
    return f"<h2>Processes</h2><table>{rows}</table>" if rows else ""
