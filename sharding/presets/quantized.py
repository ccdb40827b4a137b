"""Block-scaled weights: FP8 or int8 matrices with float32 scales, by conversion functions over engine trees.

A quantised matrix is two leaves in the place of one, ``values`` (one byte per element) and ``scale``, of the
same rank: ``scale`` has one number per block. Both are ordinary tensors of the tree. The mapper sees them as
computed leaves: they are evaluated on the trainer's mesh, from the value that the engine would hold without
quantisation, and what travels (and what a delta compares) are the quantised bytes.

Values are ``weight * (1 / scale)`` rounded to nearest even, with ``scale = max |weight| * (1 / largest)``
over the block; the largest finite number is 448 for float8_e4m3fn (OCP 8-bit floating point specification,
revision 1.0) and 127 for int8. Blocks of 128x128, and of 1x128 along the contraction, are those of
DeepSeek-V3 (arXiv 2412.19437, section 3.3). Reciprocals are written out because XLA replaces a division by a
constant or by a broadcast with them. What is left is exact or correctly rounded in any order of evaluation,
so trainer meshes and compilers can't disagree about a bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jaxrl_sync.sharding.presets.lora import merge
from jaxrl_sync.sharding.presets.quantization import Format, Quantization

Tree = dict[str, Any]

# Engine matrix -> (contracted dimension, output dimension) that blocks are cut along, and the dimension that
# tensor parallelism splits; see `qwen3.convert`. Blocks never run over two heads.
MATRICES: dict[str, tuple[int, int, int]] = {
    "qkv": (0, 3, 1),
    "o": (2, 3, 0),
    "gate_up": (0, 2, 2),
    "down": (0, 1, 0),
}
_SIDE = 128
_LARGEST: dict[Format, float] = {"fp8": 448.0, "int8": 127.0}
_DTYPE: dict[Format, Any] = {"fp8": jnp.float8_e4m3fn, "int8": jnp.int8}


def quantize(weight: jax.Array, blocks: tuple[int, ...], format: Format) -> tuple[jax.Array, jax.Array]:
    """``(values, scale)`` of a float array; ``blocks`` has one block length per dimension, each a divisor.

    values: float8_e4m3fn or int8, the shape of ``weight``. scale: float32, ``shape[d] // blocks[d]``; a block
    of zeros has scale 1. Raises ValueError when a block length does not divide its dimension.
    """
    split = _split(weight.shape, blocks)
    inner = tuple(range(1, 2 * weight.ndim, 2))
    blocked = weight.astype(jnp.float32).reshape(split)
    peak = jnp.max(jnp.abs(blocked), axis=inner, keepdims=True)
    inverse = np.float32(1) / np.float32(
        _LARGEST[format]
    )  # compilers replace a division by a constant anyway
    least = float(jnp.finfo(jnp.float32).tiny)  # a denormal scale would be flushed to zero by some compilers
    scale = jnp.where(peak == 0, 1.0, jnp.maximum(peak * inverse, least)).astype(jnp.float32)
    ratio = jnp.clip(blocked * (1 / scale), -_LARGEST[format], _LARGEST[format])
    rounded = jnp.round(ratio) if format == "int8" else ratio
    return rounded.astype(_DTYPE[format]).reshape(weight.shape), scale.reshape(split[::2])


def dequantize(values: jax.Array, scale: jax.Array, dtype: Any) -> jax.Array:
    """``values * scale`` of each block in float32, then ``dtype``; block lengths follow from the shapes."""
    blocks = tuple(n // s if s else 1 for n, s in zip(values.shape, scale.shape, strict=True))
    split = _split(values.shape, blocks)
    wide = tuple(n for pair in zip(scale.shape, (1,) * scale.ndim, strict=True) for n in pair)
    product = values.astype(jnp.float32).reshape(split) * scale.reshape(wide)
    return product.reshape(values.shape).astype(dtype)


def matrix(leaf: Any, dtype: Any, lora_scale: float = 0.0) -> jax.Array:
    """The engine's matrix in ``dtype``: plain, quantised, or either with adapters beside it, then merged."""
    if not isinstance(leaf, dict):
        return jnp.asarray(leaf).astype(dtype)
    if "base" in leaf:
        return merge(matrix(leaf["base"], jnp.float32), leaf, lora_scale).astype(dtype)
    return dequantize(leaf["values"], leaf["scale"], dtype)


