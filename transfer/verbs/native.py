"""The C extension ``_verbs``, or a clear error where it was not built."""

from __future__ import annotations

import importlib
from types import ModuleType

from jaxrl_sync.transfer.verbs.errors import VerbsError


def is_built() -> bool:
    """Whether the extension is there; that libibverbs loads is another question (``load_error``)."""
    try:
        importlib.import_module("jaxrl_sync.transfer._verbs")
    except ImportError:
        return False
    return True


def native() -> ModuleType:
    """The module ``_verbs``. VerbsError if it was not built."""
    try:
        return importlib.import_module("jaxrl_sync.transfer._verbs")
    except ImportError as error:
        raise VerbsError(
            0,
            f"the verbs extension was not built ({error}); reinstall with a C compiler or use shm or tcp",
        ) from error


def backend(name: str) -> ModuleType:
    """The module with the objects: ``native`` or ``pyverbs``. VerbsError if it can't be had."""
    if name == "native":
        return native()
    if name == "pyverbs":
        return importlib.import_module("jaxrl_sync.transfer.verbs.with_pyverbs")
    raise VerbsError(0, f"verbs backend {name!r}, expected native or pyverbs")
