"""GGUF files written by the gguf package, imported and compared with what went in."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter, TokenType, quants
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from tokenizers import pre_tokenizers

from jaxrl_sync.cli import main
from jaxrl_sync.inference.checkpoint import load_trainer, read_config
from jaxrl_sync.inference.gguf_import import GGUFFile, import_gguf
from jaxrl_sync.inference.hf_config import CheckpointError, MissingCheckpointError
from jaxrl_sync.inference.hf_convert import from_trainer
from jaxrl_sync.inference.tokenizer import load_tokenizer
from jaxrl_sync.sharding.presets.qwen3 import DecoderConfig, trainer_shapes

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
TOKENS = ["<end>", *BYTES, "Ġa", "ab", "Ġab"]
CFG = DecoderConfig(
    len(TOKENS), 2, 32, 4, 2, 8, 64, rope_theta=5e4, norm_eps=float(np.float32(1e-5)), qk_norm=False
)
Q8 = GGMLQuantizationType.Q8_0


def weights(cfg: DecoderConfig) -> Any:
    rng = np.random.default_rng(7)
    return jax.tree.map(lambda x: rng.standard_normal(x.shape).astype(np.float32), trainer_shapes(cfg))


def interleaved(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Row 2i + j of a head is row i of its half j: the order that ggml rotates pairs in."""
    out = np.empty_like(weight)
    size = weight.shape[0] // heads
    for head in range(heads):
        for i in range(size // 2):
            for half in (0, 1):
                out[head * size + 2 * i + half] = weight[head * size + half * (size // 2) + i]
    return out


def write(path: Path, cfg: DecoderConfig, kind: str = "llama", **changes: Any) -> dict[str, Any]:
    """Writes a model; returns the values that the file holds, by Hugging Face name."""
    out = GGUFWriter(path, kind)
    out.add_block_count(cfg.num_layers)
    out.add_context_length(512)
    out.add_embedding_length(cfg.d_model)
    out.add_feed_forward_length(cfg.d_ff)
    out.add_head_count(changes.get("heads", cfg.num_heads))
    out.add_head_count_kv(changes.get("kv_heads", cfg.num_kv_heads))
    out.add_key_length(cfg.head_dim)
    out.add_rope_freq_base(cfg.rope_theta)
    out.add_layer_norm_rms_eps(cfg.norm_eps)
    out.add_tokenizer_model(changes.get("tokenizer", "gpt2"))
    out.add_tokenizer_pre(changes.get("pre", "smollm"))
    out.add_token_list(TOKENS)
    out.add_token_types(changes.get("types", [TokenType.CONTROL] + [TokenType.NORMAL] * (len(TOKENS) - 1)))
    out.add_token_merges(["Ġ a", "a b", "Ġa b"])
    out.add_eos_token_id(0)
    out.add_chat_template("{{ messages }}")
    held: dict[str, Any] = {}
    for name, value in from_trainer(weights(cfg), cfg):
        if name.split(".")[-2] in changes.get("without", ()):
            continue
        stored = np.ascontiguousarray(value)
        if kind == "llama" and "q_proj" in name or "k_proj" in name and kind == "llama":
            stored = interleaved(stored, cfg.num_heads if "q_proj" in name else cfg.num_kv_heads)
        target = _named(name)
        if "down_proj" in name:
            packed = quants.quantize(stored, Q8)
            out.add_tensor(target, packed, raw_dtype=Q8)
            value = quants.dequantize(packed, Q8)
        elif "up_proj" in name:
            out.add_tensor(target, stored.astype(np.float16))
            value = stored.astype(np.float16).astype(np.float32)
        else:
            out.add_tensor(target, stored)
        held[name] = value
    for name, value in changes.get("extra", {}).items():
        out.add_tensor(name, value)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return held


def _named(name: str) -> str:
    parts = {
        "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
        "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "model.layers": "blk",
    }  # fmt: skip
    for ours, theirs in parts.items():
        name = name.replace(ours, theirs)
    return name


@pytest.mark.parametrize(
    ("cfg", "kind"),
    [
        (CFG, "llama"),
        (dataclasses.replace(CFG, tied_embeddings=True), "llama"),
        (dataclasses.replace(CFG, qk_norm=True), "qwen3"),
    ],
    ids=["untied", "tied", "qwen3"],
)
def test_the_imported_folder_holds_what_the_file_holds(tmp_path: Path, cfg: DecoderConfig, kind: str) -> None:
    held = write(tmp_path / "m.gguf", cfg, kind)
    model = import_gguf(tmp_path / "m.gguf", tmp_path / "out")
    assert model.decoder == cfg == read_config(tmp_path / "out").decoder
    assert model.eos_ids == (0,) and model.max_position == 512
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",), axis_types=(AxisType.Auto,))
    place = NamedSharding(mesh, PartitionSpec())
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), trainer_shapes(cfg)
    )
    found = dict(from_trainer(load_trainer(tmp_path / "out", cfg, abstract), cfg))
    assert found.keys() == held.keys()
    for name, value in held.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def test_the_tokenizer_splits_digits_merges_and_knows_its_end(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", CFG)
    import_gguf(tmp_path / "m.gguf", tmp_path / "out", "bfloat16")
    tokenizer = load_tokenizer(str(tmp_path / "out"), None)
    ids = tokenizer.encode("ab ab 12<end>")
    byte = {b: TOKENS.index(b) for b in ("Ġ", "1", "2")}
    assert ids == [TOKENS.index("ab"), TOKENS.index("Ġab"), byte["Ġ"], byte["1"], byte["2"], 0]
    assert tokenizer.decode(ids[:-1]) == "ab ab 12" and tokenizer.eos_ids == (0,)


def test_the_command_writes_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "m.gguf", CFG)
    assert main(["import-gguf", str(tmp_path / "m.gguf"), str(tmp_path / "out")]) == 0
    assert "num_layers=2" in capsys.readouterr().out
    assert main(["import-gguf", str(tmp_path / "m.gguf"), str(tmp_path / "out")]) == 2
    assert "exists" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"without": ("ffn_gate", "gate_proj")}, "blk.0.ffn_gate.weight is missing"),
        ({"extra": {"blk.0.attn_q.bias": np.zeros(32, np.float32)}}, "blk.0.attn_q.bias is unknown"),
        ({"extra": {"rope_freqs.weight": np.ones(4, np.float32)}}, "scaled RoPE"),
        ({"tokenizer": "llama"}, "tokenizer 'llama' is not supported"),
        ({"pre": "tekken"}, "pre-tokenizer 'tekken'"),
        ({"heads": 0}, "attention.head_count is 0, expected a whole number above 0"),
        ({"kv_heads": [2, 4]}, r"attention.head_count_kv is \[2, 4\], expected a whole number"),
        ({"kv_heads": 3}, "4 heads, expected a multiple of the 3 KV heads"),
        ({"types": [TokenType.NORMAL]}, "1 token types, expected"),
        ({"kind": "phi3"}, "architecture 'phi3' is not supported; expected llama or qwen3"),
    ],
)
def test_files_that_would_be_read_wrongly_are_refused(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    write(tmp_path / "m.gguf", CFG, **changes)
    with pytest.raises(CheckpointError, match=words):
        import_gguf(tmp_path / "m.gguf", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(MissingCheckpointError, match="no GGUF file at"):
        GGUFFile(tmp_path / "none.gguf")
    (tmp_path / "text.gguf").write_text("hello")
    with pytest.raises(CheckpointError, match="expected b'GGUF'"):
        GGUFFile(tmp_path / "text.gguf")
    write(tmp_path / "m.gguf", CFG)
    data = (tmp_path / "m.gguf").read_bytes()
    for length in (8, 30, 200, len(data) // 2):
        (tmp_path / "cut.gguf").write_bytes(data[:length])
        with pytest.raises(CheckpointError, match="not a readable GGUF file"):
            GGUFFile(tmp_path / "cut.gguf")
