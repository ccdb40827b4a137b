"""Tokenizers of published checkpoints: ``tokenizer.json`` and the small JSON files beside it."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxrl_sync.inference.tokenizer import (
    BOS,
    BOS_ID,
    EOS,
    EOS_ID,
    NUM_SPECIAL,
    PAD,
    PAD_ID,
    REPLACEMENT,
    CharTokenizer,
    Detokenizer,
    TokenizerError,
)

if TYPE_CHECKING:
    import tokenizers

_SPECIAL_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token")
# A character has at most 4 bytes, so at most 3 of them can be waiting for the rest.
_MAX_HELD_CHARS = 3
_WINDOW_TOKENS = 64
_MAX_WINDOW_TOKENS = 256  # of nothing but broken characters; then they are given out as they are
_CONTEXT_TOKENS = 8


@dataclasses.dataclass(frozen=True)
class HFTokenizer:
    """A tokenizer of the ``tokenizers`` library with its special ids and chat template."""

    core: tokenizers.Tokenizer
    vocab_size: int
    bos_id: int | None
    eos_ids: tuple[int, ...]
    pad_id: int
    chat_template: str | None
    specials: dict[str, str]

    @staticmethod
    def load(path: Path) -> HFTokenizer:
        """Reads ``tokenizer.json`` (``path`` or ``path/tokenizer.json``) and, where they exist beside it,
        ``tokenizer_config.json``, ``special_tokens_map.json``, ``generation_config.json`` and
        ``chat_template.jinja``. Raises TokenizerError naming the file."""
        try:
            import tokenizers
        except ImportError:
            raise TokenizerError(
                f"{path} needs the tokenizers package: pip install 'jaxrl-sync[serve]'"
            ) from None
        file = path / "tokenizer.json" if path.is_dir() else path
        if not file.is_file():
            raise TokenizerError(f"no tokenizer at {file}: expected a tokenizer.json, or char[:ALPHABET]")
        try:
            core = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception for a file that it cannot read
            raise TokenizerError(f"{file} is not a tokenizer.json: {error}") from None
        core.no_padding()
        core.no_truncation()
        return _assemble(core, file.parent)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Ids of ``text``; TokenizerError where the vocabulary has no id and no unknown token."""
        try:
            return list(self.core.encode(text, add_special_tokens=add_special_tokens).ids)
        except Exception as error:  # the library raises bare Exception
            raise TokenizerError(f"tokenizer can't encode {text[:60]!r}: {error}") from None

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return str(self.core.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def token_bytes(self, token_id: int) -> bytes:
        return _token_bytes(self.core.id_to_token(token_id))

    def special_tokens(self) -> dict[str, str]:
        return dict(self.specials)

    def can_encode(self, text: str) -> bool:
        """Whether ``text`` survives a round trip: an unknown-token id would lose it."""
        try:
            return self.decode(self.encode(text), skip_special_tokens=False).strip() == text.strip()
        except TokenizerError:
            return False

    def stream(self) -> Detokenizer:
        return _Stream(self)


class _Stream:
    """Incremental decoding over a sliding window of tokens.

    A decoder may change the end of its text when more tokens come (bytes of one character, spread over
    tokens), never what lies before; so a trailing run of U+FFFD is held back. The window keeps the cost of
    a token constant, and keeps the context that decoders need which treat the first token differently.
    """

    def __init__(self, tokenizer: HFTokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._emitted_chars = 0

    def push(self, ids: Iterable[int]) -> str:
        self._window.extend(ids)
        text = self._tokenizer.decode(self._window)
        trailing = len(text) - len(text.rstrip(REPLACEMENT))
        overlong = len(self._window) > _MAX_WINDOW_TOKENS
        end = len(text) - (0 if overlong else min(trailing, _MAX_HELD_CHARS))
        out = text[self._emitted_chars : end]
        self._emitted_chars = max(self._emitted_chars, end)
        if end == len(text) and len(self._window) > _WINDOW_TOKENS:
            self._window = self._window[-_CONTEXT_TOKENS:]
            self._emitted_chars = len(self._tokenizer.decode(self._window))
        return out

    def flush(self) -> str:
        text = self._tokenizer.decode(self._window)
        out = text[self._emitted_chars :]
        self._emitted_chars = len(text)
        return out


def write_char_tokenizer(tokenizer: CharTokenizer, folder: Path) -> None:
    """Writes a character tokenizer as ``tokenizer.json`` with the same ids, for checkpoints that others load.

    The padding of its vocabulary is not written: ids past the alphabet stand for no text.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    vocab = {PAD: PAD_ID, BOS: BOS_ID, EOS: EOS_ID}
    vocab |= {char: i for i, char in enumerate(tokenizer.alphabet, start=NUM_SPECIAL)}
    core = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    core.add_special_tokens([AddedToken(name, special=True) for name in (PAD, BOS, EOS)])
    core.save(str(folder / "tokenizer.json"))
    names = {"bos_token": BOS, "eos_token": EOS, "pad_token": PAD}
    config = {**names, "tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _assemble(core: tokenizers.Tokenizer, folder: Path) -> HFTokenizer:
    config = _read_json(folder / "special_tokens_map.json") | _read_json(folder / "tokenizer_config.json")
    specials = {name: text for name in _SPECIAL_NAMES if (text := _token_text(config.get(name))) is not None}
    bos, eos, pad = (
        core.token_to_id(specials[n]) if n in specials else None
        for n in ("bos_token", "eos_token", "pad_token")
    )
    generation_eos = _read_json(folder / "generation_config.json").get("eos_token_id")
    listed = generation_eos if isinstance(generation_eos, list) else [generation_eos]
    known = dict.fromkeys(i for i in [eos, *listed] if isinstance(i, int))
    return HFTokenizer(
        core=core,
        vocab_size=max(core.get_vocab(with_added_tokens=True).values(), default=-1) + 1,
        bos_id=bos,
        eos_ids=tuple(known),
        pad_id=pad if pad is not None else (next(iter(known), 0)),
        chat_template=_chat_template(config, folder),
        specials=specials,
    )


def _chat_template(config: dict[str, Any], folder: Path) -> str | None:
    """A file of its own wins; else the config's string, or the one named ``default`` of its list."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (ValueError, OSError) as error:
            raise TokenizerError(f"{file} is not readable text: {error}") from None
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _token_text(value: Any) -> str | None:
    """Special tokens are written as a string or as ``{"content": string, ...}``."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise TokenizerError(f"{file} is not readable JSON: {error}") from None
    if not isinstance(value, dict):
        raise TokenizerError(f"{file} holds a {type(value).__name__}, expected an object")
    return value


def _byte_table() -> dict[str, int]:
    """Byte-level BPE writes bytes as printable characters: printable Latin-1 as itself, the rest from U+0100
    up in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(rest)}


_BYTES = _byte_table()
_BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")


def _token_bytes(token: str | None) -> bytes:
    """Bytes of a vocabulary entry: byte-level characters, ``<0xNN>`` fallback, or plain text."""
    if token is None:
        return REPLACEMENT.encode()
    if _BYTE_TOKEN.fullmatch(token):
        return bytes([int(token[3:5], 16)])
    if all(c in _BYTES for c in token):
        return bytes(_BYTES[c] for c in token)
    return token.replace("\u2581", " ").encode()
