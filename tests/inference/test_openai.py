"""OpenAI's calls without a socket: checked bodies, choices made of token chunks, answers of a real engine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from jaxrl_sync.inference.bridge import TokenBridge
from jaxrl_sync.inference.chat import chat_format
from jaxrl_sync.inference.choices import Choice
from jaxrl_sync.inference.config import EngineConfig
from jaxrl_sync.inference.engine import Engine
from jaxrl_sync.inference.generation import Generation
from jaxrl_sync.inference.openai_api import OpenAIModel
from jaxrl_sync.inference.openai_format import event_stream, whole_answer
from jaxrl_sync.inference.openai_types import ApiError, parse_chat, parse_completion
from jaxrl_sync.inference.request import FinishReason, TokenChunk
from jaxrl_sync.inference.tokenizer import CharTokenizer
from jaxrl_sync.transfer.version import Version

from .engine_helpers import engine_weights, make_engine, tp_mesh

COMPLETION = {"model": "policy", "prompt": "12+30="}
CHAT = {"model": "policy", "messages": [{"role": "user", "content": "1+1="}]}
DIGITS = CharTokenizer("0123456789+= ", size=24)


# Bodies.


def test_completion_defaults() -> None:
    request = parse_completion(COMPLETION)
    options = request.options
    assert request.prompts == ("12+30=",)
    assert (options.n, options.max_tokens, options.temperature, options.top_p) == (1, 16, 1.0, 1.0)
    assert (options.stop, options.seed, options.logprobs, options.stream) == ((), None, False, False)


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ("a",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ((1, 2),)),
        ([[1, 2], [3]], ((1, 2), (3,))),
        (["a", [3]], ("a", (3,))),
    ],
)
def test_prompts_in_all_their_forms(prompt: Any, prompts: Any) -> None:
    assert parse_completion({**COMPLETION, "prompt": prompt}).prompts == prompts


def test_chat_fields() -> None:
    parts = [{"type": "text", "text": "1+"}, {"type": "text", "text": "1="}]
    body = {
        "model": "policy",
        "messages": [{"role": "developer", "content": "x", "name": "me"}, {"role": "user", "content": parts}],
        "max_completion_tokens": 5,
        "top_k": -1,
        "stop": "\n",
        "logprobs": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "user": "someone",
        "presence_penalty": 0,
        "tools": [],
        "response_format": {"type": "text"},
        "chat_template_kwargs": {"enable_thinking": False},
    }
    request = parse_chat(body)
    assert request.messages[0] == {"role": "developer", "content": "x", "name": "me"}
    assert request.messages[1] == {"role": "user", "content": "1+1="}
    options = request.options
    assert (options.max_tokens, options.top_k, options.stop) == (5, 0, ("\n",))
    assert options.logprobs and options.stream and options.include_usage
    assert request.template_variables == {"enable_thinking": False}


WRONG = [
    ({"model": None}, "model", "a model's name"),
    ({"temperature": "hot"}, "temperature", "expected a number, got 'hot'"),
    ({"temperature": float("nan")}, "temperature", "expected from 0 to 2"),
    ({"temperature": 10**400}, "temperature", "out of range"),
    ({"top_p": 0}, "top_p", "above 0"),
    ({"n": 0}, "n", "expected 1 to 128"),
    ({"n": True}, "n", "expected an integer, got True"),
    ({"max_tokens": 0}, "max_tokens", "out of range"),
    ({"max_tokens": 1.5}, "max_tokens", "expected an integer"),
    ({"stop": ["a", ""]}, "stop", "non-empty string"),
    ({"stop": ["a"] * 17}, "stop", "at most 16"),
    ({"stop_token_ids": [-1]}, "stop_token_ids", "token ids >= 0"),
    ({"stream": "yes"}, "stream", "true or false"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "needs stream=true"),
    ({"logit_bias": {"5": 1}}, "logit_bias", "not supported"),
    ({"presence_penalty": 0.5}, "presence_penalty", "not supported here, only 0"),
    ({"max_token": 5}, "max_token", "did you mean 'max_tokens'?"),
    ({"timeout_s": 0}, "timeout_s", "above 0"),
]
WRONG_COMPLETION = [
    *WRONG,
    ({"prompt": None}, "prompt", "expected a string"),
    ({"prompt": []}, "prompt", "expected a string"),
    ({"prompt": [1, "a"]}, "prompt", "token ids"),
    ({"echo": True}, "echo", "not supported"),
    ({"suffix": "x"}, "suffix", "not supported"),
    ({"logprobs": 3}, "logprobs", "asks for alternatives"),
    ({"best_of": 2}, "best_of", "only best_of=n"),
]
WRONG_CHAT = [
    *WRONG,
    ({"messages": []}, "messages", "at least one message"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "system or developer"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", "a string or a list"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content",
        "parts",
    ),
    ({"tools": [{"type": "function"}]}, "tools", "not supported"),
    ({"response_format": {"type": "json_object"}}, "response_format", "not supported"),
    ({"logprobs": True, "top_logprobs": 5}, "top_logprobs", "not supported"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "differ"),
    ({"chat_template_kwargs": [1]}, "chat_template_kwargs", "an object"),
]


@pytest.mark.parametrize(("change", "param", "words"), WRONG_COMPLETION)
def test_wrong_completion_bodies_name_the_field(change: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse_completion(COMPLETION | change)
    error = caught.value.to_json()["error"]
    assert caught.value.status == 400 and error["type"] == "invalid_request_error"
    assert error["param"] == param and words in error["message"]


@pytest.mark.parametrize(("change", "param", "words"), WRONG_CHAT)
def test_wrong_chat_bodies_name_the_field(change: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse_chat(CHAT | change)
    assert caught.value.status == 400 and caught.value.param == param and words in caught.value.message


# Choices.


def chunk(text: str, finish: FinishReason | None = None, end: bool = False) -> TokenChunk:
    ids = (*DIGITS.encode(text), *([2] if end else []))
    return TokenChunk(0, ids, tuple(-0.5 * i for i in range(len(ids))), (7,) * len(ids), finish)


def test_choice_ends_at_the_stop_token_without_its_text() -> None:
    choice = Choice(3, DIGITS, (), frozenset({2}))
    first = choice.advance(chunk("42"))
    last = choice.advance(chunk("1", "stop", end=True))
    assert first is not None and last is not None
    assert (first.index, first.text, first.finish_reason) == (3, "42", None)
    assert (last.text, last.finish_reason, last.token_ids) == ("1", "stop", (4, 2))
    assert [(t.text, t.logprob, t.offset_chars) for t in last.tokens] == [("1", 0.0, 2)]
    assert choice.num_tokens == 4 and choice.advance(chunk("9")) is None


def test_choice_ends_at_a_stop_string_across_tokens_and_drops_the_rest() -> None:
    choice = Choice(0, DIGITS, ("= 7",), frozenset({2}))
    pieces = [choice.advance(c) for c in (chunk("1="), chunk(" "), chunk("799", "length"))]
    assert [p.text for p in pieces if p] == ["1", "", ""]
    assert pieces[2] is not None and pieces[2].finish_reason == "stop"
    assert choice.num_tokens == 4 and choice.finished


def test_choice_gives_out_what_it_held_back_when_the_engine_ends_it() -> None:
    choice = Choice(0, DIGITS, ("= 7",), frozenset({2}))
    assert [p.text if p else None for p in (choice.advance(chunk("1=")), choice.finish("timeout"))] == [
        "1",
        "=",
    ]
    assert choice.finish("abort") is None


# Answers of a real engine.


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    config = EngineConfig(
        slots=4, max_len=48, prefill_lengths=(16,), prefill_rows=2, max_stop_ids=6, eos_token_ids=(2,)
    )
    engine = make_engine(config)
    stop = threading.Event()
    thread = threading.Thread(target=engine.run, args=(stop,))
    thread.start()
    yield engine
    stop.set()
    thread.join(30)
    engine.close()


def model_of(engine: Engine) -> OpenAIModel:
    return OpenAIModel("policy", engine.config, engine.model.vocab_size, DIGITS, chat_format(DIGITS))


def answer(engine: Engine, body: dict[str, Any]) -> dict[str, Any]:
    """The whole answer to a completion body (with ``prompt``) or to a chat body."""

    async def call() -> dict[str, Any]:
        model = model_of(engine)
        job = model.completion_job(body) if "prompt" in body else model.chat_job(body)
        bridge = TokenBridge(asyncio.get_running_loop())
        with contextlib.closing(Generation(engine, bridge, DIGITS, job)) as generation:
            return await whole_answer(generation, str(engine.version))

    return asyncio.run(asyncio.wait_for(call(), 60))


def streamed(engine: Engine, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a streamed answer, ``[DONE]`` checked and left out."""

    async def call() -> list[bytes]:
        model = model_of(engine)
        job = model.completion_job(body) if "prompt" in body else model.chat_job(body)
        bridge = TokenBridge(asyncio.get_running_loop())
        with contextlib.closing(Generation(engine, bridge, DIGITS, job)) as generation:
            return [event async for event in event_stream(generation, str(engine.version))]

    events = asyncio.run(asyncio.wait_for(call(), 60))
    assert all(e.startswith(b"data: ") and e.endswith(b"\n\n") for e in events)
    assert events.pop() == b"data: [DONE]\n\n"
    return [json.loads(e[len(b"data: ") :]) for e in events]


