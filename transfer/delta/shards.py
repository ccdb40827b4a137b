"""Shards compared where they lie, each device by a program of its own: no collective, no other process.

Links ask for comparisons from their own threads, at moments that no two processes share. A computation over
the mesh of a world would have to be started in the same order everywhere, also beside the train step;
programs of single devices need no such order.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax

from jaxrl_sync.transfer.delta import xla
from jaxrl_sync.transfer.delta.bits import CHUNK_ELEMENTS, DeltaError, chunks, unsigned
from jaxrl_sync.transfer.delta.buckets import Ladder
from jaxrl_sync.transfer.delta.encode import Encoded, Encoder, Implementation, collect
from jaxrl_sync.transfer.delta.sparse import Delta

Key = tuple[int, str]
"""(device, path) of a shard."""

Shards = Mapping[Key, jax.Array]

Words = dict[str, jax.Array] | None

_Looks = tuple[tuple[str, tuple[int, ...], Any], ...]

FROM_DEVICES = (RuntimeError, ValueError)
"""What jax raises for what a device can't do, `jax.errors.JaxRuntimeError` among them, and for an array that
was donated: a ValueError where that happens while a program is being started with it."""

FIRST_LEVEL = 1
"""Where encoders begin on the ladder: updates of a percent fit, and are compiled for at once."""

KEPT = 3
"""Encoders that are kept per device, as many with marks as without: of all tensors, of those that have no
marks, and of those whose marks are checked. A new one is compiled anew."""

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
    """Encoders of each device. Keeps compiled functions and their levels; owns no device memory.

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
        self.made = 0
        """Encoders that were made so far."""
        self._encoders: dict[tuple[int, bool], dict[_Looks, Encoder]] = {}

    def prepare(self, shards: Shards, keys: Iterable[Key]) -> None:
        """Compile for these shards, by a first comparison with themselves where there was none yet."""
        for device, paths in _by_device(shards, keys).items():
            before = self.made
            encoder = self._encoder(device, shards, paths)
            if self.made > before:
                tree = {path: shards[device, path] for path in paths}
                try:
                    jax.block_until_ready(encoder.at_level(encoder.level)(tree, tree))
                except jax.errors.JaxRuntimeError as error:
                    _warn(device, error)

    def compare(
        self, old: Shards, new: Shards, keys: Iterable[Key], marks: Shards | None = None
    ) -> dict[Key, list[Delta] | None]:
        """The changes of each shard, chunk by chunk, with old bits, on the host; None: look for yourself.

        That is where more changed than the ladder has room for, where the dtype or memory is none that
        encoders take, and where a device had no room for the comparison (one line in the log). All devices
        work side by side; blocks until the last one is through. Of shards with ``marks`` (u32[1, words], a
        bit per element, see `masks`) only what is marked is read; marks of what didn't change are dropped.
        Those that are donated meanwhile are done without.
        """
        keys, marks = list(keys), marks or {}
        found: dict[Key, list[Delta] | None] = dict.fromkeys(keys)
        running: list[tuple[int, Words, Encoder, Callable[[], dict[str, list[Encoded] | None]]]] = []
        unmarked = list[Key]()
        for device, paths in _by_device(new, keys).items():
            for marked in (False, True):
                chosen = [path for path in paths if ((device, path) in marks) == marked]
                before, after = ({p: shards[device, p] for p in chosen} for shards in (old, new))
                words = {path: marks[device, path] for path in chosen} if marked else None
                try:
                    if chosen:
                        encoder = self._encoder(device, new, chosen, marked)
                        running.append((device, words, encoder, _start(encoder, before, after, words)))
                except FROM_DEVICES as error:
                    unmarked += _excused(device, words, error)
        for device, words, encoder, finish in running:
            try:
                found.update(_collected(device, encoder, finish()))
            except FROM_DEVICES as error:
                unmarked += _excused(device, words, error)
        if unmarked:
            found.update(self.compare(old, new, unmarked))
        return {key: _changed_only(found[key]) if key in marks else found[key] for key in found}

    def _encoder(self, device: int, shards: Shards, paths: list[str], marked: bool = False) -> Encoder:
        """The device's encoder of these tensors, with or without marks; the one used longest ago goes."""
        kept = self._encoders.setdefault((device, marked), {})
        tree = {path: shards[device, path] for path in paths}
        looks = tuple((path, x.shape, x.dtype) for path, x in tree.items())
        encoder = kept.pop(looks, None)
        if encoder is None:
            self.made += 1
            encoder = Encoder(
                tree,
                ladder=self._ladder,
                keep_old=True,
                implementation=self._implementation,
                threads=self._threads,
                interpret=self._interpret,
            )
            encoder.level = min(FIRST_LEVEL, len(self._ladder.shares) - 1)
        kept[looks] = encoder
        while len(kept) > KEPT:
            kept.pop(next(iter(kept)))
        return encoder


def _excused(device: int, words: Words, error: Exception) -> list[Key]:
    """The shards to compare without marks, where the train step took those back meanwhile.

    For what else a device says the host compares; any other error is raised.
    """
    if words and any(word.is_deleted() for word in words.values()):
        return [(device, path) for path in words]
    if not isinstance(error, jax.errors.JaxRuntimeError):
        raise error
    _warn(device, error)
    return []


def _start(
    encoder: Encoder, old: dict[str, jax.Array], new: dict[str, jax.Array], words: Words
) -> Callable[[], dict[str, list[Encoded] | None]]:
    if words is None:
        return encoder.start(old, new)
    finish = encoder.start_mask(words, new)

    def with_old() -> dict[str, list[Encoded] | None]:
        found = finish()
        kept = {path: parts for path, parts in found.items() if parts is not None}
        return {**found, **_with_old(kept, {path: old[path] for path in kept})}

    return with_old


@jax.jit
def _with_old(
    found: dict[str, list[Encoded]], old: dict[str, jax.Array]
) -> dict[str, list[Encoded]]:  # one program per set of levels
    return {
        path: [
            dataclasses.replace(part, old=xla.gather(_window(old[path], *window), part.positions[0])[None])
            for window, part in zip(chunks(old[path].size, CHUNK_ELEMENTS), parts, strict=True)
        ]
        for path, parts in found.items()
    }


def _window(buffer: jax.Array, offset: int, elements: int) -> jax.Array:
    return jax.lax.slice(buffer.reshape(-1), (offset,), (offset + elements,))


def _changed_only(deltas: list[Delta] | None) -> list[Delta] | None:
    """Without elements that were marked and are what they were."""
    if deltas is None:
        return None
    found = []
    for delta in deltas:
        assert delta.old is not None
        moved = delta.new != delta.old
        if not moved.all():
            delta = Delta(delta.elements, delta.positions[moved], delta.new[moved], delta.old[moved])
        found.append(delta)
    return found


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
