"""Frames as they arrived, for those who read the version here: nothing is compared or encoded a second time.

An equal replica, whose rank has the same plan from the publisher, can apply the very frames by which a
version came to a relay. They are handed on while the relay applies them itself; their sums are told once it
has verified its own slot. Everybody else gets what the relay makes from its slots.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping, Sequence

from jaxrl_sync.sharding.digests import add_digests
from jaxrl_sync.transfer.errors import DeadlineError, ProtocolError
from jaxrl_sync.transfer.hub.state import version_json, version_of
from jaxrl_sync.transfer.payload.sections import Digests
from jaxrl_sync.transfer.payload.settings import receiver_room_bytes
from jaxrl_sync.transfer.payload.shadow import Shadow, SlotLike
from jaxrl_sync.transfer.transports.base import remaining
from jaxrl_sync.transfer.version import Version


@dataclasses.dataclass(frozen=True, eq=False)
class Passed:
    """One edge's frame as its publisher made it: the edge is that of ``plan`` from process ``source``."""

    plan: str
    source: int
    base: Version
    data: bytes | bytearray | memoryview


@dataclasses.dataclass(frozen=True)
class Origin:
    """How versions come to this rank from the publisher, and what a relay may therefore hand on to it."""

    plan: str
    shadows: Mapping[int, Shadow]

    def base(self, serving: SlotLike | None) -> Version | None:
        """The version that frames may start from: all edges must hold the same one."""
        bases = {shadow.base(serving) for shadow in self.shadows.values()}
        return bases.pop() if len(bases) == 1 else None


@dataclasses.dataclass(frozen=True)
class Wish:
    """What a reader can apply: frames of ``plan`` on ``base``."""

    plan: str
    base: Version

    def to_json(self) -> dict[str, object]:
        """As it travels in ``ready``."""
        return {"plan": self.plan, "base": version_json(self.base)}

    @classmethod
    def from_json(cls, told: object) -> Wish | None:
        """None where a reader wishes for nothing. ProtocolError."""
        if told is None:
            return None
        try:
            if isinstance(told, dict) and isinstance(plan := told.get("plan"), str):
                base = version_of(told.get("base"))
                if base is not None:
                    return cls(plan, base)
        except ValueError:
            pass
        raise ProtocolError(f"a reader wishes for frames {str(told)[:200]}, expected plan and base")


class Passing:
    """The frames by which one version comes into a slot. Thread-safe: edges tell, readers wait."""

    def __init__(self, edges: int, nbytes: int) -> None:
        """So many edges bring the version, which has ``nbytes`` here."""
        self._edges = edges
        self._room_bytes = receiver_room_bytes(nbytes)
        self._told = 0
        self._whole = edges > 0
        self._frames: list[Passed] = []
        self._digests: Digests = {}
        self._changed = threading.Condition()

    def put(self, frames: Sequence[Passed]) -> None:
        """One edge brought these frames and nothing else."""
        with self._changed:
            if self._whole:
                self._frames += frames
                self._told += 1
            if sum(len(f.data) for f in self._frames) > self._room_bytes:
                self._drop()
            self._changed.notify_all()

    def refuse(self) -> None:
        """An edge came otherwise, or the round failed: there is nothing to hand on."""
        with self._changed:
            self._drop()
            self._changed.notify_all()

    def _drop(self) -> None:
        self._whole, self._frames = False, []

    def verified(self, digests: Digests) -> None:
        """The sums of one edge, which this rank has found to be right in its slot."""
        with self._changed:
            self._digests = add_digests(self._digests, digests)

    @property
    def digests(self) -> Digests:
        """The sums of all edges that were verified so far."""
        with self._changed:
            return self._digests

    def wait(self, wish: Wish, deadline: float) -> list[Passed] | None:
        """The frames that fulfil a wish, once all are there; None where there won't be any. DeadlineError."""
        with self._changed:
            if not self._changed.wait_for(
                lambda: not self._whole or self._told == self._edges, remaining(deadline)
            ):
                raise DeadlineError("no word of how a version arrives had come in time")
            right = self._whole and all((f.plan, f.base) == (wish.plan, wish.base) for f in self._frames)
            return list(self._frames) if right and self._frames else None


def parted(told: object, data: bytearray, plan: str, base: Version, sources: Sequence[int]) -> list[Passed]:
    """The frames that lie one after the other in ``data``; ``told``: pairs of source process and bytes.

    There must be one of each of ``sources``. ProtocolError.
    """
    if not isinstance(told, list) or not all(_is_pair(pair) for pair in told):
        raise ProtocolError(f"frames {str(told)[:200]}, expected pairs of process and bytes")
    if sorted(s for s, _ in told) != sorted(sources) or sum(n for _, n in told) != len(data):
        raise ProtocolError(
            f"frames {str(told)[:200]} in {len(data)} bytes, expected one of each of {list(sources)}"
        )
    frames, at = [], 0
    for source, nbytes in told:
        frames.append(Passed(plan, source, base, memoryview(data)[at : at + nbytes]))
        at += nbytes
    return frames


def _is_pair(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(type(v) is int and v >= 0 for v in value)
