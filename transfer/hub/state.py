"""What the hub knows: members under lease, what each holds, rounds, pins. Immutable values without I/O."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple

from jaxrl_sync.transfer.version import Version

RankState = Literal["offered", "begun", "prepared", "installed", "gave_up"]
RoundState = Literal["open", "committed", "aborted", "partially_committed", "failed", "unknown", "superseded"]
Repair = Literal["none", "reoffer", "overwrite", "anchor", "wait_lease"]
HoldState = Literal["published", "offloaded", "draining"]
FanoutKind = Literal["star", "chain", "tree"]


MAX_LINEAGE = 256
MAX_NUMBER = 10**15


class MemberKey(NamedTuple):
    """Who a member is; a restarted process has the same key and another incarnation."""

    role: str
    name: str
    rank: int

    def __str__(self) -> str:
        return f"{self.role} {self.name}.{self.rank}"


class Tag(NamedTuple):
    """One version of one model."""

    model: str
    version: Version


@dataclasses.dataclass(frozen=True)
class Member:
    """One process under lease. ``info`` is what it told about itself; ``expires`` is on the hub's clock."""

    key: MemberKey
    size: int
    incarnation: str
    info: dict[str, Any]
    ttl_s: float
    expires: float
    sequence: int = 0

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

    @property
    def site(self) -> str:
        """Where it runs; members of one site reach each other over fast links. "" is the default site."""
        site = self.info.get("site", "")
        return site if isinstance(site, str) else ""

    @property
    def reliable(self) -> bool:
        """Whether it may be counted on; a spot replica may not."""
        return self.info.get("reliable", True) is not False

    @property
    def slots(self) -> int:
        """Whole versions that a subscriber has room for."""
        slots = self.info.get("slots", 2)
        return slots if isinstance(slots, int) and slots >= 1 else 2


@dataclasses.dataclass(frozen=True)
class Holding:
    """What one process holds of one version. ``pinned``: it has confirmed that it keeps it for a pin."""

    state: HoldState = "published"
    pinned: bool = False


@dataclasses.dataclass(frozen=True)
class Fanout:
    """How copies spread: all from the publisher, or over readers that serve others, ``degree`` each."""

    kind: FanoutKind = "star"
    degree: int = 2

    @property
    def readers(self) -> int:
        """How many one holder serves at a time before others are preferred; 0: any number."""
        return {"star": 0, "chain": 1, "tree": self.degree}[self.kind]


@dataclasses.dataclass(frozen=True)
class Published:
    """A version that every rank of a publisher announced.

    ``told`` is False where a restarted hub knows of it only because engines have it installed.
    """

    model: str
    version: Version
    world: str
    nbytes: int
    at: float
    told: bool = True


@dataclasses.dataclass(frozen=True)
class Round:
    """One engine takes one version: all its ranks or none (a group transaction).

    ``ranks`` maps each rank to its state; ``incarnations`` fixes the processes that take part, of the engine
    by rank, ``sources`` those of the world (``role``, ``world``) that it reads from. The source is bound when
    the first rank begins, which also sets ``deadline``; before that it is a proposal. ``parts`` is how much
    of the version a rank has, (parts, of so many), where it told. ``repair`` is what mends a round that
    ended, and ``decided`` says that every rank was prepared: from then on it can't be aborted as a whole.
    """

    id: str
    number: int
    model: str
    engine: str
    version: Version
    ranks: dict[int, RankState]
    incarnations: dict[int, str]
    sources: dict[int, str]
    world: str
    role: str = "publisher"
    state: RoundState = "open"
    reason: str = ""
    repair: Repair = "none"
    deadline: float | None = None
    decided: bool = False
    parts: dict[int, tuple[int, int]] = dataclasses.field(default_factory=dict)

    @property
    def begun(self) -> bool:
        """Whether any rank has started to receive; version and source are fixed from then on."""
        return any(s != "offered" for s in self.ranks.values())

    @property
    def reading(self) -> bool:
        """Whether the source is still needed."""
        return self.begun and not self.all_at_least(("prepared", "installed"))

    def all_at_least(self, states: tuple[RankState, ...]) -> bool:
        """Whether every rank is in one of ``states``."""
        return all(s in states for s in self.ranks.values())


@dataclasses.dataclass(frozen=True)
class HubState:
    """Everything the hub knows. ``epoch`` names this life of the hub: a restart has another one.

    ``holdings`` is what publisher ranks told that they hold (and what a relay withdrew), ``told`` the number
    of the last such message. ``installed`` is what subscriber ranks serve, ``installed_in`` the number of the
    round that brought it. ``pins`` maps a version to who wants it kept: a name -> the member with whose lease
    the pin ends, or None. ``dead`` remembers members whose lease ran out, ``replaced`` those whose place
    another process took: they never come back.
    """

    epoch: str
    members: dict[MemberKey, Member] = dataclasses.field(default_factory=dict)
    holdings: dict[MemberKey, dict[Tag, Holding]] = dataclasses.field(default_factory=dict)
    told: dict[MemberKey, int] = dataclasses.field(default_factory=dict)
    newest: dict[str, Published] = dataclasses.field(default_factory=dict)
    fanouts: dict[str, Fanout] = dataclasses.field(default_factory=dict)
    installed: dict[MemberKey, Version] = dataclasses.field(default_factory=dict)
    installed_in: dict[MemberKey, int] = dataclasses.field(default_factory=dict)
    pins: dict[Tag, dict[str, tuple[MemberKey, str] | None]] = dataclasses.field(default_factory=dict)
    dead: dict[MemberKey, str] = dataclasses.field(default_factory=dict)
    replaced: dict[MemberKey, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    rounds: dict[str, Round] = dataclasses.field(default_factory=dict)
    closed: dict[str, Round] = dataclasses.field(default_factory=dict)
    next_round: int = 1

    def worlds(self, role: str, model: str) -> dict[str, dict[int, Member]]:
        """Members of ``role`` for ``model``: name -> rank -> member."""
        found: dict[str, dict[int, Member]] = {}
        for key, member in self.members.items():
            if key.role == role and member.info.get("model") == model:
                found.setdefault(key.name, {})[key.rank] = member
        return found

    def engine_ranks(self, model: str) -> dict[str, dict[int, Member]]:
        """Subscribers of ``model``: engine name -> rank -> member."""
        return self.worlds("subscriber", model)


def whole(ranks: dict[int, Member]) -> bool:
    """Whether a world has all its processes, and they agree how many that are."""
    size = next(iter(ranks.values())).size
    return len(ranks) == size and all(r < size and m.size == size for r, m in ranks.items())


def version_json(version: Version | None) -> dict[str, Any] | None:
    """A version as JSON."""
    return None if version is None else {"lineage": version.lineage, "number": version.number}


def version_of(value: Any) -> Version | None:
    """A version from JSON; None stays None. ValueError when it is anything else."""
    if value is None:
        return None
    if not isinstance(value, dict) or not isinstance(value.get("lineage"), str):
        raise ValueError(f"a version is {{lineage, number}}, got {str(value)[:80]!r}")
    number = value.get("number")
    if not isinstance(number, int) or isinstance(number, bool):
        raise ValueError(f"a version's number is an integer, got {str(number)[:80]!r}")
    lineage: str = value["lineage"]
    if len(lineage) > MAX_LINEAGE or not lineage.isprintable():
        raise ValueError(
            f"a version's lineage is printable and of at most {MAX_LINEAGE} characters, got {lineage[:80]!r}"
        )
    if number > MAX_NUMBER:
        raise ValueError(f"a version's number is at most {MAX_NUMBER}, got {str(number)[:80]}")
    return Version(lineage, number)
