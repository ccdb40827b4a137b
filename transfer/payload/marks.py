"""Marks of what changed, made where the change was made: in the train step, at the cast to the wire dtype.

They spare devices the reading of both versions: positions come out of one bit per element, new and old bits
are read there alone. A mark that is missing is a wrong weight, so comparisons check on marks now and then.
Between two checks it goes out unseen; where a check finds one, everybody gets everything once.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxrl_sync.transfer.errors import MismatchError
from jaxrl_sync.transfer.version import Version

CHECK_EVERY = 16
"""Marks are held against a comparison the first time, and every so many times after."""
KEPT = 2
"""Marks of so many versions are kept: of the newest one, and of the one that may just be being encoded."""

Key = tuple[int, str]

logger = logging.getLogger("jaxrl_sync.transfer")


@dataclasses.dataclass(frozen=True, eq=False)
class Marked:
    """A tree to publish, with marks: what ``Publisher.publish`` takes in a tree's place.

    masks: path -> u32[shards, words] as `delta.masks.marked_cast` makes them: at least those elements whose
        bits in ``wire``'s dtype are other than in the version ``since``. Paths may be missing.
    wire: path -> anything with the dtype that was cast to, as given to ``marked_cast``.
    since: the version that was published before; where another one is compared with, marks aren't used.
        Masks are read after ``publish`` has returned: one that is donated meanwhile isn't used either.
    tree: the parameters as without marks, masters or cast ones, whichever the publisher's layout says.
    """

    tree: Any
    masks: Mapping[str, jax.Array]
    wire: Mapping[str, Any]
    since: Version


class Marks:
    """The marks of the newest versions, and whether they are trusted. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._newest: dict[Version, Marked] = {}
        self.trusted = True

    def take(self, version: Version, given: Any) -> Any:
        """The tree that was given; its marks, where it has some, are remembered. MismatchError."""
        if not isinstance(given, Marked):
            return given
        for path, mask in given.masks.items():
            if not isinstance(mask, jax.Array) or mask.dtype != np.uint32 or mask.ndim != 2:
                raise MismatchError(
                    f"marks of {path!r} are {_said(mask)}, expected jax's uint32[shards, words]"
                )
        dtypes = {path: jax.ShapeDtypeStruct((), x.dtype) for path, x in given.wire.items()}
        kept = dataclasses.replace(given, tree=None, wire=dtypes)  # no array but the marks themselves
        with self._lock:
            self._newest[version] = kept
            while len(self._newest) > KEPT:
                self._newest.pop(next(iter(self._newest)))
        return given.tree

    def between(
        self, base: Version, version: Version, parts: Mapping[Key, jax.Array], keys: Iterable[Key]
    ) -> dict[Key, jax.Array]:
        """u32[1, words] of those shards that are marked; none for another base, or distrusted."""
        with self._lock:
            marked = self._newest.get(version)
        if marked is None or marked.since != base or not self.trusted:
            return {}
        words = {
            (shard.device.id, path): shard.data
            for path, mask in marked.masks.items()
            for shard in _shards_of(mask)
        }
        found = {}
        for device, name in keys:
            path = _path_of(name, parts[device, name], marked.wire)
            mine = words.get((device, path))
            if mine is not None and mine.shape == (1, -(-parts[device, name].size // 32)):
                found[device, name] = mine
        return found

    def distrust(self, reason: str) -> None:
        """Never use marks again; one line in the log."""
        self.trusted = False
        logger.error("marks of changes aren't used any more: %s", reason)


def _shards_of(mask: jax.Array) -> Sequence[jax.Shard]:
    """None of one that the train step took back: it may do so at any moment."""
    try:
        return mask.addressable_shards
    except RuntimeError:
        if mask.is_deleted():
            return ()
        raise


def _said(mask: object) -> str:
    shape = getattr(mask, "shape", None)
    return type(mask).__name__ if shape is None else f"{type(mask).__name__} {mask.dtype}{list(shape)}"  # type: ignore[attr-defined]


def _path_of(name: str, part: jax.Array, wire: Mapping[str, Any]) -> str:
    """The parameter that an exported leaf holds in the dtype of its marks, as it is or cast; else nothing.

    Exported leaves are named by parameter and casts (`sharding.tracing`); what is computed has other names.
    """
    path, _, cast = name.partition("@")
    if path not in wire or part.dtype != wire[path].dtype:
        return ""
    return path if cast in ("", part.dtype.name) else ""
