"""`./dev bench fanout`: how long a version takes to 1 to 16 readers as a star, a chain and a tree.

The trainer and the readers stand on hosts of their own (network and mount namespaces); every reader is an
engine with a relay. The fault proxy gives each source, the trainer and every relay, the same rate outwards,
as a network card would: what differs is who sends to whom. A row has the seconds from the call of publish to
the last reader that serves the version, how many copies left the trainer, and how long the readers took from
the start of their process to serving the first version.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from tests.faults.child import Child  # noqa: E402
from tests.faults.fleet import RANKS, Fleet  # noqa: E402
from tests.faults.network import Network  # noqa: E402
from tests.faults.rules import Rule  # noqa: E402

ROWS = HERE / "rows.jsonl"
LIMIT_S = 120.0


def main(argv: list[str] | None = None) -> int:
    """Measures every kind of fan-out against every number of readers."""
    parser = argparse.ArgumentParser(description="time to serve, against the number of readers")
    parser.add_argument("--kinds", nargs="*", default=["star", "chain", "tree"])
    parser.add_argument("--readers", nargs="*", type=int, default=[1, 2, 4, 8, 16])
    parser.add_argument("--versions", type=int, default=3, help="measured, after the first")
    parser.add_argument("--rate", type=float, default=10e6, help="bytes per second out of each source")
    options = parser.parse_args(argv)
    for kind in options.kinds:
        with (
            tempfile.TemporaryDirectory(prefix="jaxrl-sync-bench-") as place,
            Network(Path(place)) as network,
        ):
            fleet = Fleet(network, Path(place), (), publisher={"fanout": kind, "fanout_degree": 2})
            try:
                for count in options.readers:
                    measure(fleet, kind, count, options)
            finally:
                fleet.close()
    return 0


def measure(fleet: Fleet, kind: str, count: int, options: argparse.Namespace) -> None:
    """One number of readers: the row, which is appended to the others."""
    fleet.network.proxy.clear()
    names = [f"r{count}-{i}" for i in range(count)]
    start = time.time()
    readers = fleet.start_readers(names, relay=True)
    fleet.publish()
    joined_s = _all_serve(fleet, readers, names) - start
    sources = [fleet.address(f"trainer.{rank}") for rank in range(RANKS)]
    for address in sources:  # both processes of the trainer share its card
        fleet.network.proxy.enforce(Rule("rate", target=address, kind="data", value=options.rate / RANKS))
    for name in names:
        rule = Rule("rate", target=fleet.address(f"{name}.0"), kind="data", value=options.rate)
        fleet.network.proxy.enforce(rule)
    seconds, copies = [], []
    for _ in range(options.versions):
        before = _sent(fleet, sources)
        start = time.time()
        fleet.publish(wait=False)
        seconds.append(_all_serve(fleet, readers, names) - start)
        copies.append((_sent(fleet, sources) - before) / readers.wait("nbytes", 1.0)["nbytes"])
    row = {
        "kind": kind,
        "readers": count,
        "rate": options.rate,
        "nbytes": readers.wait("nbytes", 1.0)["nbytes"],
        "seconds": statistics.median(seconds),
        "all_s": [round(s, 3) for s in seconds],
        "copies": round(statistics.median(copies), 2),
        "start_to_serving_s": round(joined_s, 2),
        "commit": _commit(),
    }
    with ROWS.open("a", encoding="utf8") as file:
        file.write(json.dumps(row) + "\n")
    one = row["nbytes"] / options.rate
    times = row["seconds"] / one
    print(f"{kind} {count}: {row['seconds']:.2f} s, {times:.1f} copies' time, {row['copies']} copies sent")


def _all_serve(fleet: Fleet, readers: Child, names: list[str]) -> float:
    """When the last reader served the last version, by its own clock; the bits are checked."""
    last, wanted = 0.0, fleet.expected.digest(fleet.lineage, fleet.number, 1, fleet.boxes("readers"))
    for name in names:
        mine = lambda m: m["installed"] == fleet.version and m["reader"] == name  # noqa: B023, E731
        found: dict[str, Any] = readers.wait("installed", LIMIT_S, 0, mine)
        if found["digest"] != wanted:
            raise SystemExit(f"fanout: {name} serves other bits than {fleet.version}")
        last = max(last, found["t"])
    return last


def _sent(fleet: Fleet, sources: list[str]) -> int:
    counts = fleet.network.proxy.counts().items()
    return sum(down for edge, (_, down) in counts if edge.target in sources)


def _commit() -> str:
    command = ["git", "-C", str(HERE), "rev-parse", "--short=12", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, timeout=30).stdout.strip()


if __name__ == "__main__":
    raise SystemExit(main())
