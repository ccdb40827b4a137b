"""Which processes a run consists of and how each is started: the same commands that a cluster starts."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from jaxrl_sync.config import RunConfig
from jaxrl_sync.config.sections import RoleSection
from jaxrl_sync.launch.environment import base_environment, huge_pages, role_environment
from jaxrl_sync.launch.worker import ProcessSpec, WorkerSpec


def workers(
    config: RunConfig, run_dir: Path, inherited: Mapping[str, str], *, resume: bool = False
) -> list[WorkerSpec]:
    """Hub, trainer, engines and orchestrator of ``config``, in the order they are started."""
    base = base_environment(inherited, run_dir)
    common = ("--run-dir", str(run_dir), "--config", str(run_dir / "config.toml"))
    again = ("--resume",) if resume else ()
    plain = role_environment(base, RoleSection())
    return [
        WorkerSpec("hub", "hub", (ProcessSpec("hub", command("hub", *common), plain),)),
        _world("trainer", "trainer", config.trainer, base, (*common, *again)),
        *(_engine(config, e, base, common) for e in engines(config)),
        WorkerSpec(
            "orchestrator",
            "orchestrator",
            (ProcessSpec("orchestrator", command("orchestrator", *common, *again), plain),),
        ),
    ]


def engines(config: RunConfig) -> range:
    """The replicas that have processes of their own: a colocated one, number 0, lives in the trainer's."""
    return range(0 if config.engine.placement == "disaggregated" else 1, config.engine.replicas)


def command(role: str, *arguments: str) -> tuple[str, ...]:
    """The command line of one role."""
    return (sys.executable, "-P", "-m", "jaxrl_sync.cli", role, *arguments)


def process_name(role: str, replica: int, rank: int) -> str:
    """``hub``, ``orchestrator``, ``trainer-<rank>``, ``engine-<replica>`` and ``engine-<replica>.<rank>``."""
    if role == "trainer":
        return f"trainer-{rank}"
    if role == "engine":
        return f"engine-{replica}" if rank == 0 else f"engine-{replica}.{rank}"
    return role


def _engine(config: RunConfig, replica: int, base: Mapping[str, str], common: tuple[str, ...]) -> WorkerSpec:
    arguments = (*common, "--replica", str(replica))
    return _world(f"engine-{replica}", "engine", config.engine, base, arguments, replica)


def _world(
    name: str,
    role: str,
    section: RoleSection,
    base: Mapping[str, str],
    arguments: tuple[str, ...],
    replica: int = 0,
) -> WorkerSpec:
    env = role_environment(huge_pages(base) if section.platform == "cpu" else base, section)
    ranks = tuple(
        ProcessSpec(process_name(role, replica, rank), command(role, *arguments, "--rank", str(rank)), env)
        for rank in range(section.processes)
    )
    return WorkerSpec(name, role, ranks, one_world=section.processes > 1)
