"""Episodes as an orchestrator would make them, from given answers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxrl_sync.batch.rollout import Episode, Turn
from jaxrl_sync.tasks.protocol import Task


def make_turn(prompt: Sequence[int], tokens: Sequence[int]) -> Turn:
    """A turn at version 0 with log-probs of -1."""
    n = len(tokens)
    return Turn(
        np.array(prompt, np.int32),
        np.array(tokens, np.int32),
        np.full(n, -1, np.float32),
        np.zeros(n, np.int32),
    )


def single_turn(task: Task, uid: str, answer: Sequence[int]) -> Episode:
    """The episode in which the model gives ``answer``."""
    return Episode(uid, "g", 0, "lin", 0, (make_turn(task.prompt(uid), answer),))


def play(task: Task, uid: str, answers: Sequence[Sequence[int]]) -> Episode:
    """An episode of several turns in which the model gives ``answers`` until the environment ends it."""
    environment, context, turns = task.environment(uid), list(task.prompt(uid)), []
    for answer in answers:
        turns.append(make_turn(context, answer))
        step = environment.step(answer)
        if step.done:
            break
        context = list(step.tokens)
    return Episode(uid, "g", 0, "lin", 0, tuple(turns))
