"""How long does generation stop for new weights?

    ./dev bench stall [--syncs 50] [--running 12] [--modes stop,jax,sync,async] [--resume]

A trainer and an engine, two processes, a model of 108M parameters (float32, 431 MB per version). One sync per
mode in turn; every sync is one row of ``rows.jsonl`` as soon as it is over, and ``--resume`` goes on with the
newest session. The exit code is 1 where a claim does not hold.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "transports"))

from children import Child  # noqa: E402
from summary import LABELS, summarize, verdict  # noqa: E402

from jaxrl_sync.transfer import auth  # noqa: E402
from jaxrl_sync.transfer.hub.server import run_hub  # noqa: E402

ROWS = HERE / "rows.jsonl"
BEFORE, AFTER, WARM_UPS = 16, 6, 2
Row = dict[str, Any]


def main() -> int:
    """Measure what is missing, print the table; 1 if a claim that can be checked doesn't hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--syncs", type=int, default=50, help="per mode, the trainer paused after publishing")
    parser.add_argument("--running", type=int, default=12, help="per mode, the trainer training on")
    parser.add_argument("--modes", default=",".join(LABELS))
    parser.add_argument("--model", default="100M", choices=("100M", "small"))
    parser.add_argument("--kv", default="keep", choices=("keep", "recompute"), help="of all modes alike")
    parser.add_argument("--resume", action="store_true", help="go on with the newest session of rows.jsonl")
    parser.add_argument("--rows", type=Path, default=ROWS)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped: --resume goes on from here"))
    rows = read(options.rows)
    session = rows[-1]["session"] if options.resume and rows else f"{_commit()}-{time.time():.0f}"
    done = [r for r in rows if r["session"] == session]
    if done and (done[0]["model"], done[0]["kv"]) != (options.model, options.kv):
        raise SystemExit(f"session {session} is of model {done[0]['model']}, kv {done[0]['kv']}")
    todo = list(missing(done, options.modes.split(","), options.syncs, options.running))
    if todo:
        done += measure(options, session, todo)
    summary = summarize(done)
    for line in summary.lines():
        print(line)
    return verdict(summary)


def read(path: Path) -> list[Row]:
    """The rows so far; a line that was cut off by a kill is left out."""
    lines = path.read_text(encoding="utf8").splitlines() if path.exists() else []
    found = []
    for line in lines:
        with contextlib.suppress(json.JSONDecodeError):
            found.append(json.loads(line))
    return found


def missing(done: list[Row], modes: list[str], syncs: int, running: int) -> Iterator[tuple[str, bool]]:
    """(mode, trainer running) of every sync that is still to be done, modes in turn, each first once."""
    for wanted, runs in ((syncs, False), (running, True)):
        have = Counter(r["mode"] for r in done if r["running"] == runs)
        for number in range(wanted):
            turn = number % len(modes)
            for mode in modes[turn:] + modes[:turn]:
                if have[mode] <= number:
                    yield mode, runs


def measure(options: argparse.Namespace, session: str, todo: list[tuple[str, bool]]) -> list[Row]:
    """Start hub, trainer and engine; do every sync of ``todo``. Rows of what was finished."""
    found: list[Row] = []
    shared = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="jaxrl-sync-stall-", dir=shared) as folder:
        with processes(options, Path(folder)) as (trainer, engine):
            bench = Bench(trainer, engine, Path(folder) / "checkpoint")
            modes = list(dict.fromkeys(mode for mode, _ in todo))
            for mode in modes * WARM_UPS:
                bench.sync(mode, False)
            common = {"session": session, "model": options.model, "kv": options.kv, "params": bench.params}
            common["dtype"] = "float32"
            began = time.monotonic()
            for index, (mode, runs) in enumerate(todo):
                row = {**common, "mode": mode, "running": runs, **bench.sync(mode, runs)}
                row["load"] = round(os.getloadavg()[0], 2)
                found.append(row)
                with options.rows.open("a", encoding="utf8") as file:
                    file.write(json.dumps(row) + "\n")
                progress(index + 1, len(todo), time.monotonic() - began, row)
            bench.check(modes)
    return found


def progress(done: int, total: int, seconds: float, row: Row) -> None:
    """One line per sync."""
    left_s = seconds / done * (total - done)
    trainer = "running" if row["running"] else "paused"
    print(
        f"{done:4}/{total} {row['mode']:6} trainer {trainer:8} step {row['median_s'] * 1e3:6.1f} ms, "
        f"stall {row['stall_s'] * 1e3:8.1f} ms, until it serves {row['window_s'] * 1e3:7.0f} ms; "
        f"{left_s / 60:5.1f} min left",
        flush=True,
    )


