"""Looking back: what a channel holds, whether all of it is sound, and one version as an orbax checkpoint."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxrl_sync.transfer.errors import TransferError
from jaxrl_sync.transfer.files import anchors
from jaxrl_sync.transfer.files.chains import Chain, cheapest
from jaxrl_sync.transfer.files.channel import Channel
from jaxrl_sync.transfer.files.errors import ChannelError, NoVersion
from jaxrl_sync.transfer.files.folder import Folder, as_channel_error
from jaxrl_sync.transfer.files.image import Image, Read, bring, leased_chain
from jaxrl_sync.transfer.files.leases import ReaderLease, pinned
from jaxrl_sync.transfer.files.manifest import Manifest
from jaxrl_sync.transfer.files.seal import Seal
from jaxrl_sync.transfer.version import Version

LEASE_TTL_S = 60.0


def rows(channel: Channel) -> list[dict[str, Any]]:
    """One row per version, oldest first: what it consists of, its bytes, when it was committed."""
    pins = pinned(channel)
    return [
        {
            "lineage": m.version.lineage,
            "number": m.version.number,
            "base": None if m.base is None else m.base.number,
            "anchor": None if m.anchor is None else f"{channel['anchors'].where}/{m.anchor}",
            "anchor_bytes": m.anchor_bytes,
            "delta_bytes": m.delta_bytes,
            "epoch": m.epoch,
            "pinned": m.version in pins,
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(m.time_s)),
        }
        for m in channel.manifests()
    ]


def find(channel: Channel, text: str) -> Version:
    """What ``NUMBER`` (of the newest lineage that has it) or ``LINEAGE:NUMBER`` names. NoVersion."""
    lineage, _, number = text.rpartition(":")
    found = [
        m.version
        for m in channel.manifests()
        if str(m.version.number) == number and lineage in ("", m.version.lineage)
    ]
    if not found:
        raise NoVersion(f"{channel.where} has no version {text!r}")
    return found[-1]


def restore(channel: Channel, version: Version, out: Path) -> int:
    """Write a version into the new or empty folder ``out``, as orbax restores it; bytes of its tensors.

    Everything is verified before the first byte is written. ChannelError, UnsafePath.
    """
    if out.exists() and any(out.iterdir()):
        raise ChannelError(f"{out} isn't empty")
    with ReaderLease(channel, LEASE_TTL_S) as lease:
        manifest, chain = leased_chain(channel, lease, version, None)
        stored = channel.stored(manifest.schema)
        image = Image(channel, stored, stored.slabs)
        bring(image, chain, Read())
        image.verify(manifest)
    with (
        as_channel_error(f"writing {out}"),
        Folder.root(out, dataclasses.replace(channel.root.trust, check_owner=False), create=True) as folder,
    ):
        _, nbytes = anchors.write_chunks(folder, stored, stored.slabs, image.boxes, Seal())
        anchors.finish(folder, stored)
    return nbytes


@dataclasses.dataclass(frozen=True)
class Verified:
    """What `verify` found of one version: how it was reached, or what is wrong with it."""

    version: Version
    ways: tuple[str, ...]
    wrong: str | None


def verify(channel: Channel) -> Iterator[Verified]:
    """Read all of every version, by its anchor and by its frames where it has both; one row each."""
    images: dict[str, Image] = {}
    with ReaderLease(channel, LEASE_TTL_S) as lease:
        everything = channel.manifests()
        lease.hold(everything)
        left = {m.version for m in channel.manifests()}  # others went before the lease came
        everything = [m for m in everything if m.version in left]
        for manifest in everything:
            ways = list[str]()
            try:
                if manifest.schema not in images:
                    stored = channel.stored(manifest.schema)
                    images = {manifest.schema: Image(channel, stored, stored.slabs)}
                _verify(images[manifest.schema], manifest, everything, ways)
            except (TransferError, OSError) as error:
                yield Verified(manifest.version, tuple(ways), f"{type(error).__name__}: {error}")
            else:
                yield Verified(manifest.version, tuple(ways), None)


def _verify(image: Image, manifest: Manifest, everything: list[Manifest], ways: list[str]) -> None:
    """By whatever leads to it, all of which is leased."""
    if manifest.base is not None and manifest.base == image.version:
        bring(image, Chain(None, (manifest,), 0), Read())
        image.verify(manifest)
        ways.append("frames")
    if manifest.anchor is not None:
        bring(image, Chain(manifest, (), 0), Read())
        image.verify(manifest)
        ways.append("anchor")
    if not ways:
        bring(image, cheapest(everything, manifest.version), Read())
        image.verify(manifest)
        ways.append("chain")
