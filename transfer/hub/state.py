"""What the hub knows: members under lease, published versions, rounds. Immutable values without I/O."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple

from jaxrl_sync.transfer.version import Version

RankState = Literal["offered", "begun", "prepared", "installed"]
RoundState = Literal["open", "committed", "aborted", "superseded"]


class MemberKey(NamedTuple):
    """Who a member is; a restarted process has the same key and another incarnation."""

    role: str
    name: str
    rank: int

    def __str__(self) -> str:
        return f"{self.role} {self.name}.{self.rank}"


@dataclasses.dataclass(frozen=True)
class Member:
    """One process under lease. ``info`` is what it told about itself; ``expires`` is on the hub's clock."""

    key: MemberKey
    size: int
    incarnation: str
    info: dict[str, Any]
    ttl_s: float
    expires: float

    def public(self) -> dict[str, Any]:
        """The member as others see it."""
        role, name, rank = self.key
        return {
            "role": role,
            "name": name,
            "rank": rank,
            "size": self.size,
            "incarnation": self.incarnation,
            "info": self.info,
        }


@dataclasses.dataclass(frozen=True)
class Announced:
    """A version that some ranks of a publisher announced: rank -> incarnation. Published when all did."""

    model: str
    version: Version
    world: str
    size: int
    ranks: dict[int, str]
    nbytes: int
    at: float
    complete: bool = False


@dataclasses.dataclass(frozen=True)
class Round:
    """One engine takes one version: all its ranks or none (a group transaction).

    ``ranks`` maps each rank to its state; ``incarnations`` fixes the processes that take part, of the engine
    by rank and of the publisher by rank. ``deadline`` is set by the first rank that begins.
    """

    id: str
    model: str
    engine: str
    version: Version
    ranks: dict[int, RankState]
    incarnations: dict[int, str]
    sources: dict[int, str]
    world: str
    state: RoundState = "open"
    reason: str = ""
    deadline: float | None = None

    @property
    def begun(self) -> bool:
        """Whether any rank has started to receive; the round's version is fixed from then on."""
        return any(s != "offered" for s in self.ranks.values())

    def all_at_least(self, states: tuple[RankState, ...]) -> bool:
        """Whether every rank is in one of ``states``."""
        return all(s in states for s in self.ranks.values())


@dataclasses.dataclass(frozen=True)
class HubState:
    """Everything the hub knows. ``epoch`` names this life of the hub: a restart has another one."""

    epoch: str
    members: dict[MemberKey, Member] = dataclasses.field(default_factory=dict)
    announced: dict[tuple[str, Version], Announced] = dataclasses.field(default_factory=dict)
    newest: dict[str, Announced] = dataclasses.field(default_factory=dict)
    installed: dict[MemberKey, Version] = dataclasses.field(default_factory=dict)
    rounds: dict[str, Round] = dataclasses.field(default_factory=dict)
    closed: dict[str, Round] = dataclasses.field(default_factory=dict)
    next_round: int = 1

    def engine_ranks(self, model: str) -> dict[str, dict[int, Member]]:
        """Subscribers of ``model``: engine name -> rank -> member."""
        engines: dict[str, dict[int, Member]] = {}
        for key, member in self.members.items():
            if key.role == "subscriber" and member.info.get("model") == model:
                engines.setdefault(key.name, {})[key.rank] = member
        return engines

    def sources(self, version: Announced) -> dict[int, Member] | None:
        """The live publisher ranks that hold ``version``, or None when one of them is gone or replaced."""
        found: dict[int, Member] = {}
        for rank, incarnation in version.ranks.items():
            member = self.members.get(MemberKey("publisher", version.world, rank))
            if member is None or member.incarnation != incarnation:
                return None
            found[rank] = member
        return found


def version_json(version: Version | None) -> dict[str, Any] | None:
    """A version as JSON."""
    return None if version is None else {"lineage": version.lineage, "number": version.number}


def version_of(value: Any) -> Version | None:
    """A version from JSON; None stays None. ValueError when it is anything else."""
    if value is None:
        return None
    if not isinstance(value, dict) or not isinstance(value.get("lineage"), str):
        raise ValueError(f"a version is {{lineage, number}}, got {value!r}")
    number = value.get("number")
    if not isinstance(number, int) or isinstance(number, bool):
        raise ValueError(f"a version's number is an integer, got {number!r}")
    return Version(value["lineage"], number)
