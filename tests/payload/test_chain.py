"""Chain and shadow against each other: every version bit for bit, whatever is skipped, lost or done twice."""

from __future__ import annotations

import concurrent.futures
import itertools
import random
import threading
from typing import Any

import numpy as np
import pytest

from jaxrl_sync.sharding import CopyTable
from jaxrl_sync.sharding.digests import copies_digest
from jaxrl_sync.transfer.codec import frame, positions
from jaxrl_sync.transfer.codec.errors import CorruptFrame, FrameError, TruncatedFrame, WrongBase, WrongPlan
from jaxrl_sync.transfer.codec.rules import CodingRules
from jaxrl_sync.transfer.payload import settings
from jaxrl_sync.transfer.payload.baseline import HostBaseline
from jaxrl_sync.transfer.payload.chain import Chain
from jaxrl_sync.transfer.payload.chains import Chains
from jaxrl_sync.transfer.payload.entries import compare, compare_numpy, union
from jaxrl_sync.transfer.payload.sections import Section
from jaxrl_sync.transfer.payload.seen import FIRST_RETRY, RETRY, Seen
from jaxrl_sync.transfer.payload.settings import PayloadSettings
from jaxrl_sync.transfer.payload.shadow import Shadow
from jaxrl_sync.transfer.version import Version
from tests.codec.deltas import DTYPES, adversarial
from tests.payload.edges import Memory, Tree, edge, random_tree, shards, stepped

EDGE, SLOT, SOURCE, TARGET = edge()
PLAN = "ab" * 32
RULES = [
    CodingRules(),
    CodingRules(values="auto"),
    CodingRules(positions="rice", values="xor", zstd="on", whole=False),
    CodingRules(positions="gap8", values="ulp", zstd="off", whole=False),
    CodingRules(positions="bitmap", whole=False),
]


class Receiver:
    """Two slots and a shadow, as a subscriber drives them."""

    def __init__(self, recount_every: int = 4) -> None:
        self.slots = [Memory(SLOT), Memory(SLOT)]
        self.shadow = Shadow(PLAN, EDGE, SLOT, recount_every)
        self.serving: Memory | None = None
        self.installed: Version | None = None
        self.anchors = 0

    def free(self) -> Memory:
        """The slot that doesn't serve."""
        return next(s for s in self.slots if s is not self.serving)

    def take(self, chain: Chain, version: Version, tree: Tree) -> None:
        """One round, by frame where that is possible."""
        sources, slot = shards(tree, SOURCE), self.free()
        encoded = chain.frame(self.shadow.base(self.serving), version, sources)
        if encoded is None:
            chain.anchor(version, sources)
            self.shadow.spoiled(slot)
            CopyTable.direct(EDGE.copies).execute(sources, slot.views)
            self.shadow.filled(slot, version, copies_digest(EDGE.copies, slot.views, "target"))
            self.anchors += 1
        else:
            assert self.serving is not None
            applied = self.shadow.apply(encoded.data, slot, self.serving, version)
            found = applied.digests or self.shadow.recount(slot, 1)
            assert found == encoded.digests == copies_digest(EDGE.copies, slot.views, "target")
            self.shadow.verified(slot, version, found)

    def swap(self, version: Version) -> None:
        """The filled slot serves."""
        self.serving, self.installed = self.free(), version

    def holds(self, tree: Tree) -> bool:
        """Whether the serving slot has every bit of the tree."""
        assert self.serving is not None
        wanted = shards(tree, TARGET)
        return all(self.serving.views[k].tobytes() == v.tobytes() for k, v in wanted.items())


def _chain(rules: CodingRules = RULES[0], history: int = 8) -> Chain:
    return Chain(PLAN, EDGE, PayloadSettings("sparse", rules, history=history))


