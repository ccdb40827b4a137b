"""Joining a jax.distributed world of several processes, for engines and trainers alike."""

from __future__ import annotations

import logging

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jaxrl_sync.transfer import wire

log = logging.getLogger("jaxrl_sync.inference.world")


def join_world(
    coordinator: str, size: int, rank: int, *, timeout_s: float, shutdown_s: float, heartbeat_s: float = 100.0
) -> None:
    """Be rank ``rank`` of ``size``; blocks until all are there, then makes the first use of the backend.

    jax's preemption service stays off: it would take SIGTERM away from the handlers of this process, and
    its farewell lands on stderr after the line that names why a rank has ended. Its coordinator asks nobody
    for a token and would listen on every interface: where ranks meet on loopback, it listens there alone.
    """
    jax.config.update("jax_enable_preemption_service", False)
    loopback = wire.is_loopback(coordinator.rpartition(":")[0].strip("[]"))
    if rank == 0 and not loopback:
        log.warning(
            "JAX'S COORDINATOR AT %s LISTENS ON EVERY INTERFACE AND ASKS FOR NO TOKEN: trust that network",
            coordinator,
        )
    jax.distributed.initialize(
        coordinator,
        num_processes=size,
        process_id=rank,
        initialization_timeout=int(timeout_s),
        coordinator_bind_address=coordinator if loopback else None,
        heartbeat_timeout_seconds=int(heartbeat_s),
        shutdown_timeout_seconds=int(shutdown_s),
    )
    jax.devices()  # the first use of the backend is collective: all ranks make it here


def meet(mesh: Mesh) -> None:
    """Let all ranks of an engine's mesh find each other now, in a collective that compiles at once.

    For the first collective over a set of devices gloo allows 30 s between the ranks, which is less than the
    compilation of a step may differ by; later ones wait for slower ranks.
    """
    whole = PartitionSpec()
    total = jax.shard_map(
        lambda x: jax.lax.psum(x, "tp"), mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False
    )
    jax.block_until_ready(jax.jit(total)(np.float32(1)))
