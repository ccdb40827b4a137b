"""A GGUF file of a Llama or Qwen3 model, made into a checkpoint folder that trainer and engine load.

GGUF (the file format of ggml and llama.cpp) holds metadata, the tokenizer and tensors, many of them quantised
in blocks. The ``gguf`` package reads the file and dequantises; here are the names, the order of rotary pairs
and the tokenizer. What is written is the dequantised value: float32 keeps it exactly.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_sync.inference.checkpoint import write_checkpoint
from jaxrl_sync.inference.hf_config import CheckpointError, HFModel, MissingCheckpointError
from jaxrl_sync.inference.hf_convert import EMBED, FINAL_NORM, HEAD, tensor_shapes
from jaxrl_sync.sharding.presets.qwen3 import DecoderConfig

Array = np.ndarray[Any, Any]

INSTALL_HINT = "pip install 'jaxrl-sync[pretrained]'"
# GGUF architecture -> (queries and keys are normalised, rows of q and k stand in ggml's interleaved order)
FAMILIES = {"llama": (False, True), "qwen3": (True, False)}
_TOP = {EMBED: "token_embd.weight", FINAL_NORM: "output_norm.weight", HEAD: "output.weight"}
_LAYER = {
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
}
_CONTROL = (3, 4)  # token types of the file format: control, user defined


class GGUFFile:
    """An open GGUF file, checked: ``model`` says what it holds, ``tensors`` gives them one at a time.

    Raises CheckpointError for what this project can't compute exactly.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._reader = _open(path)
        self.model = _model(self)
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        self._check()

    def value(self, key: str, default: Any = None) -> Any:
        """A metadata value; CheckpointError when it is missing and there is no default."""
        field = self._reader.fields.get(key)
        if field is None and default is None:
            raise CheckpointError(f"{self.path}: no metadata {key!r}")
        return default if field is None else field.contents()

    def has(self, key: str) -> bool:
        """Whether the metadata have that key."""
        return key in self._reader.fields

    def tensors(self) -> Iterator[tuple[str, Array]]:
        """Hugging Face name and float32 value of every tensor of the decoder."""
        from gguf import quants

        for name, shape in tensor_shapes(self.model.decoder).items():
            tensor = self._tensors[_gguf_name(name)]
            value = np.asarray(quants.dequantize(tensor.data, tensor.tensor_type), np.float32)
            yield name, self._in_halves(name, value.reshape(shape))

    def _in_halves(self, name: str, weight: Array) -> Array:
        """Rows of q and k with the two halves of each head apart, as the decoder rotates them."""
        cfg = self.model.decoder
        heads = {"q_proj": cfg.num_heads, "k_proj": cfg.num_kv_heads}.get(name.split(".")[-2])
        if heads is None or not FAMILIES[self.value("general.architecture")][1]:
            return weight
        pairs = weight.reshape(heads, cfg.head_dim // 2, 2, -1)
        return pairs.swapaxes(1, 2).reshape(weight.shape)

    def _check(self) -> None:
        expected = {_gguf_name(name): shape for name, shape in tensor_shapes(self.model.decoder).items()}
        known = {*expected, "rope_freqs.weight"}
        problems = [f"{name} is missing" for name in expected if name not in self._tensors]
        problems += [f"{name} is unknown" for name in self._tensors if name not in known]
        for name, shape in expected.items():
            if name in self._tensors and tuple(self._tensors[name].shape[::-1].tolist()) != shape:
                found = tuple(self._tensors[name].shape[::-1].tolist())
                problems.append(f"{name} has shape {found}, expected {shape}")
        if "rope_freqs.weight" in self._tensors:
            problems.append("rope_freqs.weight: scaled RoPE in a GGUF file is not supported")
        if problems:
            raise CheckpointError(f"{self.path}: {'; '.join(problems[:5])}")


def import_gguf(path: Path, folder: Path, dtype: str = "float32") -> HFModel:
    """Writes the model of ``path`` as a checkpoint ``folder`` with its tokenizer; returns what it is.

    ``dtype``: of the written tensors. The folder appears whole or not at all. Takes the host memory of the
    whole model. Raises CheckpointError; TokenizerError is left to whoever loads the folder.
    """
    source = GGUFFile(path)
    model = source.model
    pad = source.value("tokenizer.ggml.padding_token_id", -1)
    write_checkpoint(
        folder,
        source.tensors(),
        model.decoder,
        dtype=dtype,
        max_position=model.max_position,
        eos_ids=model.eos_ids,
        pad_id=pad if pad >= 0 else None,
        extra_files=_tokenizer_files(source),
    )
    return model


def _open(path: Path) -> Any:
    try:
        from gguf import GGUFReader
    except ImportError:
        raise MissingCheckpointError(f"{path} needs the gguf package: {INSTALL_HINT}") from None
    if not path.is_file():
        raise MissingCheckpointError(f"no GGUF file at {path}")
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise CheckpointError(f"{path} is not a GGUF file: it begins with {magic!r}, expected b'GGUF'")
    try:
        return GGUFReader(path)
    except (ValueError, IndexError, KeyError, OverflowError, OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is not a readable GGUF file: {error}") from None


def _model(file: GGUFFile) -> HFModel:
    kind = file.value("general.architecture")
    if kind not in FAMILIES:
        raise CheckpointError(
            f"{file.path}: architecture {kind!r} is not supported; expected {' or '.join(FAMILIES)}"
        )

    def number(name: str, default: Any = None) -> Any:
        return file.value(f"{kind}.{name}", default)

    def size(name: str, default: Any = None) -> int:
        found = number(name, default)
        if not isinstance(found, int) or found < 1:
            raise CheckpointError(f"{file.path}: {name} is {found!r}, expected a whole number above 0")
        return found

    for name in ("rope.scaling.type", "expert_count"):
        if file.has(f"{kind}.{name}") and number(name) not in ("none", 0):
            raise CheckpointError(f"{file.path}: {name}={number(name)!r} is not supported")
    heads, width = size("attention.head_count"), size("embedding_length")
    kv_heads = size("attention.head_count_kv", heads)
    if heads % kv_heads:
        raise CheckpointError(f"{file.path}: {heads} heads, expected a multiple of the {kv_heads} KV heads")
    head_dim = size("attention.key_length", width // heads)
    vocab_size = len(file.value("tokenizer.ggml.tokens"))
    if number("rope.dimension_count", head_dim) != head_dim:
        found = number("rope.dimension_count")
        raise CheckpointError(f"{file.path}: {found} rotary dimensions, expected the whole head, {head_dim}")
    names = {tensor.name for tensor in file._reader.tensors}
    decoder = DecoderConfig(
        vocab_size=vocab_size,
        num_layers=size("block_count"),
        d_model=width,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        d_ff=size("feed_forward_length"),
        rope_theta=float(number("rope.freq_base", 10_000.0)),
        norm_eps=float(np.float32(number("attention.layer_norm_rms_epsilon"))),
        tied_embeddings=_TOP[HEAD] not in names,
        qk_norm=FAMILIES[kind][0],
    )
    eos = file.value("tokenizer.ggml.eos_token_id", -1)
    bos = file.value("tokenizer.ggml.bos_token_id", -1)
    return HFModel(
        decoder=decoder,
        max_position=size("context_length"),
        eos_ids=(eos,) if eos >= 0 else (),
        bos_id=bos if bos >= 0 else None,
    )


def _gguf_name(name: str) -> str:
    if name in _TOP:
        return _TOP[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{_LAYER[rest]}"


def _tokenizer_files(file: GGUFFile) -> dict[str, str]:
    """``tokenizer.json`` and ``tokenizer_config.json`` of a byte-level BPE tokenizer."""
    if file.value("tokenizer.ggml.model") != "gpt2":
        kind = file.value("tokenizer.ggml.model")
        raise CheckpointError(f"{file.path}: tokenizer {kind!r} is not supported, expected 'gpt2'")
    tokens: list[str] = file.value("tokenizer.ggml.tokens")
    config: dict[str, Any] = {"add_bos_token": bool(file.value("tokenizer.ggml.add_bos_token", False))}
    for name in ("bos", "eos", "unknown", "padding"):
        index = file.value(f"tokenizer.ggml.{name}_token_id", -1)
        if 0 <= index < len(tokens):
            config[{"unknown": "unk", "padding": "pad"}.get(name, name) + "_token"] = tokens[index]
    with contextlib.suppress(CheckpointError):
        config["chat_template"] = file.value("tokenizer.chat_template")
    return {
        "tokenizer.json": _tokenizer(file, tokens).to_str(),
        "tokenizer_config.json": json.dumps(config, indent=2) + "\n",
    }


def _tokenizer(file: GGUFFile, tokens: list[str]) -> Any:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    merges = [tuple(merge.split(" ", 1)) for merge in file.value("tokenizer.ggml.merges")]
    core: Any = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    kind = file.value("tokenizer.ggml.pre", "default")
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if kind == "smollm":
        split: list[Any] = [pre_tokenizers.Digits(individual_digits=True), whole]
    elif kind in ("gpt-2", "default"):
        split = [whole]
    elif kind in _PATTERNS:
        bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        split = [pre_tokenizers.Split(Regex(_PATTERNS[kind]), "isolated"), bytes_only]
    else:
        known = sorted({"smollm", "gpt-2", *_PATTERNS})
        raise CheckpointError(f"{file.path}: pre-tokenizer {kind!r} is unknown, expected one of {known}")
    core.pre_tokenizer = pre_tokenizers.Sequence(split)
    core.decoder = decoders.ByteLevel()
    types = file.value("tokenizer.ggml.token_type", [1] * len(tokens))
    if len(types) != len(tokens):
        raise CheckpointError(f"{file.path}: {len(types)} token types, expected {len(tokens)}, one per token")
    special = [t for t, kind_of in zip(tokens, types, strict=True) if kind_of in _CONTROL]
    core.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    return core


_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_PATTERNS = {"llama-bpe": rf"{_WORDS}|\p{{N}}{{1,3}}{_REST}", "qwen2": rf"{_WORDS}|\p{{N}}{_REST}"}