@pytest.mark.invariant(39)
@pytest.mark.parametrize("rules", RULES, ids=str)
def test_versions_arrive_bit_for_bit_through_skips_restarts_and_late_joiners(rules: CodingRules) -> None:
    rng, dice = np.random.default_rng(1), random.Random(1)
    chain, tree = _chain(rules, history=3), random_tree(rng)
    receivers = {i: Receiver() for i in range(3)}
    lineage, number = "aaaaaaaaaaaa", 0
    for _ in range(40):
        number += 1
        if dice.random() < 0.04:
            lineage = f"{dice.getrandbits(48):012x}"
        tree = stepped(tree, dice.choice([0.0, 0.001, 0.02, 0.3, 1.0]), rng)
        version = Version(lineage, number)
        for key, receiver in receivers.items():
            if dice.random() < 0.4:
                continue  # skips this one
            if dice.random() < 0.05:
                receiver = receivers[key] = Receiver()  # restarted, or joining late
                chain.leave(key)
            receiver.take(chain, version, tree)
            if dice.random() < 0.1:
                continue  # prepared, then given up
            receiver.swap(version)
            assert receiver.holds(tree)
            if dice.random() < 0.7:
                chain.confirm(key, version)  # else the acknowledgement is lost
    assert sum(r.anchors for r in receivers.values()) < 40
    assert chain.encoded > 12


def test_equal_replicas_cost_one_encoding_and_one_baseline() -> None:
    seen = []
    for count in (1, 4, 16):
        rng = np.random.default_rng(3)
        chain, tree = _chain(), random_tree(rng)
        receivers = [Receiver() for _ in range(count)]
        for number in range(1, 7):
            version = Version("aaaaaaaaaaaa", number)
            tree = stepped(tree, 0.01, rng)
            for key, receiver in enumerate(receivers):
                receiver.take(chain, version, tree)
                receiver.swap(version)
                chain.confirm(key, version)
                assert receiver.holds(tree)
        seen.append((chain.encoded, chain.baseline_bytes, chain.step_bytes))
    assert seen[0] == seen[1] == seen[2]
    assert seen[0][0] == 5 and seen[0][1] == EDGE.total_bytes and seen[0][2] == 0


def test_a_frame_made_ahead_is_there_while_others_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(5)
    chain, tree = _chain(), random_tree(rng)
    versions = [Version("aaaaaaaaaaaa", number) for number in range(3)]
    for key, version in enumerate(versions[:2]):
        (chain.follow if key else chain.anchor)(version, shards(tree, SOURCE))
        chain.confirm(key, version)
        tree = stepped(tree, 0.01, rng)
    real, late, go_on = Chain._encode, threading.Event(), threading.Event()

    def encode(self: Chain, base: Version, *args: Any) -> Any:
        if base == versions[0]:  # of whom fewer ask
            late.set()
            assert go_on.wait(60)
        return real(self, base, *args)

    monkeypatch.setattr(Chain, "_encode", encode)
    sources = shards(tree, SOURCE)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        ahead = pool.submit(chain.ahead, versions[2], sources)
        assert late.wait(60)
        try:
            assert pool.submit(chain.frame, versions[1], versions[2], sources).result(60) is not None
        finally:
            go_on.set()
        ahead.result(60)
    assert chain.encoded == 2


def test_the_steady_state_copies_no_slot() -> None:
    rng = np.random.default_rng(4)
    chain, tree, receiver = _chain(), random_tree(rng), Receiver()
    for number in range(1, 12):
        tree = stepped(tree, 0.02, rng)
        receiver.take(chain, Version("aaaaaaaaaaaa", number), tree)
        receiver.swap(Version("aaaaaaaaaaaa", number))
        assert receiver.holds(tree)
    assert receiver.anchors == 1 and receiver.shadow.copied == 1


def test_half_of_the_weights_may_change() -> None:
    rng = np.random.default_rng(6)
    chain, tree, receiver = _chain(), random_tree(rng), Receiver()
    for number in range(1, 5):
        tree = stepped(tree, 0.5, rng)
        receiver.take(chain, Version("aaaaaaaaaaaa", number), tree)
        receiver.swap(Version("aaaaaaaaaaaa", number))
        assert receiver.holds(tree)
    assert receiver.anchors == 1


def _taken(seen: Seen, full_s: float, cold_s: float, warm_s: float, versions: range) -> list[bool]:
    """Whether frames were sent for these versions, where the rounds of one link cost so much."""
    taken = list[bool]()
    for number in versions:
        base = seen.base_wanted
        frame = seen.frame_pays(Version("aaaaaaaaaaaa", number)) and base and number > 0
        if frame:
            seen.frame(warm_s if taken and taken[-1] else cold_s, after_full=not (taken and taken[-1]))
        else:
            seen.full(full_s, first=number == 0)
        taken.append(frame)
    return taken


