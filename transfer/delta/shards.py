"""Shards compared where they lie, each device by a program of its own: no collective, no other process.

Links ask for comparisons from their own threads, at moments that no two processes share. A computation over
the mesh of a world would have to be started in the same order everywhere, also beside the train step;
programs of single devices need no such order.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping

import jax

from jaxrl_sync.transfer.delta.bits import CHUNK_ELEMENTS, DeltaError, unsigned
from jaxrl_sync.transfer.delta.buckets import Ladder
from jaxrl_sync.transfer.delta.encode import Encoded, Encoder, Implementation, collect
from jaxrl_sync.transfer.delta.sparse import Delta

Key = tuple[int, str]
"""(device, path) of a shard."""

Shards = Mapping[Key, jax.Array]

FIRST_LEVEL = 1
"""Where encoders begin on the ladder: updates of a percent fit, and are compiled for at once."""

logger = logging.getLogger("jaxrl_sync.transfer")


def comparable(shard: jax.Array) -> bool:
    """Whether jitted encoders take a shard: elements of 1, 2 or 4 bytes, in its device's own memory."""
    try:
        unsigned(shard.dtype)
    except DeltaError:
        return False
    (device,) = shard.devices()
    return shard.sharding.memory_kind in (None, device.default_memory().kind)


class ShardEncoders:
    """One encoder per device. Keeps compiled functions and their levels; owns no device memory.

    Calls come from one thread at a time. The implementation is the fastest one of each device's platform
    unless ``implementation`` names one; ``interpret`` runs Pallas kernels on a CPU.
    """

    def __init__(
        self,
        threads: int = 1,
        implementation: Implementation | None = None,
        ladder: Ladder | None = None,
        interpret: bool = False,
    ) -> None:
        self._threads = threads
        self._implementation: Implementation | None = implementation
        self._ladder = ladder or Ladder()
        self._interpret = interpret
        self._encoders: dict[int, Encoder] = {}

    def prepare(self, shards: Shards, keys: Iterable[Key]) -> None:
        """Compile for these shards, by a first comparison with themselves where there was none yet."""
        for device, paths in _by_device(shards, keys).items():
            before = self._encoders.get(device)
            encoder = self._encoder(device, shards, paths)
            if encoder is not before:
                tree = {path: shards[device, path] for path in paths}
                try:
                    jax.block_until_ready(encoder.at_level(encoder.level)(tree, tree))
                except jax.errors.JaxRuntimeError as error:
                    _warn(device, error)

    def compare(self, old: Shards, new: Shards, keys: Iterable[Key]) -> dict[Key, list[Delta] | None]:
        """The changes of each shard, chunk by chunk, with old bits, on the host; None: look for yourself.

        That is where more changed than the ladder has room for, where the dtype or memory is none that
        encoders take, and where a device had no room for the comparison (one line in the log). All devices
        work side by side; blocks until the last one is through.
        """
        keys = list(keys)
        found: dict[Key, list[Delta] | None] = dict.fromkeys(keys)
        running: list[tuple[int, Encoder, Callable[[], dict[str, list[Encoded] | None]]]] = []
        for device, paths in _by_device(new, keys).items():
            encoder = self._encoder(device, new, paths)
            trees = [{path: shards[device, path] for path in paths} for shards in (old, new)]
            try:
                running.append((device, encoder, encoder.start(*trees)))
            except jax.errors.JaxRuntimeError as error:
                _warn(device, error)
        for device, encoder, finish in running:
            try:
                found.update(_collected(device, encoder, finish()))
            except jax.errors.JaxRuntimeError as error:
                _warn(device, error)
        return found

    def _encoder(self, device: int, shards: Shards, paths: list[str]) -> Encoder:
        """The device's encoder, made anew when it is to compare other tensors than before."""
        encoder = self._encoders.get(device)
        tree = {path: shards[device, path] for path in paths}
        looks = {path: (site.shape, site.dtype) for path, site in encoder.sites.items()} if encoder else None
        if encoder is None or looks != {path: (x.shape, x.dtype) for path, x in tree.items()}:
            encoder = Encoder(
                tree,
                ladder=self._ladder,
                keep_old=True,
                implementation=self._implementation,
                threads=self._threads,
                interpret=self._interpret,
            )
            encoder.level = min(FIRST_LEVEL, len(self._ladder.shares) - 1)
            self._encoders[device] = encoder
        return encoder


def _by_device(shards: Shards, keys: Iterable[Key]) -> dict[int, list[str]]:
    """The paths of each device that encoders take, in order."""
    found: dict[int, list[str]] = {}
    for device, path in sorted(keys):
        if comparable(shards[device, path]):
            found.setdefault(device, []).append(path)
    return found


def _collected(
    device: int, encoder: Encoder, found: Mapping[str, list[Encoded] | None]
) -> dict[Key, list[Delta] | None]:
    """On the host; transfers of all tensors are started before the first is waited for."""
    for leaf in jax.tree.leaves(dict(found)):
        leaf.copy_to_host_async()
    collected: dict[Key, list[Delta] | None] = {}
    for path, parts in found.items():
        if parts is None:
            collected[device, path] = None
        else:
            ((_, deltas),) = collect(encoder.sites[path], parts, CHUNK_ELEMENTS)
            collected[device, path] = deltas
    return collected


def _warn(device: int, error: Exception) -> None:
    logger.warning("device %d compares nothing this time, the host does: %s", device, str(error)[:300])
