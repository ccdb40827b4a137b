"""Calls of one program, followed once: the outputs as fragments of the arguments, then filled in per call.

A model's layer conversion, jitted, is called for every layer with arguments that differ only in where they
lie in their source. Such a call needs no second interpretation: offsets are added, sources are put in place.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jaxrl_sync.sharding.fragments import Axis, Fragment
from jaxrl_sync.sharding.known import Known
from jaxrl_sync.sharding.values import Value

if TYPE_CHECKING:
    from jaxrl_sync.sharding.interpret import Abstract, Interpreter, NodeKey, Source

Signature = tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Outline:
    """What a program makes of arguments of one signature: outputs over its own numbering of sources."""

    outputs: tuple[Abstract, ...]
    sources: tuple[Source, ...]


def signature(args: Sequence[Abstract]) -> Signature | None:
    """Equal for calls that differ only in sources and offsets; None if a call can't be outlined.

    Every argument must be one fragment, whose place in its source is free.
    """
    parts: list[tuple[Any, ...]] = []
    for a in args:
        if isinstance(a, Known) or len(a.fragments) != 1 or a.fragments[0].start:
            return None
        parts.append((a.shape, a.dtype, a.fragments[0].axes))
    return tuple(parts)


def outline(run: Interpreter, closed: Any, args: Sequence[Abstract]) -> Outline:
    """Follows the program on arguments that are sources of their own: source k stands for argument k."""
    from jaxrl_sync.sharding.interpret import Interpreter, Source

    inner = Interpreter(run.outlines)
    given: list[Abstract] = []
    for k, a in enumerate(args):
        assert isinstance(a, Value)
        axes: tuple[Axis, ...] = a.fragments[0].axes
        inner.add(Source("param", str(k), a.shape, a.dtype, params=frozenset((str(k),))))
        given.append(Value(a.shape, a.dtype, (Fragment(k, 0, 0, axes),)))
    outputs = tuple(inner.run(closed, given))
    return Outline(outputs, tuple(inner.sources))


def fill(run: Interpreter, outline: Outline, args: Sequence[Abstract], place: NodeKey) -> list[Abstract]:
    """The outputs of one call."""
    numbers: dict[int, tuple[int, int]] = {}

    def number(inner: int) -> tuple[int, int]:
        """(outer source, offset) of an inner source."""
        if inner not in numbers:
            numbers[inner] = _outer(run, outline.sources[inner], args, place)
        return numbers[inner]

    made: list[Abstract] = []
    for out in outline.outputs:
        if isinstance(out, Known):
            made.append(out)
            continue
        fragments = []
        for f in out.fragments:
            source, offset = number(f.source)
            fragments.append(Fragment(source, f.offset + offset, f.start, f.axes))
        made.append(Value(out.shape, out.dtype, fragments))
    return made


def _outer(run: Interpreter, source: Source, args: Sequence[Abstract], place: NodeKey) -> tuple[int, int]:
    if source.kind == "param":
        arg = args[int(source.name)]
        assert isinstance(arg, Value)
        outer, offset = arg.fragments[0].source, arg.fragments[0].offset
        for dtype in source.casts:
            outer = run.cast_source(outer, dtype)
        return outer, offset
    if source.kind == "constant":
        return run.add(source), 0
    params = run.params_of([args[int(k)] for k in source.params])
    return run.add(dataclasses.replace(source, node=(*place, *source.node), params=params)), 0
