"""``sync.mode``: what its three names say about the loop, and the settings that contradict one.

    sync            barrier: batch x is generated on version x-1, once every engine that serves holds it
    one_step_off    batch x+1 is generated, whole, on version x-1 while batch x is trained
    async           engines take versions while they generate; samples lag by up to loop.staleness_bound

The mode sets ``loop.staleness_bound`` (0 and 1) where the config leaves it out, and the bound the mode.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jaxrl_sync.config.errors import ConfigError

if TYPE_CHECKING:
    from jaxrl_sync.config.sections import RunConfig

BOUNDS = {"sync": 0, "one_step_off": 1}


def resolve(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """``data`` with whichever of ``sync.mode`` and ``loop.staleness_bound`` it lacks; types are unchecked."""
    sync, loop = data.get("sync", {}), data.get("loop", {})
    if not isinstance(sync, Mapping) or not isinstance(loop, Mapping):
        return data
    mode, bound = sync.get("mode"), loop.get("staleness_bound")
    if mode is None and type(bound) is int:
        return {**data, "sync": {**sync, "mode": "sync" if bound == 0 else "async"}}
    if bound is None and isinstance(mode, str) and mode in BOUNDS:
        return {**data, "loop": {**loop, "staleness_bound": BOUNDS[mode]}}
    if bound is None and mode == "async":
        raise ConfigError("sync.mode='async' needs loop.staleness_bound, found nothing; expected at least 1")
    return data


def check_mode(config: RunConfig) -> None:
    """Raise ``ConfigError`` for a setting that the mode excludes, naming both."""
    mode, bound, sync = config.sync.mode, config.loop.staleness_bound, config.sync
    if bound != BOUNDS.get(mode, bound):
        raise ConfigError(f"sync.mode={mode!r} means loop.staleness_bound={BOUNDS[mode]}, found {bound}")
    if mode == "async" and bound == 0:
        raise ConfigError("sync.mode='async' needs loop.staleness_bound >= 1, found 0; expected mode 'sync'")
    if mode != "async" and sync.every_steps > 1:
        raise ConfigError(
            f"sync.mode={mode!r} publishes after every update, found sync.every_steps={sync.every_steps}"
        )
    if mode == "one_step_off" and sync.initiator == "pull":
        raise ConfigError(
            "sync.mode='one_step_off' needs sync.initiator='push', found 'pull': engines that take versions "
            "by themselves would change weights in the middle of a batch"
        )
    _check_placement(config)
    if mode == "one_step_off" and config.loop.pipeline_depth == 1:
        raise ConfigError(
            "sync.mode='one_step_off' generates one batch beside the one in training, found "
            "loop.pipeline_depth=1; expected 0 or at least 2"
        )


def _check_placement(config: RunConfig) -> None:
    placement, replicas, sync = config.engine.placement, config.engine.replicas, config.sync
    if placement == "disaggregated":
        if config.trainer.offload != "none":
            raise ConfigError(
                f"trainer.offload={config.trainer.offload!r} needs a colocated engine, found "
                "engine.placement='disaggregated'"
            )
        return
    if placement == "colocated" and replicas != 1:
        raise ConfigError(f"engine.placement='colocated' is one replica, found engine.replicas={replicas}")
    if placement == "colocated" and config.eval.pin:
        raise ConfigError(
            "eval.pin=true needs a trainer that keeps versions for engines elsewhere, found "
            "engine.placement='colocated'"
        )
    if placement == "mixed" and replicas < 2:
        raise ConfigError(
            f"engine.placement='mixed' is one replica with the trainer and others, found "
            f"engine.replicas={replicas}; expected at least 2"
        )
    if sync.mode == "one_step_off":
        raise ConfigError(
            "sync.mode='one_step_off' generates while the trainer trains, found "
            f"engine.placement={placement!r}, where they take turns; expected mode 'sync' or 'async'"
        )
    if sync.every_steps > 1:
        raise ConfigError(
            f"engine.placement={placement!r} takes every update, found sync.every_steps={sync.every_steps}"
        )