def test_auto_takes_what_was_seen_to_be_faster() -> None:
    assert Seen().base_wanted and Seen().frame_pays(Version("aaaaaaaaaaaa", 0))  # nothing is known yet
    # The first frame pays for a copy of the slot, which says nothing about those after it.
    taken = _taken(Seen(), 0.072, 0.080, 0.059, range(3 * RETRY))
    assert taken[:6] == [False, True, True, True, True, True]
    assert taken.count(False) <= 5
    seen = Seen()
    taken = _taken(seen, 0.040, 0.070, 0.058, range(3 * RETRY))
    assert taken[:4] == [False, True, True, False] and taken.count(True) <= 10
    assert sum(_taken(seen, 0.200, 0.070, 0.058, range(3 * RETRY, 5 * RETRY))) >= RETRY - 2  # a slower link


@pytest.mark.parametrize("full_s", [0.040, 0.200])
def test_everything_is_tried_where_it_was_never_sent(full_s: float) -> None:
    """Frames were sent for ever to an engine whose first version had come another way."""
    seen, taken = Seen(), list[bool]()
    for number in range(4 * RETRY):
        framed = bool(taken) and taken[-1]
        based = not taken or framed or seen.base_wanted
        frame = seen.frame_pays(Version("aaaaaaaaaaaa", number))
        assert based or not frame
        if frame:
            seen.frame(0.058, after_full=not framed)
        elif len(taken) < 2 * FIRST_RETRY:
            pass  # half of the bytes came from elsewhere: that round says nothing
        else:
            seen.full(full_s)
        taken.append(frame)
    assert taken[:2] == [True, True] and taken.count(False) and taken.index(False) <= FIRST_RETRY + 2
    assert (sum(taken[2 * RETRY :]) > RETRY) == (full_s > 0.058)


def test_what_lost_by_far_is_tried_by_one_frame_and_what_lost_by_little_by_two() -> None:
    for cold_s, tries in ((0.300, 1), (0.070, 2)):
        taken = _taken(Seen(), 0.040, cold_s, 0.060, range(6 * RETRY))
        runs = [len(list(run)) for frame, run in itertools.groupby(taken) if frame]
        assert set(runs) == {tries} and 5 <= len(runs) <= 9


def test_two_payloads_that_cost_the_same_do_not_take_turns() -> None:
    taken = _taken(Seen(), 0.050, 0.060, 0.0501, range(6 * RETRY))
    assert sum(a != b for a, b in itertools.pairwise(taken)) <= 20


def test_equal_replicas_try_what_lost_again_together() -> None:
    chains, rng = Chains(PayloadSettings("auto"), 1), np.random.default_rng(8)
    uses = [chains.open(f"link {i}", PLAN, EDGE, "tcp") for i in range(3)]
    tree, framed = random_tree(rng), list[int]()
    for number in range(1, RETRY + 4):
        tree, version = stepped(tree, 0.01, rng), Version("aaaaaaaaaaaa", number)
        base = Version("aaaaaaaaaaaa", number - 1) if number > 1 else None
        for use in uses:
            assert use is not None
            encoded = use.frame(base, version, shards(tree, SOURCE))
            if encoded is None:
                use.sent_full(version, shards(tree, SOURCE), EDGE.total_bytes, 1e-6)
            else:
                use.sent_frame(version, encoded, 10.0)
                framed.append(number)
            use.confirmed(version, times={"round_s": 0.1 if encoded is None else 10.0})
    assert len(framed) >= 6 and all(framed.count(number) == 3 for number in framed)


