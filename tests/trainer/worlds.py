"""A hub and the real trainer processes of a run on this machine, fed by the test as orchestrator."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from jaxrl_sync.batch.connection import Ack, BatchSender
from jaxrl_sync.batch.frame import BatchHeader, encode_batch
from jaxrl_sync.batch.pack import PackedBatch
from jaxrl_sync.config.load import save, validate
from jaxrl_sync.launch.commands import command
from jaxrl_sync.launch.environment import base_environment, role_environment
from jaxrl_sync.transfer import auth
from jaxrl_sync.transfer.hub.client import HubClient, Member
from jaxrl_sync.transfer.hub.server import run_hub
from tests.ports import free_port
from tests.trainer.batches import MODEL, ROWS, SEQ_LEN, packed, samples

DEADLINE_S = 420.0


def settings(processes: int, mesh: dict[str, int], **sections: Any) -> dict[str, Any]:
    """A run's config around the tests' model; four devices in all."""
    names = ("vocab_size", "num_layers", "d_model", "num_heads", "num_kv_heads", "head_dim", "d_ff")
    trainer = {
        "processes": processes,
        "devices": 4 // processes,
        "mesh": mesh,
        "rows": ROWS,
        "seq_len": SEQ_LEN,
        "logprob_chunk": 8,
        "init_std": 0.2,
        "learning_rate": 1e-2,
    }
    return {
        "run": {"steps": 8, "start_timeout_s": 200.0, "stuck_timeout_s": 20.0},
        "model": {name: getattr(MODEL, name) for name in names},
        "task": {"name": "addition"},
        "trainer": {**trainer, **sections.get("trainer", {})},
        "loss": {"correction": "clip", **sections.get("loss", {})},
        "loop": {"staleness_bound": 2, "sampling": {"max_tokens": 8}},
        "engine": {"max_len": SEQ_LEN, "slots": 8, "devices": 2, **sections.get("engine", {})},
    }


class TrainerWorld:
    """Owns the processes of one trainer world. ``stop`` drains them; leaving the block kills what is left."""

    def __init__(self, run_dir: Path, data: dict[str, Any], hub_url: str, resume: bool = False) -> None:
        config = validate(data)
        save(config, run_dir / "config.toml")
        self.token_file, self.hub_url, self.size = run_dir / "token", hub_url, config.trainer.processes
        cache = run_dir.parent.parent / "xla-cache"  # the worlds of one test session compile the same
        env = role_environment(base_environment(os.environ, cache / "run"), config.trainer)
        coordinator = f"127.0.0.1:{free_port()}"
        self.processes = []
        for rank in range(self.size):
            args = ["--run-dir", str(run_dir), "--hub", hub_url, "--rank", str(rank)]
            args += ["--coordinator", coordinator] if self.size > 1 else []
            args += ["--resume"] if resume else []
            log = (run_dir / f"trainer-{rank}.log").open("ab")
            self.processes.append(
                subprocess.Popen(command("trainer", *args), env=env, stdout=log, stderr=subprocess.STDOUT)
            )
            log.close()
        self._logs = [run_dir / f"trainer-{rank}.log" for rank in range(self.size)]

    def members(self) -> list[Member]:
        """The ranks, once all take batches; fails early if one of them died."""
        with HubClient(self.hub_url, self.token_file) as hub:
            deadline = time.monotonic() + DEADLINE_S
            while time.monotonic() < deadline:
                found = [m for m in hub.members("trainer") if "data_url" in m.info]
                if len(found) == self.size:
                    return found
                assert all(p.poll() is None for p in self.processes), self.log()
                time.sleep(0.2)
        raise AssertionError(f"trainer ranks did not get ready:\n{self.log()}")

    @contextlib.contextmanager
    def senders(self) -> Iterator[list[BatchSender]]:
        """One connected sender per rank, in rank order."""
        token = auth.load_token(self.token_file)
        members = sorted(self.members(), key=lambda m: m.rank)
        with contextlib.ExitStack() as stack:
            yield [
                stack.enter_context(
                    BatchSender(
                        m.info["data_url"],
                        token=token,
                        run_id=auth.run_id_of(token),
                        data_rank=m.info["data_rank"],
                    )
                )
                for m in members
            ]

    def stop(self) -> list[int]:
        """SIGTERM to all; their exit codes."""
        for process in self.processes:
            process.send_signal(signal.SIGTERM)
        return [p.wait(240) for p in self.processes]

    def log(self) -> str:
        """What the processes said."""
        return "\n".join(path.read_text()[-3000:] for path in self._logs)

    def __enter__(self) -> TrainerWorld:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()


@contextlib.contextmanager
def hub(run_dir: Path) -> Iterator[str]:
    """A hub in a thread of this process; its URL. Makes the run token."""
    run_dir.mkdir(parents=True, exist_ok=True)
    auth.create_token(run_dir / "token")
    stop, up, urls = threading.Event(), threading.Event(), []

    def announce(url: str) -> None:
        urls.append(url)
        up.set()

    thread = threading.Thread(
        target=run_hub,
        args=("127.0.0.1", 0, run_dir / "token"),
        kwargs={"stop": stop, "announce": announce},
    )
    thread.start()
    try:
        assert up.wait(30)
        yield urls[0]
    finally:
        stop.set()
        thread.join(30)


def batch_of(step: int, ranks: int) -> PackedBatch:
    """The batch of one step: the same samples however many data ranks there are."""
    return packed(samples(24, seed=step), rows=ROWS // ranks, ranks=ranks)


def frames_of(step: int, ranks: int, **header: Any) -> list[bytes]:
    """The frames of one step, one per data rank."""
    batch = batch_of(step, ranks)
    shape = (batch.micro_batches, batch.config.rows, batch.config.seq_len, batch.num_valid_tokens)
    cursor = {"prompts": 24 * step}
    return [
        encode_batch(BatchHeader(step, d, *shape, cursor=cursor, **header), batch.for_rank(d))
        for d in range(ranks)
    ]


def send_all(senders: Sequence[BatchSender], frames: Sequence[tuple[int, bytes]]) -> list[Ack]:
    """(step, frame) to each rank at the same time; all acknowledgements."""
    with ThreadPoolExecutor(len(senders)) as pool:
        calls = [
            pool.submit(sender.send, step, data, DEADLINE_S)
            for sender, (step, data) in zip(senders, frames, strict=True)
        ]
        return [call.result() for call in calls]


def train(senders: Sequence[BatchSender], steps: Sequence[int], **header: Any) -> list[Ack]:
    """Several steps through one world; rank 0's acknowledgements."""
    acks = []
    for step in steps:
        frames = frames_of(step, len(senders), **header)
        acks.append(send_all(senders, [(step, data) for data in frames])[0])
    return acks