def block_lengths(shape: tuple[int, ...], name: str, scheme: Quantization, parts: int) -> tuple[int, ...]:
    """Block length per dimension of engine matrix ``name``, cut in ``parts`` by tensor parallelism."""
    rows, columns, split = MATRICES[name]
    lengths = [1] * len(shape)
    for d in (rows, columns) if scheme.block == "128x128" else (rows,):
        local = shape[d] // parts if d == split else shape[d]
        lengths[d] = math.gcd(_SIDE, local) if local else 1
    return tuple(lengths)


def quantized_convert(
    convert: Callable[[Tree], Tree], scheme: Quantization, tp: int
) -> Callable[[Tree], Tree]:
    """``convert`` (to an engine tree of ``presets.qwen3``) followed by quantisation of the layers' matrices.

    The matrices are quantised from the values that ``convert`` gives, hence from the bf16-rounded ones where
    its dtype is bfloat16. Embedding, norms and head stay as they are.
    """

    return lambda params: _quantize_plain(convert(params), scheme, tp)


def quantize_tree(tree: Tree, scheme: Quantization, tp: int) -> Tree:
    """A plain engine tree on its mesh, quantised there; every leaf lies as what it came from."""
    shardings = jax.tree.map(lambda x: x.sharding, quantized_abstract(tree, scheme, tp))
    made: Tree = jax.jit(_quantize_plain, static_argnums=(1, 2), out_shardings=shardings)(tree, scheme, tp)
    return made


def _quantize_plain(tree: Tree, scheme: Quantization, tp: int) -> Tree:
    def cut(name: str, weight: jax.Array) -> Tree:
        values, scale = quantize(weight, block_lengths(weight.shape, name, scheme, tp), scheme.format)
        return {"values": values, "scale": scale}

    return _over_matrices(tree, cut)


def quantized_abstract(tree: Tree, scheme: Quantization, tp: int) -> Tree:
    """``qwen3.engine_abstract`` as ``quantized_convert`` fills it: scales are sharded as their values."""

    def cut(name: str, leaf: Any) -> Tree:
        blocks = block_lengths(leaf.shape, name, scheme, tp)
        grid = tuple(n // b for n, b in zip(leaf.shape, blocks, strict=True))
        sharding = leaf.sharding
        assert sharding is None or isinstance(sharding, NamedSharding)
        return {
            "values": jax.ShapeDtypeStruct(leaf.shape, _DTYPE[scheme.format], sharding=sharding),
            "scale": jax.ShapeDtypeStruct(grid, jnp.float32, sharding=sharding),
        }

    return _over_matrices(tree, cut)


def quantized_specs(specs: Tree) -> Tree:
    """Partition specs (``qwen3.engine_specs``) of a quantised tree."""
    return _over_matrices(specs, lambda _, spec: {"values": spec, "scale": spec})


def _over_matrices(tree: Tree, cut: Callable[[str, Any], Tree]) -> Tree:
    def one(name: str, leaf: Any) -> Any:
        if name not in MATRICES:
            return leaf
        if isinstance(leaf, dict):  # with adapters beside it, which stay as they are
            return leaf | {"base": cut(name, leaf["base"])}
        return cut(name, leaf)

    layers = {i: {name: one(name, x) for name, x in layer.items()} for i, layer in tree["layers"].items()}
    return tree | {"layers": layers}


def _split(shape: tuple[int, ...], blocks: tuple[int, ...]) -> tuple[int, ...]:
    for d, (size, block) in enumerate(zip(shape, blocks, strict=True)):
        if block < 1 or size % block:
            raise ValueError(f"block length of dimension {d}: expected a divisor of {size}, got {block}")
    return tuple(n for size, block in zip(shape, blocks, strict=True) for n in (size // block, block))
