"""Errors of a config, each with the exit code the command line documents."""

from __future__ import annotations

from jaxrl_sync.sharding.errors import UserError


class ConfigError(UserError, ValueError):
    """A key, a value or a combination of values that cannot be."""

    exit_code = 2


class MissingFileError(UserError, FileNotFoundError):
    """A file that the config or the command line names is not there."""

    exit_code = 3

    def __str__(self) -> str:
        return str(self.args[0])
