"""Source and target brought together: their correspondence and the plan that both sides compute."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxrl_sync.sharding import Correspondence, Edge, Layout, Plan, plan
from jaxrl_sync.sharding.manifest import Manifest
from jaxrl_sync.sharding.rank_plan import RankPlan
from jaxrl_sync.transfer.errors import MismatchError


@dataclasses.dataclass(frozen=True)
class Pairing:
    """A source layout, a target layout and the plan between them; its digest is exchanged before any byte."""

    target: Layout
    correspondence: Correspondence
    plan: Plan

    @classmethod
    def of(cls, target: Layout, correspondence: Correspondence) -> Pairing:
        """Plan the way from ``correspondence.export_layout`` (in wire dtype) to ``target``."""
        exported = correspondence.export_layout
        return cls(target, correspondence, plan(exported, target, correspondence))

    @property
    def digest(self) -> str:
        """The plan's digest: equal on both sides or the link is refused."""
        return str(self.plan.digest)

    def rank(self, process: int, side: Any) -> RankPlan:
        """One process's copies; none where it holds nothing."""
        layout = self.plan.source if side == "source" else self.plan.target
        if process not in layout.devices.values():
            return RankPlan(process, side, ())
        rank: RankPlan = self.plan.for_rank(process, side=side)
        return rank

    def edge(self, source_process: int, target_process: int) -> Edge:
        """The copies between two processes, none perhaps."""
        for edge in self.rank(source_process, "source").edges:
            if edge.target_process == target_process:
                return edge
        return Edge(source_process, target_process, ())


def compare_layouts(expected: Layout, found: Layout, what: str) -> None:
    """MismatchError that names the first tensors in which ``found`` differs from ``expected``."""
    if expected.digest == found.digest:
        return
    lines = Manifest.parse(expected.to_bytes()).differences(Manifest.parse(found.to_bytes()))
    shown = "; ".join(lines[:5]) + (f"; and {len(lines) - 5} more" if len(lines) > 5 else "")
    raise MismatchError(f"{what} differs: {shown}")
