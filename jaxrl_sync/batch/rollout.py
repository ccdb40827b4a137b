"""What a rollout leaves behind: turns, episodes, groups, and the flat samples that a batch is packed from.

Arrays are read-only numpy copies with fixed dtypes (tokens and versions int32, log-probs float32, masks
bool); every record checks its invariants at construction, so that a record that exists is a valid one.
Tokens that the model did not sample (prompt and environment tokens) have loss mask False, log-prob 0 and
the version of the model token before them (the dispatch version at the start of an episode).

*Extras* are named per-token arrays ``[T, ...]`` that an engine recorded beside the log-probs (an entropy, the
choices of a router). They stay with their tokens through everything that is done to these records; tokens
that the model did not sample have zeros in them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from jaxrl_sync.sharding.errors import UserError

FinishReason = Literal["stop", "length", "abort", "timeout", "error"]
FINISH_REASONS: tuple[str, ...] = get_args(FinishReason)

Int32s = npt.NDArray[np.int32]
Float32s = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]
Extras = Mapping[str, npt.NDArray[Any]]


class RolloutError(UserError, ValueError):
    """A rollout record that breaks an invariant: names the field, the value found and the one expected."""


@dataclasses.dataclass(frozen=True, slots=True)
class Timing:
    """Where the seconds of a rollout went: in the engine (queue, prefill, decode) and in the task."""

    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    env_s: float = 0.0
    score_s: float = 0.0

    def __add__(self, other: Timing) -> Timing:
        sums = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in dataclasses.fields(Timing)}
        return Timing(**sums)


@dataclasses.dataclass(frozen=True, slots=True)
class Reward:
    """One episode's reward: ``value`` is what advantages are made of, ``components`` are only logged."""

    value: float
    components: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, x in {"value": self.value, **self.components}.items():
            if not math.isfinite(x):
                raise RolloutError(f"reward {name!r} is {x}, expected a finite number")
        object.__setattr__(self, "components", MappingProxyType(dict(self.components)))


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """One engine request of an episode: what was appended to the context, then what the model sampled.

    ``prompt`` [P] are the task's tokens before this turn (the prompt on the first turn, the environment's
    answer on later ones); ``tokens``, ``logprobs``, ``versions`` [T] are the model's, one entry per token,
    and so are the ``extras`` [T, ...].
    """

    prompt: Int32s
    tokens: Int32s
    logprobs: Float32s
    versions: Int32s
    finish_reason: str = "stop"
    engine: str = ""
    timing: Timing = Timing()
    extras: Extras = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        _freeze(self, {"prompt": np.int32, "tokens": np.int32, "logprobs": np.float32, "versions": np.int32})
        _freeze_extras(self)
        _check_lengths(self, "tokens", ("logprobs", "versions"))
        _check_values(self)
        if self.finish_reason not in FINISH_REASONS:
            raise RolloutError(
                f"finish_reason {self.finish_reason!r}, expected one of {', '.join(FINISH_REASONS)}"
            )

    def followed_by(self, more: Turn) -> Turn:
        """This turn and its continuation, after the engine was interrupted, as one turn."""
        arrays: dict[str, Any] = {
            name: np.concatenate([getattr(self, name), getattr(more, name)])
            for name in ("tokens", "logprobs", "versions")
        }
        return dataclasses.replace(
            self,
            **arrays,
            extras=_join_extras([(len(self.tokens), self.extras), (len(more.tokens), more.extras)]),
            finish_reason=more.finish_reason,
            timing=self.timing + more.timing,
        )


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One flat token sequence of a batch, prompt included; every array is [T].

    ``logprobs[t]`` is the log-prob of ``tokens[t]`` given the tokens before it, so position 0 has none and
    is never trained. ``extras`` are [T, ...]. ``dispatch_version`` is the policy version when the group was
    opened.
    """

    uid: str
    group_id: str
    tokens: Int32s
    loss_mask: Bools
    logprobs: Float32s
    versions: Int32s
    reward: float
    advantage: float
    dispatch_version: int
    index: int = 0
    finish_reason: str = "stop"
    engine: str = ""
    timing: Timing = Timing()
    extras: Extras = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        dtypes = {"tokens": np.int32, "loss_mask": np.bool_, "logprobs": np.float32, "versions": np.int32}
        _freeze(self, dtypes)
        _freeze_extras(self)
        _check_lengths(self, "tokens", ("loss_mask", "logprobs", "versions"))
        _check_values(self)
        if not len(self.tokens):
            raise RolloutError(f"sample {self.uid!r} has no tokens, expected at least one")
        if self.loss_mask[0]:
            raise RolloutError(f"sample {self.uid!r}: loss_mask[0] is True, but token 0 has no context")
        for name in ("reward", "advantage"):
            if not math.isfinite(getattr(self, name)):
                raise RolloutError(f"sample {self.uid!r}: {name} is {getattr(self, name)}, expected finite")
        if len(self.versions) and self.versions[0] < self.dispatch_version:
            raise RolloutError(
                f"sample {self.uid!r}: first version {self.versions[0]} is before its dispatch version"
                f" {self.dispatch_version}"
            )

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays."""
        arrays = (self.tokens, self.loss_mask, self.logprobs, self.versions, *self.extras.values())
        return sum(a.nbytes for a in arrays)

    @property
    def num_loss_tokens(self) -> int:
        """Number of tokens that the model sampled, which are the ones trained on."""
        return int(self.loss_mask.sum())

    @property
    def num_versions(self) -> int:
        """Number of different versions among the sampled tokens."""
        return len(np.unique(self.versions[self.loss_mask]))

    def staleness(self, step: int) -> int:
        """Staleness when shipped for ``step`` (which trains on version step - 1): never below 0."""
        return max(0, step - 1 - self.dispatch_version)

    def truncated(self, length: int) -> Sample:
        """The first ``length`` tokens as a sample with finish reason ``length``."""
        arrays = {k: getattr(self, k)[:length] for k in ("tokens", "loss_mask", "logprobs", "versions")}
        extras = {name: values[:length] for name, values in self.extras.items()}
        return dataclasses.replace(self, **arrays, extras=extras, finish_reason="length")


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Episode:
    """One rollout of one prompt: its turns and, once scored, its reward.

    ``uid`` names the prompt within its task, ``group_id`` the group (one opening of that prompt), ``index``
    the member. ``dispatch_version`` is the version at which the group was opened and ``lineage`` its
    lineage; all turns must belong to it.
    """

    uid: str
    group_id: str
    index: int
    lineage: str
    dispatch_version: int
    turns: tuple[Turn, ...]
    reward: Reward | None = None
    started_s: float = 0.0
    ended_s: float = 0.0
    info: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        last = self.dispatch_version
        for i, turn in enumerate(self.turns):
            if len(turn.versions) and turn.versions[0] < last:
                raise RolloutError(
                    f"episode {self.uid!r} turn {i}: version {turn.versions[0]} after version {last},"
                    " expected versions that do not decrease"
                )
            last = int(turn.versions[-1]) if len(turn.versions) else last

    @property
    def finish_reason(self) -> str:
        """Why the last turn ended; ``error`` for an episode without turns."""
        return self.turns[-1].finish_reason if self.turns else "error"

    @property
    def completion(self) -> Int32s:
        """The model's tokens of the last turn."""
        return self.turns[-1].tokens if self.turns else np.zeros(0, np.int32)

    @property
    def num_sampled_tokens(self) -> int:
        """Number of tokens that the model sampled over all turns."""
        return sum(len(t.tokens) for t in self.turns)

    @property
    def timing(self) -> Timing:
        """Sum of the timings of all turns."""
        total = Timing()
        for turn in self.turns:
            total = total + turn.timing
        return total

    @property
    def end_version(self) -> int:
        """Version of the last sampled token, the dispatch version if there is none."""
        return max(
            (int(t.versions[-1]) for t in self.turns if len(t.versions)), default=self.dispatch_version
        )

    def sample(self, advantage: float = 0.0) -> Sample:
        """The whole episode as one flat sample; raises ``RolloutError`` if it is not scored yet."""
        if self.reward is None:
            raise RolloutError(f"episode {self.uid!r} has no reward yet, expected a scored episode")
        version, parts = self.dispatch_version, []
        for turn in self.turns:
            parts.append(_columns(turn.prompt, False, np.zeros(len(turn.prompt)), version))
            parts.append(_columns(turn.tokens, True, turn.logprobs, turn.versions))
            version = int(turn.versions[-1]) if len(turn.versions) else version
        spans = [(n, x) for t in self.turns for n, x in ((len(t.prompt), None), (len(t.tokens), t.extras))]
        tokens, mask, logprobs, versions = (np.concatenate(c) for c in zip(*parts, strict=True))
        return Sample(
            uid=self.uid,
            group_id=self.group_id,
            tokens=tokens,
            loss_mask=mask,
            logprobs=logprobs,
            versions=versions,
            reward=self.reward.value,
            advantage=advantage,
            dispatch_version=self.dispatch_version,
            index=self.index,
            finish_reason=self.finish_reason,
            engine=self.turns[-1].engine,
            timing=self.timing,
            extras=_join_extras(spans),
        )


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Group:
    """The surviving episodes of one prompt; ``size`` is how many were asked for."""

    group_id: str
    uid: str
    size: int
    dispatch_version: int
    episodes: tuple[Episode, ...]

    def __post_init__(self) -> None:
        if len(self.episodes) > self.size:
            raise RolloutError(
                f"group {self.group_id!r} has {len(self.episodes)} episodes, expected at most {self.size}"
            )
        for e in self.episodes:
            found, wanted = (e.group_id, e.uid), (self.group_id, self.uid)
            if found != wanted:
                raise RolloutError(f"group {wanted} holds an episode of {found}, expected its own only")
        indices = [e.index for e in self.episodes]
        if len(set(indices)) != len(indices):
            raise RolloutError(f"group {self.group_id!r} has members {indices}, expected each member once")

    @property
    def rewards(self) -> Float32s:
        """Rewards [len(episodes)] of the survivors, in their order."""
        values = [e.reward.value for e in self.episodes if e.reward is not None]
        if len(values) != len(self.episodes):
            raise RolloutError(f"group {self.group_id!r} has episodes without a reward")
        return np.array(values, np.float32)

    def samples(self, advantages: Sequence[float] | Float32s) -> tuple[Sample, ...]:
        """The survivors as flat samples with these advantages, one per episode in order."""
        if len(advantages) != len(self.episodes):
            raise RolloutError(
                f"group {self.group_id!r}: {len(advantages)} advantages, expected {len(self.episodes)}"
            )
        return tuple(e.sample(float(a)) for e, a in zip(self.episodes, advantages, strict=True))


