"""How many members a hub takes: no more than it has connections for, and those need open files."""

from __future__ import annotations

import dataclasses
import resource

from jaxrl_sync.transfer.impatient import MAX_UNPROVEN

MAX_MEMBERS = 1 << 14
CONNECTIONS_PER_MEMBER = 3
"""A member's calls at one time: a long poll, a heartbeat, and what it has to say."""
OWN_DESCRIPTORS = 64
"""Of the process itself: logs, its loop, listeners."""


@dataclasses.dataclass(frozen=True)
class Room:
    """``members`` that are taken, ``connections`` that are open at a time, of so many ``descriptors``.

    Every member that is taken has its connections even while strangers fill the lobby: a fleet that a hub has
    no room for is refused by name as it registers, not by calls that fail later.
    """

    members: int
    connections: int
    descriptors: int

    @classmethod
    def of(cls, descriptors: int) -> Room:
        """What a process with this limit on open files has room for."""
        strangers = min(MAX_UNPROVEN, descriptors // 2)
        most = CONNECTIONS_PER_MEMBER * MAX_MEMBERS + strangers
        connections = max(1, min(most, descriptors - OWN_DESCRIPTORS))
        members = max(0, connections - strangers) // CONNECTIONS_PER_MEMBER
        return cls(members, connections, descriptors)

    @classmethod
    def here(cls) -> Room:
        """Of this process."""
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        unlimited = descriptors == resource.RLIM_INFINITY
        return cls.of(1 << 20 if unlimited else descriptors)

    def refusal(self, registered: int) -> str | None:
        """Why one more member isn't taken beside ``registered`` ones; None where it is."""
        if registered < self.members:
            return None
        why = "all that a hub takes"
        if self.members < MAX_MEMBERS:
            why = (
                f"all that the hub's limit of {self.descriptors} open files (ulimit -n) has connections for "
                f"({CONNECTIONS_PER_MEMBER} each)"
            )
        return f"{registered} members are registered, no more are taken: that is {why}"
