"""Writing the small part of TOML that a run's config uses: tables, lists of tables, scalars and flat lists.

``tomllib`` of the standard library only reads. Values that are ``None`` are left out: an absent key and a
``None`` are the same thing to the models.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any


def dumps(data: Mapping[str, Any]) -> str:
    """``data`` as TOML text; ``tomllib.loads`` gives back the same data without the ``None`` values."""
    return "\n".join(_table(data, ())).lstrip("\n") + "\n"


def _table(data: Mapping[str, Any], path: tuple[str, ...], listed: bool = False) -> list[str]:
    scalars = {k: v for k, v in data.items() if v is not None and not _is_nested(v)}
    lines = []
    if path and (listed or scalars or not data):
        name = ".".join(_key(p) for p in path)
        lines += ["", f"[[{name}]]" if listed else f"[{name}]"]
    lines += [f"{_key(k)} = {_value(v)}" for k, v in scalars.items()]
    for key, value in data.items():
        if isinstance(value, Mapping):
            lines += _table(value, (*path, key))
        elif _is_nested(value):
            for entry in value:
                lines += _table(entry, (*path, key), listed=True)
    return lines


def _is_nested(value: Any) -> bool:
    """Whether ``value`` is a table or a list of tables."""
    if isinstance(value, Mapping):
        return True
    listed = isinstance(value, Sequence) and not isinstance(value, str)
    return listed and bool(value) and all(isinstance(entry, Mapping) for entry in value)


def _key(key: str) -> str:
    bare = key.isascii() and key.replace("_", "a").replace("-", "a").isalnum()
    return key if bare else _string(key)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, Sequence):
        return "[" + ", ".join(_value(v) for v in value) + "]"
    raise TypeError(f"a config value must be a scalar or a list of scalars, found {type(value).__name__}")


def _string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
