"""Playing one group: engine requests and environment steps until every member has ended.

The first turn of all members is one engine request (n = group size): they share the prompt. Later turns are
one request per member, with the whole context as prompt: token ids in, token ids out, nothing is rendered
again. All requests of a group go to the engine it is pinned to. The token budget counts the whole episode.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_sync.batch.rollout import Episode, RolloutError, Timing, Turn
from jaxrl_sync.orchestrator.config import SamplingConfig
from jaxrl_sync.orchestrator.engines import Engine, EngineClient
from jaxrl_sync.orchestrator.errors import DeadlineError
from jaxrl_sync.orchestrator.flow import Fate
from jaxrl_sync.orchestrator.groups import OpenGroup
from jaxrl_sync.orchestrator.threads import CallPool
from jaxrl_sync.tasks.protocol import Environment, Step, Task

OnEpisode = Callable[[int, Episode], None]
OnLoss = Callable[[int, Fate, str, str], None]
_MAX_RESUMES = 1000


class EpisodeError(Exception):
    """An episode that can't be completed: how its sample is counted, under which word, and what happened."""

    def __init__(self, fate: Fate, reason: str, detail: str = "") -> None:
        super().__init__(detail or reason)
        self.fate: Fate = fate
        self.reason, self.detail = reason, detail


@dataclasses.dataclass(frozen=True)
class Player:
    """What playing needs beside the group: the tasks, the engines, and what an episode may use up."""

    task_of: Callable[[OpenGroup], Task]
    client: EngineClient
    calls: CallPool
    env_timeout_s: float
    outstanding: dict[int, set[str]] = dataclasses.field(default_factory=dict)
    """Group id -> ids of the requests it has at its engine now."""

    async def play(
        self,
        group: OpenGroup,
        engine: Engine,
        uid_of: Callable[[], str],
        request_id: str,
        sampling: SamplingConfig,
        pinned: bool,
        on_episode: OnEpisode,
        on_loss: OnLoss,
    ) -> None:
        """Play all members; each ends in exactly one call of ``on_episode`` or ``on_loss``.

        Raises what the engine client raises when the engine itself fails: the whole group is then lost.
        """
        table = _Request(request_id, group, engine, sampling, self.task_of(group), pinned)
        try:
            uid, prompt = await self._prompt(table.task, uid_of)
            budget = self._turn_budget(table, sampling.max_tokens, len(prompt))
            if budget < 1:
                raise EpisodeError("errored", "prompt_too_long", f"prompt {uid} has {len(prompt)} tokens")
            first = await self._ask(table, request_id, prompt, group.size, budget)
        except EpisodeError as error:
            for index in range(group.size):
                on_loss(index, error.fate, error.reason, error.detail)
            return
        members = (
            self._member(table, _Context(uid, index, list(prompt), sampling.max_tokens), turn)
            for index, turn in enumerate(first)
        )
        tasks = [asyncio.ensure_future(m) for m in members]
        try:
            await _collect(tasks, on_episode, on_loss)
        finally:
            for task in tasks:
                task.cancel()

    async def _prompt(self, task: Task, uid_of: Callable[[], str]) -> tuple[str, list[int]]:
        def make() -> tuple[str, list[int]]:
            uid = uid_of()
            return uid, [int(t) for t in task.prompt(uid)]

        try:
            return await self.calls.run(make, timeout_s=self.env_timeout_s, what="a prompt")
        except Exception as error:  # whatever a task raises is its prompt's failure
            raise _task_error("prompt", error) from error

    async def _member(self, table: _Request, context: _Context, turn: Turn) -> Episode:
        turns: list[Turn] = []
        env_s = 0.0
        while True:
            turn = await self._finish_turn(table, context, turn)
            turns.append(turn)
            context.tokens.extend(int(t) for t in turn.tokens)
            if table.task.max_turns <= 1:
                break
            began = time.monotonic()
            step: Step = await self._in_task(_step, table.task, context, [int(t) for t in turn.tokens])
            env_s += time.monotonic() - began
            context.tokens.extend(step.tokens)
            budget = self._turn_budget(table, context.left, len(context.tokens))
            if step.done or len(turns) >= table.task.max_turns or budget < 1:
                break
            name = f"{table.request_id}.{context.index}.{len(turns)}"
            turn = (await self._ask(table, name, context.tokens, 1, budget, step.tokens))[0]
        turns[-1] = dataclasses.replace(turns[-1], timing=turns[-1].timing + Timing(env_s=env_s))
        return table.episode(context, turns)

    async def _finish_turn(self, table: _Request, context: _Context, turn: Turn) -> Turn:
        """Go on with a turn that the engine cut off (a pause that aborts) until it ends by itself."""
        context.left -= len(turn.tokens)
        for _ in range(_MAX_RESUMES):
            if turn.finish_reason in ("stop", "length"):
                return turn
            if turn.finish_reason != "abort":
                fate: Fate = "cancelled" if turn.finish_reason == "timeout" else "errored"
                raise EpisodeError(fate, f"engine:{turn.finish_reason}")
            so_far = [*context.tokens, *(int(t) for t in turn.tokens)]
            budget = self._turn_budget(table, context.left, len(so_far))
            if budget < 1:
                return dataclasses.replace(turn, finish_reason="length")
            name = f"{table.request_id}.{context.index}+{len(so_far)}"
            more = (await self._ask(table, name, so_far, 1, budget))[0]
            context.left -= len(more.tokens)
            turn = table.joined(turn, more)
        raise EpisodeError("cancelled", "engine:abort")

    def _turn_budget(self, table: _Request, left: int, context_len: int) -> int:
        """Tokens that the next request may sample: what is left of the episode, the context and the turn."""
        turn = table.task.max_new_tokens if table.task.max_turns > 1 else left
        return min(left, turn, table.engine.max_len - context_len)

    async def _in_task(self, call: Callable[..., Any], *args: Any) -> Any:
        try:
            return await self.calls.run(call, *args, timeout_s=self.env_timeout_s, what="the environment")
        except DeadlineError:
            raise EpisodeError("errored", "environment:timeout") from None
        except Exception as error:  # whatever a task raises is the episode's failure
            raise _task_error("environment", error) from error

    async def _ask(
        self,
        table: _Request,
        request_id: str,
        prompt: list[int],
        n: int,
        budget: int,
        appended: Any = None,
    ) -> list[Turn]:
        timeout_s = table.remaining_s()
        body = table.body(request_id, prompt, n, budget, timeout_s)
        ids = self.outstanding.setdefault(table.group.gid, set())
        ids.add(request_id)
        try:
            answer = await self.client.generate(table.engine, body, timeout_s)
        finally:
            ids.discard(request_id)
        return table.turns(answer, n, prompt if appended is None else appended)


