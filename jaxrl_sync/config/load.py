"""Reading a config: TOML file, dotted overrides, validation, cross-checks; and writing the resolved one.

Every fault is a ``ConfigError`` of one line: which key, what was found, what was expected.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from jaxrl_sync.config import toml
from jaxrl_sync.config.checks import check
from jaxrl_sync.config.errors import ConfigError, MissingFileError
from jaxrl_sync.config.modes import resolve
from jaxrl_sync.config.sections import RunConfig

SHOWN_CHARS = 200


def load(path: str | Path, overrides: Mapping[str, Any] | None = None) -> RunConfig:
    """The config in the file at ``path`` with ``overrides`` (dotted key -> value) laid over it, checked.

    Raises ``MissingFileError`` (exit code 3) for a file that is not there, ``ConfigError`` (2) for the rest.
    """
    path = Path(path)
    data = _read(path)
    for key, value in (overrides or {}).items():
        _assign(data, key, value)
    config = validate(data, origin=str(path))
    check(config)
    return config


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf8"))
    except FileNotFoundError:
        raise MissingFileError(f"config file {path} does not exist") from None
    except IsADirectoryError:
        raise ConfigError(f"{path} is a folder; expected a TOML file") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    except (ValueError, RecursionError):  # of Python's limits, not of TOML
        raise ConfigError(
            f"{path} can't be read: it has a number of thousands of digits, or lists thousands deep"
        ) from None


def validate(data: Mapping[str, Any], origin: str = "config") -> RunConfig:
    """The models for ``data``; keys, types and bounds checked, not yet the rules across sections."""
    if (where := _nul(data)) is not None:
        raise ConfigError(f"{origin}: {where}: found a NUL character, which no path or name can have")
    try:
        return RunConfig.model_validate(resolve(data))
    except ValidationError as error:
        raise ConfigError(f"{origin}: {_one_line(error)}") from None


def save(config: RunConfig, path: str | Path) -> None:
    """Write the resolved config, defaults included, atomically; ``load`` gives back an equal one."""
    path = Path(path)
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    scratch.write_text(render(config), encoding="utf8")
    scratch.replace(path)


def render(config: RunConfig) -> str:
    """The resolved config as TOML text."""
    return toml.dumps(config.model_dump(mode="python"))


def parse_overrides(words: Sequence[str]) -> dict[str, Any]:
    """``["--loop.staleness_bound", "2", "--eval.prompts=8"]`` as dotted keys and values.

    A value is read as TOML where it is TOML (number, true, false, list, quoted string), else taken as text.
    """
    found: dict[str, Any] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or "." not in name:
            raise ConfigError(f"unexpected argument {word!r}; overrides look like --section.key value")
        if not equals:
            if not rest:
                raise ConfigError(f"override {word} has no value; overrides look like --section.key value")
            value = rest.pop(0)
        found[name] = _parse_value(value)
    return found


def _parse_value(text: str) -> Any:
    try:
        found = tomllib.loads(f"x = {text}")
    except (ValueError, RecursionError):  # no TOML, or none that Python reads
        return text
    return found["x"] if len(found) == 1 else text


def _assign(data: dict[str, Any], dotted: str, value: Any) -> None:
    *parents, leaf = dotted.split(".")
    node: Any = data
    for i, part in enumerate(parents):
        node = _entry(node, part, dotted) if isinstance(node, list) else node.setdefault(part, {})
        if not isinstance(node, dict | list):
            raise ConfigError(f"override --{dotted}: {'.'.join(parents[: i + 1])} is a value, not a table")
    if isinstance(node, list):
        raise ConfigError(f"override --{dotted}: {'.'.join(parents)} is a list, not a table")
    node[leaf] = value


def _entry(entries: list[Any], number: str, dotted: str) -> Any:
    """One table of a list of tables, counted from 0: ``--task.mix.1.weight 3``."""
    if not number.isdigit() or int(number) >= len(entries):
        raise ConfigError(f"override --{dotted}: {number!r}, expected a number from 0 to {len(entries) - 1}")
    return entries[int(number)]


def _nul(data: Mapping[str, Any]) -> str | None:
    """The key of the first text with a NUL character, if there is one."""
    left: list[tuple[str, Any]] = [("", data)]
    while left:
        where, value = left.pop()
        if isinstance(value, Mapping):
            left += [(f"{where}.{key}".lstrip("."), part) for key, part in value.items()]
            value = "".join(map(str, value))
        elif isinstance(value, list):
            left += [(where, part) for part in value]
        if isinstance(value, str) and "\0" in value:
            return where.replace("\0", "\\0")
    return None


def _one_line(error: ValidationError) -> str:
    faults = error.errors(include_url=False)
    first = faults[0]
    more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
    where = [str(part) for part in first["loc"]]
    kind = first["type"]
    if kind == "extra_forbidden":
        return _unknown_key(where) + more
    if kind == "missing":
        return f"{'.'.join(where)} is missing" + more
    if kind in ("model_type", "dict_type"):
        return f"{'.'.join(where)}: found {_shown(first['input'])}; input should be a table" + more
    return f"{'.'.join(where)}: found {_shown(first['input'])}; {_lower(first['msg'])}" + more


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}..."


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]


def _unknown_key(where: list[str]) -> str:
    model: type[BaseModel] = RunConfig
    for part in where[:-1]:
        if part.isdigit():  # an entry of a list of tables
            continue
        annotation = model.model_fields[part].annotation
        kinds = [k for k in (annotation, *get_args(annotation)) if isinstance(k, type)]
        nested = next((k for k in kinds if issubclass(k, BaseModel)), None)
        if nested is None:
            break
        model = nested
    known = sorted(model.model_fields)
    close = difflib.get_close_matches(where[-1], known, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"
    return f"unknown key {'.'.join(where)}; {hint}"
