"""Does tracing a function twice give the same program? What Python hides from jax shows only there.

A counter, the time, ``np.random``: none of them is in the program, only what they happened to be. Then the
two sides of a transfer trace different conversions, or one of them sends what it meant a minute ago.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from jaxrl_sync.sharding.errors import MappingError

LARGE_PROGRAM = 20_000
"""Programs of more operations and outputs are traced once: a second trace would cost as much as the first
(20 s for a plain loop over the 70,000 tensors of a model of 1T parameters)."""

Same = set[tuple[int, int]]

_PLAIN = (bool, int, float, complex, str, tuple, list, np.ndarray, np.generic)


def check_pure(
    again: Callable[[], tuple[ClosedJaxpr, Sequence[str]]], closed: ClosedJaxpr, outputs: Sequence[str]
) -> None:
    """Raises `MappingError` if a second trace differs from ``closed`` with its ``outputs`` (their names).

    The error names the operation or constant that differs and the first tensor that depends on it. What
    happens inside a function that is already jitted is not seen: jax itself traces that once.
    """
    if len(closed.jaxpr.eqns) + len(outputs) > LARGE_PROGRAM:
        return
    other, names = again()
    if list(names) != list(outputs):
        changed = sorted(set(names) ^ set(outputs))
        words = f"the tensors it returns ({', '.join(map(repr, changed[:4]))})"
    else:
        found = difference(closed, other)
        if found is None:
            return
        words = found + _who(closed, other, outputs)
    raise MappingError(
        f"convert is impure: traced twice, it gives two programs, which differ in {words}; random numbers, "
        "counters and clocks must be inputs, or be fixed before"
    )


def _who(a: ClosedJaxpr, b: ClosedJaxpr, outputs: Sequence[str]) -> str:
    """The first output that depends on what differs, if it can be told."""
    pairs = zip(a.jaxpr.constvars, a.consts, b.consts, strict=False)
    touched = {var for var, x, y in pairs if not _equal(x, y)}
    numbers: tuple[dict[Any, int], dict[Any, int]] = {}, {}
    for e, f in zip(a.jaxpr.eqns, b.jaxpr.eqns, strict=False):
        used = any(_is_var(v) and v in touched for v in e.invars)
        if used or _equation(e, f, numbers, set()) is not None:
            touched |= set(e.outvars)
    made = zip(outputs, a.jaxpr.outvars, b.jaxpr.outvars, strict=False)
    hit = [n for n, v, w in made if not _agree([v], [w], numbers) or (_is_var(v) and v in touched)]
    return f", on which {hit[0]!r} depends" if hit else ""


def _is_var(atom: Any) -> bool:
    return not isinstance(atom, Literal)


def difference(a: ClosedJaxpr, b: ClosedJaxpr) -> str | None:
    """Where two programs differ, in words, or None. Python functions among parameters are not compared."""
    return _closed(a, b, set())


def _closed(a: ClosedJaxpr, b: ClosedJaxpr, same: Same) -> str | None:
    if a is b or (id(a), id(b)) in same:
        return None
    if len(a.consts) != len(b.consts):
        return f"the number of constants ({len(a.consts)}, then {len(b.consts)})"
    for x, y in zip(a.consts, b.consts, strict=True):
        if not _equal(x, y):
            return f"a constant ({_brief(x)}, then {_brief(y)})"
    found = _jaxpr(a.jaxpr, b.jaxpr, same)
    if found is None:
        same.add((id(a), id(b)))
    return found


def _jaxpr(a: Jaxpr, b: Jaxpr, same: Same) -> str | None:
    numbers: tuple[dict[Any, int], dict[Any, int]] = {}, {}
    if not _agree([*a.constvars, *a.invars], [*b.constvars, *b.invars], numbers):
        return "the inputs of a function"
    for e, f in zip(a.eqns, b.eqns, strict=False):
        if (found := _equation(e, f, numbers, same)) is not None:
            return found
    if len(a.eqns) != len(b.eqns):
        return f"the number of operations ({len(a.eqns)}, then {len(b.eqns)})"
    return None if _agree(a.outvars, b.outvars, numbers) else "which values it returns"


def _equation(e: Any, f: Any, numbers: tuple[dict[Any, int], dict[Any, int]], same: Same) -> str | None:
    name = e.primitive.name
    if name != f.primitive.name:
        return f"an operation ({name}, then {f.primitive.name})"
    operands = _agree(e.invars, f.invars, numbers)
    if not (_agree(e.outvars, f.outvars, numbers) and operands):
        shown = [[v.val if isinstance(v, Literal) else v.aval for v in eqn.invars] for eqn in (e, f)]
        return f"the operands of {name} ({_brief(shown[0])}, then {_brief(shown[1])})"
    for key, value in e.params.items():
        if (found := _param(value, f.params.get(key), same)) is not None:
            return f"{key} of {name}: {found}"
    return None


def _agree(xs: Sequence[Any], ys: Sequence[Any], numbers: tuple[dict[Any, int], dict[Any, int]]) -> bool:
    """Whether two rows of operands are the same: variables by order of appearance, literals by value."""
    if len(xs) != len(ys):
        return False
    for x, y in zip(xs, ys, strict=True):
        if isinstance(x, Literal) or isinstance(y, Literal):
            if not (isinstance(x, Literal) and isinstance(y, Literal) and _equal(x.val, y.val)):
                return False
        elif numbers[0].setdefault(x, len(numbers[0])) != numbers[1].setdefault(y, len(numbers[1])):
            return False
        elif x.aval is not y.aval and (x.aval.shape, x.aval.dtype) != (y.aval.shape, y.aval.dtype):
            return False
    return True


def _param(a: Any, b: Any, same: Same) -> str | None:
    if a is b:
        return None
    if isinstance(a, ClosedJaxpr) and isinstance(b, ClosedJaxpr):
        return _closed(a, b, same)
    if isinstance(a, Jaxpr) and isinstance(b, Jaxpr):
        return _jaxpr(a, b, same)
    if isinstance(a, tuple | list) and isinstance(b, tuple | list) and len(a) == len(b):
        return next((found for x, y in zip(a, b, strict=True) if (found := _param(x, y, same))), None)
    if isinstance(a, _PLAIN) and isinstance(b, _PLAIN) and not _equal(a, b):
        return f"{_brief(a)}, then {_brief(b)}"
    return None


def _equal(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if isinstance(a, tuple | list) or isinstance(b, tuple | list):  # maybe of arrays: == would be one, too
        return type(a) is type(b) and len(a) == len(b) and all(map(_equal, a, b))
    if isinstance(a, str) or isinstance(b, str):
        return type(a) is type(b) and bool(a == b)
    try:
        x, y = np.asarray(a), np.asarray(b)
    except TypeError:  # random keys have no numpy form
        return str(a) == str(b)
    return x.shape == y.shape and x.dtype == y.dtype and x.tobytes() == y.tobytes()


def _brief(value: Any) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= 60 else text[:57] + "..."
