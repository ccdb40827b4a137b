"""Inside one process of a run: signals, the role's entry point, its last line and its exit code."""

from __future__ import annotations

import logging
import os
import resource
import signal
import sys
import time
import traceback
from types import FrameType

from jaxrl_sync.config.errors import ConfigError
from jaxrl_sync.config.process import ProcessContext
from jaxrl_sync.launch.certificates import server_tls
from jaxrl_sync.launch.commands import engines
from jaxrl_sync.launch.worker import ECHO_S, ERROR_PREFIX, missing_resource
from jaxrl_sync.sharding.errors import UserError
from jaxrl_sync.transfer import clean

MAX_DESCRIPTORS = 1 << 16


def run_role(context: ProcessContext) -> int:
    """Play ``context.role`` until it is done or told to stop; the exit code of the process.

    The last line on stderr names the cause of a failure. A rank of a bigger world leaves without the
    interpreter's farewell when it fails: that would wait for peers that may hang.
    """
    _stop_on_signals(context)
    _raise_descriptors()
    _log_to_stderr()
    try:
        _enter(context)
        return 0
    except UserError as error:
        code, cause = error.exit_code, str(error)
    except Exception as error:
        line = missing_resource(error) if isinstance(error, OSError) else None
        if line is None:
            traceback.print_exc()
        code, cause = (1, f"{type(error).__name__}: {error}") if line is None else (3, line)
    print(ERROR_PREFIX + one_line(cause), file=sys.stderr, flush=True)
    if context.world_size > 1:
        sys.stdout.flush()
        clean.remove_mine()
        os._exit(code)
    return code


def one_line(text: str) -> str:
    """``text`` without line breaks."""
    return " ".join(str(text).split())


def _raise_descriptors() -> None:
    """As many open files and sockets as this user may have: the usual 1024 are few for a fleet."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _log_to_stderr() -> None:
    """Everything from INFO on; of libraries that log every request only warnings."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for name in ("httpx", "httpcore", "uvicorn", "jax", "absl", "orbax"):
        logging.getLogger(name).setLevel(logging.WARNING)


def _stop_on_signals(context: ProcessContext) -> None:
    """The first SIGTERM or SIGINT asks the role to drain, one more than ``ECHO_S`` later ends the process."""
    asked_at = 0.0

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal asked_at
        if not context.stop.is_set():
            asked_at = time.monotonic()
            context.stop.set()
        elif time.monotonic() - asked_at > ECHO_S:
            clean.remove_mine()  # nobody closes the slots any more
            os._exit(130)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)


def _enter(context: ProcessContext) -> None:
    if context.role == "hub":
        _run_hub(context)
    elif context.role == "trainer":
        from jaxrl_sync.trainer.process import run as run_trainer

        colocated = context.config.engine.placement != "disaggregated" and context.rank == 0
        run_trainer(context, server_tls(context.config, context.run_dir) if colocated else None)
    elif context.role == "orchestrator":
        from jaxrl_sync.orchestrator.process import run as run_orchestrator

        run_orchestrator(context)
    elif context.role == "engine":
        _run_engine(context)
    else:
        raise ValueError(f"unknown role {context.role!r}")


def _run_hub(context: ProcessContext) -> None:
    from jaxrl_sync.transfer.hub.server import run_hub

    settings = context.config
    run_hub(
        settings.run.host,
        context.port if context.port is not None else settings.hub.port,
        context.token_file,
        stop=context.stop,
        announce=context.announce,
        ttl_s=settings.hub.ttl_s,
        tls=server_tls(settings, context.run_dir),
        metrics_open=settings.hub.metrics_open,
    )


def _run_engine(context: ProcessContext) -> None:
    from jaxrl_sync.config.convert import to_decoder, to_engine, to_subscriber
    from jaxrl_sync.config.file_channel import to_file_source
    from jaxrl_sync.inference.process import run as run_engine

    config = context.config
    own = engines(config)
    if context.replica not in own:
        raise ConfigError(
            f"engine --replica {context.replica}: expected {' or '.join(map(str, own)) or 'none'} "
            f"(engine.placement={config.engine.placement!r}, engine.replicas={config.engine.replicas})"
        )
    timeline = context.open_timeline()
    try:
        run_engine(
            to_engine(config),
            to_decoder(config),
            to_subscriber(config, context.replica, context.rank),
            dtype=config.engine.dtype,
            swap_policy="auto" if config.sync.initiator == "pull" else "approved",
            auto_mode=config.sync.pause_mode,
            hub_url=context.wait_hub(config.run.start_timeout_s),
            token_file=context.token_file,
            host=config.run.host,
            port=context.port if context.port is not None else config.engine.port,
            replica=context.replica,
            coordinator=context.coordinator,
            tokenizer=config.model.tokenizer,
            tls=server_tls(config, context.run_dir),
            metrics_open=config.hub.metrics_open,
            files=to_file_source(config, context.run_dir, context.rank),
            stop=context.stop,
            announce=context.announce,
            record=timeline.record,
        )
    finally:
        timeline.close()