def test_streamed_answer_equals_the_whole_one(engine: Engine) -> None:
    body = {**COMPLETION, "n": 3, "max_tokens": 20, "seed": 5, "logprobs": 0, "return_token_ids": True}
    whole = answer(engine, body)
    parts = streamed(engine, body | {"stream": True, "stream_options": {"include_usage": True}})
    for choice in whole["choices"]:
        own = [c for p in parts for c in p["choices"] if c["index"] == choice["index"]]
        assert "".join(c["text"] for c in own) == choice["text"]
        assert [t for c in own for t in c["token_ids"]] == choice["token_ids"]
        assert [x for c in own for x in c["logprobs"]["token_logprobs"]] == choice["logprobs"][
            "token_logprobs"
        ]
        assert [c["finish_reason"] for c in own][-1] == choice["finish_reason"]
    assert parts[-1]["usage"] == whole["usage"] and parts[-1]["choices"] == []
    assert whole["usage"]["prompt_tokens"] == 6
    assert whole["usage"]["completion_tokens"] == sum(len(c["token_ids"]) for c in whole["choices"])
    assert whole["system_fingerprint"] == "test:0"


def test_logprobs_and_offsets_fit_the_text(engine: Engine) -> None:
    choice = answer(engine, {**COMPLETION, "max_tokens": 12, "logprobs": 0, "seed": 1})["choices"][0]
    listed = choice["logprobs"]
    assert "".join(t for t in listed["tokens"] if not t.startswith("<")) == choice["text"]
    assert all(x < 0 for x in listed["token_logprobs"])
    for token, at in zip(listed["tokens"], listed["text_offset"], strict=True):
        assert token.startswith("<") or choice["text"][at : at + len(token)] == token


