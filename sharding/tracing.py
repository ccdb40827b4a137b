"""trace: from a pure JAX function between two trees to the correspondence of their elements.

The function runs once on abstract values; its jaxpr is then interpreted (`interpret`), its outputs are
checked against the target, and the sources they name become the numbered leaves of the correspondence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxrl_sync.sharding.axis_errors import axis_error
from jaxrl_sync.sharding.correspondence import Correspondence, Leaf, TensorMap
from jaxrl_sync.sharding.errors import MappingError
from jaxrl_sync.sharding.exporting import Program
from jaxrl_sync.sharding.fragments import coalesce
from jaxrl_sync.sharding.interpret import Interpreter, Source
from jaxrl_sync.sharding.layout import Layout
from jaxrl_sync.sharding.paths import leaves_by_path, nearest, path_names
from jaxrl_sync.sharding.purity import check_pure
from jaxrl_sync.sharding.values import Value

_LOOKS = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)
"""What jax says where Python needs to know a value that isn't known yet."""


def trace(convert: Callable[[Any], Any], source: Any, target: Any = None) -> Correspondence:
    """Which source elements every target tensor of ``convert`` consists of. Reads no weights.

    ``convert``: a pure function from the source tree to the target tree. ``source``: a tree of arrays or
    ``jax.ShapeDtypeStruct``, or a `Layout` (then ``convert`` gets nested dictionaries). ``target``: the tree
    or Layout that ``convert`` must produce, or None to accept what it does. Raises `MappingError` for an
    impure function (side effects, or another program when traced again; see `purity`), positions taken from
    data, axes that a mesh lacks, and missing or extra tensors and other shapes or dtypes.
    """
    tree = source.shapes() if isinstance(source, Layout) else source
    for path, leaf in leaves_by_path(tree, "source").items():
        _check_leaf("source", path, leaf)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
    params = leaves_by_path(shapes, "source")
    closed, keys = _program(convert, shapes)
    run = Interpreter()
    inputs = [run.param(path, tuple(x.shape), np.dtype(x.dtype)) for path, x in params.items()]
    if len(set(keys)) != len(keys):
        twice = next(k for k in keys if keys.count(k) > 1)
        raise MappingError(f"convert returns two tensors named {twice!r}")
    check_pure(lambda: _program(convert, shapes), closed, keys)
    values = {}
    for path, value in zip(keys, run.run(closed, inputs), strict=True):
        values[path] = run.value(value)
    if target is not None:
        _check(values, target)
    return _correspondence(run, dict(sorted(values.items())), params, source, closed)


def _check_leaf(side: str, path: str, leaf: Any) -> None:
    if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
        raise MappingError(f"{side} {path!r} is a {type(leaf).__name__}, expected an array or its shape")
    if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.extended):
        raise MappingError(
            f"{side} {path!r} is of type {leaf.dtype}, no number type of jax: leave it out of the tree, or "
            "give what jax.random.key_data makes of it"
        )


def _program(convert: Callable[[Any], Any], shapes: Any) -> tuple[Any, list[str]]:
    """One trace: (closed jaxpr, names of its outputs)."""

    def fresh(tree: Any) -> Any:  # jax remembers what it traced by function; this one is new
        try:
            return convert(tree)
        except Exception as error:
            wrong = axis_error(error, list(leaves_by_path(tree).items()))
            if wrong is None:
                raise
            raise wrong from error

    try:
        closed, out_tree = jax.make_jaxpr(fresh, return_shape=True)(shapes)
    except jax.errors.UnexpectedTracerError as error:
        raise MappingError(f"convert is impure: {str(error).splitlines()[0]}") from error
    except (*_LOOKS, TypeError) as error:
        if not isinstance(error, _LOOKS) and "depends on the value" not in str(error):
            raise  # a shape of traced sizes is a bare TypeError
        words = str(error).splitlines()
        reason = " ".join([words[0], *(w for w in words[1:] if "depends on the value" in w)])
        raise MappingError(
            f"convert looks at the values of the weights, not only moves them: {reason}"
        ) from error
    if closed.effects:
        effects = ", ".join(sorted(map(str, closed.effects)))
        raise MappingError(f"convert is impure: it has side effects ({effects})")
    return closed, path_names([k for k, _ in jax.tree_util.tree_flatten_with_path(out_tree)[0]])


