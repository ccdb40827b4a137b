"""Times the transports on W1, case A, between two processes, beside the machine's floors and other systems.

    ./dev bench transports [--scale 0.1] [--only shm,tcp,ray,...] [--repeats 7]

Ours runs through Publisher.publish and Subscriber, and reshards; the others only move as many bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from children import Child, ChildError, environment

from jaxrl_sync.transfer import auth
from jaxrl_sync.transfer.hub.server import run_hub

HERE = Path(__file__).resolve().parent
ROWS = HERE / "rows.jsonl"
LOG = "transports.log"
NIXL = [["--no-deps", "nixl-cu12==1.5.1"], ["numpy"]]
PEERS: dict[str, tuple[str, list[list[str]], dict[str, Any]]] = {
    "ray": ("ray_store.py", [["ray==2.60.0", "numpy"]], {}),
    "nixl-cma": ("nixl_pair.py", NIXL, {"tls": "tcp,posix,cma,self"}),
    "nixl-tcp": ("nixl_pair.py", NIXL, {"tls": "tcp"}),
    "mooncake-tcp": (
        "mooncake_pair.py", [["mooncake-transfer-engine-non-cuda==0.3.13.post1", "numpy"]], {},
    ),
    "jax-transfer": ("jax_transfer.py", [], {}),
}  # fmt: skip
LABELS = {
    "memcpy": "memcpy, 2 threads, one process", "shm": "jaxrl_sync, shm", "tcp": "jaxrl_sync, tcp",
    "stream": "raw socket stream", "ray": "Ray object store", "nixl-cma": "NIXL, UCX with CMA",
    "nixl-tcp": "NIXL, UCX over tcp", "mooncake-tcp": "Mooncake, tcp",
    "jax-transfer": "jax.experimental.transfer",
}  # fmt: skip

Row = dict[str, Any]


def main() -> int:
    """Measure what is asked for, record one row, print the table; 1 if a claim of the README doesn't hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--scale", type=float, default=1.0, help="share of W1's layers and vocabulary")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--connections", type=int, default=2)
    parser.add_argument("--only", default=",".join(["shm", "tcp", *PEERS]))
    parser.add_argument(
        "--envs", type=Path, default=HERE.parents[1] / ".venv-bench", help="where peers are installed"
    )
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped: what was measured is recorded"))
    row: Row = {}
    try:
        measure(options, options.only.split(","), row)
    finally:
        if row.get("seconds"):
            with ROWS.open("a", encoding="utf8") as file:
                file.write(json.dumps(row) + "\n")
            show(row)
    return verdict(row)


def measure(options: argparse.Namespace, only: list[str], row: Row) -> None:
    """Everything in one run, one system after the other, each floor in turn with what it is a floor for."""
    sys.path.insert(0, str(HERE))
    import w1

    size = w1.total_bytes(options.scale)
    row |= {"commit": _commit(), "bytes": size, "scale": options.scale, "repeats": options.repeats}
    row |= {
        "threads": options.threads,
        "connections": options.connections,
        "seconds": {},
        "missing": {},
        "floors": {},
    }
    row["load"] = [round(os.getloadavg()[0], 1)]
    with tempfile.TemporaryDirectory(prefix="jaxrl-sync-bench-") as folder:
        place = Path(folder)
        for transport in ("shm", "tcp"):
            if transport in only:
                row[transport] = ours(transport, options, size, place, row["seconds"])
        for name in PEERS:
            if name in only:
                peer(name, options, size, place, row)
    row["load"].append(round(os.getloadavg()[0], 1))


def ours(transport: str, options: argparse.Namespace, size: int, place: Path, seconds: Row) -> Row:
    """Rounds of publish and take, in turn with the transport's floor. Also checks bits and recompilation."""
    log = place / LOG
    auth.create_token(place / f"token-{transport}")
    base = {"transport": transport, "threads": options.threads, "scale": options.scale}
    base |= {"token": str(place / f"token-{transport}"), "connections": options.connections, "bytes": size}
    stop, urls = threading.Event(), list[str]()
    up = threading.Event()

    def announce(url: str) -> None:
        urls.append(url)
        up.set()

    hub = threading.Thread(
        target=run_hub, args=("127.0.0.1", 0, base["token"]),
        kwargs={"stop": stop, "announce": announce, "ttl_s": 30.0},
    )  # fmt: skip
    hub.start()
    up.wait(20)
    told = json.dumps({**base, "hub": urls[0]})
    program = [sys.executable, str(HERE / "ours.py")]
    floors: list[Child] = []
    try:
        with (
            Child([*program, "trainer", told], log) as trainer,
            Child([*program, "engine", told], log) as engine,
        ):
            trainer.answer()
            engine.answer()
            floors, floor = start_floor(transport, base, log)
            found = rounds(trainer, engine, floor, options.repeats)
            if trainer.ask(checksum=1) != engine.ask(checksum=1):
                raise SystemExit(f"{transport}: other bits arrived than were published")
            found["publisher"], found["subscriber"] = trainer.ask(stats=1), engine.ask(stats=1)
    finally:
        for child in floors:
            child.close()
        stop.set()
        hub.join(10)
    seconds[transport] = found.pop("path")
    seconds["memcpy" if transport == "shm" else "stream"] = found.pop("floor")
    return found


