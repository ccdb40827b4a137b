"""Bodies of the OpenAI calls as checked, frozen requests; and the shape of their errors.

What this engine does not do (tools, images, penalties, alternatives' log-probs, ...) is refused by name,
never ignored; the few fields without meaning here (``user`` and the like) are accepted. docs/serving.md
holds the table.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Mapping
from typing import Any

MAX_N = 128
MAX_PROMPTS = 128
MAX_STOPS = 16
MAX_STOP_CHARS = 256
ROLES = ("system", "developer", "user", "assistant", "tool")


class ApiError(Exception):
    """An answer in OpenAI's error format."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message, self.status, self.kind, self.param, self.code = message, status, kind, param, code

    def to_json(self) -> dict[str, Any]:
        """``{"error": {message, type, param, code}}``."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


@dataclasses.dataclass(frozen=True)
class Options:
    """What both calls share. ``max_tokens`` None: as much as the context has room for."""

    model: str
    n: int
    max_tokens: int | None
    temperature: float
    top_p: float
    top_k: int
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    seed: int | None
    ignore_eos: bool
    timeout_s: float | None
    logprobs: bool
    stream: bool
    include_usage: bool
    return_token_ids: bool


@dataclasses.dataclass(frozen=True)
class CompletionRequest:
    """``POST /v1/completions``; each prompt is text or token ids."""

    options: Options
    prompts: tuple[str | tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True)
class ChatRequest:
    """``POST /v1/chat/completions``; each message has text content."""

    options: Options
    messages: tuple[dict[str, Any], ...]
    template_variables: dict[str, Any]


# Fields of the protocol that ask for nothing, when they have one of these values (or any, for None).
_HARMLESS: dict[str, tuple[Any, ...] | None] = {
    "user": None,
    "metadata": None,
    "safety_identifier": None,
    "prompt_cache_key": None,
    "service_tier": ("auto", "default"),
    "store": (False,),
    "parallel_tool_calls": None,
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "echo": (False,),
    "suffix": ("",),
    "top_logprobs": (0,),
}
_SHARED = (
    "model n max_tokens temperature top_p top_k stop stop_token_ids seed ignore_eos timeout_s logprobs "
    "stream stream_options return_token_ids"
).split()
_COMPLETION = [*_SHARED, "prompt", "best_of"]
_CHAT = [*_SHARED, "messages", "max_completion_tokens", "chat_template_kwargs"]


def parse_completion(body: Mapping[str, Any]) -> CompletionRequest:
    """A checked completion request. Raises ApiError (400) naming the field."""
    _refuse_unsupported(body, _COMPLETION)
    options = _options(body, default_max_tokens=16, logprobs=_completion_logprobs(body))
    best_of = _integer(body, "best_of", options.n, 1, MAX_N)
    if best_of != options.n:
        raise _bad("best_of", f"best_of={best_of} is not supported, only best_of=n (n={options.n})")
    return CompletionRequest(options, _prompts(body))


def parse_chat(body: Mapping[str, Any]) -> ChatRequest:
    """A checked chat request. Raises ApiError (400) naming the field."""
    _refuse_unsupported(body, _CHAT)
    completion_tokens = body.get("max_completion_tokens")
    if completion_tokens is not None:
        if body.get("max_tokens") not in (None, completion_tokens):
            raise _bad("max_tokens", "max_tokens and max_completion_tokens differ; give one of them")
        body = {**body, "max_tokens": completion_tokens}
    options = _options(body, default_max_tokens=None, logprobs=_boolean(body, "logprobs", False))
    variables = body.get("chat_template_kwargs") or {}
    if not isinstance(variables, dict):
        raise _wrong_type("chat_template_kwargs", "an object", variables)
    return ChatRequest(options, _messages(body), variables)


def _options(body: Mapping[str, Any], default_max_tokens: int | None, logprobs: bool) -> Options:
    model = body.get("model")
    if not isinstance(model, str) or not model:
        raise _wrong_type("model", "a model's name", model)
    max_tokens = body.get("max_tokens")
    stream = _boolean(body, "stream", False)
    return Options(
        model=model,
        n=_integer(body, "n", 1, 1, MAX_N),
        max_tokens=default_max_tokens if max_tokens is None else _integer(body, "max_tokens", 1, 1, 1 << 31),
        temperature=_number(body, "temperature", 1.0, lambda x: 0 <= x <= 2, "from 0 to 2"),
        top_p=_number(body, "top_p", 1.0, lambda x: 0 < x <= 1, "above 0 and at most 1"),
        top_k=max(0, _integer(body, "top_k", 0, -1, (1 << 31) - 1)),
        stop=_stops(body),
        stop_token_ids=_token_ids(body.get("stop_token_ids") or [], "stop_token_ids"),
        seed=None if body.get("seed") is None else _integer(body, "seed", 0, -(1 << 63), (1 << 64) - 1),
        ignore_eos=_boolean(body, "ignore_eos", False),
        timeout_s=_timeout_s(body),
        logprobs=logprobs,
        stream=stream,
        include_usage=_include_usage(body, stream),
        return_token_ids=_boolean(body, "return_token_ids", False),
    )


def _refuse_unsupported(body: Mapping[str, Any], known: list[str]) -> None:
    for name, value in body.items():
        if name in known or value is None:
            continue
        if name not in _HARMLESS:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise _bad(name, f"unknown field {name!r}{hint}", code="unknown_parameter")
        allowed = _HARMLESS[name]
        if allowed is not None and value not in allowed:
            shown = " or ".join(repr(v) for v in allowed)
            raise _bad(
                name, f"{name}={_show(value)} is not supported here, only {shown}", "unsupported_value"
            )


def _prompts(body: Mapping[str, Any]) -> tuple[str | tuple[int, ...], ...]:
    """A string, a list of strings, a list of token ids, or a list of such lists."""
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        return (prompt,)
    if not isinstance(prompt, list) or not prompt:
        raise _wrong_type("prompt", "a string, strings, token ids, or lists of token ids", prompt)
    if all(type(x) is int for x in prompt):
        return (_token_ids(prompt, "prompt"),)
    if len(prompt) > MAX_PROMPTS:
        raise _bad("prompt", f"{len(prompt)} prompts in one request, at most {MAX_PROMPTS} are taken")
    return tuple(x if isinstance(x, str) else _token_ids(x, "prompt") for x in prompt)


def _messages(body: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise _wrong_type("messages", "a list of at least one message", messages)
    return tuple(_message(m, f"messages[{i}]") for i, m in enumerate(messages))


def _message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise _wrong_type(where, "an object", message)
    role = message.get("role")
    if role not in ROLES:
        raise _wrong_type(f"{where}.role", " or ".join(ROLES), role)
    for name in sorted(set(message) - {"role", "content", "name", "tool_call_id", "refusal"}):
        if message[name] not in (None, []):
            raise _bad(f"{where}.{name}", f"{where}.{name} is not supported", "unsupported_value")
    kept = {k: v for k, v in message.items() if k in ("name", "tool_call_id") and v is not None}
    return {"role": role, "content": _content(message.get("content"), f"{where}.content"), **kept}


def _content(content: Any, where: str) -> str:
    """Text, or the joined text of parts; images and audio are refused."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _wrong_type(where, "a string or a list of text parts", content)
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise _wrong_type(where, 'parts {"type": "text", "text": string}', part)
    return "".join(part["text"] for part in content)