def _check(values: dict[str, Value], target: Any) -> None:
    if isinstance(target, Layout):
        wanted = {p: (t.shape, t.dtype) for p, t in target.items()}
    else:
        leaves = leaves_by_path(target, "target")
        for path, leaf in leaves.items():
            _check_leaf("target", path, leaf)
        wanted = {p: (tuple(x.shape), str(np.dtype(x.dtype))) for p, x in leaves.items()}
    missing = sorted(set(wanted) - set(values))
    extra = sorted(set(values) - set(wanted))
    if missing or extra:
        words = [f"target tensor {p!r} is not produced{nearest(p, extra or values)}" for p in missing[:5]]
        words += [
            f"convert produces {p!r}, which the target lacks{nearest(p, missing or wanted)}"
            for p in extra[:5]
        ]
        more = max(0, len(missing) - 5) + max(0, len(extra) - 5)
        raise MappingError("; ".join(words) + (f"; and {more} more" if more else ""))
    for path, (shape, dtype) in wanted.items():
        found = values[path]
        if len(found.shape) != len(shape):
            raise MappingError(
                f"{path!r}: convert gives rank {len(found.shape)} {found.shape}, the target has {shape}"
            )
        if (found.shape, str(found.dtype)) != (shape, dtype):
            made = f"{found.dtype}{list(found.shape)}"
            raise MappingError(f"{path!r}: convert gives {made}, the target is {dtype}{list(shape)}")


def _correspondence(
    run: Interpreter, values: dict[str, Value], params: dict[str, Any], source: Any, closed: Any
) -> Correspondence:
    """Numbers the sources by first use; equal constants and equal computed nodes become one leaf."""
    numbers: dict[Any, int] = {}
    leaves: list[Leaf] = []
    nodes: dict[str, tuple[int, ...]] = {}
    renamed: dict[int, int] = {}
    tensors = {}
    for path, value in values.items():
        fragments = []
        for f in value.fragments:
            if f.source not in renamed:
                s = run.sources[f.source]
                key = (
                    s.kind,
                    s.name,
                    s.node,
                    s.casts,
                    _constant_bytes(s),
                    str(s.dtype) * (s.kind == "constant"),
                )
                if key not in numbers:
                    numbers[key] = len(leaves)
                    leaves.append(_leaf(s, len(leaves), path))
                    if s.kind == "computed":
                        nodes[leaves[-1].name] = s.node
                renamed[f.source] = numbers[key]
            fragments.append(f._replace(source=renamed[f.source]))
        tensors[path] = TensorMap(value.shape, str(value.dtype), coalesce(fragments))
    known = {p: (tuple(x.shape), str(np.dtype(x.dtype))) for p, x in sorted(params.items())}
    program = Program(closed, tuple(params), nodes) if nodes else None
    return Correspondence(tuple(leaves), tensors, known, _layout(source), program)


def _layout(source: Any) -> Layout | None:
    if isinstance(source, Layout):
        return source
    placed = all(getattr(x, "sharding", None) is not None for x in jax.tree.leaves(source))
    return Layout.of(source) if placed else None


def _constant_bytes(source: Source) -> bytes:
    return np.ascontiguousarray(source.values.small).tobytes() if source.values is not None else b""


def _leaf(source: Source, number: int, path: str) -> Leaf:
    """Names are the same on both sides: by parameter and casts, or by the first target that needs it."""
    suffix = "".join(f"@{c}" for c in source.casts)
    dtype = source.casts[-1] if source.casts else str(source.dtype)
    if source.kind == "param":
        return Leaf(
            "param", source.name + suffix, source.shape, dtype, source.name, source.casts, (source.name,)
        )
    if source.kind == "constant":
        name = f"{path}#constant{number}"
        return Leaf("constant", name, source.shape, dtype, values=_constant_bytes(source))
    name = f"{path}#computed{number}{suffix}"
    params = tuple(sorted(source.params))
    return Leaf("computed", name, source.shape, dtype, casts=source.casts, params=params, reason=source.name)
