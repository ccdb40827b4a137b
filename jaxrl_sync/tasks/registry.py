"""Tasks by name, each with a frozen dataclass of its arguments, checked against what the config gives."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import typing
from collections.abc import Callable, Mapping
from typing import Any

from jaxrl_sync.tasks.protocol import Task, TaskError

# name -> module:class; a task class takes its arguments dataclass, which is its ``Args`` attribute.
_BUILTIN = {
    "addition": "jaxrl_sync.tasks.addition:AdditionTask",
    "reasoning": "jaxrl_sync.tasks.reasoning:ReasoningTask",
    "guess": "jaxrl_sync.tasks.multi_turn:GuessTask",
    "faulty": "jaxrl_sync.tasks.faulty:FaultyTask",
}
_REGISTERED: dict[str, Callable[..., Task]] = {}


def register(name: str) -> Callable[[Any], Any]:
    """Class decorator that makes a task known under ``name``; raises ``TaskError`` for a taken name."""

    def add(task: Any) -> Any:
        if name in _BUILTIN or name in _REGISTERED:
            raise TaskError(f"task name {name!r} is taken")
        _REGISTERED[name] = task
        return task

    return add


def task_names() -> list[str]:
    """Names that ``make_task`` knows."""
    return sorted({*_BUILTIN, *_REGISTERED})


def make_task(name: str, args: Mapping[str, Any] | None = None) -> Task:
    """The task ``name`` with these arguments.

    ``name`` is a known name or ``module:Class`` of a user's own. Raises ``TaskError`` for an unknown name, a
    module that is not there, an unknown argument or a value of the wrong type.
    """
    factory = _find(name)
    arguments = getattr(factory, "Args", None)
    if arguments is None or not dataclasses.is_dataclass(arguments):
        raise TaskError(f"task {name!r} has no Args dataclass")
    task: Task = factory(parse_args(name, typing.cast(type, arguments), args or {}))
    return task


def parse_args(name: str, arguments: type, given: Mapping[str, Any]) -> Any:
    """An instance of the dataclass ``arguments`` from a config table; strict types, but int serves float."""
    hints = typing.get_type_hints(arguments)
    known = [f.name for f in dataclasses.fields(arguments)]
    values = {}
    for key, value in given.items():
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known) or 'none'}"
            raise TaskError(f"task {name!r} has no argument {key!r}; {hint}")
        wanted = hints[key]
        if wanted is float and type(value) is int:
            value = float(value)
        if type(value) is not wanted:
            raise TaskError(f"task {name!r}: {key}={value!r}, expected a value of type {wanted.__name__}")
        values[key] = value
    return arguments(**values)


def _find(name: str) -> Any:
    if name in _REGISTERED:
        return _REGISTERED[name]
    where = _BUILTIN.get(name, name)
    module, _, attribute = where.partition(":")
    if not attribute:
        raise TaskError(f"unknown task {name!r}, expected one of {', '.join(task_names())} or module:Class")
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as e:
        raise TaskError(
            f"task {name!r} needs the module {e.name!r}, which is neither installed nor on PYTHONPATH"
        ) from e
    except Exception as e:  # a user's module may raise whatever it likes
        raise TaskError(f"task {name!r}: import of {module!r} raised {type(e).__name__}: {e}") from e
    if not hasattr(found, attribute):
        raise TaskError(f"module {module!r} has no task {attribute!r}")
    return getattr(found, attribute)
