"""Checkpoints: published names to device trees and back, bit for bit, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from safetensors.numpy import load_file, save_file

from jaxrl_sync.inference.checkpoint import (
    INDEX,
    Checkpoint,
    load_engine,
    load_trainer,
    read_config,
    save_engine,
    save_trainer,
)
from jaxrl_sync.inference.hf_config import (
    CheckpointError,
    MissingCheckpointError,
    parse_config,
    render_config,
)
from jaxrl_sync.inference.hf_convert import tensor_shapes, trainer_block
from jaxrl_sync.inference.tokenizer import CharTokenizer, TokenizerError, load_tokenizer
from jaxrl_sync.sharding.presets.qwen3 import DecoderConfig, RopeScaling, convert, trainer_shapes

TINY = DecoderConfig(
    vocab_size=24, num_layers=2, d_model=16, num_heads=4, num_kv_heads=2, head_dim=6, d_ff=20, rope_theta=5e5
)
TIED = DecoderConfig(24, 1, 8, 2, 1, 4, 12, tied_embeddings=True)
LLAMA = dataclasses.replace(TINY, qk_norm=False, rope_scaling=RopeScaling(32.0, 1.0, 4.0, 8192))


def mesh_of(tp: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:tp]), ("tp",), axis_types=(AxisType.Auto,))


def trainer_tree(cfg: DecoderConfig, seed: int = 0, dtype: Any = np.float32) -> Any:
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda s: rng.normal(size=s.shape).astype(dtype), trainer_shapes(cfg))


def bits(tree: Any) -> list[bytes]:
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


def same(a: Any, b: Any) -> bool:
    leaves, structure = jax.tree.flatten(a)
    return bits(leaves) == bits(b) and str(structure) == str(jax.tree.structure(b))


@pytest.mark.parametrize("cfg", [TINY, TIED, LLAMA], ids=["untied", "tied", "llama"])
def test_trainer_tree_round_trip_is_bit_exact(tmp_path: Path, cfg: DecoderConfig) -> None:
    tree = trainer_tree(cfg)
    save_trainer(tmp_path / "ckpt", tree, cfg)
    devices = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)

    def spread(leaf: Any) -> Any:
        axes = [n if s % 2 == 0 else None for s, n in zip(leaf.shape[::-1], "ab", strict=False)]
        spec = PartitionSpec(*[None] * (len(leaf.shape) - len(axes)), *axes[::-1])
        return jax.ShapeDtypeStruct(leaf.shape, np.float32, sharding=NamedSharding(devices, spec))

    loaded = load_trainer(tmp_path / "ckpt", cfg, jax.tree.map(spread, tree))
    assert same(loaded, tree)
    assert read_config(tmp_path / "ckpt").decoder == cfg


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize(("cfg", "dtype"), [(TINY, "float32"), (TINY, "bfloat16"), (LLAMA, "bfloat16")])
def test_engine_tree_equals_conversion_of_the_trainer_tree(
    tmp_path: Path, tp: int, cfg: DecoderConfig, dtype: str
) -> None:
    tree = trainer_tree(cfg)
    save_trainer(tmp_path / "ckpt", tree, cfg)
    loaded = load_engine(tmp_path / "ckpt", cfg, mesh_of(tp), dtype)
    expected = jax.jit(lambda p: convert(p, cfg, tp, jnp.dtype(dtype)))(tree)
    assert same(loaded, expected)
    assert loaded["layers"]["1"]["qkv"].sharding.spec == PartitionSpec(None, "tp")


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_engine_tree_round_trip_is_bit_exact_over_several_files(tmp_path: Path, tp: int) -> None:
    engine = convert(trainer_tree(TINY), TINY, tp, jnp.bfloat16)
    save_engine(tmp_path / "ckpt", engine, TINY, max_file_bytes=2000)
    index = json.loads((tmp_path / "ckpt" / INDEX).read_text())
    assert len(set(index["weight_map"].values())) > 2
    assert index["metadata"]["total_size"] == 2 * sum(int(np.prod(s)) for s in tensor_shapes(TINY).values())
    assert same(load_engine(tmp_path / "ckpt", TINY, mesh_of(tp), "bfloat16"), engine)
    assert json.loads((tmp_path / "ckpt" / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_every_bit_pattern_survives(tmp_path: Path) -> None:
    patterns = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16)
    cfg = DecoderConfig(4096, 1, 16, 2, 1, 4, 12, tied_embeddings=True)
    tree = convert(trainer_tree(cfg), cfg, 1, jnp.bfloat16)
    tree["embed"] = patterns.reshape(4096, 16)
    save_engine(tmp_path / "ckpt", tree, cfg)
    loaded = load_engine(tmp_path / "ckpt", cfg, mesh_of(2), "bfloat16")
    assert np.array_equal(np.asarray(loaded["embed"]).view(np.uint16).ravel(), np.arange(1 << 16))


def test_names_and_shapes_are_the_published_ones(tmp_path: Path) -> None:
    save_trainer(tmp_path / "ckpt", trainer_tree(TINY), TINY, dtype="bfloat16")
    tensors = load_file(tmp_path / "ckpt" / "model.safetensors")
    assert {n: t.shape for n, t in tensors.items()} == tensor_shapes(TINY)
    assert tensors["model.layers.1.self_attn.k_proj.weight"].shape == (12, 16)
    assert {t.dtype.name for t in tensors.values()} == {"bfloat16"}


def test_only_the_slices_of_a_shard_are_read() -> None:
    asked: list[tuple[str, Any]] = []

    def read(name: str, box: Any) -> np.ndarray[Any, Any]:
        asked.append((name, box))
        return np.zeros([b - a for a, b in box], np.float32)

    block = trainer_block("layers/attn/k_proj/kernel", ((1, 2), (4, 8), (1, 2), (0, 6)), TINY, read)
    assert block.shape == (1, 4, 1, 6)
    assert asked == [("model.layers.1.self_attn.k_proj.weight", ((6, 12), (4, 8)))]


def altered(folder: Path, **changes: Any) -> Path:
    """A checkpoint with one tensor replaced (or, with None, left out)."""
    save_trainer(folder, trainer_tree(TINY), TINY)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name, value in changes.items():
        tensors.pop(name, None)
        if value is not None:
            tensors[name] = value
    save_file(tensors, file)
    return folder


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {
                "model.layers.0.self_attn.q_norm.weight": None,
                "model.layers.0.self_attn.q_nrom.weight": np.ones(6),
            },
            "q_norm.weight is missing (nearest: model.layers.0.self_attn.q_nrom.weight)",
        ),
        ({"lm_head.weight": None}, "lm_head.weight is missing"),
        ({"model.layers.0.self_attn.q_proj.bias": np.ones(24)}, "q_proj.bias is unknown"),
        ({"model.norm.weight": np.ones(17)}, "model.norm.weight has shape (17,), expected (16,)"),
        ({"model.norm.weight": np.ones(16, np.int8)}, "has dtype I8, expected one of F32"),
    ],
)
def test_tensors_that_do_not_fit_are_named(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    folder = altered(tmp_path / "ckpt", **changes)
    with pytest.raises(CheckpointError) as caught:
        load_engine(folder, TINY, mesh_of(1))
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_tied_head_and_rope_frequencies_in_the_file_are_ignored(tmp_path: Path) -> None:
    folder = tmp_path / "ckpt"
    save_trainer(folder, trainer_tree(TIED), TIED)
    tensors = load_file(folder / "model.safetensors")
    extra = {"lm_head.weight": np.zeros((24, 8)), "model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(2)}
    save_file({**tensors, **extra}, folder / "model.safetensors")
    assert same(
        load_engine(folder, TIED, mesh_of(1), "float32"), convert(trainer_tree(TIED), TIED, 1, jnp.float32)
    )


@pytest.mark.parametrize(
    "file", ["../secret.safetensors", "/etc/passwd", "sub/x.safetensors", "..", "x.bin", 3]
)
def test_index_can_not_leave_its_folder(tmp_path: Path, file: Any) -> None:
    save_trainer(tmp_path / "secret", trainer_tree(TINY), TINY)
    (tmp_path / "secret" / "model.safetensors").rename(tmp_path / "secret.safetensors")
    folder = tmp_path / "ckpt"
    folder.mkdir()
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(tensor_shapes(TINY), file)}))
    with pytest.raises(CheckpointError, match="expected the name of a .safetensors file beside it"):
        Checkpoint(folder, TINY)


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(MissingCheckpointError, match=r"config\.json is missing") as caught:
        read_config(tmp_path)
    assert caught.value.exit_code == 3
    with pytest.raises(MissingCheckpointError, match=r"expected model\.safetensors or"):
        Checkpoint(tmp_path, TINY)
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(MissingCheckpointError, match="is not a safetensors file"):
        Checkpoint(tmp_path, TINY)
    folder = tmp_path / "cut"
    save_trainer(folder, trainer_tree(TINY), TINY)
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-8])
    with pytest.raises(MissingCheckpointError, match="is not a safetensors file"):
        Checkpoint(folder, TINY)
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))
    with pytest.raises(MissingCheckpointError, match=r"gone\.safetensors is missing"):
        Checkpoint(folder, TINY)


def test_existing_folder_is_not_overwritten_and_a_failed_save_leaves_nothing(tmp_path: Path) -> None:
    save_trainer(tmp_path / "ckpt", trainer_tree(TINY), TINY)
    with pytest.raises(CheckpointError, match="exists"):
        save_trainer(tmp_path / "ckpt", trainer_tree(TINY), TINY)
    broken = trainer_tree(TINY)
    del broken["layers"]["mlp"]["down_proj"]
    with pytest.raises(KeyError):
        save_trainer(tmp_path / "other", broken, TINY)
    assert [p.name for p in tmp_path.iterdir()] == ["ckpt"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "qwen2"}, "biases"),
        ({"model_type": "qwen3_moe"}, "expected qwen3 or llama"),
        ({"mlp_bias": True}, "mlp_bias=True"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "'yarn'"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor='None'"),
        (
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 4.0,
                    "high_freq_factor": 1.0,
                    "original_max_position_embeddings": 8192,
                }
            },
            "low_freq_factor < high_freq_factor",
        ),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers='two'"),
        ({"vocab_size": None}, "vocab_size=None"),
        ({"rope_parameters": [1]}, "rope_parameters is a list"),
        ({"rope_scaling": "yarn"}, "rope_scaling is a str"),
        ({"rope_parameters": {}, "rope_theta": "1e6"}, "rope_theta='1e6'"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps='nan'"),
    ],
)
def test_decoders_that_would_be_computed_wrongly_are_refused(change: dict[str, Any], words: str) -> None:
    config = render_config(TINY, "bfloat16", 128) | change
    with pytest.raises(CheckpointError) as caught:
        parse_config(config)
    assert words in str(caught.value)


def test_config_round_trip_and_both_places_of_rope_theta() -> None:
    config = render_config(TINY, "float32", 128, eos_ids=(2, 7), pad_id=0)
    model = parse_config(config)
    assert (model.decoder, model.max_position, model.eos_ids) == (TINY, 128, (2, 7))
    del config["rope_parameters"]
    assert parse_config(config).decoder.rope_theta == 5e5


def test_char_tokenizer_is_written_with_the_same_ids(tmp_path: Path) -> None:
    chars = CharTokenizer("0123456789+= \n", size=24)
    save_trainer(tmp_path / "ckpt", trainer_tree(TINY), TINY, tokenizer=chars)
    read = load_tokenizer(str(tmp_path / "ckpt"))
    ids = chars.encode("12 + 30=\n42")
    assert read.encode("12 + 30=\n42") == ids
    assert read.decode([1, *ids, 2]) == "12 + 30=\n42" == "".join(read.stream().push([i]) for i in ids)
    assert (read.vocab_size, read.bos_id, read.eos_ids, read.pad_id) == (17, 1, (2,), 0)
    assert read.decode([20]) in ("", "\ufffd") and not read.can_encode("x")
    with pytest.raises(TokenizerError, match="can't encode 'x'"):
        read.encode("x")


def test_tokenizer_files_travel_with_the_weights(tmp_path: Path) -> None:
    source = tmp_path / "tok"
    source.mkdir()
    (source / "tokenizer.json").write_text("{}")
    (source / "unrelated.bin").write_text("x")
    save_trainer(tmp_path / "ckpt", trainer_tree(TINY), TINY, tokenizer=source)
    assert sorted(p.name for p in (tmp_path / "ckpt").iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
