"""How every command of the project takes its command line: what is wrong with it is one error line."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from jaxrl_sync.sharding.errors import UserError


class UsageError(UserError):
    """A command line that can't be understood."""

    exit_code = 2


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line instead of printing the usage first; no abbreviated options."""

    def __init__(self, prog: str | None = None, **settings: Any) -> None:
        super().__init__(prog, **{**settings, "allow_abbrev": False})

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see `{self.prog} --help`)")
