"""The processes of one trainer world: joining it, and agreeing on a step before any collective.

The one module that touches jax's private coordination client. Agreement goes through its key-value store
(half a millisecond a key), because a device collective that a peer never enters has no deadline.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import jax

from jaxrl_sync.inference.world import join_world
from jaxrl_sync.sharding.errors import UserError

_PREFIX = "jaxrl_sync/round"


class WorldError(UserError, RuntimeError):
    """The processes of the trainer world disagree, or one of them did not answer in time."""

    exit_code = 4


class World:
    """Rank ``rank`` of ``size`` processes. Owns the jax.distributed runtime when there are several."""

    def __init__(self, rank: int, size: int, coordinator: str | None, *, timeout_s: float = 120.0) -> None:
        if not 0 <= rank < size:
            raise WorldError(f"trainer rank {rank}: expected 0 to {size - 1}")
        self.rank, self.size = rank, size
        self._round = 0
        self._client: Any = None
        if size == 1:
            jax.devices()
            return
        if coordinator is None:
            raise WorldError(f"trainer rank {rank} of {size}: expected a coordinator address, found none")
        join_world(coordinator, size, rank, timeout_s=timeout_s, shutdown_s=30, heartbeat_s=30)
        from jax._src import distributed

        self._client = distributed.global_state.client

    def say(self, word: Mapping[str, Any]) -> None:
        """Speak in the next round without waiting for the others: the last word of a rank that leaves."""
        if self.size > 1:
            self._round += 1
            self._client.key_value_set(f"{_PREFIX}/{self._round}/{self.rank}", json.dumps(dict(word)))

    def gather(self, word: Mapping[str, Any], timeout_s: float) -> list[dict[str, Any]]:
        """Every rank's ``word`` of this round, in rank order; ``WorldError`` if one is not in time."""
        if self.size == 1:
            return [dict(word)]
        self.say(word)
        words: list[dict[str, Any]] = []
        for rank in range(self.size):
            try:
                text = self._client.blocking_key_value_get(
                    f"{_PREFIX}/{self._round}/{rank}", int(timeout_s * 1000)
                )
            except jax.errors.JaxRuntimeError as error:
                raise WorldError(
                    f"trainer rank {rank} of {self.size} did not reach {dict(word)} within {timeout_s:g} s"
                ) from error
            words.append(dict(json.loads(text)))
        if self._round > 2:  # everyone has read a round once all have spoken in the next one
            self._client.key_value_delete(f"{_PREFIX}/{self._round - 2}/{self.rank}")
        return words

    def share(self, word: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """Rank 0's ``word``, on every rank."""
        return self.gather(word if self.rank == 0 else {}, timeout_s)[0]

    def close(self) -> None:
        """Leave the world; waits for the peers up to the runtime's shutdown timeout. Idempotent."""
        if self._client is not None:
            self._client = None
            jax.distributed.shutdown()

    def __enter__(self) -> World:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:  # after a failure the peers may never come to the barrier of a shutdown
            self.close()
