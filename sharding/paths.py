"""Names of the leaves of a pytree: the keys on the way to it, joined by "/"."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax

from jaxrl_sync.sharding.errors import MappingError


def _key_name(key: Any) -> str:
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def path_names(paths: Sequence[tuple[Any, ...]]) -> list[str]:
    """ "a/b/0" of each key path of a tree, all of them in its order.

    The ``.value`` that an NNX Variable puts below its name is left out, but not a field of that name that has
    others beside it.
    """
    names = []
    for i, keys in enumerate(paths):
        if len(keys) > 1 and isinstance(keys[-1], jax.tree_util.GetAttrKey) and keys[-1].name == "value":
            around = [*paths[max(0, i - 1) : i], *paths[i + 1 : i + 2]]  # a node's leaves follow each other
            if all(other[: len(keys) - 1] != keys[:-1] for other in around):
                keys = keys[:-1]
        names.append("/".join(_key_name(k) for k in keys))
    return names


def leaves_by_path(
    tree: Any, what: str = "tree", is_leaf: Callable[[Any], bool] | None = None
) -> dict[str, Any]:
    """Path -> leaf in the tree's own order. Two leaves of one name are a `MappingError`."""
    named: dict[str, Any] = {}
    found = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)[0]
    for name, (_, leaf) in zip(path_names([keys for keys, _ in found]), found, strict=True):
        if name in named:
            raise MappingError(f"{what}: two leaves are both named {name!r}")
        named[name] = leaf
    return named


def nested(leaves: Mapping[str, Any]) -> Any:
    """Nested dictionaries of leaves named "a/b/c". A sole leaf without a name is returned bare."""
    if set(leaves) == {""}:
        return leaves[""]
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        node = tree
        *parents, last = path.split("/")
        for part in parents:
            node = node.setdefault(part, {})
            if not isinstance(node, dict):
                raise MappingError(f"{path!r}: {part!r} is a tensor and a folder at once")
        if last in node:
            raise MappingError(f"{path!r} is a tensor and a folder at once")
        node[last] = leaf
    return tree


def nearest(name: str, names: Iterable[str]) -> str:
    """' (nearest: ...)' for error messages, or an empty string."""
    close = difflib.get_close_matches(name, list(names), n=1, cutoff=0.3)
    return f" (nearest: {close[0]!r})" if close else ""
