"""`./dev bench sparsity sync`: whole synchronisations, sparse against full, over a link of a given rate.

Publisher and subscriber stand on two hosts in network namespaces of their own, joined by a cable whose ends
are throttled by a token bucket (tc-tbf(8)); needs root or user namespaces. 64 MiB of bfloat16 over tcp,
resharded from rows to columns, one clipped-normal step per version, scaled so that about 1 % of the elements
change. Rows go to ``sync.jsonl``: medians over the versions after the first.
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

from recorded import circumstances

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from tests.faults.network import Host, throttled_pair, ways  # noqa: E402

ROWS = HERE / "sync.jsonl"
RATES = {"1 Gb/s": "1gbit", "10 Gb/s": "10gbit", "unthrottled": ""}
PAYLOADS = (("full", "overwrite"), ("sparse", "overwrite"), ("sparse", "ulp"), ("auto", "overwrite"))
TENSORS, STEP, LIMIT_S = 8, 3.6e-7, 300


def main(argv: list[str] | None = None) -> int:
    """Measures every payload at every rate; 1 if auto is more than 10 % slower than the better of the two."""
    parser = argparse.ArgumentParser(description="sparse against full over a throttled link")
    parser.add_argument("--versions", type=int, default=7)
    parser.add_argument("--rates", nargs="*", default=list(RATES), choices=list(RATES))
    options = parser.parse_args(argv)
    if ways() is None:
        print("sync: needs namespaces, ip and tc (Debian: iproute2); nothing was measured", file=sys.stderr)
        return 3
    good = True
    for rate in options.rates:
        medians: dict[str, float] = {}
        with throttled_pair(RATES[rate]) as pair, tempfile.TemporaryDirectory() as folder:
            for payload, values in PAYLOADS:
                row = measure(Path(folder), pair, rate, payload, values, options.versions)
                medians[f"{payload}/{values}"] = row["seconds"]
        full = medians["full/overwrite"]
        line = "  ".join(f"{name} {s * 1e3:.0f} ms ({full / s:.1f}x)" for name, s in medians.items())
        print(f"{rate}: {line}")
        best = min(full, medians["sparse/overwrite"])
        good &= medians["auto/overwrite"] <= 1.1 * best
    return 0 if good else 1


def measure(
    folder: Path, pair: tuple[Host, Host], rate: str, payload: str, values: str, versions: int
) -> dict[str, Any]:
    """Hub and publisher on one host, the subscriber on the other; ``versions`` after the first."""
    here, there = pair
    with contextlib.ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=folder)))
        token = place / "token"
        _run(sys.executable, "-c", f"from jaxrl_sync.transfer.auth import *; create_token({str(token)!r})")
        hub = _child(stack, here, "-c", _HUB, str(token), here.address)
        url = _line(hub)["url"]
        options = {"hub": url, "token": str(token), "payload": payload, "values": values}
        options |= {"tensors": TENSORS, "step": STEP, "host": here.address}
        child = str(HERE / "sync_child.py")
        sender = _child(stack, here, child, "publisher", json.dumps(options))
        receiver = _child(stack, there, child, "subscriber", json.dumps(options))
        _line(sender), _line(receiver)
        taken, sent = [], []
        for number in range(versions + 1):
            _tell(sender, {"publish": number})
            taken.append(_line(receiver))
            sent.append(_line(sender))
    row = {
        **circumstances(),
        "rate": rate,
        "payload": payload,
        "values": values,
        "seconds": statistics.median(t["seconds"] for t in taken[1:]),
        "first_s": taken[0]["seconds"],
        "nbytes": statistics.median(t["nbytes"] for t in taken[1:]),
        "stall_s": statistics.median(s["stall_s"] for s in sent[1:]),
        "changed": statistics.median(s["changed"] for s in sent[1:]),
        "transport": taken[0]["transport"],
        "versions": versions,
    }
    with ROWS.open("a", encoding="utf8") as file:
        file.write(json.dumps(row) + "\n")
    print(
        f"  {rate} {payload}/{values}: {row['seconds'] * 1e3:.0f} ms, {row['nbytes']:,.0f} B, "
        f"{row['changed']:.2%} changed, publish blocked for {row['stall_s'] * 1e3:.1f} ms"
    )
    return row


_HUB = """
import json, sys, threading
from pathlib import Path
from jaxrl_sync.transfer.hub.server import run_hub
say = lambda url: print(json.dumps({"url": url}), flush=True)
run_hub(sys.argv[2], 0, Path(sys.argv[1]), stop=threading.Event(), announce=say, ttl_s=30.0)
"""


def _child(stack: contextlib.ExitStack, host: Host, *arguments: str) -> subprocess.Popen[str]:
    command = host.wrap([sys.executable, *arguments])
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)

    def end() -> None:
        process.kill()
        process.wait(20)

    stack.callback(end)
    return process


def _tell(process: subprocess.Popen[str], message: dict[str, Any]) -> None:
    assert process.stdin is not None
    process.stdin.write(json.dumps(message) + "\n")
    process.stdin.flush()


def _line(process: subprocess.Popen[str]) -> dict[str, Any]:
    """The next message within LIMIT_S; ends the bench when the process has died or says nothing."""
    assert process.stdout is not None
    timer = threading.Timer(LIMIT_S, process.kill)
    timer.start()
    try:
        for text in process.stdout:
            if text.startswith("{"):
                found: dict[str, Any] = json.loads(text)
                return found
    finally:
        timer.cancel()
    raise SystemExit(f"sync: a process ended with code {process.wait(20)}, or said nothing for {LIMIT_S} s")


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise SystemExit(f"sync: {' '.join(command)}: {done.stderr.strip()}")


if __name__ == "__main__":
    raise SystemExit(main())
