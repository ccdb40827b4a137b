"""`./dev bench slow-link`: one version to four replicas at another site, over a slow line that is far away.

Trainer and hub stand at one site, the replicas at the other, each on a host of its own (network and mount
namespaces). Between the sites is a cable of 100 Mb/s (tc-tbf(8) at both ends), and the fault proxy at its
near end holds every byte for half of the round trip in each direction. Ways:

- naive: every replica takes the whole version over the line;
- seed: one replica takes it, the others take it from that one while it arrives;
- delta: the same, and only what changed travels.

A row has the seconds from the call of publish to the last replica that serves, the bytes that crossed the
line, and the bound: those bytes at the line's rate, and three round trips.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from jaxrl_sync.transfer import auth  # noqa: E402
from tests.faults.network import Host, Network, ways  # noqa: E402
from tests.faults.rules import Edge, Rule  # noqa: E402

ROWS = HERE / "rows.jsonl"
SITE, PORT, LIMIT_S = "far", 7070, 300
WAYS: dict[str, dict[str, Any]] = {
    "naive": {"relay": False, "site": "", "payload": "full"},
    "seed": {"relay": True, "site": SITE, "payload": "full"},
    "delta": {"relay": True, "site": SITE, "payload": "sparse"},
}


def main(argv: list[str] | None = None) -> int:
    """Measures every way; 1 if one takes longer than ``--limit`` times its bound."""
    parser = argparse.ArgumentParser(description="one version to another site over a slow line")
    parser.add_argument("--tensors", type=int, default=16, help="of 2 MiB each")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--versions", type=int, default=5, help="measured, after the first")
    parser.add_argument("--rate-mbit", type=float, default=100.0)
    parser.add_argument("--round-trip-ms", type=float, default=40.0)
    parser.add_argument("--changed", type=float, default=0.01)
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--limit", type=float, default=1.15)
    options = parser.parse_args(argv)
    if ways() is None:
        print(
            "slow-link: needs namespaces, ip and tc (Debian: iproute2); nothing was measured", file=sys.stderr
        )
        return 3
    rows = [measure(way, options) for way in options.ways]
    medians = {row["way"]: row["seconds"] for row in rows}
    for row in rows:
        print(
            f"{row['way']}: {row['seconds']:.3f} s, {row['line_bytes']:,} B over the line, "
            f"bound {row['bound_s']:.3f} s, {row['seconds'] / row['bound_s']:.2f}x of it"
        )
    if len(medians) > 1:
        first, last = rows[0]["seconds"], rows[-1]["seconds"]
        print(f"{rows[0]['way']} to {rows[-1]['way']}: {first / last:.1f}x (TensorHub's published: 19x)")
    return 0 if all(row["seconds"] <= options.limit * row["bound_s"] for row in rows) else 1


def measure(way: str, options: argparse.Namespace) -> dict[str, Any]:
    """One way on a network of its own: the row, which is appended to the others."""
    how = WAYS[way]
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="jaxrl-sync-bench-")))
        network = stack.enter_context(Network(folder))
        network.site(SITE, f"{options.rate_mbit:g}mbit")
        half_s = options.round_trip_ms / 2e3
        token = folder / "token"
        auth.create_token(token)
        common = {"token": str(token), "tensors": options.tensors, "changed": options.changed}
        home = network.host("trainer", isolated=False)
        hub = {"host": home.address, "port": PORT, "token": str(token), "ttl_s": 30.0}
        _line(_child(stack, home, "-m", "tests.faults.peer", "hub", json.dumps(hub)), "ready")
        url = f"{home.address}:{PORT}"
        here = {"hub": f"http://{url}", "host": home.address, "payload": how["payload"]}
        sender = _child(stack, home, str(HERE / "child.py"), "trainer", json.dumps({**common, **here}))
        door, replicas = network.proxy.listen(), []
        for index in range(options.replicas):
            place = network.host(f"r{index}", site=SITE, isolated=False)
            control = network.proxy.listen(Edge(place.name, url, "control"))
            there = {"hub": f"http://{control}", "door": door, "name": place.name, "host": place.address}
            there |= {"direct": place.address.rpartition(".")[0] + ".", "site": how["site"]}
            there |= {"relay": how["relay"], "payload": how["payload"], **common}
            replicas.append(_child(stack, place, str(HERE / "child.py"), "replica", json.dumps(there)))
        for child in (sender, *replicas):
            _line(child, "ready")
        network.proxy.enforce(Rule("delay", source="r*", value=half_s))
        seconds, crossed, parts = [], [], []
        for number in range(options.versions + 1):
            before = _crossed(network)
            _tell(sender, {"publish": number})
            start = _line(sender, "published")["t"]
            taken = [_line(child, "installed") for child in replicas]
            seconds.append(max(t["t"] for t in taken) - start)
            crossed.append(_crossed(network) - before)
            parts.append(_parts(start, taken))
            print(f"  {way} {number}: {seconds[-1]:.3f} s, {crossed[-1]:,} B, {parts[-1]}")
    line_bytes = int(statistics.median(crossed[1:]))
    row = {
        "way": way,
        "replicas": options.replicas,
        "model_bytes": options.tensors * (2 << 20),
        "changed": options.changed,
        "rate_mbit": options.rate_mbit,
        "round_trip_ms": options.round_trip_ms,
        "line_bytes": line_bytes,
        "bound_s": line_bytes * 8 / (options.rate_mbit * 1e6) + 3 * options.round_trip_ms / 1e3,
        "seconds": statistics.median(seconds[1:]),
        "all_s": [round(s, 4) for s in seconds[1:]],
        "parts_s": {k: round(statistics.median(p[k] for p in parts[1:]), 4) for k in parts[0]},
        "commit": _commit(),
    }
    with ROWS.open("a", encoding="utf8") as file:
        file.write(json.dumps(row) + "\n")
    return row


def _parts(start: float, taken: list[dict[str, Any]]) -> dict[str, float]:
    """Seconds from publish until the last replica has seen the offer, until the first and the last serve."""
    moments = {
        "offer": max(t["seen"] for t in taken),
        "first": min(t["t"] for t in taken),
        "last": max(t["t"] for t in taken),
    }
    worst = {k: max(t["seconds"].get(k, 0.0) for t in taken) for k in ("wire", "apply", "verify")}
    return {k: round(v, 4) for k, v in {**{k: t - start for k, t in moments.items()}, **worst}.items()}


def _crossed(network: Network) -> int:
    """Bytes of weights that the proxy has brought to the other site."""
    return sum(down for edge, (_, down) in network.proxy.counts().items() if edge.kind == "data")


def _commit() -> str:
    command = ["git", "-C", str(HERE), "rev-parse", "--short=12", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, timeout=30).stdout.strip()


def _child(stack: contextlib.ExitStack, host: Host, *arguments: str) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    process = subprocess.Popen(host.wrap([sys.executable, *arguments]), stdin=pipe, stdout=pipe, text=True)

    def end() -> None:
        process.kill()
        process.wait(20)

    stack.callback(end)
    return process


def _tell(process: subprocess.Popen[str], message: dict[str, Any]) -> None:
    assert process.stdin is not None
    process.stdin.write(json.dumps(message) + "\n")
    process.stdin.flush()


def _line(process: subprocess.Popen[str], key: str) -> dict[str, Any]:
    """The next message that has ``key``, within LIMIT_S."""
    assert process.stdout is not None
    timer = threading.Timer(LIMIT_S, process.kill)
    timer.start()
    try:
        for text in process.stdout:
            if text.startswith("{") and key in (found := json.loads(text)):
                return dict(found)
    finally:
        timer.cancel()
    raise SystemExit(f"slow-link: a process ended with {process.wait(20)}, or was silent for {LIMIT_S} s")


if __name__ == "__main__":
    raise SystemExit(main())
