"""Published checkpoints (``config.json`` + safetensors) to device trees and back.

Loading reads, for each shard that a device holds, only the slices that it consists of: host memory never
has more than one tensor's shard at a time. Every process of a multi-process mesh reads its own shards.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrl_sync.inference.hf_config import (
    CheckpointError,
    HFModel,
    MissingCheckpointError,
    parse_config,
    render_config,
)
from jaxrl_sync.inference.hf_convert import (
    HEAD,
    Array,
    Box,
    engine_block,
    from_engine,
    from_trainer,
    tensor_shapes,
    trainer_block,
)
from jaxrl_sync.inference.hf_tokenizer import write_char_tokenizer
from jaxrl_sync.inference.tokenizer import CharTokenizer
from jaxrl_sync.sharding.presets.qwen3 import DecoderConfig, Tree, engine_abstract, kv_groups

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_FILE_BYTES = 4 << 30
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
)
_FLOATS = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}
_SHOWN = 5


def read_config(folder: Path) -> HFModel:
    """The model that ``folder/config.json`` describes. Raises CheckpointError."""
    file = folder / "config.json"
    if not file.is_file():
        raise MissingCheckpointError(f"no checkpoint at {folder}: {file} is missing")
    return parse_config(_json_object(file))


def load_engine(
    folder: Path, cfg: DecoderConfig, mesh: Mesh, dtype: Any = "bfloat16", axis: str = "tp"
) -> Tree:
    """The engine tree of a checkpoint on ``mesh``, cast to ``dtype``. Raises CheckpointError."""
    groups = kv_groups(cfg, mesh.shape[axis])
    with Checkpoint(folder, cfg) as files:

        def block(path: str, box: Box) -> Array:
            return engine_block(path, box, cfg, groups, files.read)

        return _fill(engine_abstract(cfg, mesh, np.dtype(dtype), axis), block)


def load_trainer(folder: Path, cfg: DecoderConfig, abstract: Tree) -> Tree:
    """The trainer tree of a checkpoint. ``abstract`` has ``jax.ShapeDtypeStruct`` leaves with shardings.

    Raises CheckpointError.
    """
    with Checkpoint(folder, cfg) as files:

        def block(path: str, box: Box) -> Array:
            return trainer_block(path, box, cfg, files.read)

        return _fill(abstract, block)


class Checkpoint:
    """The open safetensors files of one folder, checked against the decoder: names, shapes, dtypes.

    Raises CheckpointError naming the first tensors that are missing, unknown or of another shape.
    """

    def __init__(self, folder: Path, cfg: DecoderConfig) -> None:
        self._stack = contextlib.ExitStack()
        try:
            self._tensors = _open(folder, self._stack)
            _check(self._tensors, cfg, folder)
        except BaseException:
            self._stack.close()
            raise

    def read(self, name: str, box: Box) -> Array:
        """The part ``box`` of one tensor, in the file's dtype."""
        part: Array = self._tensors[name].get_slice(name)[tuple(slice(a, b) for a, b in box)]
        return part

    def close(self) -> None:
        """Closes the files."""
        self._stack.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def save_engine(folder: Path, tree: Mapping[str, Any], cfg: DecoderConfig, **options: Any) -> None:
    """Writes an engine tree as a checkpoint; ``write_checkpoint`` has the options.

    The leaves must be addressable by this process.
    """
    write_checkpoint(folder, from_engine(tree, cfg), cfg, **options)


def save_trainer(folder: Path, tree: Mapping[str, Any], cfg: DecoderConfig, **options: Any) -> None:
    """Writes a trainer tree as a checkpoint; ``write_checkpoint`` has the options.

    The leaves must be addressable by this process.
    """
    write_checkpoint(folder, from_trainer(tree, cfg), cfg, **options)


