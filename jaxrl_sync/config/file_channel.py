"""Writers and readers of the file channel, made from a run's config."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from jaxrl_sync.config.sections import RunConfig

if TYPE_CHECKING:
    from jaxrl_sync.transfer.files.config import FileSource, FileWriterConfig, Trust


def channel_path(config: RunConfig, run_dir: Path) -> Path | None:
    """Where the channel is; None where the run has none."""
    path = config.sync.file.path
    return None if path is None else run_dir / path


def to_trust(config: RunConfig) -> Trust:
    """Whose files are read, and who may read ours."""
    from jaxrl_sync.transfer.files.config import Trust

    table = config.sync.file
    modes = {"owner": 0o600, "group": 0o640, "all": 0o644}
    return Trust(frozenset(table.owners), table.check_owner, modes[table.readable])


def to_file_writer(config: RunConfig) -> FileWriterConfig:
    """How one trainer process writes."""
    from jaxrl_sync.transfer.codec.rules import CodingRules
    from jaxrl_sync.transfer.files.config import FileWriterConfig

    sync = config.sync
    return FileWriterConfig(
        anchor_every=1 if sync.payload == "full" else sync.file.anchor_every,
        keep=sync.file.keep,
        rules=CodingRules(sync.sparse.positions, "auto", sync.sparse.zstd),
        threads=sync.threads,
        fsync=sync.file.fsync,
        timeout_s=sync.timeout_s,
        trust=to_trust(config),
    )


def to_file_source(config: RunConfig, run_dir: Path, rank: int) -> FileSource | None:
    """Where rank ``rank`` of an engine reads; None where it gets its weights another way.

    The text that its ranks share is made once they are one world.
    """
    from jaxrl_sync.transfer.files.config import FileReaderConfig, FileSource

    path = channel_path(config, run_dir)
    if config.sync.transport != "file" or path is None:
        return None
    sync, size = config.sync, config.engine.processes
    reader = FileReaderConfig(
        rank=rank,
        size=size,
        world="unnamed" if size > 1 else "",
        slots=sync.slots,
        threads=sync.threads,
        poll_s=0.05,
        timeout_s=sync.timeout_s,
        trust=to_trust(config),
    )
    return FileSource(str(path), sync.file.sealed, reader)
