"""The matrix: who is struck how, at which phase of whose round; and what is done to whose connections.

A phase is reached by holding it: the proxy stalls the message that begins it (or half of the bytes), or the
process that plays the role stops at that place. Product code knows nothing of it.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from tests.faults.rules import Action, Rule

How = Literal["kill", "stop"]
HALF_BYTES = 3_000_000
"""About half of what the smallest replica receives of one whole version."""

PHASES = ("export", "announce", "begin", "move", "verify", "prepared", "swap", "commit", "idle")


@dataclasses.dataclass(frozen=True)
class Strike:
    """``victim`` is killed or stopped while the round of process ``filling`` is in ``phase``."""

    victim: str
    how: How
    phase: str
    filling: str = "one.0"

    @property
    def name(self) -> str:
        """As pytest shows it."""
        return f"{self.how}-{self.victim}-at-{self.phase}-of-{self.filling}"

    @property
    def role(self) -> str:
        """hub, trainer, or the replica."""
        return self.victim.partition(".")[0]

    @property
    def outcomes(self) -> set[str]:
        """What may have become of the version that was under way, where somebody is left to say it.

        Who is killed before it serves has failed for its part, unless it is back and has taken the version
        as its anchor before the next one; once it served, the version is committed.
        """
        if self.role == "hub":
            return {"committed", "partially_committed"}
        if self.role == "trainer":
            return {"committed", "partially_committed", "aborted"}
        alone = self.victim == self.filling and self.role != "pair"  # the other rank may not have swapped yet
        if self.how == "kill" and alone and self.phase in ("swap", "commit"):
            return {"committed"}
        return {"committed", "partially_committed"}


@dataclasses.dataclass(frozen=True)
class Broken:
    """Something is done to the connections of ``engine`` (or to those of ``source``) for ``seconds``.

    ``when``: at half of the bytes of its round (move), at its word that it begins (begin), or before the
    version is published (idle).
    """

    action: Action | Literal["unplug"]
    kind: Literal["control", "data"]
    when: Literal["move", "begin", "idle"]
    value: float = 0.0
    seconds: float = 2.0
    source: str = "one.0"

    @property
    def name(self) -> str:
        """As pytest shows it."""
        return f"{self.action}-{self.kind}-at-{self.when}-of-{self.source}"

    def rule(self, half_bytes: int) -> Rule:
        """What the proxy is told; ``half_bytes`` of a version."""
        assert self.action != "unplug"
        rule = Rule(self.action, self.source, kind=self.kind, value=self.value)
        if self.when == "move":
            return dataclasses.replace(rule, up=False, after_bytes=half_bytes)
        if self.when == "begin":
            return dataclasses.replace(rule, down=False, pattern=phase_pattern("begin"))
        return rule


def phase_pattern(phase: str) -> str:
    """What begins a phase in the stream of a control connection (in that of a data connection: verify)."""
    return {
        "announce": "POST /v1/event/announce",
        "begin": r'"to": ?"begun"',
        "begun": r'"committed": ?false, ?"offer"',  # the hub's answer
        "commit": r'"to": ?"installed"',
        "verify": '"kind":"sums"',
        "written": '"kind":"done"',
    }[phase]


def _strikes() -> list[Strike]:
    hows: tuple[How, ...] = ("kill", "stop")
    found = [Strike(v, h, p) for v in ("hub", "trainer.0", "trainer.1") for h in hows for p in PHASES]
    filling = PHASES[2:]
    found += [Strike("one.0", h, p) for h in hows for p in filling]
    found += [Strike(v, h, p, "pair.0") for v in ("pair.0", "pair.1") for h in hows for p in filling]
    found += [Strike("local.0", h, p, "local.0") for h in hows for p in filling]
    found += [Strike("trainer.0", h, "move", "local.0") for h in hows]
    found += [Strike(v, h, p, "leaf.0") for v in ("relay.0", "leaf.0") for h in hows for p in filling]
    found += [Strike("two.0", h, p) for h in hows for p in PHASES if p not in ("export", "announce")]
    return found


STRIKES = _strikes()
FRAMES = [
    Strike(victim, how, phase, filling)
    for victim, phase, filling in (
        ("inplace.0", "move", "inplace.0"),
        ("inplace.0", "verify", "inplace.0"),
        ("inplace.0", "prepared", "inplace.0"),
        ("inplace.0", "commit", "inplace.0"),
        ("framed.0", "move", "framed.0"),
        ("trainer.0", "move", "inplace.0"),
        ("trainer.1", "move", "framed.0"),
        ("hub", "move", "inplace.0"),
    )
    for how in ("kill", "stop")
]
BROKEN = [
    Broken("rate", "data", "idle", value=4e6),
    Broken("rate", "control", "idle", value=20e3),
    Broken("delay", "data", "idle", value=0.2),
    Broken("delay", "control", "idle", value=0.2),
    Broken("stall", "data", "move", seconds=2.0),
    Broken("stall", "data", "move", seconds=10.0),
    Broken("stall", "control", "begin", seconds=2.0),
    Broken("stall", "control", "idle", seconds=5.0, source="trainer.?"),
    Broken("reset", "data", "move"),
    Broken("reset", "data", "idle"),
    Broken("reset", "control", "begin"),
    Broken("reset", "control", "idle", source="*"),
    Broken("half_open", "data", "move", seconds=4.0),
    Broken("half_open", "data", "idle", seconds=2.0),
    Broken("half_open", "control", "begin", seconds=4.0),
    Broken("partition", "data", "move", seconds=10.0),
    Broken("partition", "data", "idle", seconds=3.0),
    Broken("partition", "control", "begin", seconds=6.0),
    Broken("partition", "control", "idle", seconds=6.0),
    Broken("partition", "control", "idle", seconds=5.0, source="pair.1"),
    Broken("duplicate", "data", "move", value=5000),
    Broken("duplicate", "control", "begin", value=400),
    Broken("truncate", "data", "move"),
    Broken("truncate", "control", "begin"),
    Broken("flip", "data", "move"),
    Broken("unplug", "data", "move", seconds=3.0),
    Broken("unplug", "control", "idle", seconds=5.0),
]