@dataclasses.dataclass(slots=True)
class _Context:
    """One member between its turns: everything it has seen, and the tokens it may still sample."""

    uid: str
    index: int
    tokens: list[int]
    left: int
    environment: Environment | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class _Request:
    """What all requests of one group have in common."""

    request_id: str
    group: OpenGroup
    engine: Engine
    sampling: SamplingConfig
    task: Task
    pinned: bool

    def remaining_s(self) -> float:
        age_s = self.group.age_s(time.monotonic(), self.engine.stood_s())
        return max(0.1, self.group.timeout_s - age_s)

    def body(
        self, request_id: str, prompt: list[int], n: int, budget: int, timeout_s: float
    ) -> dict[str, Any]:
        return {
            "request_id": request_id,
            "prompt": list(prompt),
            "n": n,
            "sampling": self.sampling.as_request(self.task.stop_token_ids, budget),
            "version": dataclasses.asdict(self.group.version) if self.pinned else None,
            "timeout_s": timeout_s,
        }

    def turns(self, answer: Mapping[str, Any], n: int, prompt: Any) -> list[Turn]:
        """The samples of an answer as turns; ``EpisodeError`` for one that breaks the contract."""
        samples, timing = answer.get("samples", ()), answer.get("timing", {})
        foreign = [x for x in answer.get("lineages", ()) if x != self.group.version.lineage]
        if len(samples) != n or foreign:
            detail = f"{self.engine.name} answered {len(samples)} of {n} samples, foreign lineages {foreign}"
            raise EpisodeError("errored", "engine:malformed", detail)
        try:
            return [
                Turn(
                    prompt=np.asarray(prompt, np.int32),
                    tokens=np.asarray(s["tokens"], np.int32),
                    logprobs=np.asarray(s["logprobs"], np.float32),
                    versions=np.asarray(s["versions"], np.int32),
                    finish_reason=s["finish_reason"],
                    engine=self.engine.name,
                    timing=Timing(**timing),
                    extras={name: _extra(values) for name, values in s.get("extras", {}).items()},
                )
                for s in samples
            ]
        except (RolloutError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise self._malformed(error) from error

    def joined(self, turn: Turn, more: Turn) -> Turn:
        """A turn and its continuation as one; ``EpisodeError`` if they don't fit together."""
        try:
            return turn.followed_by(more)
        except RolloutError as error:
            raise self._malformed(error) from error

    def episode(self, context: _Context, turns: list[Turn]) -> Episode:
        try:
            return Episode(
                uid=context.uid,
                group_id=str(self.group.gid),
                index=context.index,
                lineage=self.group.version.lineage,
                dispatch_version=self.group.version.number,
                turns=tuple(turns),
                started_s=self.group.opened_s,
                ended_s=time.monotonic(),
            )
        except RolloutError as error:
            raise self._malformed(error) from error

    def _malformed(self, error: Exception) -> EpisodeError:
        return EpisodeError("errored", "engine:malformed", f"{self.engine.name}: {error}")


def _step(task: Task, context: _Context, tokens: list[int]) -> Step:
    """The environment's answer to one turn; blocks. The environment is made at the first turn."""
    environment = context.environment or task.environment(context.uid)
    context.environment = environment
    step = environment.step(tokens)
    return Step([int(t) for t in step.tokens], bool(step.done))


async def _collect(tasks: Sequence[asyncio.Future[Episode]], on_episode: OnEpisode, on_loss: OnLoss) -> None:
    """Report members as they end; an engine failure in any of them is the whole group's."""
    index_of = {task: index for index, task in enumerate(tasks)}
    pending = set(tasks)
    while pending:
        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        for task in sorted(done, key=lambda t: index_of[t]):
            error = task.exception()
            if error is None:
                on_episode(index_of[task], task.result())
            elif isinstance(error, EpisodeError):
                on_loss(index_of[task], error.fate, error.reason, error.detail)
            else:
                raise error


def _task_error(call: str, error: Exception) -> EpisodeError:
    """Whatever a task raises, as the end of one episode."""
    name = type(error).__name__
    return EpisodeError("errored", f"{call}:{name}", f"{call} raised {name}: {error}")


def _extra(values: Any) -> np.ndarray[Any, Any]:
    """A named per-token array of an engine's answer: float32, or int32 where it holds whole numbers."""
    array = np.asarray(values)
    return array.astype(np.int32 if array.dtype.kind == "i" else np.float32)
