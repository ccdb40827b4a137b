"""What each coding of a sparse payload costs, and whether the automatic choice is best: rate x density.

One clipped-normal step on normal bfloat16 weights; every coding is measured, then the choice is made with the
speeds that a process measures for itself. Cost = encode + bytes / rate + decode.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxrl_sync.transfer.codec import choose, costs
from jaxrl_sync.transfer.codec.choose import Delta
from jaxrl_sync.transfer.codec.frame import Coding
from jaxrl_sync.transfer.codec.measure import Measured, all_codings
from jaxrl_sync.transfer.codec.rules import CodingRules

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "sparsity"))

from recorded import circumstances  # noqa: E402

ROWS = HERE / "rows.jsonl"
DENSITIES = (0.0007, 0.003, 0.01, 0.03, 0.1, 0.5)
RATES = {"10 Mb/s": 1.25e6, "100 Mb/s": 1.25e7, "1 Gb/s": 1.25e8, "10 Gb/s": 1.25e9, "100 Gb/s": 1.25e10}


def step(elements: int, density: float) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """bfloat16 bits before and after one step that changes this share of them."""
    rng = np.random.default_rng(0)
    weights = rng.standard_normal(elements, np.float32) * np.float32(0.02)
    moves = np.clip(rng.standard_normal(elements, np.float32), -1, 1)
    before = weights.astype(ml_dtypes.bfloat16).view(np.uint16)
    after, low, high = before, 1e-9, 1e-2
    for _ in range(24):
        size = math.sqrt(low * high)
        after = (weights + np.float32(size) * moves).astype(ml_dtypes.bfloat16).view(np.uint16)
        low, high = (size, high) if np.mean(after != before) < density else (low, size)
    return before, after


def row(delta: Delta, measured: dict[Coding, Measured], rate: str, values: Any) -> dict[str, Any]:
    """The choice at one rate beside the best coding that the rules allow."""
    allowed = {c: m for c, m in measured.items() if values == "auto" or c.values == values}
    seconds = {c: m.seconds + m.nbytes / RATES[rate] for c, m in allowed.items()}
    chosen = choose.choose(delta, RATES[rate], costs.measured(), CodingRules(values=values)).coding
    best = min(seconds, key=lambda c: seconds[c])
    return {
        **circumstances(),
        "elements": delta.elements, "density": delta.positions.size / delta.elements, "rate": rate,
        "values": values, "chosen": str(chosen), "best": str(best), "bytes": measured[chosen].nbytes,
        "ratio_to_full": delta.elements * 2 / measured[chosen].nbytes,
        "chosen_ms": 1e3 * seconds[chosen], "best_ms": 1e3 * seconds[best],
        "over_best": seconds[chosen] / seconds[best] - 1,
    }  # fmt: skip


def main() -> int:
    """Print and record every row; the exit code is 1 where a choice is more than 5 % off."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--elements", type=int, default=1 << 22)
    parser.add_argument("--dry", action="store_true", help="record nothing")
    options = parser.parse_args()
    rows = []
    for density in DENSITIES:
        before, after = step(options.elements, density)
        places = np.flatnonzero(before != after).astype(np.uint32)
        delta = Delta(options.elements, places, after[places], before[places])
        measured = all_codings(delta, after)
        for rate in RATES:
            for values in ("overwrite", "auto"):
                found = row(delta, measured, rate, values)
                rows.append(found)
                print(
                    f"{100 * density:6.2f} %  {rate:>8}  {values:9}  {found['chosen']:28} "
                    f"{found['ratio_to_full']:7.1f}x smaller  "
                    f"{100 * found['over_best']:5.1f} % over {found['best']}"
                )
    if not options.dry:
        ROWS.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return int(any(r["over_best"] > 0.05 for r in rows))


if __name__ == "__main__":
    raise SystemExit(main())
