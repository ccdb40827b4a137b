"""What goes into the engine and what comes out: requests, token chunks, samples. No jax.

A request is a *group*: ``n`` samples of one prompt. Token ids in, token ids out.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Mapping
from typing import Any, Literal

from jaxrl_sync.inference.errors import RequestError
from jaxrl_sync.transfer.version import Version

MAX_N = 1 << 16
"""Samples of one group: whoever aborts a group gets an answer for each of them."""
MAX_ID_CHARS = 1024
TEMPERATURES = 1e-6, 1e6
"""Least and greatest one that isn't greedy: beyond, logits over it are no float32 any more, or all alike."""

FinishReason = Literal["stop", "length", "abort", "timeout", "error"]
PauseMode = Literal["keep", "wait", "abort"]


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. Filters (top_k, top_p) change what is drawn, never the reported log-probs.

    temperature: 0 means greedy, and log-probs are then reported at temperature 1; else within TEMPERATURES.
    top_k: 0 means no limit. top_p: 1 means no limit; applied after top_k.
    max_tokens: limit of generated tokens per sample; the engine also stops at its ``max_len``.
    stop_token_ids: end a sample, beside the engine's end-of-sequence ids; the stop token is returned.
    seed: None draws from (run seed, request id, sample, position); a number replaces the first two, so that
        the same seed and prompt give the same tokens under any request id.
    ignore_eos: the engine's end-of-sequence ids don't end a sample.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    max_tokens: int = 16
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        least, most = TEMPERATURES
        good = self.temperature == 0 or least <= self.temperature <= most
        _expect(good, "temperature", self, f"0, or from {least:g} to {most:g}")
        _expect(0 <= self.top_k < 2**31, "top_k", self, "in [0, 2**31)")
        _expect(0 < self.top_p <= 1, "top_p", self, "in (0, 1]")
        _expect(self.max_tokens >= 1, "max_tokens", self, ">= 1")
        _expect(self.seed is None or 0 <= self.seed < 2**32, "seed", self, "in [0, 2**32)")


@dataclasses.dataclass(frozen=True)
class Request:
    """``n`` samples of one prompt. ``version`` pins it; ``timeout_s`` counts from submission."""

    request_id: str
    prompt: tuple[int, ...]
    n: int = 1
    sampling: Sampling = dataclasses.field(default_factory=Sampling)
    version: Version | None = None
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        good_id = 0 < len(self.request_id) <= MAX_ID_CHARS and _has_utf8(self.request_id)
        _expect(good_id, "request_id", self, f"1 to {MAX_ID_CHARS} whole characters")
        _expect(len(self.prompt) >= 1, "prompt", self, "at least one token id")
        _expect(1 <= self.n <= MAX_N, "n", self, f"1 to {MAX_N}")
        _expect(self.timeout_s is None or self.timeout_s > 0, "timeout_s", self, "> 0 or null")

    @staticmethod
    def from_json(body: Mapping[str, Any]) -> Request:
        """The request of a ``POST /generate`` body; raises RequestError on any unknown or wrong field."""
        _known(body, Request, "request")
        sampling = body.get("sampling") or {}
        if not isinstance(sampling, Mapping):
            raise RequestError(f"sampling: expected an object, got {_shown(sampling)}")
        _known(sampling, Sampling, "sampling")
        return Request(
            request_id=_typed(body, "request_id", str, None),
            prompt=_ids(body, "prompt"),
            n=_typed(body, "n", int, 1),
            sampling=Sampling(
                temperature=_number(sampling, "temperature", 1.0),
                top_k=_typed(sampling, "top_k", int, 0),
                top_p=_number(sampling, "top_p", 1.0),
                max_tokens=_typed(sampling, "max_tokens", int, 16),
                stop_token_ids=_ids(sampling, "stop_token_ids") if sampling.get("stop_token_ids") else (),
                seed=_typed(sampling, "seed", int, None) if sampling.get("seed") is not None else None,
                ignore_eos=_typed(sampling, "ignore_eos", bool, False),
            ),
            version=_version(body.get("version")),
            timeout_s=_number(body, "timeout_s", 0.0) if body.get("timeout_s") is not None else None,
        )

    def to_json(self) -> dict[str, Any]:
        """The ``POST /generate`` body of this request."""
        sampling = dataclasses.asdict(self.sampling)
        sampling["stop_token_ids"] = list(self.sampling.stop_token_ids)
        return {
            "request_id": self.request_id,
            "prompt": list(self.prompt),
            "n": self.n,
            "sampling": sampling,
            "version": dataclasses.asdict(self.version) if self.version else None,
            "timeout_s": self.timeout_s,
        }