def test_a_baseline_that_is_wrong_is_taken_again_with_the_next_anchor() -> None:
    rng = np.random.default_rng(10)
    chain, tree = _chain(), random_tree(rng)
    versions = [Version("aaaaaaaaaaaa", n) for n in range(4)]

    def digests() -> dict[str, tuple[int, int]]:
        return copies_digest(EDGE.copies, shards(tree, SOURCE), "source")

    chain.anchor(versions[0], shards(tree, SOURCE), digests())
    assert isinstance(chain._baseline, HostBaseline)
    chain._baseline.bits[0][3] ^= 1  # a fault of memory
    tree = stepped(tree, 0.05, rng)
    wrong = chain.frame(versions[0], versions[1], shards(tree, SOURCE))
    assert wrong is not None and wrong.digests != digests()  # the receiver refuses it and asks for an anchor
    chain.anchor(versions[1], shards(tree, SOURCE), digests())
    assert chain.step_bytes == 0
    for before, after in itertools.pairwise(versions[1:]):
        tree = stepped(tree, 0.05, rng)
        right = chain.frame(before, after, shards(tree, SOURCE))
        assert right is not None and right.digests == digests()


def test_a_frame_that_changes_nothing_says_the_sums_of_its_version_or_is_none() -> None:
    rng = np.random.default_rng(12)
    chain, trees = _chain(), [random_tree(rng)]
    versions = [Version("aaaaaaaaaaaa", n) for n in range(3)]
    chain.anchor(versions[0], shards(trees[0], SOURCE))
    for before, after in itertools.pairwise(versions):
        trees.append(stepped(trees[-1], 0.05, rng))
        assert chain.frame(before, after, shards(trees[-1], SOURCE)) is not None
    newest = chain.frame(versions[2], versions[2], shards(trees[2], SOURCE))
    assert newest is not None and newest.density == 0.0
    assert newest.digests == copies_digest(EDGE.copies, shards(trees[2], SOURCE), "source")
    assert chain.frame(versions[1], versions[1], shards(trees[1], SOURCE)) is None


def test_dense_steps_and_frames_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "LEAST_ROOM_BYTES", 0)
    rng = np.random.default_rng(11)
    chain, tree = _chain(), random_tree(rng)
    receivers = [Receiver(), Receiver()]
    for number in range(1, 6):
        tree, version = stepped(tree, 1.0, rng), Version("aaaaaaaaaaaa", number)
        for receiver in receivers:
            receiver.take(chain, version, tree)
            receiver.swap(version)
            assert receiver.holds(tree)
        assert chain.step_bytes <= chain.baseline_bytes // 2
        assert len(chain._frames) <= 1
    assert chain.encoded == 4 and [r.anchors for r in receivers] == [1, 1]


def _ready() -> tuple[Receiver, Chain, Tree, Version]:
    rng = np.random.default_rng(5)
    chain, tree, receiver = _chain(CodingRules(values="xor")), random_tree(rng), Receiver()
    for number in (1, 2, 3):
        tree = stepped(tree, 0.05, rng)
        receiver.take(chain, Version("aaaaaaaaaaaa", number), tree)
        receiver.swap(Version("aaaaaaaaaaaa", number))
    return receiver, chain, stepped(tree, 0.05, rng), Version("aaaaaaaaaaaa", 4)


def _every_element_by_xor(receiver: Receiver, chain: Chain, version: Version) -> bytearray:
    """No sender makes one, and its bits would be taken for new ones."""
    base = receiver.shadow.base(receiver.serving)
    assert base is not None
    coding = frame.Coding(positions.Coding("all"), "xor")
    changes = [
        frame.Changes(s.elements, None, np.ones(s.elements, f"<u{s.itemsize}"), "xor") for s in chain.sections
    ]
    head = frame.Head(PLAN, base, version, EDGE.source_process, EDGE.target_process)
    return frame.encode(head, changes, [coding] * len(changes))


def _refused(receiver: Receiver, data: Any, version: Version, error: type[Exception]) -> None:
    assert receiver.serving is not None
    before = bytes(receiver.serving.data)
    with pytest.raises(error):
        receiver.shadow.apply(data, receiver.free(), receiver.serving, version)
    assert bytes(receiver.serving.data) == before


