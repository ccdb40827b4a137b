"""What the loop believes about versions: the newest published one, and what the trainer has committed."""

from __future__ import annotations

import dataclasses

from jaxrl_sync.orchestrator.errors import LoopError
from jaxrl_sync.transfer.version import Version


class LineageError(LoopError):
    """A version of another training history appeared in the middle of this one."""

    exit_code = 4


@dataclasses.dataclass(slots=True)
class Policy:
    """``label`` is the newest version engines may be brought to; ``committed`` the trainer's number of
    updates.

    Both only grow. Staleness and the trainer's lead are counted in ``committed`` updates, never in how often
    something was published.
    """

    lineage: str
    committed: int
    label: Version | None = None

    def publish(self, version: Version) -> bool:
        """Take a published version; False if it is not newer. Raises ``LineageError`` for a foreign one."""
        if version.lineage != self.lineage:
            raise LineageError(f"version {version} was published, expected lineage {self.lineage}")
        if self.label is not None and version.number <= self.label.number:
            return False
        self.label = version
        self.committed = max(self.committed, version.number)
        return True

    def commit(self, number: int) -> None:
        """The trainer acknowledged this many updates."""
        self.committed = max(self.committed, number)
