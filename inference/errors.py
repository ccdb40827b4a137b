"""Errors of the engine that a client can cause or must know by name."""

from __future__ import annotations

from jaxrl_sync.sharding.errors import UserError


class EngineError(UserError):
    """Base of the engine's errors; ``status`` is the HTTP status a server answers with."""

    status: int = 500


class RequestError(EngineError, ValueError):
    """A request that can't be served as it is: names the field, the value found and the value expected."""

    exit_code = 2
    status = 400


class NotServingError(EngineError):
    """The engine has no complete version of the weights, or is draining: ask again or elsewhere."""

    status = 503


class PoisonedError(NotServingError):
    """A failed update left the weights incomplete; a later verified version heals the engine."""


class VersionMismatchError(EngineError):
    """A request pins a version that the engine doesn't serve."""

    status = 409


class QueueFullError(EngineError):
    """More groups wait than ``EngineConfig.max_waiting``."""

    status = 429


class SwapTimeoutError(EngineError):
    """A swap did not happen before its deadline; the engine serves what it served before."""

    exit_code = 4
    status = 504


class RankDiedError(EngineError):
    """A rank of a multi-process engine ended or fell silent; the engine ends as one unit."""

    exit_code = 4
