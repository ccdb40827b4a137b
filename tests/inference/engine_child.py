"""One rank of an engine as a process, for tests: ``python -m tests.inference.engine_child JSON``."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

from jaxrl_sync.config.process import ProcessContext
from jaxrl_sync.inference.config import EngineConfig
from jaxrl_sync.inference.process import run
from jaxrl_sync.launch import roles
from jaxrl_sync.sharding.presets.qwen3 import DecoderConfig
from jaxrl_sync.transfer.config import SubscriberConfig


def engine_config(fields: dict[str, Any]) -> EngineConfig:
    """The config of its JSON form, lists turned back into tuples."""
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
    return EngineConfig(**values)


def play(context: ProcessContext) -> None:
    """Be the rank that the JSON of the command line describes."""
    spec = json.loads(sys.argv[1])
    rows = Path(spec["rows"])
    rows.parent.mkdir(parents=True, exist_ok=True)

    def record(kind: str, t0: float, t1: float, *, version: int | None = None) -> None:
        with rows.open("a") as file:
            file.write(json.dumps({"kind": kind, "t0": t0, "t1": t1, "version": version}) + "\n")

    def announce(url: str | None = None) -> None:
        Path(spec["announce"]).write_text(json.dumps({"url": url, "at": time.time()}))

    run(
        engine_config(spec["engine"]),
        DecoderConfig(**spec["model"]),
        SubscriberConfig(**spec["subscriber"]),
        dtype="float32",
        swap_policy=spec["swap_policy"],
        hub_url=spec["hub"],
        token_file=Path(spec["token_file"]),
        coordinator=spec["coordinator"],
        port=spec["port"],
        stop=context.stop,
        announce=announce,
        record=record,
    )


def main() -> int:
    """The exit code that a process of a run would have."""
    subscriber: dict[str, Any] = json.loads(sys.argv[1])["subscriber"]
    context = ProcessContext(
        role="engine",
        name="engine-0",
        config=None,  # type: ignore[arg-type]
        run_dir=Path(),
        token_file=Path(),
        rank=subscriber["rank"],
        world_size=subscriber["size"],
    )
    roles._enter = play
    return roles.run_role(dataclasses.replace(context))


if __name__ == "__main__":
    sys.exit(main())
