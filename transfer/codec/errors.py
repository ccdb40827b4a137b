"""Named errors of frames. All are refused before anything is written to a slot."""

from __future__ import annotations

from jaxrl_sync.transfer.errors import ProtocolError, TransferError


class FrameError(ProtocolError):
    """A frame that the format doesn't allow; the message names the field, the value and what is allowed."""


class TruncatedFrame(FrameError):
    """A frame shorter or longer than its own header says."""


class CorruptFrame(FrameError):
    """A frame whose bytes don't give its digest."""


class WrongBase(TransferError):
    """A frame for another base version than the one it would go onto: replayed, reordered or skipped."""


class WrongPlan(TransferError):
    """A frame of another plan or edge than the link's."""
