"""Tokenizers: the fixed alphabet, tokenizer.json files, and streams that never split a character."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from jaxrl_sync.inference.hf_tokenizer import HFTokenizer, _token_bytes
from jaxrl_sync.inference.stops import StopMatcher
from jaxrl_sync.inference.tokenizer import CharTokenizer, Tokenizer, TokenizerError, load_tokenizer

SAMPLE = "Grüße, 世界! 👩‍👩‍👧 naïve\ttab  two spaces"


def byte_level(folder: Path, **config: object) -> HFTokenizer:
    """A byte-level BPE without merges: one token per byte, so every character of two bytes is split."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {c: i for i, c in enumerate(alphabet)}
    core = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<|end|>", "<|pad|>"])
    core.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return HFTokenizer.load(folder)


def streamed(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    stream = tokenizer.stream()
    return [stream.push([i]) for i in ids] + [stream.flush()]


def test_char_ids_are_the_documented_ones() -> None:
    tokenizer = CharTokenizer("0123456789+=")
    assert tokenizer.encode("12+3=", add_special_tokens=True) == [4, 5, 13, 6, 14]
    assert tokenizer.vocab_size == 15
    assert (tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_ids) == (0, 1, (2,))


def test_char_decode_drops_specials_and_marks_unknown_ids() -> None:
    tokenizer = CharTokenizer("ab", size=8)
    assert tokenizer.decode([1, 3, 4, 2]) == "ab"
    assert tokenizer.decode([1, 3, 2], skip_special_tokens=False) == "<bos>a<eos>"
    assert tokenizer.decode([5, 7, 99]) == "\ufffd" * 3
    assert tokenizer.vocab_size == 8


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: CharTokenizer("aba"), "repeated: ['a']"),
        (lambda: CharTokenizer(""), "at least one"),
        (lambda: CharTokenizer("abc", size=5), "below 6"),
        (lambda: CharTokenizer("abc").encode("abxc"), "'x' at position 2"),
        (lambda: load_tokenizer("/nowhere/at/all"), "/nowhere/at/all"),
    ],
)
def test_char_errors_name_the_thing(make, words: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(TokenizerError) as caught:
        make()
    assert words in str(caught.value) and "\n" not in str(caught.value)


@given(st.text(st.characters(min_codepoint=32, max_codepoint=126)))
def test_char_round_trip(text: str) -> None:
    tokenizer = load_tokenizer("char")
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert "".join(streamed(tokenizer, tokenizer.encode(text))) == text


def test_load_tokenizer_takes_an_alphabet() -> None:
    assert load_tokenizer("char:01", size=8) == CharTokenizer("01", 8)


def test_hf_specials_come_from_the_files_beside(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [256, 257]}')
    tokenizer = byte_level(
        tmp_path, eos_token={"content": "<|end|>"}, pad_token="<|pad|>", chat_template="{{ messages }}"
    )
    assert tokenizer.eos_ids == (256, 257)
    assert tokenizer.pad_id == 257 and tokenizer.bos_id is None
    assert tokenizer.vocab_size == 258
    assert tokenizer.chat_template == "{{ messages }}"
    assert tokenizer.special_tokens() == {"eos_token": "<|end|>", "pad_token": "<|pad|>"}


def test_hf_chat_template_file_wins_and_lists_give_default(tmp_path: Path) -> None:
    named = [{"name": "tool", "template": "T"}, {"name": "default", "template": "D"}]
    assert byte_level(tmp_path, chat_template=named).chat_template == "D"
    (tmp_path / "chat_template.jinja").write_text("F")
    assert byte_level(tmp_path, chat_template=named).chat_template == "F"


def test_hf_errors_name_the_file(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json is not a tokenizer\.json"):
        HFTokenizer.load(tmp_path)
    byte_level(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[1]")
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json holds a list"):
        HFTokenizer.load(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(TokenizerError, match=r"chat_template\.jinja is not readable text"):
        HFTokenizer.load(tmp_path)


def test_bytes_of_odd_vocabulary_entries() -> None:
    assert _token_bytes("<0x0A>") == b"\n"
    assert _token_bytes("<0xZZ>") == b"<0xZZ>"
    assert _token_bytes("<0x-1>") == b"<0x-1>"
    assert _token_bytes("\u2581a") == b" a"


def test_stream_never_hands_out_half_a_character(tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path)
    parts = streamed(tokenizer, tokenizer.encode(SAMPLE))
    assert "".join(parts) == SAMPLE
    assert not any("\ufffd" in part for part in parts)


@settings(max_examples=60, deadline=None)
@given(data=st.binary(max_size=300))
def test_stream_of_any_bytes_equals_decoding_them_at_once(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    tokenizer = byte_level(tmp_path_factory.mktemp("byte"))
    from_byte = {tokenizer.token_bytes(i): i for i in range(256)}
    ids = [from_byte[bytes([b])] for b in data]
    assert "".join(streamed(tokenizer, ids)) == data.decode("utf-8", "replace")


def test_long_stream_keeps_its_window_small(tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path)
    text = SAMPLE * 30
    stream = tokenizer.stream()
    assert "".join(stream.push([i]) for i in tokenizer.encode(text)) + stream.flush() == text
    assert len(stream._window) <= 65  # type: ignore[attr-defined]


def test_token_bytes_of_split_characters(tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path)
    assert b"".join(tokenizer.token_bytes(i) for i in tokenizer.encode(SAMPLE)) == SAMPLE.encode()


@settings(max_examples=200)
@given(
    text=st.text("abc", max_size=40),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(0, 40), max_size=8),
)
def test_stop_strings_end_the_text_wherever_it_is_cut(text: str, stops: list[str], cuts: list[int]) -> None:
    matcher = StopMatcher(stops)
    edges = sorted({0, len(text), *(c for c in cuts if c < len(text))})
    parts = [text[a:b] for a, b in zip(edges, edges[1:], strict=False)]
    out = "".join(matcher.push(part) for part in parts) + matcher.flush()
    # The earliest end decides; of stops ending there, the matcher may not have seen a later beginning yet.
    hits = [text.find(s) for s in stops if s in text]
    assert matcher.stopped == bool(hits)
    if not hits:
        assert out == text
    elif len(parts) == 1:
        assert out == text[: min(hits)]
    else:
        assert text.startswith(out) and any(text[len(out) :].startswith(s) for s in stops)


def test_stop_strings_hold_back_only_what_may_begin_one() -> None:
    matcher = StopMatcher(["END", "\n\n"])
    assert [matcher.push(p) for p in ("a\n", "b", "E", "NX", "EN", "D tail", "more")] == [
        "a",
        "\nb",
        "",
        "ENX",
        "",
        "",
        "",
    ]
    assert matcher.stopped and matcher.flush() == ""


def test_tokenizers_do_not_import_jax() -> None:
    modules = "jaxrl_sync.inference.tokenizer, jaxrl_sync.inference.chat"
    code = f"import sys, {modules}; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