@dataclasses.dataclass(frozen=True)
class TokenChunk:
    """Tokens that one sample gained in one engine step, in order; the last chunk has ``finish_reason``."""

    sample: int
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    finish_reason: FinishReason | None


@dataclasses.dataclass(frozen=True)
class Sample:
    """One finished sample. All sequences have one entry per generated token, ``extras`` included."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    finish_reason: FinishReason
    extras: Mapping[str, tuple[float, ...]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds of one group: waiting for slots, in prefill steps, and from then to the last token."""

    queue_s: float
    prefill_s: float
    decode_s: float


@dataclasses.dataclass(frozen=True)
class GroupResult:
    """The answer to a request; ``lineages`` are those its tokens came from, in order of appearance."""

    request_id: str
    samples: tuple[Sample, ...]
    lineages: tuple[str, ...]
    timing: Timing

    def to_json(self, engine: str) -> dict[str, Any]:
        """The ``POST /generate`` answer; ``engine`` is the name of the replica."""
        return {
            "request_id": self.request_id,
            "engine": engine,
            "samples": [
                {
                    "tokens": list(s.tokens),
                    "logprobs": list(s.logprobs),
                    "versions": list(s.versions),
                    "finish_reason": s.finish_reason,
                    "extras": {name: list(values) for name, values in s.extras.items()},
                }
                for s in self.samples
            ],
            "lineages": list(self.lineages),
            "timing": dataclasses.asdict(self.timing),
        }


def hash32(request_id: str) -> int:
    """The 32-bit identity of a request id in random keys: CRC-32 of its UTF-8 bytes."""
    return zlib.crc32(request_id.encode("utf-8"))


def _expect(ok: bool, name: str, owner: Any, expected: str) -> None:
    if not ok:
        raise RequestError(f"{name}: expected {expected}, got {_shown(getattr(owner, name))}")


def _known(body: Mapping[str, Any], kind: Any, where: str) -> None:
    names = [f.name for f in dataclasses.fields(kind)]
    unknown = sorted(set(body) - set(names))
    if unknown:
        raise RequestError(f"{where}: unknown field {unknown[0]!r}; known fields are {', '.join(names)}")


def _typed(body: Mapping[str, Any], name: str, kind: Any, default: Any) -> Any:
    value = body.get(name, default)
    wrong_bool = isinstance(value, bool) and kind is not bool
    if wrong_bool or not isinstance(value, kind):
        kinds = kind if isinstance(kind, tuple) else (kind,)
        raise RequestError(f"{name}: expected {' or '.join(k.__name__ for k in kinds)}, got {_shown(value)}")
    return value


def _number(body: Mapping[str, Any], name: str, default: float) -> float:
    value = _typed(body, name, (int, float), default)
    try:
        return float(value)
    except OverflowError:
        raise RequestError(f"{name}: expected a number of sensible size, got {_shown(value)}") from None


def _has_utf8(text: str) -> bool:
    """Whether it is made of whole characters: half a surrogate pair, which JSON can spell, has no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _ids(body: Mapping[str, Any], name: str) -> tuple[int, ...]:
    value = body.get(name)
    if not isinstance(value, (list, tuple)) or not all(type(v) is int and v >= 0 for v in value):
        raise RequestError(f"{name}: expected a list of token ids >= 0, got {str(value)[:80]!r}")
    return tuple(value)


def _version(value: Any) -> Version | None:
    if value is None:
        return None
    if not isinstance(value, Mapping) or set(value) != {"lineage", "number"}:
        raise RequestError(f"version: expected null or {{lineage, number}}, got {_shown(value)}")
    try:
        return Version(_typed(value, "lineage", str, None), _typed(value, "number", int, None))
    except ValueError as error:
        raise RequestError(f"version: {error}") from error
