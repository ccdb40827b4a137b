"""Named errors of the transfer room; each has one clear line and an exit code for the command line."""

from __future__ import annotations

from jaxrl_sync.sharding.errors import UserError


class TransferError(UserError):
    """A transfer, a peer or the hub failed; the message names the peer, the value found and the expected."""

    exit_code = 4


class DeadlineError(TransferError, TimeoutError):
    """A wait reached its deadline; the message names what was awaited and for how long."""


class PeerLost(TransferError, ConnectionError):
    """The other side closed its connection, was reset or can't be reached."""


class ProtocolError(TransferError):
    """The other side sent something that the protocol doesn't allow; the connection is of no further use."""


class AuthError(TransferError):
    """Wrong or missing run token, foreign run id, or a token file that others could read."""


class AddressError(TransferError, ValueError):
    """A URL that nothing can listen at: another scheme, no host, no port that there could be."""

    exit_code = 2


class MismatchError(TransferError):
    """Two sides disagree on a layout, a correspondence, a plan or on bits; the message names the tensors."""


class ResourceError(UserError):
    """Something this machine must provide is missing: shared memory, a port, a file."""

    exit_code = 3
