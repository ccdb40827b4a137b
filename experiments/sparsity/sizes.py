"""`./dev bench sparsity sizes`: bytes of positions on W1-delta and of whole frames on W1-step.

W1 has the shapes of Qwen3-0.6B, 1.5 GB of bfloat16. W1-delta: independent changes, positions against their
entropy H(p)/p. W1-step: normal weights (0.02), one clipped-normal step scaled so that 1 % change; frames in
the smallest codings. Sizes don't depend on the machine. Prints the README's tables and writes ``sizes.jsonl``
anew; about two minutes with all of W1.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from recorded import circumstances

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from jaxrl_sync.transfer.codec import positions, rice  # noqa: E402
from jaxrl_sync.transfer.codec.rules import CodingRules  # noqa: E402
from tests.codec import w1  # noqa: E402

ROWS = HERE / "sizes.jsonl"
DENSITIES = (0.001, 0.01, 0.1)
RULES = {
    "overwrite": CodingRules(whole=False),
    "xor": CodingRules(values="xor", whole=False),
    "ulp": CodingRules(values="ulp", whole=False),
}
LEAST = {"overwrite": 78, "ulp": 140}
Row = dict[str, Any]


def position_rows(elements: int) -> list[Row]:
    """Bits per entry of every coding at every density."""
    rows = []
    for density in DENSITIES:
        places = w1.independent(elements, density)
        bits = {}
        for coding in (
            positions.Coding("rice", rice.guess(places.size, elements)),
            positions.Coding("gap8"),
            positions.Coding("gap8", zstd=True),
            positions.Coding("gap16"),
            positions.Coding("gap16", zstd=True),
            positions.Coding("u32"),
            positions.Coding("bitmap"),
        ):
            name = coding.kind + (" + zstd" if coding.zstd else "")
            bits[name] = 8 * len(positions.encode(places, elements, coding)[0]) / places.size
        rows.append(
            {"workload": "W1-delta", "elements": elements, "density": density, "bits": bits}
            | {"entropy_bits": w1.entropy_bits(density)}
        )
    return rows


def step_row(scale: float) -> Row:
    """Bytes of frames by value coding."""
    deltas = list(w1.deltas(scale))
    full = sum(2 * d.elements for d in deltas)
    changed = sum(d.positions.size for d in deltas) * 2 / full
    sizes = {name: w1.frame_bytes(deltas, rules) for name, rules in RULES.items()}
    return {"workload": "W1-step", "full_bytes": full, "density": changed, "frame_bytes": sizes}


def table(rows: list[Row]) -> str:
    """The README's tables."""
    deltas = [r for r in rows if r["workload"] == "W1-delta"]
    lines = ["| positions, bits per entry | " + " | ".join(f"{r['density']:.1%}" for r in deltas) + " |"]
    lines += ["| --- |" + " --- |" * len(deltas)]
    lines += ["| entropy H(p)/p | " + " | ".join(f"{r['entropy_bits']:.2f}" for r in deltas) + " |"]
    for name in deltas[0]["bits"]:
        shares = (f"{r['bits'][name]:.2f}, {r['bits'][name] / r['entropy_bits']:.2f}x" for r in deltas)
        lines.append(f"| {name} | " + " | ".join(shares) + " |")
    (step,) = (r for r in rows if r["workload"] == "W1-step")
    lines += ["", f"| {step['density']:.2%} of {step['full_bytes']:,} bytes | frame | smaller |"]
    lines += ["| --- | --- | --- |"]
    for name, size in step["frame_bytes"].items():
        lines.append(f"| {name} | {size:,} bytes | {step['full_bytes'] / size:.1f}x |")
    return "\n".join([*lines, "", f"Commit {step['commit']}."])


def main(arguments: list[str] | None = None) -> int:
    """Count and print; 1 if a frame is larger than it may be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", type=float, default=1.0, help="share of W1's layers and vocabulary")
    parser.add_argument("--no-rows", action="store_true", help="print only")
    options = parser.parse_args(arguments)
    elements = int(w1.W1_BYTES // 2 * options.scale)
    rows = [{**circumstances(), **row} for row in (*position_rows(elements), step_row(options.scale))]
    print(table(rows))
    if not options.no_rows:
        ROWS.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf8")
    step = rows[-1]
    small = all(step["full_bytes"] >= n * step["frame_bytes"][name] for name, n in LEAST.items())
    return 0 if small else 1


if __name__ == "__main__":
    raise SystemExit(main())