def start_floor(transport: str, base: Row, log: Path) -> tuple[list[Child], Callable[[], float]]:
    """The floor's processes and a call that measures it once."""
    program = [sys.executable, str(HERE / "floors.py")]
    if transport == "shm":
        copier = Child([*program, "memcpy", json.dumps(base)], log)
        copier.answer()
        return [copier], lambda: float(copier.ask()["seconds"])
    sink = Child([*program, "sink", json.dumps(base)], log)
    port = sink.answer()["port"]
    source = Child([*program, "source", json.dumps({**base, "port": port})], log)
    source.answer()
    return [source, sink], lambda: float(source.ask()["seconds"])


def rounds(trainer: Child, engine: Child, floor: Callable[[], float], repeats: int) -> Row:
    """Two rounds that touch every slot, then the measured ones."""
    moved: dict[str, int] = {}
    found: Row = {k: [] for k in ("path", "floor", "wire", "digest", "swap", "stall")}
    for number in range(repeats + 3):
        trainer.ask(step=1)
        floor_s = floor()
        engine.tell(take=1)
        published = trainer.ask(publish=number)
        taken = engine.answer()
        if taken["compiled"] != 1:
            raise SystemExit(f"the engine compiled {taken['compiled']} times, expected once")
        if number >= 3:
            values = (
                taken["complete_at"] - published["ready_at"],
                floor_s,
                taken["wire_s"],
                taken["verify_s"],
            )
            values += (taken["swap_s"], published["stall_s"])
            for key, value in zip(found, values, strict=True):
                found[key].append(value)
            moved = taken["moved"]
    return {**found, "moved": moved}


def peer(name: str, options: argparse.Namespace, size: int, place: Path, row: Row) -> None:
    """One peer in its own environment; what can't be had is recorded with its reason."""
    script, requirements, extra = PEERS[name]
    told = {"bytes": size, "scale": options.scale, **extra}
    base = {"bytes": size, "threads": options.threads, "connections": options.connections}
    pace = "tcp" if name.endswith("-tcp") else "shm"
    try:
        python = Path(sys.executable)
        if requirements:
            python = environment(options.envs, name.split("-")[0], requirements)
        program = [str(python), str(HERE / "peers" / script), json.dumps(told)]
        with Child(program, place / f"{name}.log") as child:
            version = child.answer()["version"]
            floors, floor = start_floor(pace, base, place / LOG)
            try:
                pairs = [(floor(), float(child.ask()["seconds"])) for _ in range(options.repeats + 2)][2:]
            finally:
                for one in floors:
                    one.close()
            if name != "ray" and not child.ask(check=1)["good"]:
                raise ChildError("other bytes arrived than were sent")
    except (OSError, ChildError, subprocess.TimeoutExpired) as error:
        row["missing"][name] = str(error)
        return
    row["floors"][name] = [floor_s for floor_s, _ in pairs]
    row["seconds"][name] = [seconds for _, seconds in pairs]
    row.setdefault("versions", {})[name] = version


def median(row: Row, name: str) -> float | None:
    """Median seconds of one system, None if it wasn't measured."""
    values = row["seconds"].get(name)
    return statistics.median(values) if values else None


def show(row: Row) -> None:
    """The table, with what is missing and why."""
    print(f"W1 case A, {row['bytes']:,} bytes, medians of {row['repeats']}, commit {row['commit']}")
    print(f"  load average before and after: {row['load']}; above about 1 before, others were busy too")
    for name, label in LABELS.items():
        seconds = median(row, name)
        if seconds is not None:
            line = f"  {label:32} {seconds * 1e3:8.1f} ms  {row['bytes'] / seconds / 1e9:6.2f} GB/s"
            floors = row["floors"].get(name)  # what it leaves to others of the machine
            print(
                line + (f"  (its floor, beside it: {statistics.median(floors) * 1e3:.1f})" if floors else "")
            )
        elif name in row["missing"]:
            print(f"  {label:32}  missing: {row['missing'][name]}")
    for name in ("shm", "tcp"):
        if name in row:
            parts = {k: statistics.median(v) * 1e3 for k, v in row[name].items() if isinstance(v, list)}
            print(f"  {name}: " + ", ".join(f"{k} {v:.2f} ms" for k, v in parts.items()))
            print(f"  {name}: bytes moved {row[name]['moved']}")


def verdict(row: Row) -> int:
    """The claims, each with its ratio; 1 if one that can be checked doesn't hold."""
    claims = [
        ("shm over 2-thread memcpy", "shm", ["memcpy"], 1.3, True),
        ("best of Ray and NIXL/CMA over shm", "shm", ["ray", "nixl-cma"], 2.5, False),
        ("jax.experimental.transfer over shm", "shm", ["jax-transfer"], 30.0, False),
        ("raw stream over tcp", "tcp", ["stream"], 0.85, False),
        ("best of Mooncake and NIXL/tcp over tcp", "tcp", ["mooncake-tcp", "nixl-tcp"], 1.5, False),
    ]
    failed = 0
    for text, name, others, limit, at_most in claims:
        mine = median(row, name)
        theirs = [s for s in (median(row, other) for other in others) if s is not None]
        if mine is None or not theirs:
            continue
        ratio = mine / min(theirs) if at_most else min(theirs) / mine
        good = ratio <= limit if at_most else ratio >= limit
        failed += not good
        print(
            f"  {text}: {ratio:.2f} ({'at most' if at_most else 'at least'} {limit}) {'' if good else 'NO'}"
        )
    return 1 if failed else 0


def _commit() -> str:
    git = ["git", "-C", str(HERE), "rev-parse", "--short", "HEAD"]
    return subprocess.run(git, capture_output=True, text=True, timeout=10).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
