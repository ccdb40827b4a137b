"""Named errors of the file channel. After any of them a reader keeps the version that it serves."""

from __future__ import annotations

from jaxrl_sync.transfer.errors import TransferError


class ChannelError(TransferError):
    """A channel that can't be used as asked; the message names the file, what was found and expected."""


class UnsafePath(ChannelError):
    """A name that no channel writes, a link, no regular file, or one that belongs to somebody else."""


class BrokenObject(ChannelError):
    """A file that is shorter, longer or of other content than its manifest says."""


class ForeignChannel(ChannelError):
    """A channel, or a file in it, of another run, another model or sealed with another token."""


class ChannelBusy(ChannelError):
    """Another writer holds the channel."""


class Fenced(ChannelError):
    """Another writer has taken the channel over: what this one writes doesn't exist for any reader."""


class NoVersion(ChannelError):
    """A version that isn't in the channel, not any more, or not with a whole chain below it."""
