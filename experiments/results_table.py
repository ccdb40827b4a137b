"""Rebuilds the results table of the README from the rows that experiments wrote; figures are redrawn too."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
README = HERE.parent / "README.md"
TRANSPORTS = {
    "memcpy": "2-thread memcpy inside one process",
    "shm": "**jaxrl_sync, shm**, resharded",
    "ray": "Ray object store",
    "nixl-cma": "NIXL, UCX with CMA",
    "stream": "raw stream over 2 sockets",
    "tcp": "**jaxrl_sync, tcp**, resharded",
    "nixl-tcp": "NIXL, UCX over tcp",
    "mooncake-tcp": "Mooncake, tcp",
    "jax-transfer": "`jax.experimental.transfer`",
}
RESHARD_TENSORS = 311
RESHARD_CASES = {
    "A": "A: fsdp 4 to tp 4",
    "B": "B: fsdp 2 x tp 2 to the same",
    "C": "C: tp 4 to fsdp 2 x tp 2",
}
DELTAS = {
    "encode, ffi in jit, 2 threads": "encode inside jit, C, 2 threads",
    "encode, plain XLA": "encode, plain XLA",
    "decode + apply, ffi in jit, 2 threads": "decode and apply inside jit, 2 threads",
    "decode + apply, aliased, 2 threads": "decode and apply into a slot, 2 threads",
}
SITES = {
    "naive": "each takes all of it",
    "seed": "one takes it, the others from it",
    "delta": "the same, only what changed (1 %)",
}
BEGIN, END = "<!-- results -->", "<!-- /results -->"


def main() -> int:
    """Redraw the figures of experiments that have rows, then replace the table between the markers."""
    for figure in sorted(HERE.glob("*/figure.py")):
        if (figure.parent / "rows.jsonl").exists():
            subprocess.run([sys.executable, str(figure)], check=True, timeout=120)
    README.write_text(replaced(README.read_text(encoding="utf8"), table(HERE)), encoding="utf8")
    return 0


def replaced(text: str, content: str) -> str:
    """``text`` with ``content`` between the markers."""
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"README.md lacks the markers {BEGIN} and {END}")
    return f"{head}{BEGIN}\n{content}{END}{tail}"


def table(folder: Path) -> str:
    """All tables, one after the other."""
    parts = (runs, reshards, transports, deltas, links, stalls, sites, fanouts)
    return "".join(part(folder) for part in parts)


def deltas(folder: Path) -> str:
    """How fast a delta is made and applied: the newest row per jax version."""
    newest = {row["jax"]: row for row in _rows(folder / "sparsity" / "speed.jsonl")}
    if not newest:
        return ""
    head = "| 64M bf16 weights, 1 % changed | jax | ms | of a numpy copy |"
    lines = ["", head, "| --- | --- | --- | --- |"]
    for version, row in sorted(newest.items()):
        for name, label in DELTAS.items():
            ms = row["ms"][name]
            lines.append(f"| {label} | {version} | {ms:.1f} | {ms / row['ms']['copy']:.2f} |")
    return "\n".join(lines) + "\n"


def links(folder: Path) -> str:
    """Whole synchronisations over throttled links: the newest row per rate and payload."""
    newest = {(r["rate"], r["payload"], r["values"]): r for r in _rows(folder / "sparsity" / "sync.jsonl")}
    if not newest:
        return ""
    lines = ["", "| 67 MB over tcp, 1 % changed | payload | bytes | ms |", "| --- | --- | --- | --- |"]
    for (rate, payload, values), row in newest.items():
        name = payload if payload == "full" else f"{payload}, {values}"
        lines.append(f"| {rate} | {name} | {row['nbytes']:,.0f} | {row['seconds'] * 1e3:.0f} |")
    return "\n".join(lines) + "\n"


def stalls(folder: Path) -> str:
    """How long generation stops for new weights: the newest session."""
    rows = _rows(folder / "stall" / "rows.jsonl")
    if not rows:
        return ""
    sys.path.append(str(folder / "stall"))
    import summary

    found: str = summary.markdown(rows)
    return found


def sites(folder: Path) -> str:
    """One version to replicas at another site over a slow line: the newest row per way."""
    newest = {row["way"]: row for row in _rows(folder / "slow_link" / "rows.jsonl")}
    if not newest:
        return ""
    first = next(iter(newest.values()))
    what = f"{first['model_bytes'] / 1e6:.0f} MB to {first['replicas']} replicas"
    place = f"{first['rate_mbit']:g} Mb/s and {first['round_trip_ms']:g} ms away"
    lines = ["", f"| {what}, {place} | s | of bytes / rate + 3 round trips |"]
    lines.append("| --- | --- | --- |")
    for way, label in SITES.items():
        if way in newest:
            seconds, bound = newest[way]["seconds"], newest[way]["bound_s"]
            lines.append(f"| {label} | {seconds:.2f} | {seconds / bound:.2f}x |")
    return "\n".join(lines) + "\n"


def fanouts(folder: Path) -> str:
    """Seconds to the last reader by kind of fan-out: the newest row per kind and number."""
    newest = {(row["kind"], row["readers"]): row for row in _rows(folder / "fanout" / "rows.jsonl")}
    if not newest:
        return ""
    numbers = sorted({n for _, n in newest})
    head = " | ".join(str(n) for n in numbers)
    lines = ["", f"| seconds to the last of so many readers | {head} |", "| --- |" + " --- |" * len(numbers)]
    for kind in ("star", "chain", "tree"):
        cells = [f"{newest[kind, n]['seconds']:.2f}" if (kind, n) in newest else "" for n in numbers]
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def reshards(folder: Path) -> str:
    """How fast W1 gets from one mesh to another inside a process: the newest row per case and jax version."""
    path = folder / "reshard" / "rows.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    newest = {(row["jax"], row["case"]): row for row in rows if row["tensors"] == RESHARD_TENSORS}
    if not newest:
        return ""
    lines = [
        "",
        "| 1.5 GB from mesh to mesh | jax | `jax.device_put` | **`reshard`** | without C | 2-thread memcpy |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for (version, case), row in sorted(newest.items()):
        slow, fast, numpy = (row[k] for k in ("device_put_s", "reshard_s", "reshard_numpy_s"))
        ways = f"{slow * 1e3:.0f} ms | **{fast * 1e3:.0f} ms, {slow / fast:.1f}x**"
        others = f"{numpy * 1e3:.0f} ms, {slow / numpy:.1f}x | {row['memcpy_s'] * 1e3:.0f} ms"
        lines.append(f"| {RESHARD_CASES[case]} | {version} | {ways} | {others} |")
    return "\n".join(lines) + "\n"


def transports(folder: Path) -> str:
    """How fast W1 reaches another process: the newest row at full size, nothing without one."""
    path = folder / "transports" / "rows.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    rows = [row for row in rows if row["scale"] == 1.0]
    if not rows:
        return ""
    row = rows[-1]
    lines = ["", "| 1.5 GB of weights to another process | ms | GB/s |", "| --- | --- | --- |"]
    for name, label in TRANSPORTS.items():
        if name in row["seconds"]:
            seconds = statistics.median(row["seconds"][name])
            lines.append(f"| {label} | {seconds * 1e3:.0f} | {row['bytes'] / seconds / 1e9:.1f} |")
    beside = [
        f"{name}: {_ms(row[name]['digest']):.0f} ms later the receiver has counted all bytes again while its "
        f"engine decodes on; then the swap takes {_ms(row[name]['swap']):.2f} ms."
        for name in ("shm", "tcp")
        if name in row
    ]
    about = f"Commit {row['commit']}, 2 CPU cores, medians of {row['repeats']}."
    return "\n".join([*lines, "", about, *beside]) + "\n"


def _ms(seconds: list[float]) -> float:
    return statistics.median(seconds) * 1e3


def runs(folder: Path) -> str:
    """Asynchronous beside synchronous training; without rows one sentence that says so."""
    path = folder / "async_vs_sync" / "rows.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    if not rows:
        return "No rows yet: run `./dev bench async-vs-sync`.\n"
    latest = rows[-1]["commit"]
    rows = [row for row in rows if row["commit"] == latest]
    lines = [
        "| default run | seeds | updates | exact match before | after (each) | mean | tokens/s | wall time |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for mode, label in (("async", "asynchronous, bound 2"), ("sync", "synchronous, bound 0")):
        chosen = [row for row in rows if row["mode"] == mode]
        if chosen:
            lines.append(_line(label, chosen))
    return "\n".join([*lines, "", f"Commit {latest}, 2 CPU cores."]) + "\n"


def _line(label: str, rows: list[dict[str, Any]]) -> str:
    def mean(key: str) -> float:
        return statistics.mean(float(row[key]) for row in rows)

    seeds = ", ".join(str(row["seed"]) for row in rows)
    each = ", ".join(f"{row['after']:.2f}" for row in rows)
    return (
        f"| {label} | {seeds} | {rows[0]['steps']} | {mean('before'):.2f} | {each} | {mean('after'):.2f} "
        f"| {mean('tokens_per_s'):.0f} | {mean('wall_s'):.0f} s |"
    )


if __name__ == "__main__":
    raise SystemExit(main())
