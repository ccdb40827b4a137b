"""Garbage collection of a channel, by its writer: what no kept version, no pin and no reader needs goes.

The order is what makes it safe beside readers. A reader writes its lease first and reads the manifests after
that. The collector removes manifests, then looks at the leases once more, and only then removes files: a
reader that still found the manifest is in that second look.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence

from jaxrl_sync.transfer.files import leases, names
from jaxrl_sync.transfer.files.channel import Channel
from jaxrl_sync.transfer.files.errors import ChannelError
from jaxrl_sync.transfer.files.manifest import Manifest
from jaxrl_sync.transfer.version import Version

TEMPORARY_S = 600.0
"""Age from which a file that never became whole is garbage."""

logger = logging.getLogger("jaxrl_sync.transfer")


@dataclasses.dataclass(frozen=True)
class Collected:
    """What went: versions, and files or folders."""

    versions: tuple[Version, ...]
    files: int


def kept(
    manifests: Sequence[Manifest],
    keep: int,
    wanted: Iterable[Version],
    unreadable: Collection[Version] = (),
) -> set[Version]:
    """The newest ``keep`` versions, the wanted ones, and what their chains stand on down to an anchor.

    What an ``unreadable`` manifest on the way stands on isn't known now, and may be again: everything before
    it in its lineage, down to an anchor, stays.
    """
    by_version: Mapping[Version, Manifest] = {m.version: m for m in manifests}
    roots = [m.version for m in manifests[-keep:]] + [v for v in wanted if v in by_version]
    found: set[Version] = set()
    for root in roots:
        at: Version | None = root
        while at is not None and at not in found:
            if at in by_version:
                found.add(at)
                at = None if by_version[at].anchor is not None else by_version[at].base
            elif at in unreadable:
                at = max((v for v in by_version if at.follows(v)), key=lambda v: v.number, default=None)
            else:
                break
    return found


def collect(channel: Channel, keep: int, epoch: int, turn: int, schema: str) -> Collected:
    """Remove what isn't needed. Only for the channel's writer; files of this epoch's turns from ``turn`` on
    are being written and stay, and so does the writer's ``schema``, before its first version too.
    """
    survey = channel.survey()
    if survey.rules.newest != epoch:  # somebody takes the channel over: it is theirs to clean up
        return Collected((), 0)
    wanted = leases.held(channel).versions | leases.pinned(channel)
    stay = kept(survey.manifests, keep, wanted, survey.unreadable)
    gone = [m.version for m in (*survey.manifests, *survey.fenced) if m.version not in stay]
    for version in gone:
        channel["versions"].remove(names.version_name(version))
    if gone:
        channel["versions"].sync()
    left = [m for m in survey.manifests if m.version in stay]
    stems = {names.stem(m.version.number, m.epoch, m.turn) for m in left} | leases.held(channel).stems
    unreadable = {v.number for v in survey.unreadable}
    files = _remove_files(channel, stems, unreadable, epoch, turn)
    if not unreadable:  # nobody knows what those need
        known = (*survey.manifests, *survey.fenced)
        read = {m.schema for m in known if names.stem(m.version.number, m.epoch, m.turn) in stems}
        _forget(channel, {schema, *read}, min((m.epoch for m in left), default=epoch))
    _sweep(channel, epoch)
    if gone:
        logger.info("%s: %d versions and %d files collected", channel.where, len(gone), files)
    return Collected(tuple(gone), files)


def _remove_files(channel: Channel, stems: set[str], unreadable: set[int], epoch: int, turn: int) -> int:
    """Files of no version that stays. Those of one whose manifest can't be read now stay."""
    count = 0
    for folder in ("objects", "anchors"):
        for name in channel[folder].names():
            attempt = names.attempt_of(name)
            if attempt is None or attempt >= (epoch, turn) or names.stem_of(name) in stems:
                continue
            if int(name[:12]) in unreadable:
                continue
            try:
                if folder == "anchors":
                    channel[folder].remove_folder(name)
                else:
                    channel[folder].remove(name)
                count += 1
            except (OSError, ChannelError) as error:  # others can go although this one can't
                logger.warning("%s/%s can't be removed: %s", channel[folder].where, name, error)
    return count


def _forget(channel: Channel, schemas: set[str], oldest: int) -> None:
    """Schemas and epochs that nothing needs any more; ``oldest`` is the first epoch with a version."""
    channel.epochs.forget(oldest)
    for name in channel["schemas"].names():
        if name not in schemas and not name.startswith(names.TEMPORARY):
            channel["schemas"].remove(name)


def _sweep(channel: Channel, epoch: int) -> None:
    """Turns of older epochs, and files that never became whole."""
    for name in channel["ranks"].names():
        if name.startswith("e") and not name.startswith(f"e{epoch}-"):
            channel["ranks"].remove(name)
    for folder in (channel.root, *(channel[name] for name in names.FOLDERS)):
        torn = [name for name in folder.names() if name.startswith(names.TEMPORARY)]
        now_s = folder.now_s() if torn else 0.0
        for name in torn:
            made_s = folder.mtime_s(name)
            if made_s is not None and now_s - made_s > TEMPORARY_S:
                folder.remove(name)
