"""What a conversion did wrong with meshes and axes, in words: jax says which axis, not for which tensor.

A spec with an axis that the mesh lacks, a collective over one that is not there, a spec where no mesh is set:
jax raises whatever it finds on its way, from ``ValueError`` to a bare ``AssertionError``.
"""

from __future__ import annotations

import linecache
import os
import re
import types
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.core
from jax.sharding import AbstractMesh, Mesh

from jaxrl_sync.sharding.errors import MappingError

_SPOKEN = re.compile(
    r"not found in mesh|axis name|non-empty mesh|set a mesh|_specs argument|_specs passed|marked as manual|"
    r"(?<![/\\])[Ss]harding\b(?![/\\])"  # the word, not a folder of a file that jax names
)
_AXES = ("axes", "axis_name", "axis_names", "names")
"""What jax calls the axes of a collective, in the frames of its assertions."""

_SHOWN, _LONGEST, _DEEPEST = 3, 160, 16
"""Most tensors that an error names, characters of its parts, and levels of the trees that it looks into."""


def axis_error(error: Exception, named: Sequence[tuple[str, Any]]) -> MappingError | None:
    """The error to raise instead of ``error``, or None where it isn't about meshes.

    ``error``: raised by a conversion while it was traced, not yet passed through any function of jax around
    it. ``named``: path and tracer of each of the conversion's inputs. The error names the operation and its
    line, the tensors that it works on, the reason in jax's words, and the axes of the mesh.
    """
    if isinstance(error, MappingError | jax.errors.JAXTypeError):
        return None
    frames = list(_frames(error))
    axes = _mesh_axes(frames)
    reason = _reason(error, frames, axes)
    if reason is None:
        return None
    mesh = f"the mesh has the axes {', '.join(map(repr, axes))}" if axes else "no mesh is set"
    return MappingError(f"convert: {_operation(frames)} {_tensors(frames, named)}: {reason}; {mesh}")


def _frames(error: Exception) -> Iterator[types.TracebackType]:
    trace = error.__traceback__
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _is_jax(trace: types.TracebackType) -> bool:
    return str(trace.tb_frame.f_globals.get("__name__", "")).partition(".")[0] in ("jax", "jaxlib")


def _reason(error: Exception, frames: list[types.TracebackType], axes: tuple[str, ...]) -> str | None:
    words = " ".join(str(error).split())
    if words:
        return _short(words.partition(" To fix this")[0].rstrip(".")) if _SPOKEN.search(words) else None
    if isinstance(error, AssertionError) and frames and _is_jax(frames[-1]):
        for frame in reversed(frames):
            for name in _AXES:
                found = frame.tb_frame.f_locals.get(name)
                unknown = [a for a in _strings(found) if a not in axes]
                if unknown and _is_jax(frame):
                    return f"unknown axis {unknown[0]!r}"
    return None


def _strings(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    return [v for v in value if isinstance(v, str)] if isinstance(value, tuple | list) else []


def _mesh_axes(frames: list[types.TracebackType]) -> tuple[str, ...]:
    """Axes of the innermost mesh that a frame of the error works with, or of the one that is set."""
    for frame in reversed(frames):
        for value in frame.tb_frame.f_locals.values():
            if isinstance(value, Mesh | AbstractMesh) and value.axis_names:
                return tuple(map(str, value.axis_names))
    return tuple(map(str, jax.sharding.get_abstract_mesh().axis_names))


def _operation(frames: list[types.TracebackType]) -> str:
    """ "`psum(x, 'tp')` (convert.py:12)": the expression that was being evaluated last, outside of jax."""
    last = max((i for i, f in enumerate(frames) if not _is_jax(f)), default=0)
    frame = frames[last]
    code = frame.tb_frame.f_code
    line, end, left, right = list(code.co_positions())[frame.tb_lasti // 2]
    source = linecache.getlines(code.co_filename)[(line or 1) - 1 : end or line]
    if source and left is not None and right is not None:
        source[-1] = source[-1].encode()[:right].decode()
        source[0] = source[0].encode()[left:].decode()
    where = f"{os.path.basename(code.co_filename)}:{frame.tb_lineno}"
    text = _short(" ".join("".join(source).split()))
    return f"`{text}` ({where})" if text else f"{code.co_name} ({where})"


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


def _tensors(frames: list[types.TracebackType], named: Sequence[tuple[str, Any]]) -> str:
    """Which inputs the failed operation got, by their paths; of what was made from them also its shape."""
    paths = {id(tracer): path for path, tracer in named}
    made = ""
    for frame in reversed(frames):
        held = list(_tracers(frame.tb_frame.f_locals.values()))
        names = sorted({paths[id(x)] for x in held if id(x) in paths})
        if names:
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            return f"of {made}{', '.join(map(repr, names[:_SHOWN]))}{more}"
        if held and not made and not _is_jax(frame):
            made = f"{held[0].dtype}{list(held[0].shape)}, made from "
    return f"of {made}the inputs"


def _tracers(values: Iterable[Any], seen: set[int] | None = None, depth: int = 0) -> Iterator[Any]:
    """The tracers among local variables and in what trees they are: any objects, not only trees."""
    seen = set() if seen is None else seen
    for value in values if depth < _DEEPEST else ():
        if isinstance(value, jax.core.Tracer):
            yield value
        elif id(value) in seen or isinstance(value, str | bytes | Iterator):  # jax warns of iterators
            continue
        else:
            seen.add(id(value))
            yield from _tracers(_children(value), seen, depth + 1)


def _children(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return tuple(value.values())
    if isinstance(value, list | tuple):
        return value
    node = jax.tree_util.default_registry.flatten_one_level(value)
    return node[0] if node else ()
