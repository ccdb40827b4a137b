"""RDMA WRITEs of `jaxrl-sync verbs bench` against perftest's `ib_write_bw`, in the VM with soft-RoCE.

    ./dev bench perftest [--rounds 5] [--mib-iters 200] [--scattered-iters 10000]

Both move the same number of messages at the same queue depth over one queue pair, one after the other in each
round, on one guest CPU. The VM emulates: the rates mean nothing, their ratio does. `ib_write_bw -e` (sleeping
instead of polling) is asked too; perftest refuses it for WRITE up to 4.5 at least, and then says so.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
ROWS = HERE / "rows.jsonl"
VM_S = 1500
DEPTH = 128
MIB = 1 << 20
WANTED = {"1MiB": 0.95, "4KiB scattered": 0.90}
SERVER_UP_S = 60.0


def parse() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mib-iters", type=int, default=200, help="messages of 1 MiB per run")
    parser.add_argument("--scattered-iters", type=int, default=10000, help="messages of 4 KiB per run")
    parser.add_argument("--device", nargs=2, default=["rxe0", "rxe1"], metavar=("HERE", "THERE"))
    parser.add_argument("--gid-index", type=int, default=1)
    parser.add_argument("--server", default="10.77.0.2", help="address of THERE, for perftest")
    return parser.parse_args()


def main() -> int:
    """Outside of the VM: run this file in it. In it: measure. 1 if a ratio is below what is wanted."""
    if "RDMA_VM" not in os.environ:
        with tempfile.TemporaryDirectory() as folder:
            vm = [str(ROOT / "tests/vm/run"), "-t", str(VM_S), "-o", folder, "-p", "perftest", "--"]
            code = subprocess.run([*vm, sys.executable, __file__, *sys.argv[1:]]).returncode
            found = Path(folder) / "row.json"
            if not found.exists():
                return code or 1
            row = {"commit": commit(), **json.loads(found.read_text())}
        with ROWS.open("a", encoding="utf8") as file:
            file.write(json.dumps(row) + "\n")
        return code
    options = parse()
    row = measure(options)
    (Path(os.environ["RDMA_VM_OUT"]) / "row.json").write_text(json.dumps(row))
    print("\n".join(table(row)))
    return 0 if all(row["ratio"][name] >= least for name, least in WANTED.items()) else 1


def commit() -> str:
    """The short hash of the commit, ``+`` appended when the tree differs."""

    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", ":!experiments")
    return (git("rev-parse", "--short=12", "HEAD") or "none") + ("+" if changed else "")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Every round: ours and theirs for both kinds of messages; medians and their ratio."""
    kinds = {
        "1MiB": (MIB, options.mib_iters, ["--region", "1MiB"]),
        "4KiB scattered": (4096, options.scattered_iters, ["--scattered", "--region", "4MiB"]),
    }
    rates: dict[str, dict[str, list[float]]] = {
        name: {"ours": [], "ib_write_bw": [], "ib_write_bw -e": []} for name in kinds
    }
    for number in range(options.rounds):
        for name, (size, iters, extra) in kinds.items():
            rates[name]["ours"].append(ours(options, size, iters, extra))
            for events in (False, True):
                rate = perftest(options, size, iters, events)
                if rate is not None:
                    rates[name]["ib_write_bw -e" if events else "ib_write_bw"].append(rate)
            print(
                number,
                name,
                {who: round(seen[-1], 2) for who, seen in rates[name].items() if seen},
                flush=True,
            )
    medians = {
        name: {who: statistics.median(seen) for who, seen in found.items() if seen}
        for name, found in rates.items()
    }
    ratio = {
        name: m["ours"] / max(rate for who, rate in m.items() if who != "ours") for name, m in medians.items()
    }
    return {
        "rounds": options.rounds,
        "depth": DEPTH,
        "mb_per_s": rates,
        "median_mb_per_s": medians,
        "ratio": ratio,
    }


def ours(options: argparse.Namespace, size: int, iters: int, extra: list[str]) -> float:
    """MB/s of the extension."""
    command = [sys.executable, "-m", "jaxrl_sync.cli", "verbs", "bench", "--loopback", "--json"]
    command += ["--device", options.device[0], "--peer-device", options.device[1], "--depth", str(DEPTH)]
    command += ["--size", str(size), "--iters", str(iters), "--pings", "0", "--checked", "4", *extra]
    done = subprocess.run(command, capture_output=True, text=True, timeout=VM_S, cwd=ROOT)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed: {done.stderr}")
    return float(json.loads(done.stdout)["bytes_per_s"]) / 1e6


def perftest(options: argparse.Namespace, size: int, iters: int, events: bool) -> float | None:
    """MB/s of perftest, on average over its run; None if it can't sleep on events for WRITE."""
    common = ["ib_write_bw", "-x", str(options.gid_index), "-F", "-s", str(size), "-n", str(iters)]
    common += ["-t", str(DEPTH), *(["-e"] if events else [])]
    with tempfile.TemporaryFile("w+") as said:
        server = subprocess.Popen([*common, "-d", options.device[1]], stdout=said, stderr=subprocess.STDOUT)
        try:
            if not listens(server):
                said.seek(0)
                text = said.read()
                if "vents feature not available" in text:
                    return None
                raise SystemExit(f"ib_write_bw failed: {text}")
            client = [*common, "-d", options.device[0], options.server]
            done = subprocess.run(client, capture_output=True, text=True, timeout=VM_S)
        finally:
            server.kill()
            server.wait()
    found = re.search(rf"^\s*{size}\s+{iters}\s+\S+\s+(\S+)", done.stdout, re.MULTILINE)
    if not found:
        raise SystemExit(f"{' '.join(client)} failed: {done.stdout} {done.stderr}")
    return float(found[1]) * MIB / 1e6  # perftest's MB are MiB


def listens(server: subprocess.Popen[bytes], port: int = 18515) -> bool:
    """Wait until perftest's server accepts connections; False if it ended instead."""
    end = time.monotonic() + SERVER_UP_S
    wanted = f":{port:04X} "
    while server.poll() is None and time.monotonic() < end:
        tables = "".join(Path(f"/proc/net/{name}").read_text() for name in ("tcp", "tcp6"))
        if any(wanted in line and line.split()[3] == "0A" for line in tables.splitlines()[1:]):
            return True
        time.sleep(0.1)
    return False


def table(row: dict[str, Any]) -> list[str]:
    """For README and terminal."""
    lines = [
        "| messages | ours | ib_write_bw | ib_write_bw -e | ratio | wanted |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, medians in row["median_mb_per_s"].items():
        shown = [f"{medians[w]:.1f} MB/s" if w in medians else "refused" for w in row["mb_per_s"][name]]
        lines.append(f"| {name} | {' | '.join(shown)} | {row['ratio'][name]:.2f} | {WANTED[name]:.2f} |")
    return lines


if __name__ == "__main__":
    raise SystemExit(main())
