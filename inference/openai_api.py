"""From a checked OpenAI call to an engine job: model name, prompt tokens, room in the context, stops."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl_sync.inference.chat import ChatError, ChatFormat, chat_format
from jaxrl_sync.inference.config import EngineConfig
from jaxrl_sync.inference.generation import DEFAULT_TIMEOUT_S, Job
from jaxrl_sync.inference.openai_format import CHAT, COMPLETION
from jaxrl_sync.inference.openai_types import ApiError, Options, parse_chat, parse_completion
from jaxrl_sync.inference.request import Request, Sampling
from jaxrl_sync.inference.tokenizer import Tokenizer, TokenizerError, load_tokenizer


class OpenAIModel:
    """One served model under its name, with what turns text into its tokens."""

    def __init__(
        self, name: str, config: EngineConfig, vocab_size: int, tokenizer: Tokenizer, chat: ChatFormat
    ) -> None:
        self.name = name
        self.tokenizer = tokenizer
        self._config = config
        self._vocab_size = vocab_size
        self._chat = chat
        self._created = int(time.time())

    def listing(self) -> dict[str, Any]:
        """The answer of ``GET /v1/models``: the one model."""
        return {"object": "list", "data": [self.description(self.name)]}

    def description(self, name: str) -> dict[str, Any]:
        """The answer of ``GET /v1/models/{name}``. ApiError 404 for another name."""
        self._check_name(name)
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "jaxrl-sync",
            "max_model_len": self._config.max_len,
        }

    def completion_job(self, body: Mapping[str, Any]) -> Job:
        """A checked completion call; blocks while it encodes. Raises ApiError."""
        request = parse_completion(body)
        self._check_name(request.options.model)
        prompts = [
            self._encode(p, add_special_tokens=True) if isinstance(p, str) else self._checked_ids(p)
            for p in request.prompts
        ]
        return self._job("cmpl", COMPLETION, request.options, prompts, request.options.stop)

    def chat_job(self, body: Mapping[str, Any]) -> Job:
        """A checked chat call; blocks while the template runs. Raises ApiError."""
        request = parse_chat(body)
        self._check_name(request.options.model)
        try:
            text = self._chat.render(request.messages, request.template_variables)
        except ChatError as error:
            raise ApiError(str(error), param="messages") from None
        stops = (*request.options.stop, *self._chat.stop)
        prompt = self._encode(text, add_special_tokens=False)
        return self._job("chatcmpl", CHAT, request.options, [prompt], stops)

    def _job(
        self,
        prefix: str,
        kind: str,
        options: Options,
        prompts: Sequence[tuple[int, ...]],
        stops: tuple[str, ...],
    ) -> Job:
        answer_id = f"{prefix}-{uuid.uuid4().hex}"
        requests = tuple(
            Request(
                request_id=f"{answer_id}-{i}",
                prompt=prompt,
                n=options.n,
                sampling=self._sampling(options, len(prompt)),
                timeout_s=options.timeout_s or DEFAULT_TIMEOUT_S,
            )
            for i, prompt in enumerate(prompts)
        )
        ends = set(requests[0].sampling.stop_token_ids)
        if not options.ignore_eos:
            ends.update(self._config.eos_token_ids)
        created = int(time.time())
        return Job(answer_id, kind, created, self.name, options, requests, stops, frozenset(ends))

    def _sampling(self, options: Options, prompt_tokens: int) -> Sampling:
        eos = () if options.ignore_eos else self.tokenizer.eos_ids
        extra = [i for i in eos if i not in self._config.eos_token_ids]
        return Sampling(
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            max_tokens=self._max_tokens(options.max_tokens, prompt_tokens),
            stop_token_ids=tuple(dict.fromkeys((*options.stop_token_ids, *extra))),
            seed=None if options.seed is None else options.seed % (1 << 32),
            ignore_eos=options.ignore_eos,
        )

    def _max_tokens(self, wanted: int | None, prompt_tokens: int) -> int:
        """What is asked for, or all that the context has room for."""
        if prompt_tokens == 0:
            raise ApiError("prompt has no tokens, at least one is needed", param="prompt")
        room = self._config.max_len - prompt_tokens
        if room < (wanted or 1):
            asked = f", max_tokens={wanted}" if wanted is not None else ""
            message = (
                f"context has {self._config.max_len} tokens, not enough for {prompt_tokens} of prompt{asked}"
            )
            raise ApiError(message, param="prompt", code="context_length_exceeded")
        return wanted if wanted is not None else room

    def _encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        try:
            return tuple(self.tokenizer.encode(text, add_special_tokens=add_special_tokens))
        except TokenizerError as error:
            raise ApiError(str(error), param="prompt", code="invalid_prompt") from None

    def _checked_ids(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        largest = max(ids, default=0)
        if largest >= self._vocab_size:
            message = f"prompt has token id {largest}, the vocabulary ends at {self._vocab_size - 1}"
            raise ApiError(message, param="prompt", code="invalid_prompt")
        return ids

    def _check_name(self, name: str) -> None:
        if name != self.name:
            message = f"model {name!r} does not exist, this engine serves {self.name!r}"
            raise ApiError(message, status=404, param="model", code="model_not_found")


def openai_model(
    tokenizer: str | None, config: EngineConfig, vocab_size: int, stack: contextlib.ExitStack
) -> OpenAIModel | None:
    """The served policy with the tokenizer of that name or path, closed by ``stack``; None without one."""
    if tokenizer is None:
        return None
    loaded = load_tokenizer(tokenizer, None)
    chat = chat_format(loaded)
    stack.callback(chat.close)
    return OpenAIModel("policy", config, vocab_size, loaded, chat)