@contextlib.contextmanager
def processes(options: argparse.Namespace, folder: Path) -> Iterator[tuple[Child, Child]]:
    """Hub, trainer and engine; the engine serves version 0 when they are handed out."""
    token = folder / "token"
    auth.create_token(token)
    stop, up, urls = threading.Event(), threading.Event(), list[str]()

    def announce(url: str) -> None:
        urls.append(url)
        up.set()

    hub = threading.Thread(
        target=run_hub,
        args=("127.0.0.1", 0, token),
        kwargs={"stop": stop, "announce": announce, "ttl_s": 30.0},
    )
    hub.start()
    try:
        if not up.wait(20):
            raise SystemExit("the hub did not come up within 20 s")
        told = json.dumps({"hub": urls[0], "token": str(token), "model": options.model, "kv": options.kv})
        log = folder / "children.log"
        with (
            Child([sys.executable, str(HERE / "trainer_child.py"), told], log) as trainer,
            Child([sys.executable, str(HERE / "engine_child.py"), told], log) as engine,
        ):
            yield trainer, engine
    finally:
        stop.set()
        hub.join(10)


class Bench:
    """Does syncs, one after the other, and keeps count of versions."""

    def __init__(self, trainer: Child, engine: Child, checkpoint: Path) -> None:
        self._trainer, self._engine, self._checkpoint = trainer, engine, checkpoint
        self.params = trainer.answer()["params"]
        trainer.ask(publish=0)
        self._compiled = engine.answer()["compiled"]
        self._number = 0

    def sync(self, mode: str, running: bool) -> Row:
        """One update, a batch that decodes, one sync in it. With ``running`` the trainer never rests.

        The trainer has just finished an update when the sync begins: that is when a stop begins too.
        """
        self._number += 1
        train_s = self._trainer.ask(train=1, running=running)["train_s"]
        self._engine.ask(start=BEFORE)
        beside = self._trainer.ask(hold=1)["trained"]
        way = {"stop": self._stop, "jax": self._jax, "sync": self._sync, "async": self._async}[mode]
        since, report = way(running)
        row = self._engine.ask(finish={"after": AFTER, "since": since})
        during = self._trainer.ask(hold=1)["trained"]
        steps = {"alone_s": train_s, "beside_s": [s for _, s in beside]}
        steps["overlapped_s"] = [s for began, s in during if began < since + row["window_s"]]
        return {**row, "train_s": train_s, "train_steps": steps, "report": report}

    def _stop(self, running: bool) -> tuple[float, Row]:
        began = self._pause()
        told = self._trainer.ask(save=str(self._checkpoint), running=running)
        report = self._engine.ask(load={"folder": str(self._checkpoint), "number": self._number})
        self._engine.ask(resume=1)
        return began, {**report, "nbytes": told["nbytes"], "save_s": told["ended"] - told["began"]}

    def _jax(self, running: bool) -> tuple[float, Row]:
        began = self._pause()
        told = self._trainer.ask(offer=self._number, running=running)
        report = self._engine.ask(pull={"address": told["address"], "number": self._number})
        self._engine.ask(resume=1)
        return began, {**report, "offer_s": told["ended"] - told["began"]}

    def _sync(self, running: bool) -> tuple[float, Row]:
        began = self._pause()
        told = self._trainer.ask(publish=self._number, running=running)
        report = self._engine.ask(take=self._number)
        self._engine.ask(resume=1)
        return began, {**report, **_blocked(told)}

    def _async(self, running: bool) -> tuple[float, Row]:
        self._engine.tell(take=self._number)
        told = self._trainer.ask(publish=self._number, running=running)
        report = self._engine.answer()
        return told["began"], {**report, **_blocked(told)}

    def _pause(self) -> float:
        self._engine.ask(pause=1)
        return time.time()

    def check(self, modes: list[str]) -> None:
        """One more sync of every mode: trainer and engine hold the same bits, and nothing was recompiled."""
        for mode in modes:
            self.sync(mode, False)
            theirs, ours = self._engine.ask(checksum=1), self._trainer.ask(checksum=1)
            if theirs["checksum"] != ours["checksum"]:
                raise SystemExit(f"{mode}: the engine holds other bits than the trainer handed out")
            if theirs["compiled"] != self._compiled:
                raise SystemExit(f"{mode}: compiled {theirs['compiled']}, at the start {self._compiled}")


def _blocked(told: Row) -> Row:
    """How long publish kept the training thread, by this clock and by the publisher's, the export in it."""
    blocked = {name: told[name] for name in ("stall_s", "export_s")}
    return {"publish_s": told["ended"] - told["began"], **blocked}


def _commit() -> str:
    git = ["git", "-C", str(HERE), "rev-parse", "--short", "HEAD"]
    return subprocess.run(git, capture_output=True, text=True, timeout=10).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
