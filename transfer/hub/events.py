"""What happens to the hub: the events of its state machine, and what becomes of each."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxrl_sync.transfer.hub.state import Fanout, Holding, MemberKey, RankState
from jaxrl_sync.transfer.version import Version

Held = dict[Version, Holding]


@dataclasses.dataclass(frozen=True)
class Register:
    """A process joins, or tells new ``info`` (same incarnation). Another incarnation replaces the old one.

    ``sequence`` counts what a process says of itself: an earlier word that comes late renews its lease only.
    """

    key: MemberKey
    size: int
    incarnation: str
    info: dict[str, Any]
    ttl_s: float
    installed: Version | None = None
    sequence: int = 0


@dataclasses.dataclass(frozen=True)
class Heartbeat:
    """A lease is renewed."""

    key: MemberKey
    incarnation: str


@dataclasses.dataclass(frozen=True)
class Leave:
    """A process goes in order."""

    key: MemberKey
    incarnation: str


@dataclasses.dataclass(frozen=True)
class Announce:
    """A publisher rank holds ``version`` ready; it is published once every rank of its world said so.

    ``held`` is everything that the rank holds, ``sequence`` counts such messages of one process: what comes
    late says nothing about what is held. Without ``held`` the version is added to what was told before.
    """

    key: MemberKey
    incarnation: str
    model: str
    version: Version
    nbytes: int
    at: float
    held: Held | None = None
    sequence: int = 0
    fanout: Fanout | None = None


@dataclasses.dataclass(frozen=True)
class Hold:
    """What a publisher rank holds, told without a new version (a pin confirmed, a version offloaded)."""

    key: MemberKey
    incarnation: str
    model: str
    held: Held
    sequence: int = 0


@dataclasses.dataclass(frozen=True)
class Unpublish:
    """A holder wants to drop a version: nobody new reads it there. The last reliable one needs ``force``."""

    key: MemberKey
    incarnation: str
    model: str
    version: Version
    force: bool = False


@dataclasses.dataclass(frozen=True)
class Advance:
    """A subscriber rank reports progress of a round: begun, prepared or installed.

    ``parts``: it has so many parts of so many. ``timeout_s``: by then all ranks are prepared, or none is.
    """

    key: MemberKey
    incarnation: str
    round: str
    to: RankState
    timeout_s: float = 60.0
    parts: tuple[int, int] | None = None


@dataclasses.dataclass(frozen=True)
class Fail:
    """A subscriber rank gives a round up."""

    key: MemberKey
    incarnation: str
    round: str
    reason: str


@dataclasses.dataclass(frozen=True)
class Pin:
    """``by`` wants a version kept. With ``owner`` (a member and its incarnation) the pin ends with it.

    ``again``: said to a restarted hub, which may not know yet who holds the version.
    """

    model: str
    version: Version
    by: str
    owner: tuple[MemberKey, str] | None = None
    again: bool = False


@dataclasses.dataclass(frozen=True)
class Unpin:
    """``by`` needs a version no longer."""

    model: str
    version: Version
    by: str


@dataclasses.dataclass(frozen=True)
class Tick:
    """Time passed."""


Owned = Heartbeat | Leave | Announce | Hold | Unpublish | Advance | Fail
Event = Register | Owned | Pin | Unpin | Tick


@dataclasses.dataclass(frozen=True)
class Done:
    """The event was taken; ``log`` lines are for the operator."""

    log: tuple[str, ...] = ()
    reply: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Refused:
    """The event was not taken: a code for programs and a message for people."""

    code: str
    message: str
