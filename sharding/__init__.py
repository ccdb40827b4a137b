"""Who holds what: layouts, correspondences between trees, transfer plans, in-process reshard, copy kernels.

Needs jax and numpy only. Names load on first use, so importing the package costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxrl_sync.sharding.box import Box as Box
    from jaxrl_sync.sharding.correspondence import Correspondence as Correspondence
    from jaxrl_sync.sharding.errors import DeviceCopyError as DeviceCopyError
    from jaxrl_sync.sharding.errors import MappingError as MappingError
    from jaxrl_sync.sharding.errors import UserError as UserError
    from jaxrl_sync.sharding.kernels import CopyTable as CopyTable
    from jaxrl_sync.sharding.kernels import copies_digest as copies_digest
    from jaxrl_sync.sharding.kernels import state_digest as state_digest
    from jaxrl_sync.sharding.layout import Layout as Layout
    from jaxrl_sync.sharding.layout import Shard as Shard
    from jaxrl_sync.sharding.layout import TensorLayout as TensorLayout
    from jaxrl_sync.sharding.planning import Plan as Plan
    from jaxrl_sync.sharding.planning import plan as plan
    from jaxrl_sync.sharding.rank_plan import Copy as Copy
    from jaxrl_sync.sharding.rank_plan import Edge as Edge
    from jaxrl_sync.sharding.rank_plan import RankPlan as RankPlan
    from jaxrl_sync.sharding.resharding import make_pool as make_pool
    from jaxrl_sync.sharding.resharding import reshard as reshard
    from jaxrl_sync.sharding.shardings import placed as placed
    from jaxrl_sync.sharding.slots import SlotLayout as SlotLayout
    from jaxrl_sync.sharding.topology import Policy as Policy
    from jaxrl_sync.sharding.topology import Topology as Topology
    from jaxrl_sync.sharding.tracing import trace as trace

_HOME = {
    "Box": "box",
    "Correspondence": "correspondence",
    "DeviceCopyError": "errors",
    "MappingError": "errors",
    "UserError": "errors",
    "CopyTable": "kernels",
    "state_digest": "kernels",
    "Layout": "layout",
    "Shard": "layout",
    "TensorLayout": "layout",
    "Plan": "planning",
    "plan": "planning",
    "Copy": "rank_plan",
    "Edge": "rank_plan",
    "RankPlan": "rank_plan",
    "make_pool": "resharding",
    "reshard": "resharding",
    "placed": "shardings",
    "SlotLayout": "slots",
    "trace": "tracing",
    "Policy": "topology",
    "Topology": "topology",
    "copies_digest": "kernels",
}

__all__ = [
    "Box",
    "Copy",
    "CopyTable",
    "Correspondence",
    "DeviceCopyError",
    "Edge",
    "Layout",
    "MappingError",
    "Plan",
    "Policy",
    "RankPlan",
    "Shard",
    "SlotLayout",
    "TensorLayout",
    "Topology",
    "UserError",
    "copies_digest",
    "make_pool",
    "placed",
    "plan",
    "reshard",
    "state_digest",
    "trace",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value
