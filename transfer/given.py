"""What a trainer hands to ``publish``: a tree, or an iterator of (path, array), held against its layout."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax

from jaxrl_sync.sharding import Layout
from jaxrl_sync.sharding.paths import leaves_by_path, nested
from jaxrl_sync.transfer.errors import MismatchError
from jaxrl_sync.transfer.pairing import compare_layouts

SHOWN = 5


class Given:
    """Checks what is given against ``source``: in full when it looks different from the time before."""

    def __init__(self, source: Layout) -> None:
        self._source = source
        self._seen: Any = None

    def tree(self, given: Any) -> Any:
        """The tree to publish. MismatchError names tensors that are missing, extra, twice or different."""
        tree = nested(self._collect(given)) if isinstance(given, Iterator) else given
        leaves, structure = jax.tree.flatten(tree)
        looks = structure, [(getattr(x, "shape", None), getattr(x, "dtype", None), _where(x)) for x in leaves]
        if looks != self._seen:
            _check_arrays(tree)
            compare_layouts(self._source, Layout.of(tree), "the published tree")
            self._seen = looks
        return tree

    def _collect(self, pairs: Iterator[Any]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        twice: list[str] = []
        for pair in pairs:
            if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str)):
                raise MismatchError(f"the iterator gave {str(pair)[:80]!r}, expected (path, array)")
            twice += [pair[0]] if pair[0] in found else []
            found[pair[0]] = pair[1]
        missing = sorted(set(self._source) - found.keys())
        extra = sorted(found.keys() - set(self._source))
        faults = [
            f"{what}: {_names(paths)}"
            for what, paths in (("given twice", twice), ("missing", missing), ("not expected", extra))
            if paths
        ]
        if faults:
            raise MismatchError(f"the published tensors differ from the source layout; {'; '.join(faults)}")
        return found


def _where(leaf: Any) -> Any:
    return getattr(leaf, "sharding", None)


def _check_arrays(tree: Any) -> None:
    wrong = [
        f"{path!r} ({type(leaf).__name__})"
        for path, leaf in leaves_by_path(tree).items()
        if not isinstance(leaf, jax.Array)
    ]
    if wrong:
        raise MismatchError(f"only jax.Arrays are published, found {_names(wrong)}")


def _names(paths: list[str]) -> str:
    more = f" and {len(paths) - SHOWN} more" if len(paths) > SHOWN else ""
    return ", ".join(paths[:SHOWN]) + more
