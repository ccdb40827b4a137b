"""What must hold before a run starts, beyond its config: rooms take it, the task fits, ports are free."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import TYPE_CHECKING

from jaxrl_sync.config import ConfigError, RunConfig
from jaxrl_sync.sharding.errors import UserError
from jaxrl_sync.transfer import wire

if TYPE_CHECKING:
    from jaxrl_sync.tasks.protocol import Task


class PortError(UserError, OSError):
    """A port that the config names can't be listened on."""

    exit_code = 3

    def __str__(self) -> str:
        return str(self.args[0])


def check_rooms(config: RunConfig) -> None:
    """Make every room's own settings, each of which refuses what it can't work with."""
    from jaxrl_sync.config.checks import check_whole_run
    from jaxrl_sync.config.convert import to_engine
    from jaxrl_sync.orchestrator.config import loop_config
    from jaxrl_sync.trainer.config import validate_loss
    from jaxrl_sync.trainer.settings import loss_config, trainer_config

    check_whole_run(config)
    _check_requests(config)
    to_engine(config)
    loop_config(config)
    trainer_config(config)
    validate_loss(config.loop.staleness_bound, loss_config(config))


def _check_requests(config: RunConfig) -> None:
    """Raise for what engines would refuse of every request."""
    from jaxrl_sync.inference.errors import RequestError
    from jaxrl_sync.inference.request import MAX_N, Sampling

    drawn = config.loop.sampling
    for where, temperature in (("loop.sampling", drawn.temperature), ("eval", config.eval.temperature)):
        try:
            Sampling(temperature, drawn.top_k, drawn.top_p, drawn.max_tokens)
        except RequestError as error:
            raise ConfigError(f"{where}.{error}") from None
    for key, n in (("loop.group_size", config.loop.group_size), ("eval.samples", config.eval.samples)):
        if n > MAX_N:
            raise ConfigError(f"{key}={n}: expected at most {MAX_N}, what one request may ask for")


def check_task(config: RunConfig) -> None:
    """Build the tasks and compare their sizes with the model's and the engine's."""
    from jaxrl_sync.tasks.mixture import make_mixture

    mixture = make_mixture(config.task)
    vocabulary, names = mixture.tokenizer.vocab_size, ", ".join(repr(x) for x in mixture.labels)
    if vocabulary > config.model.vocab_size:
        raise ConfigError(
            f"model.vocab_size={config.model.vocab_size} is below the {vocabulary} tokens of task {names}"
        )
    for part in mixture.parts:
        _check_room(config, part.label, part.task)


def _check_room(config: RunConfig, name: str, task: Task) -> None:
    room = config.engine.max_len
    needed = task.max_prompt_len + config.loop.sampling.max_tokens
    if task.max_turns == 1 and needed > room:
        raise ConfigError(
            f"engine.max_len={room} is below {needed}: prompts of task {name!r} have up to "
            f"{task.max_prompt_len} tokens and loop.sampling.max_tokens={config.loop.sampling.max_tokens}"
        )


def check_channel(config: RunConfig, run_dir: Path, token: str) -> None:
    """Make the folder of the file channel, if the run has one, and see that its trainer can write there."""
    from jaxrl_sync.config.file_channel import channel_path, to_trust
    from jaxrl_sync.transfer.files.place import check_place

    path = channel_path(config, run_dir)
    if path is not None:
        check_place("sync.file.path", path, to_trust(config), token if config.sync.file.sealed else None)


def check_ports(config: RunConfig) -> None:
    """Raise ``PortError`` for a fixed port that is in use or can't be had."""
    if config.engine.port and config.engine.replicas > 1:
        raise ConfigError(
            f"engine.port={config.engine.port} can't serve engine.replicas={config.engine.replicas} on one "
            "machine; expected 0 (any free port)"
        )
    for key, port in (("hub.port", config.hub.port), ("engine.port", config.engine.port)):
        if port:
            _check_port(key, config.run.host, port)


def _check_port(key: str, host: str, port: int) -> None:
    if port > 65535:
        raise ConfigError(f"{key}={port}: expected 0 to 65535")
    try:
        wire.listen(host, port).close()
    except OSError as error:
        why = "is in use" if error.errno == errno.EADDRINUSE else f"can't be used: {error.strerror}"
        raise PortError(f"{key}: port {port} of {host} {why}") from None
