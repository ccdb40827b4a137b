"""The JSON of OpenAI's answers, whole and streamed, made from pieces of text."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

from jaxrl_sync.inference.choices import Piece, TokenText
from jaxrl_sync.inference.errors import EngineError
from jaxrl_sync.inference.generation import Generation, Job
from jaxrl_sync.inference.openai_types import ApiError

CHAT = "chat.completion"
COMPLETION = "text_completion"


async def whole_answer(generation: Generation, fingerprint: str) -> dict[str, Any]:
    """The answer in one piece. Raises EngineError, TimeoutError."""
    job = generation.job
    pieces: list[list[Piece]] = [[] for _ in range(job.num_choices)]
    async for piece in generation.pieces():
        if piece is not None:
            pieces[piece.index].append(piece)
    return {
        **_envelope(job, job.kind, fingerprint),
        "choices": [_whole_choice(job, merged(parts)) for parts in pieces],
        "usage": usage(job.prompt_tokens, generation.completion_tokens),
    }


async def event_stream(generation: Generation, fingerprint: str) -> AsyncIterator[bytes]:
    """The answer as server-sent events, ``[DONE]`` last; an error after the first one is an event too."""
    job = generation.job
    envelope = _envelope(job, "chat.completion.chunk" if job.kind == CHAT else job.kind, fingerprint)
    for index in range(job.num_choices if job.kind == CHAT else 0):
        opening = {"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        yield _event({**envelope, "choices": [{**opening, "logprobs": None}]})
    try:
        async for piece in generation.pieces():
            if piece is None:
                yield b": waiting\n\n"
            elif piece.text or piece.tokens or piece.finish_reason:
                yield _event({**envelope, "choices": [_streamed_choice(job, piece)]})
    except (EngineError, TimeoutError) as error:
        status = getattr(error, "status", 504)
        yield _event(ApiError(str(error), status=status, kind="server_error").to_json())
        return
    if job.options.include_usage:
        counts = usage(job.prompt_tokens, generation.completion_tokens)
        yield _event({**envelope, "choices": [], "usage": counts})
    yield b"data: [DONE]\n\n"


def merged(pieces: list[Piece]) -> Piece:
    """All pieces of one choice as one."""
    return Piece(
        index=pieces[0].index,
        text="".join(p.text for p in pieces),
        token_ids=tuple(t for p in pieces for t in p.token_ids),
        tokens=tuple(t for p in pieces for t in p.tokens),
        finish_reason=pieces[-1].finish_reason,
    )


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """Token counts; a stop token counts, tokens after a stop string don't."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def _whole_choice(job: Job, piece: Piece) -> dict[str, Any]:
    if job.kind == CHAT:
        return {"message": {"role": "assistant", "content": piece.text, "refusal": None}, **_rest(job, piece)}
    return {"text": piece.text, **_rest(job, piece)}


def _streamed_choice(job: Job, piece: Piece) -> dict[str, Any]:
    if job.kind == CHAT:
        return {"delta": {"content": piece.text} if piece.text else {}, **_rest(job, piece)}
    return {"text": piece.text, **_rest(job, piece)}


def _rest(job: Job, piece: Piece) -> dict[str, Any]:
    rest: dict[str, Any] = {
        "index": piece.index,
        "logprobs": None,
        "finish_reason": piece.finish_reason,
    }
    if job.options.logprobs:
        rest["logprobs"] = (_chat_logprobs if job.kind == CHAT else _completion_logprobs)(piece.tokens)
    if job.options.return_token_ids:
        rest["token_ids"] = list(piece.token_ids)
    return rest


def _chat_logprobs(tokens: tuple[TokenText, ...]) -> dict[str, Any]:
    """The engine knows no alternatives, so ``top_logprobs`` is empty."""
    content = [
        {"token": t.text, "logprob": t.logprob, "bytes": list(t.bytes), "top_logprobs": []} for t in tokens
    ]
    return {"content": content, "refusal": None}


def _completion_logprobs(tokens: tuple[TokenText, ...]) -> dict[str, Any]:
    return {
        "tokens": [t.text for t in tokens],
        "token_logprobs": [t.logprob for t in tokens],
        "top_logprobs": None,
        "text_offset": [t.offset_chars for t in tokens],
    }


def _envelope(job: Job, kind: str, fingerprint: str) -> dict[str, Any]:
    """What every part carries; the fingerprint is the version of the weights at the start."""
    return {
        "id": job.answer_id,
        "object": kind,
        "created": job.created,
        "model": job.model,
        "system_fingerprint": fingerprint,
    }


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"