def _columns(
    tokens: Int32s, mask: bool, logprobs: npt.ArrayLike, versions: npt.ArrayLike
) -> tuple[Int32s, Bools, Float32s, Int32s]:
    n = len(tokens)
    return (
        tokens,
        np.full(n, mask),
        np.broadcast_to(np.asarray(logprobs, np.float32), (n,)),
        np.broadcast_to(np.asarray(versions, np.int32), (n,)),
    )


def _join_extras(spans: Sequence[tuple[int, Extras | None]]) -> Extras:
    """Extras of consecutive stretches of tokens, (number of tokens, their extras), as those of all of them.

    None stands for tokens that the model did not sample: zeros. Stretches without tokens don't count (an
    empty array has no shape to go by); all others must have the same names.
    """
    sampled = [extras for n, extras in spans if n and extras is not None]
    names = [sorted(extras) for extras in sampled]
    if any(found != names[0] for found in names):
        raise RolloutError(f"extras {names}, expected the same names for all tokens of an episode")
    return {
        name: _join_extra(name, spans, [x[name] for x in sampled]) for name in (names[0] if names else ())
    }


def _join_extra(
    name: str, spans: Sequence[tuple[int, Extras | None]], known: Sequence[npt.NDArray[Any]]
) -> npt.NDArray[Any]:
    kinds = sorted({(values.dtype.name, values.shape[1:]) for values in known})
    if len(kinds) > 1:
        raise RolloutError(
            f"extras {name!r} is {kinds}, expected one dtype and shape per token in an episode"
        )
    dtype, shape = kinds[0]
    zeros = (np.zeros((n, *shape), dtype) for n, extras in spans if n and extras is None)
    values = iter(known)
    return np.concatenate([next(zeros) if extras is None else next(values) for n, extras in spans if n])


