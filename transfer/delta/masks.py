"""Change masks made inside of the train step: the baseline that costs an eighth to a thirty-second of a copy.

The step has old and new masters at hand while it casts to the wire dtype; whether the cast changed an
element's bits is one comparison there. Masks of skipped versions are merged by OR: overwrite payloads may
send an element that changed and changed back. One step's mask gives exactly the delta of a comparison with
the last cast.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_sync.transfer.delta import xla
from jaxrl_sync.transfer.delta.encode import Site, Tree, sites_of


def cast_with_mask(
    old: Tree, new: Tree, wire: Mapping[str, Any], masks: Tree | None = None
) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """The new tensors in the wire dtype, and where the cast of ``new`` differs in bits from the cast of
    ``old``.

    Traceable: for use in the train step, on masters before and after the update. ``wire``: path ->
    ShapeDtypeStruct (or array) with wire dtype and sharding. Masks are u32[shards, ceil(elements of a shard /
    32)], laid out like the tensors, bit j of word w for element 32 w + j of the shard; ``masks`` of earlier
    steps are merged in.
    """
    cast, words = {}, {}
    for site in sites_of(wire):
        before, after = old[site.path].astype(site.dtype), new[site.path].astype(site.dtype)
        cast[site.path] = after
        words[site.path] = mask_words(site, before, after)
        if masks is not None:
            words[site.path] |= masks[site.path]
    return cast, words


def marked_cast(
    old: Tree, new: Tree, wire: Mapping[str, Any], masks: Tree | None = None
) -> tuple[dict[str, jax.Array], dict[str, jax.Array], dict[str, jax.Array]]:
    """(masters, cast, masks): `cast_with_mask` of masters that are pinned down first. Traceable.

    The step must keep the masters that are returned here: compilers may compute ``new`` anew for every use,
    with other roundings, and then what is kept isn't what was cast. (The CPU backend of jax 0.10.2 drops the
    barrier that prevents this; marks are held against comparisons anyway.) ``masks`` go to
    `payload.marks.Marked`; a step whose version isn't published hands its own on to the next one.
    """
    settled = jax.lax.optimization_barrier({path: new[path] for path in wire})
    cast, words = cast_with_mask(old, settled, wire, masks)
    return settled, cast, words


def mask_words(site: Site, old: jax.Array, new: jax.Array) -> jax.Array:
    """u32[shards, words]: which elements of each shard differ in their bits. Traceable."""
    function = site.per_shard(lambda a, b: xla.mask_words(a, b)[None], 2, False)
    words: jax.Array = function(old, new)
    return words


def union(*masks: Tree) -> dict[str, jax.Array]:
    """What changed in any of several versions: for a receiver that skipped some."""
    merged = dict(masks[0])
    for mask in masks[1:]:
        merged = {path: words | mask[path] for path, words in merged.items()}
    return merged


def changed(masks: Tree) -> jax.Array:
    """Number of changed elements over all tensors, replicas counted once (float32, for metrics)."""
    counts = [
        jax.lax.population_count(words).sum(dtype=jnp.uint32).astype(jnp.float32) for words in masks.values()
    ]
    return jnp.sum(jnp.stack(counts)) if counts else jnp.zeros(())