def write_checkpoint(
    folder: Path,
    tensors: Iterable[tuple[str, Array]],
    cfg: DecoderConfig,
    *,
    dtype: Any = None,
    max_position: int = 32768,
    eos_ids: tuple[int, ...] = (),
    pad_id: int | None = None,
    tokenizer: Path | CharTokenizer | None = None,
    extra_files: Mapping[str, str] | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Writes ``folder`` so that this project and others load it. It appears whole or not at all.

    ``dtype`` None keeps each tensor's. Files hold at most ``max_file_bytes`` each (or one tensor), which is
    also the host memory it takes. ``tokenizer`` is written too: the files of a folder, or a character
    tokenizer as such files. ``extra_files``: name -> text of further files. Raises CheckpointError when
    ``folder`` exists.
    """
    if folder.exists():
        raise CheckpointError(f"{folder} exists; a checkpoint is written to a new folder")
    partial = folder.with_name(f".{folder.name}.partial-{os.getpid()}")
    partial.mkdir(parents=True)
    try:
        kept = _write_files(partial, tensors, dtype, max_file_bytes)
        config = render_config(cfg, kept, max_position, eos_ids, pad_id)
        _write_json(partial / "config.json", config)
        for name, text in (extra_files or {}).items():
            (partial / name).write_text(text, encoding="utf-8")
        if isinstance(tokenizer, CharTokenizer):
            write_char_tokenizer(tokenizer, partial)
        elif tokenizer is not None:
            _copy_tokenizer(tokenizer, partial)
        partial.replace(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _copy_tokenizer(source: Path, folder: Path) -> None:
    for name in _TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def _write_files(folder: Path, tensors: Iterable[tuple[str, Array]], dtype: Any, max_file_bytes: int) -> str:
    """Writes the safetensors files and, for more than one, their index. Returns the tensors' dtype name."""
    from safetensors.numpy import save_file

    files: list[list[str]] = []
    total_bytes, kind = 0, "float32"
    for batch in _batches(tensors, dtype, max_file_bytes):
        save_file(batch, folder / f"part-{len(files):05d}", metadata={"format": "pt"})
        files.append(list(batch))
        total_bytes += sum(a.nbytes for a in batch.values())
        kind = next(iter(batch.values())).dtype.name
    names = [
        SINGLE if len(files) == 1 else f"model-{i + 1:05d}-of-{len(files):05d}.safetensors"
        for i in range(len(files))
    ]
    for i, name in enumerate(names):
        (folder / f"part-{i:05d}").rename(folder / name)
    if len(files) > 1:
        weight_map = {tensor: names[i] for i, held in enumerate(files) for tensor in held}
        _write_json(folder / INDEX, {"metadata": {"total_size": total_bytes}, "weight_map": weight_map})
    return kind


def _batches(tensors: Iterable[tuple[str, Array]], dtype: Any, max_bytes: int) -> Iterator[dict[str, Array]]:
    batch: dict[str, Array] = {}
    for name, value in tensors:
        array = np.ascontiguousarray(value if dtype is None else value.astype(np.dtype(dtype)))
        if batch and sum(a.nbytes for a in batch.values()) + array.nbytes > max_bytes:
            yield batch
            batch = {}
        batch[name] = array
    if batch:
        yield batch


def _fill(abstract: Tree, block: Any) -> Tree:
    """Arrays for the abstract leaves, made shard by shard; equal shards of one process are read once."""

    def leaf(path: Any, spec: jax.ShapeDtypeStruct) -> jax.Array:
        name = "/".join(str(p.key) for p in path)
        made: dict[Box, Array] = {}

        def shard(index: tuple[slice, ...] | None) -> Array:
            assert index is not None
            ranges = (s.indices(n)[:2] for s, n in zip(index, spec.shape, strict=True))
            box = tuple((a, b) for a, b in ranges)
            if box not in made:
                made[box] = np.ascontiguousarray(block(name, box).astype(spec.dtype))
            return made[box]

        return jax.make_array_from_callback(spec.shape, spec.sharding, shard)

    filled: Tree = jax.tree_util.tree_map_with_path(leaf, abstract)
    return filled


def _open(folder: Path, stack: contextlib.ExitStack) -> dict[str, Any]:
    """Tensor name -> the open file that holds it."""
    from safetensors import SafetensorError, safe_open

    where: dict[str, Any] = {}
    for file, names in _files(folder).items():
        path = folder / file
        if not path.is_file():
            raise MissingCheckpointError(f"{path} is missing")
        try:
            opened: Any = stack.enter_context(safe_open(path, framework="numpy"))
        except (SafetensorError, OSError) as error:
            raise MissingCheckpointError(f"{path} is not a safetensors file: {error}") from None
        held = set(opened.keys())
        for name in sorted(held) if names is None else names:
            if name not in held:
                raise CheckpointError(f"{INDEX} places {name} in {file}, which doesn't hold it")
            where[name] = opened
    return where


def _files(folder: Path) -> dict[str, list[str] | None]:
    """File name -> the tensors to take from it (None: all). Only names inside ``folder`` are followed."""
    index = folder / INDEX
    if not index.is_file():
        if not (folder / SINGLE).is_file():
            raise MissingCheckpointError(f"no weights at {folder}: expected {SINGLE} or {INDEX}")
        return {SINGLE: None}
    weight_map = _json_object(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{index}: weight_map is {type(weight_map).__name__}, expected an object")
    files: dict[str, list[str] | None] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise CheckpointError(
                f"{index}: {name} is in {file!r}, expected the name of a .safetensors file beside it"
            )
        names = files.setdefault(file, [])
        assert names is not None
        names.append(name)
    return files


def _check(tensors: Mapping[str, Any], cfg: DecoderConfig, folder: Path) -> None:
    expected = tensor_shapes(cfg)
    unknown = [n for n in tensors if n not in expected and not _derived(n, cfg)]
    missing = [n for n in expected if n not in tensors]
    problems = [f"{n} is missing{_nearest(n, unknown)}" for n in missing]
    problems += [f"{n} is unknown{_nearest(n, missing)}" for n in unknown]
    for name in expected:
        if name in tensors:
            part = tensors[name].get_slice(name)
            shape, kind = tuple(part.get_shape()), part.get_dtype()
            if shape != expected[name]:
                problems.append(f"{name} has shape {shape}, expected {expected[name]}")
            elif kind not in _FLOATS:
                problems.append(f"{name} has dtype {kind}, expected one of {', '.join(_FLOATS)}")
    if problems:
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise CheckpointError(f"{folder}: {'; '.join(problems[:_SHOWN])}{more}")


def _derived(name: str, cfg: DecoderConfig) -> bool:
    """Tensors that some checkpoints carry although they follow from others: a tied head, RoPE frequencies."""
    return name.endswith("rotary_emb.inv_freq") or (cfg.tied_embeddings and name == HEAD)


def _nearest(name: str, names: list[str]) -> str:
    near = difflib.get_close_matches(name, names, 1, cutoff=0.8)
    return f" (nearest: {near[0]})" if near else ""


def _json_object(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise MissingCheckpointError(f"{file} is not readable JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} holds a {type(value).__name__}, expected an object")
    return value


def _write_json(file: Path, value: Any) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
