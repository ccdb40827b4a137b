"""Named ends of the loop. Each says what was waited for or counted, and what was found."""

from __future__ import annotations

from jaxrl_sync.sharding.errors import UserError


class LoopError(UserError, RuntimeError):
    """The loop can't go on; the message names the cause."""


class DeadlineError(LoopError):
    """A wait passed its deadline: names what was waited for, how long, and the state found."""

    exit_code = 4


class PeerDiedError(LoopError):
    """A process that the loop depends on is gone and did not come back in time."""

    exit_code = 4


class BarrenError(LoopError):
    """Too many prompts in a row gave nothing to train on."""


class EmptyDatasetError(LoopError):
    """The task has no prompt at all."""


class FlowError(LoopError):
    """An accounting identity of the loop does not hold: a bug of the loop, never of the user."""


class InterruptedRunError(LoopError):
    """The run was asked to stop before its last step."""

    exit_code = 130
