"""Whether an engine can ever serve a request, and what it says to one that comes for another version."""

from __future__ import annotations

from jaxrl_sync.inference.config import EngineConfig
from jaxrl_sync.inference.errors import RequestError, VersionMismatchError
from jaxrl_sync.inference.prefill import stop_ids
from jaxrl_sync.inference.request import Request
from jaxrl_sync.sharding.presets.qwen3 import DecoderConfig
from jaxrl_sync.transfer.version import Version


def check_request(request: Request, config: EngineConfig, model: DecoderConfig) -> None:
    """Raise RequestError for a request that an engine of this shape can never serve."""
    limit = config.max_len - 1
    if len(request.prompt) > limit:
        raise RequestError(f"prompt: expected at most {limit} tokens, got {len(request.prompt)}")
    top = max(*request.prompt, *request.sampling.stop_token_ids, 0)
    if top >= model.vocab_size:
        raise RequestError(f"token id: expected < {model.vocab_size} (vocabulary), got {top}")
    stops = stop_ids(request, config)
    if len(stops) > config.max_stop_ids:
        raise RequestError(
            f"stop_token_ids: expected at most {config.max_stop_ids} with the end-of-sequence ids, "
            f"got {len(stops)}"
        )


def mismatch(request: Request, serving: Version | None, *, asleep: bool = False) -> VersionMismatchError:
    """The error of a pin that is not what serves; a sleeping engine wakes with a later version."""
    found = "sleeps until its next version" if asleep else f"serves {serving}"
    return VersionMismatchError(
        f"request {request.request_id!r} pins version {request.version}, the engine {found}"
    )