def _freeze_extras(record: Any) -> None:
    """Replaces ``extras`` by a read-only mapping of read-only copies; each has one entry per token."""
    frozen: dict[str, npt.NDArray[Any]] = {}
    for name, values in record.extras.items():
        array = np.array(values)
        if array.dtype.kind not in "biuf" or array.ndim < 1 or len(array) != len(record.tokens):
            raise RolloutError(
                f"extras {name!r} is {array.dtype.name} {array.shape}, expected numbers, one entry for each"
                f" of {len(record.tokens)} tokens"
            )
        array.setflags(write=False)
        frozen[name] = array
    object.__setattr__(record, "extras", MappingProxyType(frozen))


def _freeze(record: Any, dtypes: Mapping[str, Any]) -> None:
    """Replaces array fields by read-only one-dimensional copies of their dtype."""
    for name, dtype in dtypes.items():
        try:
            array = np.array(getattr(record, name), dtype)
        except (TypeError, ValueError, OverflowError) as e:
            raise RolloutError(f"{name}: {e}, expected values of {np.dtype(dtype).name}") from e
        if array.ndim != 1:
            raise RolloutError(f"{name} has shape {array.shape}, expected one dimension")
        array.setflags(write=False)
        object.__setattr__(record, name, array)


def _check_lengths(record: Any, reference: str, names: Sequence[str]) -> None:
    expected = len(getattr(record, reference))
    for name in names:
        if len(getattr(record, name)) != expected:
            raise RolloutError(
                f"len({name}) is {len(getattr(record, name))}, expected len({reference}) = {expected}"
            )


def _check_values(record: Any) -> None:
    if len(record.tokens) and record.tokens.min() < 0:
        raise RolloutError(f"tokens has {record.tokens.min()}, expected ids from 0")
    if not np.isfinite(record.logprobs).all():
        bad = int(np.flatnonzero(~np.isfinite(record.logprobs))[0])
        raise RolloutError(f"logprobs[{bad}] is {record.logprobs[bad]}, expected finite numbers")
    if len(record.logprobs) and record.logprobs.max() > 1e-3:
        raise RolloutError(f"logprobs has {record.logprobs.max()}, expected log-probs of at most 0")
    falls = np.flatnonzero(np.diff(record.versions) < 0)
    if len(falls):
        i = int(falls[0])
        raise RolloutError(
            f"versions[{i + 1}] is {record.versions[i + 1]} after {record.versions[i]}, expected versions"
            " that do not decrease"
        )
    if len(record.versions) and record.versions[0] < 0:
        raise RolloutError(f"versions has {record.versions[0]}, expected numbers from 0")
