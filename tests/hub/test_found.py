"""What the simulation found in the shells around the machines, each as the smallest real case."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from jaxrl_sync.transfer import links as links_module
from jaxrl_sync.transfer.config import SubscriberConfig
from jaxrl_sync.transfer.errors import PeerLost
from jaxrl_sync.transfer.hub.client import HubRefused, Member
from jaxrl_sync.transfer.hub.lease import Lease
from jaxrl_sync.transfer.hub.state import MemberKey
from jaxrl_sync.transfer.links import PUBLISHER, Links, Way
from jaxrl_sync.transfer.version import Version


class ForgetfulHub:
    """A client of a hub that has forgotten the caller and then doesn't answer: its calls take their time."""

    def __init__(self) -> None:
        self.allowed_s: list[float] = []
        self._leases: list[Any] = []

    def call(
        self, path: str, body: Any, timeout_s: Any = None, until: Any = None, within_s: float = 1e9
    ) -> Any:
        self.allowed_s.append(within_s)
        if path == "/v1/event/advance":
            raise HubRefused("unknown_member", "restarted")
        time.sleep(min(within_s, 3.0))
        raise PeerLost("the hub is away again")


@pytest.mark.invariant(18)
def test_a_call_with_a_deadline_keeps_it_when_the_hub_forgot_the_caller_and_went_away() -> None:
    """Registering again took the hub client's minute: a prepare ended long after its own deadline."""
    hub: Any = ForgetfulHub()
    lease = Lease(hub, MemberKey("subscriber", "e", 0), 1, {}, 10.0, None, None, None)
    with pytest.raises(PeerLost):
        lease.call("/v1/event/advance", {}, within_s=0.2)
    assert max(hub.allowed_s) <= 0.2


@pytest.mark.invariant(29)
def test_a_publisher_hears_over_a_new_link_what_the_engine_took_from_a_relay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its link was cut when the version came another way: the outcome stayed open for ever."""
    told: list[dict[str, Any]] = []

    class Opened:
        closed, incarnation = False, "a"

        def __init__(self, *_: object) -> None:
            pass

        def tell(self, message: dict[str, Any], timeout_s: float) -> None:
            told.append(message)

    monkeypatch.setattr(links_module, "Inbound", Opened)
    hub: Any = SimpleNamespace(token="", run_id="")
    target: Any = SimpleNamespace(layout={}, slot=None)
    links = Links(hub, target, lambda tree: tree, SubscriberConfig(), [])
    links.serving = lambda: Version("l", 6)
    way: Any = Way(
        SimpleNamespace(digest="d"),  # type: ignore[arg-type]
        SimpleNamespace(edges=[SimpleNamespace(source_process=0, copies=())]),  # type: ignore[arg-type]
        ("", ""),
        {},
    )
    links._way_of[PUBLISHER, "trainer"] = way
    links._link(PUBLISHER, Member(PUBLISHER, "trainer", 0, 1, "a", {}))
    assert [(m["kind"], m["version"]) for m in told] == [("installed", {"lineage": "l", "number": 6})]
