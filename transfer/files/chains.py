"""The cheapest way to a version: from what a reader holds, or from an anchor, along deltas. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from jaxrl_sync.transfer.files.errors import NoVersion
from jaxrl_sync.transfer.files.manifest import Manifest
from jaxrl_sync.transfer.version import Version


@dataclasses.dataclass(frozen=True)
class Chain:
    """Load ``anchor`` (None: begin from what is held), then apply ``deltas`` in order; ``nbytes`` to read."""

    anchor: Manifest | None
    deltas: tuple[Manifest, ...]
    nbytes: int

    @property
    def manifests(self) -> tuple[Manifest, ...]:
        """All versions that are read."""
        return (self.anchor, *self.deltas) if self.anchor is not None else self.deltas


def cheapest(
    manifests: Iterable[Manifest],
    target: Version,
    held: Version | None = None,
    held_schema: str | None = None,
) -> Chain:
    """The chain to ``target`` with the fewest bytes. NoVersion where none is whole.

    ``held`` and its schema: what the reader has the bits of.
    """
    by_version = {m.version: m for m in manifests}
    if target not in by_version:
        raise NoVersion(f"version {target} isn't in the channel")
    found: list[Chain] = []
    deltas: tuple[Manifest, ...] = ()
    at: Version | None = target
    schema = by_version[target].schema
    seen: set[Version] = set()
    while at is not None and at not in seen:
        seen.add(at)
        nbytes = sum(m.delta_bytes for m in deltas)
        if at == held and held_schema == schema:
            found.append(Chain(None, deltas, nbytes))
        manifest = by_version.get(at)
        if manifest is None or manifest.schema != schema:
            break
        if manifest.anchor is not None:
            found.append(Chain(manifest, deltas, nbytes + manifest.anchor_bytes))
        deltas, at = (manifest, *deltas), manifest.base
    if not found:
        raise NoVersion(f"version {target} has no whole chain: {at} is missing below it")
    return min(found, key=lambda c: c.nbytes)
