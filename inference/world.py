"""Joining a jax.distributed world of several processes, for engines and trainers alike."""

from __future__ import annotations

import jax


def join_world(
    coordinator: str, size: int, rank: int, *, timeout_s: float, shutdown_s: float, heartbeat_s: float = 100.0
) -> None:
    """Be rank ``rank`` of ``size``; blocks until all are there, then makes the first use of the backend.

    jax's preemption service stays off: it would take SIGTERM away from the handlers of this process, and
    its farewell lands on stderr after the line that names why a rank has ended.
    """
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        coordinator,
        num_processes=size,
        process_id=rank,
        initialization_timeout=int(timeout_s),
        heartbeat_timeout_seconds=int(heartbeat_s),
        shutdown_timeout_seconds=int(shutdown_s),
    )
    jax.devices()  # the first use of the backend is collective: all ranks make it here
