"""Runs the real orchestrator process function against the doubles of ``doubles.py``."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxrl_sync.config.load import validate
from jaxrl_sync.config.process import ProcessContext
from jaxrl_sync.orchestrator.process import run
from jaxrl_sync.transfer import auth

from .doubles import EngineBehaviour, EngineDouble, TrainerDouble, hub

MODEL = {
    "vocab_size": 16,
    "num_layers": 1,
    "d_model": 8,
    "num_heads": 2,
    "num_kv_heads": 2,
    "head_dim": 4,
    "d_ff": 8,
}


def context(run_dir: Path, hub_url: str, **sections: Any) -> ProcessContext:
    """An orchestrator's context: 3 prompts of 4 samples per step over the faulty (well-behaved) task."""
    data: dict[str, Any] = {
        "run": {"steps": 6, "start_timeout_s": 10.0},
        "model": MODEL,
        "task": {"name": "faulty", "args": {"size": 1000, "max_new_tokens": 4}},
        "loss": {"correction": "tis_token"},
        "loop": {
            "staleness_bound": 2,
            "prompts_per_step": 3,
            "group_size": 4,
            "group_timeout_s": 10.0,
            "swap_timeout_s": 5.0,
            "step_timeout_s": 10.0,
            "target_lag": 1,
            "sampling": {"max_tokens": 4},
        },
        "eval": {"prompts": 4, "timeout_s": 20.0},
        "hub": {"ttl_s": 2.0},
    }
    for name, values in sections.items():
        merged = {**data.get(name, {}), **values}
        data[name] = {key: value for key, value in merged.items() if value is not None}
    return ProcessContext(
        role="orchestrator",
        name="orchestrator",
        config=validate(data),
        run_dir=run_dir,
        token_file=run_dir / "token",
        hub_url=hub_url,
    )


@contextlib.contextmanager
def world(
    run_dir: Path, *, engines: int = 2, moves_itself: bool = False, colocated: bool = False, **trainer: Any
) -> Iterator[tuple[str, list[EngineDouble], TrainerDouble]]:
    """A hub, engine doubles and a trainer double."""
    run_dir.mkdir(parents=True, exist_ok=True)
    if not (run_dir / "token").exists():
        auth.create_token(run_dir / "token")
    stop = threading.Event()
    with hub(run_dir / "token", stop) as url, contextlib.ExitStack() as stack:
        behaviours = [EngineBehaviour(moves_itself=moves_itself, colocated=colocated) for _ in range(engines)]
        doubles = [EngineDouble(f"engine-{i}", url, run_dir / "token", b) for i, b in enumerate(behaviours)]
        for double in doubles:
            stack.callback(double.close)
        learner = TrainerDouble(url, run_dir / "token", hub_stop=stop, **trainer)
        stack.callback(learner.close)
        yield url, doubles, learner


class Running:
    """The orchestrator in a thread; ``error`` is what ended it."""

    def __init__(self, process: ProcessContext) -> None:
        self.process = process
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            run(self.process)
        except BaseException as error:
            self.error = error

    def join(self, timeout_s: float) -> None:
        """Wait for its end; raises what it raised."""
        assert self.ended_within(timeout_s), (
            f"the orchestrator did not end within {timeout_s} s: {self.progress()}"
        )
        if self.error is not None:
            raise self.error

    def ended_within(self, timeout_s: float) -> bool:
        """Whether it ended, with or without an error."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def exit_code(self) -> int:
        """What the process would have returned."""
        return 0 if self.error is None else int(getattr(self.error, "exit_code", 1))

    def progress(self) -> dict[str, Any]:
        """The newest progress.json, empty before the first."""
        path = self.process.run_dir / "progress.json"
        return dict(json.loads(path.read_text())) if path.exists() else {}

    @property
    def summary(self) -> dict[str, Any]:
        """summary.json."""
        return dict(json.loads((self.process.run_dir / "summary.json").read_text()))

    def rows(self, kind: str) -> list[dict[str, Any]]:
        """Rows of metrics.jsonl of one kind."""
        lines = (self.process.run_dir / "metrics.jsonl").read_text().splitlines()
        return [r for r in map(json.loads, lines) if r["kind"] == kind]
