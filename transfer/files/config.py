"""What a writer and a reader of a file channel can be told; every wait is bounded by a field here."""

from __future__ import annotations

import dataclasses

from jaxrl_sync.transfer.codec.rules import CodingRules


@dataclasses.dataclass(frozen=True)
class Trust:
    """Whose files are read: ours, root's and those of ``owners`` (user ids). Files that others may write are
    refused. ``check_owner`` False is for mounts that tell no owners (object stores); then a token should
    seal the channel. ``file_mode`` is that of new files; folders get the matching execute bits.
    """

    owners: frozenset[int] = frozenset()
    check_owner: bool = True
    file_mode: int = 0o600

    def __post_init__(self) -> None:
        if self.file_mode & ~0o644 or self.file_mode & 0o600 != 0o600:
            raise ValueError(f"file_mode={self.file_mode:o}, expected 600, 640 or 644: only the owner writes")


@dataclasses.dataclass(frozen=True)
class FileWriterConfig:
    """Settings of one writer process.

    ``anchor_every``: versions between two anchors; an anchor also comes where the deltas since the last one
    take ``anchor_share`` of its bytes. ``keep``: newest versions that stay, beside pinned and leased ones.
    ``rate_bytes_s`` is what codings are chosen for: what is written once may be read by many, far away.
    ``frame_bytes`` of weights share one frame, which is read whole. ``fsync``: wait until the disk has it.
    ``timeout_s`` bounds what one rank waits for another. ``holder_ttl_s``: a writer on another host that
    gave no sign of life for so long is taken for dead.
    """

    model: str = "policy"
    anchor_every: int = 16
    anchor_share: float = 1.0
    keep: int = 4
    rules: CodingRules = CodingRules("auto", "auto", "auto")
    rate_bytes_s: float = 100e6
    frame_bytes: int = 64 << 20
    threads: int = 1
    fsync: bool = True
    timeout_s: float = 120.0
    holder_ttl_s: float = 30.0
    trust: Trust = Trust()

    def __post_init__(self) -> None:
        for name, least in (("anchor_every", 1), ("keep", 1), ("threads", 1), ("frame_bytes", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)}, expected at least {least}")
        for name in ("anchor_share", "rate_bytes_s", "timeout_s", "holder_ttl_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)}, expected more than 0")


@dataclasses.dataclass(frozen=True)
class FileReaderConfig:
    """Settings of one reader process: one rank of ``size``.

    With several ranks, ``world`` is a text that they share and that no other start of them had: they then
    take the version that rank 0 takes, all or none. A lease that isn't renewed for ``lease_ttl_s`` ends.
    ``poll_s``: seconds between two looks at the folder.
    """

    model: str = "policy"
    rank: int = 0
    size: int = 1
    world: str = ""
    slots: int = 2
    threads: int = 1
    poll_s: float = 0.2
    timeout_s: float = 120.0
    lease_ttl_s: float = 60.0
    trust: Trust = Trust()

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank={self.rank}, expected 0 to {self.size - 1}")
        if self.slots < 2 or self.threads < 1:
            raise ValueError(f"slots={self.slots}, threads={self.threads}, expected at least 2 and 1")
        if self.size > 1 and not self.world:
            raise ValueError(f"world is empty, expected a text that the {self.size} ranks share")
        for name in ("poll_s", "timeout_s", "lease_ttl_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)}, expected more than 0")


@dataclasses.dataclass(frozen=True)
class FileSource:
    """Where an engine reads its weights; ``sealed``: with the run token."""

    path: str
    sealed: bool
    config: FileReaderConfig