def _stops(body: Mapping[str, Any]) -> tuple[str, ...]:
    stop = body.get("stop")
    stops = [stop] if isinstance(stop, str) else stop or []
    if not isinstance(stops, list) or not all(isinstance(s, str) and s for s in stops):
        raise _wrong_type("stop", "a non-empty string or a list of them", stop)
    if len(stops) > MAX_STOPS or any(len(s) > MAX_STOP_CHARS for s in stops):
        raise _bad("stop", f"stop: at most {MAX_STOPS} strings of at most {MAX_STOP_CHARS} characters")
    return tuple(stops)


def _completion_logprobs(body: Mapping[str, Any]) -> bool:
    """``logprobs: 0`` is the sampled token's alone; a larger number asks for alternatives."""
    value = body.get("logprobs")
    if value is None or value is False:
        return False
    if value is True or value == 0:
        return True
    message = f"logprobs={_show(value)} asks for alternatives; the engine reports sampled tokens: logprobs=0"
    raise _bad("logprobs", message, "unsupported_value")


def _include_usage(body: Mapping[str, Any], stream: bool) -> bool:
    options = body.get("stream_options")
    if options is None:
        return False
    if not stream:
        raise _bad("stream_options", "stream_options needs stream=true")
    if not isinstance(options, dict) or set(options) - {"include_usage", "include_obfuscation"}:
        raise _wrong_type("stream_options", '{"include_usage": boolean}', options)
    return _boolean(options, "include_usage", False)


def _timeout_s(body: Mapping[str, Any]) -> float | None:
    if body.get("timeout_s") is None:
        return None
    return _number(body, "timeout_s", 1.0, lambda x: x > 0, "above 0")


def _token_ids(value: Any, name: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(x) is int and x >= 0 for x in value):
        raise _wrong_type(name, "token ids >= 0", value)
    return tuple(value)


def _integer(body: Mapping[str, Any], name: str, default: int, least: int, most: int) -> int:
    value = body.get(name)
    if value is None:
        return default
    if type(value) is not int:
        raise _wrong_type(name, "an integer", value)
    if not least <= value <= most:
        raise _bad(name, f"{name}={value} is out of range, expected {least} to {most}")
    return value


def _number(
    body: Mapping[str, Any], name: str, default: float, ok: Callable[[float], bool], expected: str
) -> float:
    value = body.get(name)
    if value is None:
        return default
    if type(value) not in (int, float):
        raise _wrong_type(name, "a number", value)
    in_float_range = abs(value) < 1e300  # also for integers too large to become floats
    if not in_float_range or not ok(value):
        raise _bad(name, f"{name}={value} is out of range, expected {expected}")
    return float(value)


def _boolean(body: Mapping[str, Any], name: str, default: bool) -> bool:
    value = body.get(name)
    if value is None:
        return default
    if type(value) is not bool:
        raise _wrong_type(name, "true or false", value)
    return value


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _bad(param: str, message: str, code: str | None = None) -> ApiError:
    return ApiError(message, param=param, code=code)


def _wrong_type(name: str, expected: str, value: Any) -> ApiError:
    return _bad(name, f"{name}: expected {expected}, got {_show(value)}", "invalid_type")
