"""Errors that the user of the library or of the command line can cause and mend."""

from __future__ import annotations


class UserError(Exception):
    """An error with one clear line; ``exit_code`` is what the command line returns for it."""

    exit_code: int = 1


class MappingError(UserError, ValueError):
    """A layout, conversion or plan that cannot be: names the tensor, the operation and the reason."""

    exit_code = 2


class DeviceCopyError(UserError):
    """A compiled gather or scatter gave other bytes than a plain copy of the same shards."""
