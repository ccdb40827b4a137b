"""Abstract interpretation of a jaxpr: where does every element of every output come from?

Values are `Known` (constants, evaluated) or `Value`s over numbered sources. Movement operations rearrange;
operations on constants are evaluated; everything else ends in a *computed* source, one per output of that
operation, named by its place in the program, so that only the smallest computed frontier is left.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from jaxrl_sync.sharding import movement
from jaxrl_sync.sharding.errors import MappingError
from jaxrl_sync.sharding.fragments import TooManyFragments
from jaxrl_sync.sharding.known import ELEMENTWISE, KNOWN_LIMIT, Known, bind, evaluate_known
from jaxrl_sync.sharding.layout import dtype_of
from jaxrl_sync.sharding.memo import Outline, fill, outline, signature
from jaxrl_sync.sharding.values import Value, reshape, slice_dim, stack

NodeKey = tuple[int, ...]
"""Place of a computed output: equation numbers from the outermost program inwards (loop rounds between)."""

Bind = Callable[[Any, Sequence[Any]], list[Any]]
SCAN_LIMIT = 4096


@dataclasses.dataclass(frozen=True)
class Source:
    """Something that target elements are copies of.

    ``kind``: "param" (``name`` is its path), "computed" (``name`` says by what, ``node`` where in the
    program) or "constant" (``values``). ``casts``: dtypes that it is converted to, one after the other.
    ``params``: paths of the parameters that it depends on.
    """

    kind: str
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    casts: tuple[str, ...] = ()
    node: NodeKey = ()
    params: frozenset[str] = frozenset()
    values: Known | None = None


Abstract = Value | Known


def inner_program(eqn: Any) -> ClosedJaxpr | None:
    """The program that an equation merely wraps (jit, remat, custom derivatives), or None."""
    if eqn.primitive.name in _WRAPPERS:
        for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
            inner = eqn.params.get(name)
            if isinstance(inner, ClosedJaxpr):
                return inner
            if isinstance(inner, Jaxpr):
                return ClosedJaxpr(inner, [])
    return None


_WRAPPERS = frozenset(
    "pjit jit closed_call core_call custom_jvp_call custom_vjp_call custom_vjp_call_jaxpr remat remat2 "
    "checkpoint custom_lin core_closed_call".split()
)


def scan_counts(eqn: Any) -> tuple[int, int]:
    """(constants, carried values) of a scan: the first operands in that order.

    Up to jax 0.10 the counts are parameters; later versions keep the operands' tree instead.
    """
    if "num_consts" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carry, _ = eqn.params["ft_in"].unpack()
    return len(list(consts)), len(list(carry))


class Interpreter:
    """Runs programs on abstract values and collects the sources."""

    def __init__(self, outlines: dict[Any, Outline] | None = None) -> None:
        self.sources: list[Source] = []
        self.outlines: dict[Any, Outline] = {} if outlines is None else outlines
        self._calls: set[int] = set()
        self._casts: dict[tuple[int, str], int] = {}

    def add(self, source: Source) -> int:
        """The number of a new source."""
        self.sources.append(source)
        return len(self.sources) - 1

    def param(self, path: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Value:
        """A parameter as an abstract value."""
        source = Source("param", path, shape, dtype, params=frozenset((path,)))
        return Value.whole(self.add(source), shape, dtype)

    def run(self, closed: ClosedJaxpr, args: Sequence[Abstract], place: NodeKey = ()) -> list[Abstract]:
        """The outputs of a program; ``place`` is the key of the equation that holds it."""
        jaxpr = closed.jaxpr
        env: dict[Any, Abstract] = {}
        for var, const in zip(jaxpr.constvars, closed.consts, strict=True):
            env[var] = Known.of(const)
        env.update(zip(jaxpr.invars, args, strict=True))

        def read(atom: Any) -> Abstract:
            if isinstance(atom, Literal):
                return Known.of(np.asarray(atom.val, getattr(atom.aval, "dtype", None)))
            return env[atom]

        for number, eqn in enumerate(jaxpr.eqns):
            outs = self.equation(eqn, [read(v) for v in eqn.invars], (*place, number))
            env.update(zip(eqn.outvars, outs, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def equation(self, eqn: Any, args: list[Abstract], place: NodeKey) -> list[Abstract]:
        """The outputs of one equation."""
        name = eqn.primitive.name
        if (inner := inner_program(eqn)) is not None:
            return self._call(inner, args, place)
        if (
            name == "scan"
            and eqn.params["length"] <= SCAN_LIMIT
            and not all(isinstance(a, Known) for a in args)
        ):
            return self._scan(eqn, args, place)
        if name == "cond" and isinstance(args[0], Known):
            branches = eqn.params["branches"]
            index = min(max(int(args[0].array()), 0), len(branches) - 1)
            return self.run(branches[index], args[1:], (*place, index))
        if all(isinstance(a, Known) for a in args):
            known = self._known(eqn, [a for a in args if isinstance(a, Known)])
            if known is not None:
                return list(known)
        try:
            moved = self._move(eqn, args)
        except TooManyFragments as error:
            return self._compute(eqn, args, place, f"{name}: {error}")
        return moved if moved is not None else self._compute(eqn, args, place, name)

    def _call(self, closed: ClosedJaxpr, args: list[Abstract], place: NodeKey) -> list[Abstract]:
        """A wrapped program; from its second call on it is only filled in, if its arguments allow that."""
        calls = signature(args)
        if calls is None or id(closed.jaxpr) not in self._calls:
            self._calls.add(id(closed.jaxpr))
            return self.run(closed, args, place)
        key = (id(closed.jaxpr), calls)
        if key not in self.outlines:
            self.outlines[key] = outline(self, closed, args)
        return fill(self, self.outlines[key], args, place)

    def value(self, abstract: Abstract) -> Value:
        """A `Value`; a constant becomes a source of its own."""
        if isinstance(abstract, Value):
            return abstract
        source = self.add(
            Source("constant", "constant", abstract.small.shape, abstract.dtype, values=abstract)
        )
        return abstract.spread(source)

    def _known(self, eqn: Any, args: list[Known]) -> list[Known] | None:
        sizes = [math.prod(v.aval.shape) for v in (*eqn.invars, *eqn.outvars)]
        if eqn.primitive.name in ELEMENTWISE or max(sizes, default=0) <= KNOWN_LIMIT:
            return evaluate_known(eqn, args)
        if eqn.primitive.name == "broadcast_in_dim":
            return [args[0].broadcast(eqn.params["shape"], eqn.params["broadcast_dimensions"])]
        return None

    def _move(self, eqn: Any, args: list[Abstract]) -> list[Abstract] | None:
        name = eqn.primitive.name
        if name == "convert_element_type":
            return self._cast(args[0], np.dtype(eqn.params["new_dtype"]))
        rule = movement.RULES.get(name)
        if rule is None:
            return None
        static = movement.STATIC_OPERANDS.get(name, lambda n: ())(len(args))
        for i in static:
            if not isinstance(args[i], Known):
                self._refuse_dynamic(name, args[0], args[i])
        operands = [a if i in static else self.value(a) for i, a in enumerate(args)]
        result = rule(self, eqn.params, operands, [v.aval for v in eqn.outvars])
        return None if result is None else list(result)

    def _refuse_dynamic(self, name: str, operand: Abstract, index: Abstract) -> None:
        params, moved = sorted(self.params_of([index])), sorted(self.params_of([operand]))
        if name == "select_n":
            return  # arithmetic like any other: a computed leaf
        what, whence = ", ".join(map(repr, moved)) or "a constant", ", ".join(params) or "a computed value"
        raise MappingError(
            f"{name} of {what} takes its positions from data ({whence}): which elements move would change "
            "with the weights; use static indices"
        )

    def params_of(self, args: Sequence[Abstract]) -> frozenset[str]:
        """Paths of the parameters that these values depend on."""
        found: set[str] = set()
        for a in args:
            if isinstance(a, Value):
                for s in a.sources:
                    found |= self.sources[s].params
        return frozenset(found)

    def _compute(self, eqn: Any, args: list[Abstract], place: NodeKey, reason: str) -> list[Abstract]:
        params = self.params_of(args)
        outs: list[Abstract] = []
        for k, var in enumerate(eqn.outvars):
            shape, dtype = tuple(var.aval.shape), var.aval.dtype
            if not isinstance(dtype, np.dtype):
                raise MappingError(f"{reason}: values of type {dtype} can't be a part of the weights")
            source = Source("computed", reason, shape, dtype, node=(*place, k), params=params)
            outs.append(Value.whole(self.add(source), shape, dtype))
        return outs

    def _cast(self, value: Abstract, dtype: np.dtype[Any]) -> list[Abstract]:
        value = self.value(value)
        return [value.with_sources(dtype, lambda s: self.cast_source(s, dtype))]

    def cast_source(self, number: int, dtype: np.dtype[Any] | str) -> int:
        """The source that is a source converted to ``dtype``."""
        source = self.sources[number]
        if str(dtype) == (source.casts[-1] if source.casts else str(source.dtype)):
            return number
        key = (number, str(dtype))
        if key not in self._casts:
            if source.values is not None:
                cast = source.values.cast(dtype_of(str(dtype)))
                new = dataclasses.replace(source, dtype=cast.dtype, values=cast)
            else:
                new = dataclasses.replace(source, casts=(*source.casts, str(dtype)))
            self._casts[key] = self.add(new)
        return self._casts[key]

    def _scan(self, eqn: Any, args: list[Abstract], place: NodeKey) -> list[Abstract]:
        p = eqn.params
        num_consts, num_carry = scan_counts(eqn)
        consts, rest = args[:num_consts], args[num_consts:]
        carry, xs = rest[:num_carry], rest[num_carry:]
        rounds = range(p["length"])
        ys: dict[int, list[Abstract]] = {}
        for i in reversed(rounds) if p["reverse"] else rounds:
            row = [self._row(x, i) for x in xs]
            outs = self.run(p["jaxpr"], [*consts, *carry, *row], (*place, i))
            carry, ys[i] = outs[:num_carry], outs[num_carry:]
        stacked: list[Abstract] = []
        for k, var in enumerate(eqn.outvars[num_carry:]):
            rows = [self.value(ys[i][k]) for i in rounds]
            if rows:
                stacked.append(stack(rows, 0))
            else:
                stacked.append(Value(tuple(var.aval.shape), var.aval.dtype, ()))
        return [*carry, *stacked]

    def _row(self, x: Abstract, i: int) -> Abstract:
        if isinstance(x, Known) and math.prod(x.shape) <= KNOWN_LIMIT:
            return Known.of(x.array()[i])
        x = self.value(x)
        return reshape(slice_dim(x, 0, i, i + 1), x.shape[1:])


def evaluate(
    closed: ClosedJaxpr, args: Sequence[Any], wanted: set[NodeKey], place: NodeKey = (), run: Bind = bind
) -> tuple[list[Any], dict[NodeKey, Any]]:
    """Runs a program on real (or traced) values; the second result holds the computed nodes asked for.

    ``run``: what runs one equation. Programs inside equations are opened only where a wanted node lies in
    them. Under jit, what no wanted node needs is removed by the compiler.
    """
    jaxpr, env, found = closed.jaxpr, dict[Any, Any](), dict[NodeKey, Any]()
    env.update(zip(jaxpr.constvars, closed.consts, strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))
    depth = len(place)
    opened = {key[depth] for key in wanted if key[:depth] == place and len(key) > depth + 2}
    last = max((key[depth] for key in wanted if key[:depth] == place), default=-1)

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else env[atom]

    for number, eqn in enumerate(jaxpr.eqns):
        if place == () and number > last:
            break
        values, here = [read(v) for v in eqn.invars], (*place, number)
        if number in opened:
            outs, inner = _open(eqn, values, wanted, here, run)
            found.update(inner)
        else:
            outs = run(eqn, values)
        env.update(zip(eqn.outvars, outs, strict=True))
        for k, out in enumerate(outs):
            if (*here, k) in wanted:
                found[(*here, k)] = out
    return ([] if place == () else [read(v) for v in jaxpr.outvars]), found


def _open(
    eqn: Any, values: list[Any], wanted: set[NodeKey], here: NodeKey, run: Bind
) -> tuple[list[Any], dict[NodeKey, Any]]:
    if (inner := inner_program(eqn)) is not None:
        return evaluate(inner, values, wanted, here, run)
    p = eqn.params
    if eqn.primitive.name == "cond":
        index = next(key[len(here)] for key in wanted if key[: len(here)] == here)
        return evaluate(p["branches"][index], values[1:], wanted, (*here, index), run)
    num_consts, num_carry = scan_counts(eqn)
    consts, rest = values[:num_consts], values[num_consts:]
    carry, xs = rest[:num_carry], rest[num_carry:]
    found: dict[NodeKey, Any] = {}
    ys: dict[int, list[Any]] = {}
    for i in reversed(range(p["length"])) if p["reverse"] else range(p["length"]):
        row = [*consts, *carry, *(x[i] for x in xs)]
        outs, inner_found = evaluate(p["jaxpr"], row, wanted, (*here, i), run)
        found.update(inner_found)
        carry, ys[i] = outs[:num_carry], outs[num_carry:]
    count = len(eqn.outvars) - num_carry
    stacked = [jax.numpy.stack([ys[i][k] for i in range(p["length"])]) for k in range(count)]
    return [*carry, *stacked], found
