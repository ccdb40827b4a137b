"""Rewards and advantages of one complete group, computed in threads."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

from jaxrl_sync.batch.rollout import Episode, Group, Reward, RolloutError, Sample
from jaxrl_sync.orchestrator.advantages import group_advantages, is_uniform
from jaxrl_sync.orchestrator.book import Book
from jaxrl_sync.orchestrator.errors import DeadlineError
from jaxrl_sync.orchestrator.groups import OpenGroup
from jaxrl_sync.orchestrator.threads import CallPool
from jaxrl_sync.tasks.protocol import Task


@dataclasses.dataclass(frozen=True, slots=True)
class Scored:
    """The survivors of one group with their advantages; ``uniform`` groups carry no gradient."""

    samples: tuple[Sample, ...]
    rewards: tuple[Reward, ...]
    uniform: bool

    @property
    def nbytes(self) -> int:
        """Bytes of the samples' arrays."""
        return sum(s.nbytes for s in self.samples)


class Scorer:
    """Calls ``score`` of the group's task in ``calls``, one group per call, each under a deadline."""

    def __init__(
        self,
        task_of: Callable[[OpenGroup], Task],
        book: Book,
        calls: CallPool,
        *,
        timeout_s: float,
        normalize_std: bool,
    ) -> None:
        self._task_of, self._book, self._calls, self._timeout_s = task_of, book, calls, timeout_s
        self._normalize_std = normalize_std
        self.last_failure = "score"

    async def score(self, group: OpenGroup, episodes: dict[int, Episode]) -> Scored | None:
        """Score the arrived members; a member whose scoring fails counts as errored and leaves the group.

        None if no member is left, or if the group was cancelled meanwhile.
        """
        rewarded: list[Episode] = []
        outcomes = await self._score_all(self._task_of(group), list(episodes.values()))
        for index, outcome in zip(episodes, outcomes, strict=True):
            if isinstance(outcome, Reward):
                rewarded.append(dataclasses.replace(episodes[index], reward=outcome))
            else:
                name = type(outcome).__name__
                detail = f"score raised {name}: {outcome}"
                self._book.lose(group.gid, index, "errored", f"score:{name}", detail)
                self.last_failure = f"score:{name}"
        if not rewarded or group.gid not in self._book.open:
            return None
        rewarded.sort(key=lambda e: e.index)
        first = rewarded[0]
        whole = Group(first.group_id, first.uid, group.size, first.dispatch_version, tuple(rewarded))
        rewards = [float(r) for r in whole.rewards]
        advantages = group_advantages(rewards, normalize_std=self._normalize_std)
        kept = tuple(e.reward for e in rewarded if e.reward is not None)
        return Scored(whole.samples(advantages), kept, is_uniform(rewards))

    async def _score_all(self, task: Task, episodes: list[Episode]) -> list[Reward | Exception]:
        def work() -> list[Reward | Exception]:
            return [self._score_one(task, e) for e in episodes]

        try:
            return await self._calls.run(work, timeout_s=self._timeout_s, what="the scores of a group")
        except DeadlineError as error:
            return [error for _ in episodes]

    def _score_one(self, task: Task, episode: Episode) -> Reward | Exception:
        began = time.monotonic()
        try:
            reward = task.score(episode)
        except Exception as error:  # whatever a task raises is the episode's failure
            return error
        if not isinstance(reward, Reward):
            return RolloutError(f"score gave a {type(reward).__name__}, expected a Reward")
        if time.monotonic() - began > self._timeout_s:
            return DeadlineError(f"the score of {episode.uid} took longer than {self._timeout_s:g} s")
        return reward
