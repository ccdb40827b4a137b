"""``jaxrl-sync engine CONFIG``: one engine that serves a checkpoint or random weights, without a run."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from jaxrl_sync.config import ConfigError, MissingFileError, RunConfig, load
from jaxrl_sync.launch.certificates import server_tls
from jaxrl_sync.launch.environment import role_environment
from jaxrl_sync.launch.worker import ECHO_S


def serve(options: argparse.Namespace, overrides: Mapping[str, Any]) -> int:
    """Serve until SIGTERM or SIGINT; prints the URL and the token file. Returns the exit code."""
    config = load(options.standalone, overrides)
    if not options.random_weights and options.checkpoint is None:
        raise ConfigError("engine CONFIG needs the weights to serve: --checkpoint DIR or --random-weights")
    checkpoint = Path(options.checkpoint) if options.checkpoint is not None else None
    if checkpoint is not None and not checkpoint.is_dir():
        raise MissingFileError(f"--checkpoint {checkpoint}: no such folder")
    if config.engine.processes > 1:
        raise ConfigError(f"engine.processes={config.engine.processes}: an engine alone is one process")
    os.environ.update(role_environment(os.environ, config.engine))  # before jax is imported
    from jaxrl_sync.config.convert import to_decoder, to_engine
    from jaxrl_sync.inference.server import ServerConfig
    from jaxrl_sync.inference.standalone import Standalone, serve_standalone

    token_file = Path(options.token_file or Path(config.run.root) / "engine-token")
    tls = server_tls(config, token_file.absolute().parent)
    vouched = f", certificate {tls.cert}" if tls is not None else ""
    port = options.port if options.port is not None else config.engine.port
    serve_standalone(
        Standalone(
            engine=to_engine(config),
            model=to_decoder(config),
            checkpoint=checkpoint,
            tokenizer=config.model.tokenizer or (None if checkpoint else _task_alphabet(config)),
            tp=config.engine.devices,
            dtype=config.engine.dtype,
        ),
        token=_token(token_file),
        server=ServerConfig(host=config.run.host, port=port, tls=tls),
        stop=_stop_event(),
        announce=lambda url: print(
            f"serving on {url}, token file {token_file.absolute()}{vouched}", flush=True
        ),
    )
    return 0


def _task_alphabet(config: RunConfig) -> str | None:
    """The task's own characters as a tokenizer spec: how to talk to random weights of a run's shape."""
    from jaxrl_sync.inference.tokenizer import CharTokenizer
    from jaxrl_sync.tasks.mixture import make_mixture

    tokenizer = make_mixture(config.task).tokenizer
    return f"char:{tokenizer.alphabet}" if isinstance(tokenizer, CharTokenizer) else None


def _token(path: Path) -> str:
    """The token in ``path``, made there if the file does not exist."""
    from jaxrl_sync.transfer.auth import create_token, load_token

    if path.exists():
        return load_token(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    return create_token(path)


def _stop_event() -> threading.Event:
    """Set by the first SIGTERM or SIGINT; one more than ``ECHO_S`` later ends the process."""
    stop = threading.Event()
    asked_at = 0.0

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal asked_at
        if not stop.is_set():
            asked_at = time.monotonic()
            stop.set()
        elif time.monotonic() - asked_at > ECHO_S:
            sys.stderr.flush()
            os._exit(130)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    return stop