@pytest.mark.invariant(32)
@pytest.mark.invariant(39)
def test_bad_frames_are_refused_and_a_good_one_still_fits() -> None:
    receiver, chain, tree, version = _ready()
    base = receiver.shadow.base(receiver.serving)
    encoded = chain.frame(base, version, shards(tree, SOURCE))
    assert encoded is not None
    flipped = bytearray(encoded.data)
    flipped[len(flipped) // 2] ^= 4
    _refused(receiver, encoded.data[:-5], version, TruncatedFrame)
    _refused(receiver, flipped, version, CorruptFrame)
    _refused(receiver, encoded.data, Version("aaaaaaaaaaaa", 5), WrongBase)
    foreign = Chain("cd" * 32, EDGE, PayloadSettings("sparse"))
    foreign.anchor(Version("aaaaaaaaaaaa", 3), shards(tree, SOURCE))
    other = foreign.frame(Version("aaaaaaaaaaaa", 3), version, shards(tree, SOURCE))
    assert other is not None
    _refused(receiver, other.data, version, WrongPlan)
    _refused(receiver, b"", version, FrameError)
    _refused(receiver, _every_element_by_xor(receiver, chain, version), version, FrameError)
    receiver.take(chain, version, tree)
    receiver.swap(version)
    assert receiver.holds(tree)
    _refused(receiver, encoded.data, version, WrongBase)  # replayed


@pytest.mark.invariant(39)
def test_frames_out_of_order_are_refused() -> None:
    receiver, chain, tree, version = _ready()
    later = stepped(tree, 0.1, np.random.default_rng(9))
    base, after = receiver.shadow.base(receiver.serving), Version("aaaaaaaaaaaa", 5)
    first = chain.frame(base, version, shards(tree, SOURCE))
    second = chain.frame(version, after, shards(later, SOURCE))
    assert first is not None and second is not None
    _refused(receiver, second.data, after, WrongBase)
    union_of_both = chain.frame(base, after, shards(later, SOURCE))
    assert union_of_both is not None and receiver.serving is not None
    receiver.shadow.apply(union_of_both.data, receiver.free(), receiver.serving, after)
    receiver.swap(after)
    assert receiver.holds(later)


def test_an_apply_that_ended_half_way_is_done_over_on_known_bits() -> None:
    receiver, chain, tree, version = _ready()
    slot, serving = receiver.free(), receiver.serving
    assert serving is not None
    encoded = chain.frame(receiver.shadow.base(serving), version, shards(tree, SOURCE))
    assert encoded is not None
    receiver.shadow.apply(encoded.data, slot, serving, version)  # applied once, never verified
    receiver.shadow.apply(encoded.data, slot, serving, version)  # XOR: twice on one slot would undo it
    receiver.shadow.verified(slot, version, encoded.digests)
    receiver.swap(version)
    assert receiver.holds(tree)


def test_doubt_asks_for_an_anchor() -> None:
    receiver, chain, tree, version = _ready()
    receiver.shadow.doubt = True
    assert receiver.shadow.base(receiver.serving) is None
    receiver.take(chain, version, tree)
    assert receiver.anchors == 2 and receiver.shadow.base(receiver.free()) == version


@pytest.mark.parametrize("name", DTYPES)
def test_compare_and_union_see_every_bit(name: str) -> None:
    old, new = adversarial(DTYPES[name], 4000)
    middle = old.copy()
    middle[::3] = new[::3]
    back = middle.copy()
    back[::6] = old[::6]
    for a, b in ((old, new), (old, middle), (middle, back), (old, old)):
        for found, wanted in zip(compare(a, b), compare_numpy(a, b), strict=True):
            np.testing.assert_array_equal(found, wanted)
    section = Section(old.dtype.itemsize, old.size, 0, ())
    joined = union([compare(old, middle), compare(middle, back), compare(back, new)], section)
    for found, wanted in zip(joined, compare_numpy(old, new), strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_the_rate_is_what_the_receiver_saw() -> None:
    seen = Seen()
    seen.sent(1 << 24, 0.01)  # buffers on the way took it
    assert seen.rate > 1e9
    seen.arrived(1 << 10, 1e-9)  # too few to say anything
    seen.arrived(1 << 24, 1.0)
    assert seen.rate == 1 << 24
    seen.sent(1 << 22, 1e-4)
    seen.sent(1 << 24, 0.01)
    assert seen.rate == 1 << 24
    seen.arrived(1 << 22, 1.0)
    assert 1 << 22 < seen.rate < 1 << 24
