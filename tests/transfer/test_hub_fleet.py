"""Who serves whom: the hub's choice of sources on literal states, and rounds whose source goes away."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from jaxrl_sync.transfer.hub import fleet, machine, views
from jaxrl_sync.transfer.hub.state import Fanout, FanoutKind, Holding, HubState, MemberKey, Tag
from jaxrl_sync.transfer.version import Version

A1, A2, A3 = Version("a", 1), Version("a", 2), Version("a", 3)
PUB = MemberKey("publisher", "trainer", 0)
MODEL = {"model": "policy"}


class Hub:
    """The state machine with a name for each thing that happens; every event must be taken."""

    def __init__(self, kind: FanoutKind = "star", degree: int = 2, site: str = "") -> None:
        self.state = HubState("e")
        self.now = 0.0
        self.fanout = Fanout(kind, degree)
        self.do(machine.Register(PUB, 1, "i", {**MODEL, "site": site}, 1e6))

    def do(self, event: machine.Event) -> dict[str, Any]:
        self.state, outcome = machine.step(self.state, event, self.now)
        assert isinstance(outcome, machine.Done), outcome
        return outcome.reply

    def refused(self, event: machine.Event) -> str:
        self.state, outcome = machine.step(self.state, event, self.now)
        assert isinstance(outcome, machine.Refused), outcome
        return outcome.code

    def publish(self, version: Version, **more: Any) -> None:
        held = {version: Holding()} | more.pop("held", {})
        self.do(machine.Announce(PUB, "i", "policy", version, 8, 0.0, held, fanout=self.fanout))

    def engine(self, name: str, ranks: int = 1, installed: Version | None = None, **info: Any) -> None:
        told = {**MODEL, "relay": True, **info}
        for rank in range(ranks):
            if told["relay"]:
                relay = MemberKey("relay", name, rank)
                self.do(machine.Register(relay, ranks, "i", {**MODEL, "site": told.get("site", "")}, 1e6))
            self.do(machine.Register(MemberKey("subscriber", name, rank), ranks, "i", told, 1e6, installed))

    def offer(self, name: str, rank: int = 0) -> dict[str, Any] | None:
        seen = machine.watch(self.state, MemberKey("subscriber", name, rank), "i")
        assert isinstance(seen, dict)
        return seen["offer"]  # type: ignore[no-any-return]

    def advance(self, name: str, to: Any, rank: int = 0, round_id: str | None = None) -> dict[str, Any]:
        offer = self.offer(name, rank)
        round_id = round_id or (offer or {})["round"]
        return self.do(machine.Advance(MemberKey("subscriber", name, rank), "i", str(round_id), to, 5.0))

    def begin(self, name: str, rank: int = 0) -> str:
        """The source that the engine is bound to."""
        bound = self.advance(name, "begun", rank)["offer"]
        return f"{bound['role']} {bound['sources']}"

    def take(self, name: str) -> str:
        source = self.begin(name)
        self.advance(name, "installed")
        return source

    def gone(self, role: str, name: str, rank: int = 0) -> None:
        self.do(machine.Leave(MemberKey(role, name, rank), "i"))


def names(count: int) -> list[str]:
    return [f"x{i}" for i in range(count)]


def fleet_of(kind: FanoutKind, count: int, degree: int = 2) -> Hub:
    hub = Hub(kind, degree)
    for name in names(count):
        hub.engine(name)
    hub.publish(A1)
    return hub


def test_star_is_the_default_and_all_read_from_the_trainer() -> None:
    hub = fleet_of("star", 4)
    assert [hub.begin(x) for x in names(4)] == ["publisher trainer"] * 4


def test_in_a_chain_each_serves_one_and_the_trainer_sends_one_copy() -> None:
    hub = fleet_of("chain", 4)
    assert [hub.begin(x) for x in names(4)] == ["publisher trainer", "relay x0", "relay x1", "relay x2"]
    bound = hub.offer("x3")
    assert bound is not None and [r["name"] for r in bound["relays"]] == ["x2"]


def test_in_a_tree_each_serves_its_degree_nearest_to_the_root_first() -> None:
    hub = fleet_of("tree", 7)
    found = [hub.begin(x).split()[1] for x in names(7)]
    assert found == ["trainer", "trainer", "x0", "x1", "x0", "x1", "x2"]


def test_those_who_come_after_others_have_finished_take_from_the_least_loaded_engine() -> None:
    hub = fleet_of("chain", 4)
    assert hub.take("x0") == "publisher trainer"
    assert hub.take("x1") == "relay x0"  # the trainer has sent its copy
    assert hub.begin("x2") == "relay x0"
    assert hub.begin("x3") == "relay x1"


def test_the_source_is_bound_when_a_round_begins_and_for_all_ranks_of_an_engine() -> None:
    hub = Hub("chain")
    hub.engine("x")
    hub.engine("y", ranks=2)
    hub.publish(A1)
    assert hub.begin("y") == hub.begin("y", rank=1) == "publisher trainer"
    assert hub.begin("x") == "relay y"  # it was proposed the trainer


def test_engines_that_do_not_follow_relays_read_from_the_trainer_and_serve_nobody() -> None:
    hub = Hub("chain")
    for name in names(3):
        hub.engine(name, relay=False)
    old = MemberKey("subscriber", "old", 0)
    hub.do(machine.Register(old, 1, "i", MODEL, 1e6))
    hub.publish(A1)
    for name in (*names(3), "old"):
        assert hub.begin(name) == "publisher trainer"


def test_one_seed_per_site_crosses_the_slow_link() -> None:
    hub = Hub("star", site="home")
    for site in ("home", "far", "away"):
        for i in range(3):
            hub.engine(f"{site}{i}", site=site)
    hub.publish(A1)
    bound = {f"{s}{i}": hub.begin(f"{s}{i}") for i in range(3) for s in ("far", "home", "away")}
    assert [x for x, s in bound.items() if s == "publisher trainer" and "home" not in x] == ["far0", "away0"]
    assert all(bound[f"{s}{i}"] == f"relay {s}0" for s in ("far", "away") for i in (1, 2))
    assert all(bound[f"home{i}"] == "publisher trainer" for i in range(3))


def test_a_seed_that_can_not_relay_does_not_keep_its_site_waiting() -> None:
    hub = Hub(site="home")
    hub.engine("far0", site="far", relay=False)
    hub.engine("far1", site="far")
    hub.publish(A1)
    assert hub.begin("far0") == hub.begin("far1") == "publisher trainer"


def test_reliable_engines_are_preferred_and_spot_ones_still_serve() -> None:
    hub = Hub()
    hub.engine("a-spot", installed=A1, reliable=False)
    hub.engine("steady", installed=A1)
    hub.publish(A1)
    hub.engine("late")
    hub.gone("publisher", "trainer")
    assert hub.begin("late") == "relay steady"
    hub.gone("relay", "steady")
    hub.engine("later")
    assert hub.begin("later") == "relay a-spot"


def test_engines_serve_late_joiners_when_the_trainer_is_gone() -> None:
    hub = fleet_of("star", 2)
    hub.take("x0")
    hub.gone("publisher", "trainer")
    newest = machine.newest_version(hub.state, "policy")
    assert newest is not None and newest["available"]
    hub.engine("late")
    assert hub.take("late") == "relay x0"
    hub.gone("relay", "x0")
    hub.gone("relay", "late")
    hub.engine("too-late")
    assert hub.offer("too-late") is None
    newest = machine.newest_version(hub.state, "policy")
    assert newest is not None and not newest["available"]


def test_a_source_that_dies_ends_its_readers_rounds_but_not_the_prepared_ones() -> None:
    hub = fleet_of("chain", 4)
    for name in names(4):
        hub.begin(name)
    rounds = {x: hub.offer(x) for x in names(4)}
    hub.advance("x2", "prepared")  # x2 read from x1, x3 reads from x2
    hub.gone("relay", "x0")
    ended = {r.engine: r for r in hub.state.closed.values()}
    assert set(ended) == {"x1"} and (ended["x1"].state, ended["x1"].repair) == ("failed", "reoffer")
    again = hub.offer("x1")
    before = rounds["x1"]
    assert again is not None and before is not None and again["round"] != before["round"]
    assert again["version"] == before["version"]
    assert hub.offer("x2") == rounds["x2"]


def test_a_source_whose_own_round_fails_takes_its_readers_with_it_down_the_chain() -> None:
    hub = fleet_of("chain", 3)
    for name in names(3):
        hub.begin(name)
    fallen = hub.offer("x0")
    assert fallen is not None
    hub.do(machine.Fail(MemberKey("subscriber", "x0", 0), "i", fallen["round"], "bits differ"))
    ended = {r.engine: (r.state, r.reason) for r in hub.state.closed.values()}
    assert ended["x0"][0] == "aborted" and ended["x1"][0] == ended["x2"][0] == "failed"
    assert "no longer receives" in ended["x1"][1] and "bits differ" in ended["x2"][1]
    assert [hub.begin(x) for x in names(3)] == ["publisher trainer", "publisher trainer", "relay x0"]


def test_a_reader_that_gives_up_is_given_another_source() -> None:
    hub = fleet_of("chain", 3)
    hub.take("x0")
    hub.take("x1")
    assert hub.begin("x2") == "relay x0"
    offer = hub.offer("x2")
    assert offer is not None
    hub.do(machine.Fail(MemberKey("subscriber", "x2", 0), "i", offer["round"], "no route to x0"))
    assert hub.begin("x2") == "relay x1"


def test_a_slot_that_others_still_read_is_not_overwritten() -> None:
    hub = Hub("chain")
    hub.engine("x")
    hub.publish(A1)
    hub.take("x")
    hub.engine("slow")
    assert hub.begin("slow") == "relay x"
    hub.publish(A2)
    hub.take("x")  # into the other slot; the one of A1 is read by slow
    hub.publish(A3)
    assert hub.offer("x") is None
    rows = {(r["holder"]["name"], r["state"]) for r in views.replicas(hub.state, "policy")}
    assert {("x", "published"), ("x", "draining"), ("slow", "replicating")} <= rows
    hub.advance("slow", "prepared")
    assert hub.offer("x") is not None


def test_an_engine_with_one_slot_is_void_once_it_begins_and_repaired_by_overwrite() -> None:
    hub = Hub()
    hub.engine("x", slots=1, installed=A1)
    hub.publish(A2)
    hub.begin("x")
    assert MemberKey("subscriber", "x", 0) not in hub.state.installed
    offer = hub.offer("x")
    assert offer is not None
    hub.do(machine.Fail(MemberKey("subscriber", "x", 0), "i", offer["round"], "half"))
    assert hub.state.closed[offer["round"]].repair == "overwrite"
    hub.take("x")
    hub.engine("y")
    hub.gone("publisher", "trainer")
    assert hub.begin("y") == "relay x"
    assert hub.state.installed[MemberKey("subscriber", "x", 0)] == A2


def test_a_relays_deadline_frees_it_from_a_reader_that_hangs() -> None:
    hub = fleet_of("chain", 2)
    hub.take("x0")
    hub.begin("x1")
    hub.now = 6.0
    hub.do(machine.Tick())
    ended = [r for r in hub.state.closed.values() if r.engine == "x1"]
    assert [(r.state, r.repair) for r in ended] == [("aborted", "reoffer")]
    assert "deadline" in ended[0].reason and hub.offer("x1") is not None


def test_a_restarted_hub_learns_from_engines_what_is_published() -> None:
    hub = Hub()
    hub.gone("publisher", "trainer")
    hub.engine("x", installed=A2)
    hub.engine("old", installed=A1)
    hub.engine("fresh")
    assert hub.begin("fresh") == hub.begin("old") == "relay x"
    newest = machine.newest_version(hub.state, "policy")
    assert newest is not None and newest["version"]["number"] == 2


def test_what_engines_alone_have_shown_to_be_the_newest_version_never_goes_back() -> None:
    """It went back when the last engine that served it was lost: joiners got an older one."""
    hub = Hub()
    hub.gone("publisher", "trainer")
    hub.engine("x", installed=A2)
    hub.engine("y", installed=A1)
    hub.gone("subscriber", "x")
    hub.gone("relay", "x")
    hub.engine("late")
    newest = machine.newest_version(hub.state, "policy")
    assert newest is not None and newest["version"]["number"] == 2 and not newest["available"]
    assert hub.offer("late") is None
    hub.engine("x", installed=A3)
    assert hub.begin("late") == "relay x"
    newest = machine.newest_version(hub.state, "policy")
    assert newest is not None and newest["version"]["number"] == 3


def test_of_two_lineages_that_engines_hold_none_is_called_the_later_one() -> None:
    hub = Hub()
    hub.gone("publisher", "trainer")
    hub.engine("x", installed=A2)
    hub.engine("y", installed=Version("b", 7))
    hub.engine("fresh")
    assert hub.offer("x") is None and hub.offer("y") is None


@pytest.mark.parametrize("told", [True, False])
def test_an_engine_that_asks_for_a_version_gets_that_one(told: bool) -> None:
    hub = Hub()
    hub.publish(A1)
    hub.do(machine.Pin("policy", A1, "evaluation"))
    hub.publish(A2, held={A1: Holding("offloaded", True)} if told else {})
    hub.engine("x", want={"lineage": "a", "number": 1})
    offer = hub.offer("x")
    assert (offer is not None) == told
    if offer is not None:
        assert offer["version"]["number"] == 1
        hub.take("x")
        assert hub.offer("x") is None  # and it stays with it
        state = views.pin_state(hub.state, Tag("policy", A1))
        assert state["confirmed"] and state["held"]


def test_late_words_about_what_is_held_change_nothing() -> None:
    hub = Hub()
    hub.do(machine.Announce(PUB, "i", "policy", A2, 8, 0.0, {A2: Holding()}, sequence=2))
    hub.do(machine.Hold(PUB, "i", "policy", {A1: Holding()}, sequence=1))
    assert set(hub.state.holdings[PUB]) == {Tag("policy", A2)}
    hub.do(machine.Hold(PUB, "i", "policy", {A2: Holding("offloaded")}, sequence=3))
    assert hub.state.holdings[PUB][Tag("policy", A2)].state == "offloaded"


def test_unpublish_keeps_the_last_reliable_copy_and_waits_for_readers() -> None:
    hub = Hub()
    hub.engine("spot", reliable=False)
    hub.publish(A1)
    hub.take("spot")
    hub.engine("reader", relay=False)
    hub.begin("reader")
    unpublish = machine.Unpublish(PUB, "i", "policy", A1)
    assert hub.do(unpublish) == {"drained": False, "readers": ["reader"], "last_reliable": True}
    assert fleet.holders(hub.state, Tag("policy", A1))[0].source.role == "publisher"
    hub.engine("steady", installed=A1)
    assert hub.do(unpublish) == {"drained": False, "readers": ["reader"], "last_reliable": False}
    hub.engine("next")
    assert hub.begin("next").startswith("relay")  # nobody new reads there
    hub.advance("reader", "prepared")
    assert hub.do(unpublish) == {"drained": True, "readers": [], "last_reliable": False}
    assert hub.do(unpublish)["drained"]


def test_of_a_pinned_version_the_last_copy_is_a_publishers_whoever_else_has_one() -> None:
    """An engine that serves it will overwrite it: nobody had what was promised to be kept."""
    hub = Hub()
    hub.engine("x")
    hub.publish(A1)
    hub.take("x")
    hub.do(machine.Pin("policy", A1, "evaluation"))
    unpublish = machine.Unpublish(PUB, "i", "policy", A1)
    assert hub.do(unpublish) == {"drained": False, "readers": [], "last_reliable": True}
    hub.do(machine.Unpin("policy", A1, "evaluation"))
    assert hub.do(unpublish)["drained"]


def test_pins_are_refused_for_what_nobody_holds_and_released_with_their_owner() -> None:
    hub = Hub()
    hub.publish(A1)
    assert hub.refused(machine.Pin("policy", A2, "x")) == "unavailable"
    owner = MemberKey("engine", "x", 0)
    hub.do(machine.Register(owner, 1, "j", {}, 1e6))
    for _ in range(2):
        hub.do(machine.Pin("policy", A1, "x", (owner, "j")))
    hub.do(machine.Pin("policy", A1, "y"))
    assert views.pinned(hub.state, "policy") == [A1]
    hub.do(machine.Leave(owner, "j"))
    assert hub.state.pins == {Tag("policy", A1): {"y": None}}
    for _ in range(2):
        hub.do(machine.Unpin("policy", A1, "y"))
    assert hub.state.pins == {}


def test_the_directory_shows_every_state_of_a_replica() -> None:
    hub = Hub("chain")
    hub.engine("x")
    hub.engine("idle")
    hub.engine("lost")
    hub.publish(A1)
    hub.take("x")
    hub.publish(A2, held={A1: Holding("offloaded", True)})
    hub.begin("x")
    key = MemberKey("subscriber", "x", 0)
    offer = hub.offer("x")
    assert offer is not None
    hub.do(machine.Advance(key, "i", offer["round"], "begun", 5.0, (3, 16)))
    lost = MemberKey("subscriber", "lost", 0)
    member = dataclasses.replace(hub.state.members[lost], expires=0.0)
    hub.state = dataclasses.replace(hub.state, members={**hub.state.members, lost: member})
    hub.do(machine.Tick())
    rows = views.replicas(hub.state, "policy")
    found = {(r["holder"]["name"], r["state"]): r for r in rows}
    assert set(found) == {
        ("trainer", "published"),
        ("trainer", "offloaded"),
        ("x", "published"),
        ("x", "replicating"),
        ("idle", "absent"),
        ("lost", "dead"),
    }
    assert found["x", "replicating"]["prefix"] == {"0": [3, 16]}
    assert found["x", "replicating"]["source"] == {"role": "publisher", "name": "trainer"}
    assert found["trainer", "published"]["readers"] == ["x"]


def test_a_rank_that_begins_as_the_lease_of_another_runs_out_is_told_that_the_round_is_over() -> None:
    hub = Hub()
    hub.publish(A1)
    hub.engine("pair", ranks=2)
    told = {**MODEL, "relay": True}
    hub.do(machine.Register(MemberKey("subscriber", "pair", 0), 2, "i", told, ttl_s=5.0))
    offer = hub.offer("pair", 1)
    assert offer is not None
    hub.now = 5.0
    begun = machine.Advance(MemberKey("subscriber", "pair", 1), "i", offer["round"], "begun")
    assert hub.refused(begun) == "round_over"


def test_engines_that_never_come_back_leave_nothing_behind() -> None:
    hub = Hub()
    hub.publish(A1)
    for number in range(3 * machine.KEPT_DEAD):
        name = f"spot-{number}"
        hub.engine(name, relay=False)
        hub.take(name)
        key = MemberKey("subscriber", name, 0)
        if number % 2:
            hub.gone("subscriber", name)
        else:
            hub.do(machine.Register(key, 1, "i", MODEL, ttl_s=1.0, installed=A1))
            hub.now += 1.0
            hub.do(machine.Tick())
    state = hub.state
    assert len(state.dead) == machine.KEPT_DEAD and len(state.installed_in) == machine.KEPT_DEAD
    assert not state.installed and not state.rounds