def test_many_prompts_make_choices_in_order(engine: Engine) -> None:
    one = [
        answer(engine, {**COMPLETION, "prompt": p, "temperature": 0})["choices"][0]["text"]
        for p in ("1", "2+")
    ]
    both = answer(engine, {**COMPLETION, "prompt": ["1", "2+"], "n": 2, "temperature": 0})
    assert [c["index"] for c in both["choices"]] == [0, 1, 2, 3]
    assert [c["text"] for c in both["choices"]] == [one[0], one[0], one[1], one[1]]


def test_stop_string_cuts_the_answer_and_frees_the_engine(engine: Engine) -> None:
    body = {**COMPLETION, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    text = answer(engine, body)["choices"][0]["text"]
    stop = text[3:6]
    cut = answer(engine, body | {"stop": [stop]})["choices"][0]
    assert cut["text"] == text[: text.index(stop)] and cut["finish_reason"] == "stop"
    for _ in range(1200):
        if engine.stats().running == 0:
            break
        threading.Event().wait(0.05)
    assert engine.stats().running == 0


def test_stop_token_ids_end_without_their_text(engine: Engine) -> None:
    body = {**COMPLETION, "max_tokens": 40, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    ids = answer(engine, body)["choices"][0]["token_ids"]
    choice = answer(engine, body | {"stop_token_ids": [ids[4]]})["choices"][0]
    first = ids.index(ids[4])
    assert choice["token_ids"] == ids[: first + 1] and choice["finish_reason"] == "stop"
    assert choice["text"] == DIGITS.decode(ids[:first])


def test_seed_repeats_an_answer_under_another_request_id(engine: Engine) -> None:
    body = {**CHAT, "max_tokens": 16, "seed": -3}
    texts = {answer(engine, body)["choices"][0]["message"]["content"] for _ in range(2)}
    other = answer(engine, body | {"seed": 4})["choices"][0]["message"]["content"]
    assert len(texts) == 1 and other not in texts


def test_chat_fills_the_context_by_default(engine: Engine) -> None:
    whole = answer(engine, {**CHAT, "ignore_eos": True})
    assert whole["object"] == "chat.completion"
    assert whole["choices"][0]["finish_reason"] == "length"
    assert whole["usage"]["total_tokens"] == engine.config.max_len
    assert whole["choices"][0]["message"]["role"] == "assistant"


@pytest.mark.parametrize(
    ("change", "status", "code", "words"),
    [
        ({"model": "gpt"}, 404, "model_not_found", "'gpt' does not exist, this engine serves 'policy'"),
        ({"prompt": "1" * 48}, 400, "context_length_exceeded", "48 of prompt"),
        ({"prompt": "1" * 40, "max_tokens": 9}, 400, "context_length_exceeded", "max_tokens=9"),
        ({"prompt": []}, 400, "invalid_type", "prompt"),
        ({"prompt": "1+x"}, 400, "invalid_prompt", "character 'x' at position 2"),
        ({"prompt": [5, 24]}, 400, "invalid_prompt", "token id 24, the vocabulary ends at 23"),
    ],
)
def test_requests_that_do_not_fit_the_model(
    engine: Engine, change: dict[str, Any], status: int, code: str, words: str
) -> None:
    with pytest.raises(ApiError) as caught:
        model_of(engine).completion_job(COMPLETION | change)
    assert (caught.value.status, caught.value.code) == (status, code) and words in caught.value.message


def test_engine_that_goes_down_ends_the_stream_with_an_error_event(engine: Engine) -> None:
    async def call() -> list[bytes]:
        job = model_of(engine).completion_job({**COMPLETION, "max_tokens": 40, "stream": True})
        bridge = TokenBridge(asyncio.get_running_loop())
        engine.pause("keep").result(60)  # it may be done before the weights are torn otherwise
        generation = Generation(engine, bridge, DIGITS, job)
        engine.poison("torn weights")
        return [event async for event in event_stream(generation, "v")]

    try:
        events = asyncio.run(asyncio.wait_for(call(), 60))
        assert b"torn weights" in events[-1] and b'"type":"server_error"' in events[-1]
    finally:
        weights = engine_weights(0, tp_mesh(), config=engine.config)
        engine.install(weights, Version("test", 1)).result(60)
        engine.resume().result(60)
        assert engine.state == "ready"
