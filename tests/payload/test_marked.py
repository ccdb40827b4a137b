"""Marks made in the train step, through a live publisher: the bits of a full sync, nothing is compared."""

from __future__ import annotations

import dataclasses
import gc
import re
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_sync.sharding.paths import leaves_by_path, nested
from jaxrl_sync.transfer import Version
from jaxrl_sync.transfer.codec.rules import CodingRules
from jaxrl_sync.transfer.delta import shards as shards_module
from jaxrl_sync.transfer.delta.masks import marked_cast
from jaxrl_sync.transfer.delta.shards import ShardEncoders
from jaxrl_sync.transfer.errors import MismatchError
from jaxrl_sync.transfer.lazy import DeviceShards
from jaxrl_sync.transfer.payload import differences as differences_module
from jaxrl_sync.transfer.payload.differences import Differences
from jaxrl_sync.transfer.payload.inverse import Changes
from jaxrl_sync.transfer.payload.marks import CHECK_EVERY, Marked, Marks
from jaxrl_sync.transfer.payload.settings import PayloadSettings
from tests.transfer.models import Rig, convert, host, same_bits, trainer_params

Tree = dict[str, Any]


def _settings(compare: Any = "device") -> PayloadSettings:
    return PayloadSettings("sparse", CodingRules(values="auto", whole=False), compare=compare)


def _wire(params: Any) -> Tree:
    return {
        path: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16, sharding=x.sharding)
        for path, x in leaves_by_path(params).items()
    }


class Steps:
    """A train step on float32 masters that marks what its cast changes."""

    def __init__(self, params: Any) -> None:
        self.wire = _wire(params)
        self.masters = leaves_by_path(params)
        self.cast = {p: x.astype(jnp.bfloat16) for p, x in self.masters.items()}
        self.masks: Tree | None = None
        self._run = jax.jit(self._step)

    def _step(self, masters: Tree, seed: Any, masks: Tree | None) -> Any:
        moved = {path: x - 1e-4 * jnp.sin(x * 1e4 + seed) * jnp.abs(x) for path, x in masters.items()}
        return marked_cast(masters, moved, self.wire, masks)

    def step(self, seed: int) -> None:
        self.masters, self.cast, self.masks = self._run(self.masters, seed, self.masks)

    def marked(self, tree: Any, since: Version) -> Marked:
        masks, self.masks = self.masks, None
        assert masks is not None
        return Marked(tree, masks, self.wire, since)


@pytest.mark.invariant(39)
@pytest.mark.parametrize("published", ["masters", "cast"])
def test_marks_of_the_train_step_bring_every_version_bit_for_bit(rig: Rig, published: str) -> None:
    steps = Steps(trainer_params())
    tree = lambda: nested(getattr(steps, published))  # noqa: E731
    publisher = rig.publisher(tree(), "tcp", payload=_settings())
    subscriber = rig.subscriber(transport="tcp")
    given: Any = tree()
    for number in range(6):
        publisher.publish(given, Version("a", number))
        update = subscriber.poll(60)
        assert update is not None
        report = update.prepare()
        assert report.payload == ("frame" if number else "full")
        assert same_bits(update.swap(), convert(tree()))
        steps.step(number)
        if number == 2:  # a step whose version isn't published: marks of both are merged
            steps.step(100)
        given = steps.marked(tree(), Version("a", number))
    stats = publisher.stats()
    assert stats["marked_compares"] == stats["device_compares"] == 5


def test_marks_since_another_version_and_on_the_host_are_let_go(rig: Rig) -> None:
    for compare in ("device", "host"):
        with rig:
            steps = Steps(trainer_params())
            publisher = rig.publisher(nested(steps.masters), "tcp", payload=_settings(compare))
            subscriber = rig.subscriber(transport="tcp")
            given: Any = nested(steps.masters)
            for number in range(3):
                publisher.publish(given, Version(compare, number))
                update = subscriber.poll(60)
                assert update is not None and update.prepare() is not None
                assert same_bits(update.swap(), convert(nested(steps.masters)))
                steps.step(number)
                given = steps.marked(nested(steps.masters), Version(compare, 9))
            assert publisher.stats()["marked_compares"] == 0


def _followed(masks_of: Any, versions: int, form: Any = None) -> tuple[Differences, Marks, list[bool | None]]:
    """Whether what is found equals a comparison, version by version; marks by ``masks_of(number, mask)``.

    None where nothing is known, so that receivers get everything.
    """
    steps, marks = Steps({"w": jax.device_put(_weights(), jax.devices()[0])}), Marks()
    encoders = (ShardEncoders(1, form, interpret=form == "pallas") for _ in range(2))
    differences, plain = (Differences(e, 8, 1, m) for e, m in zip(encoders, (marks, None), strict=True))
    user, keys, equal = object(), frozenset({(jax.devices()[0].id, "w")}), list[bool | None]()
    for number in range(versions):
        version = Version("a", number)
        shards, other = (DeviceShards(version, dict(steps.cast), one) for one in (differences, plain))
        if number == 0:
            differences.follow(user, keys, shards)
            plain.follow(user, keys, other)
        else:
            found, wanted = differences.since(user, shards), plain.since(user, other)
            assert wanted is not None
            equal.append(None if found is None else _same(found, wanted))
            if found is None:
                differences.follow(user, keys, shards)
        steps.step(number)
        made = steps.marked(dict(steps.cast), version)
        masks = {p: masks_of(number, m) for p, m in made.masks.items()}
        marks.take(Version("a", number + 1), Marked(made.tree, masks, made.wire, version))
    return differences, marks, equal


def _same(found: list[Changes], wanted: list[Changes]) -> bool:
    pairs = [zip(a[k], b[k], strict=True) for a, b in zip(found, wanted, strict=True) for k in b]
    return all(np.array_equal(x, y) for pair in pairs for x, y in pair)


def _weights() -> Any:
    return np.random.default_rng(0).normal(0, 0.02, (64, 96)).astype(np.float32)


@pytest.mark.parametrize(
    ("form", "versions"), [(None, CHECK_EVERY + 3), ("xla", 4), ("pallas", 4)], ids=["own", "xla", "pallas"]
)
def test_marks_of_what_did_not_change_are_dropped(form: Any, versions: int) -> None:
    more = lambda number, mask: mask | jnp.uint32(0x00010000)  # noqa: E731
    differences, marks, equal = _followed(more, versions, form)
    assert all(equal) and marks.trusted and differences.marked == versions - 1


def test_checks_of_a_tree_that_is_marked_in_part_compile_nothing_anew() -> None:
    """The encoders of what is checked and of what has no marks took each other's place at every check."""
    device, marks = jax.devices()[0], Marks()
    steps = Steps({name: jax.device_put(_weights(), device) for name in ("u", "v", "w")})
    encoders = ShardEncoders(1)
    differences, user = Differences(encoders, 8, 1, marks), object()
    keys, made = frozenset((device.id, name) for name in steps.wire), list[int]()
    for number in range(2 * CHECK_EVERY + 3):
        version = Version("a", number)
        shards = DeviceShards(version, dict(steps.cast), differences)
        if number == 0:
            differences.follow(user, keys, shards)
        else:
            assert differences.since(user, shards) is not None
        made.append(encoders.made)
        steps.step(number)
        given = steps.marked(dict(steps.cast), version)
        some = {path: mask for path, mask in given.masks.items() if path != "u"}
        marks.take(Version("a", number + 1), dataclasses.replace(given, masks=some))
    assert differences.marked == 2 * CHECK_EVERY + 2 and marks.trusted
    assert made[1:] == [4] * (len(made) - 1)  # of all, of u, of v and w by their marks, of v and w without


@pytest.mark.parametrize(("first", "known_at"), [(0, 1), (3, CHECK_EVERY + 1)])
def test_missing_marks_are_noticed_by_the_check_and_never_used_again(
    first: int, known_at: int, caplog: pytest.LogCaptureFixture
) -> None:
    less = lambda number, mask: mask & jnp.uint32(0xFFFF if number >= first else 0xFFFFFFFF)  # noqa: E731
    differences, marks, equal = _followed(less, CHECK_EVERY + 4)
    assert not marks.trusted and differences.marked == known_at
    # What was let out between two checks is made good by everything; the first check comes before that.
    assert equal[known_at - 1] is (None if first else True)
    assert all(equal[known_at:]) and all(equal[: first or None])
    assert [r.message for r in caplog.records if "aren't used any more" in r.message]


def test_marks_that_the_train_step_took_back_are_compared() -> None:
    """Whoever asked for the difference got jax's "Array has been deleted", and its link ended."""

    def gone(number: int, mask: jax.Array) -> jax.Array:
        if number == 1:
            mask.delete()
        return mask

    differences, marks, equal = _followed(gone, 4)
    assert equal == [True] * 3 and differences.marked == 2 and marks.trusted


@pytest.mark.parametrize("moment", ["before", "start", "climb"])
def test_marks_that_are_donated_while_they_are_read_are_compared(
    moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The train step goes on while a link compares; a level more is encoded by the marks once again."""
    between, start, dropped = Marks.between, shards_module._start, list[str]()

    def drop(masks: dict[Any, jax.Array], at: str) -> None:
        if masks and at == moment and len(dropped) < 2:
            dropped.append(at)
            for mask in masks.values():
                mask.delete()

    def then_gone(*args: Any) -> Any:
        found = between(*args)
        drop(found, "before")
        return found

    def started(encoder: Any, old: Any, new: Any, words: Any) -> Any:
        drop(words or {}, "start")
        if dropped[-1:] == ["start"] and words and next(iter(words.values())).is_deleted():
            raise ValueError("INVALID_ARGUMENT: Buffer has been deleted or donated.")  # as jax says it then
        finish = start(encoder, old, new, words)

        def then_finished() -> Any:
            drop(words or {}, "climb")
            return finish()

        return then_finished

    monkeypatch.setattr(Marks, "between", then_gone)
    monkeypatch.setattr(shards_module, "_start", started)
    more = lambda number, mask: mask | jnp.uint32(0x01010101)  # noqa: E731  an eighth: more than there is room for
    differences, marks, equal = _followed(more, 5)
    assert equal == [True] * 4 and len(dropped) == 2 and marks.trusted and differences.marked == 4


def test_marks_that_are_none_are_refused_where_they_are_published() -> None:
    marks = Marks()
    for mask, said in ((np.zeros((1, 1), np.uint32), "ndarray uint32[1, 1]"), (None, "NoneType")):
        with pytest.raises(MismatchError, match=re.escape(f"marks of 'w' are {said}, expected jax's uint32")):
            marks.take(Version("a", 1), Marked({}, {"w": mask}, {}, Version("a", 0)))  # type: ignore[dict-item]
    with pytest.raises(MismatchError, match=r"'w' are ArrayImpl int32\[8\]"):
        marks.take(Version("a", 1), Marked({}, {"w": jnp.zeros(8, jnp.int32)}, {}, Version("a", 0)))


@pytest.mark.invariant(39)
def test_what_missing_marks_let_out_is_made_good_by_everything_once_one_is_found(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(differences_module, "CHECK_EVERY", 3)
    steps = Steps(trainer_params())
    publisher = rig.publisher(nested(steps.masters), "tcp", payload=_settings())
    subscriber = rig.subscriber(transport="tcp")
    given: Any = nested(steps.masters)
    seen = []
    for number in range(7):
        publisher.publish(given, Version("a", number))
        update = subscriber.poll(60)
        assert update is not None
        payload = update.prepare().payload
        seen.append((payload, same_bits(update.swap(), convert(nested(steps.masters)))))
        steps.step(number)
        given = steps.marked(nested(steps.masters), Version("a", number))
        if number >= 1:  # versions 2 and 3 go out without what changed, the check at 4 finds out
            given = dataclasses.replace(given, masks={p: jnp.zeros_like(m) for p, m in given.masks.items()})
    right = ("full", True), ("frame", True)
    assert seen == [*right, ("frame", False), ("frame", False), *right, ("frame", True)]
    assert publisher.stats()["marked_compares"] == 4


def test_marks_keep_no_tree_alive_and_only_the_newest_marks() -> None:
    marks, gone = Marks(), list[Any]()
    tree, masks = dict[str, jax.Array](), dict[str, jax.Array]()
    for number in range(4):
        tree = {"w": jnp.full(8, number, jnp.float32)}
        masks = {"w": jnp.zeros((1, 1), jnp.uint32)}
        gone.append((weakref.ref(tree["w"]), weakref.ref(masks["w"])))
        assert marks.take(Version("a", number + 1), Marked(tree, masks, tree, Version("a", number))) is tree
    del tree, masks
    gc.collect()
    assert all(tree() is None for tree, _ in gone)
    assert [mask() is None for _, mask in gone] == [True, True, False, False]


def test_the_masters_that_a_step_keeps_are_those_that_it_cast() -> None:
    steps = Steps(trainer_params())
    for seed in range(3):
        before = steps.cast
        steps.step(seed)
        again = {p: x.astype(jnp.bfloat16) for p, x in steps.masters.items()}
        assert same_bits(again, steps.cast) and not same_bits(before, steps.cast)
        assert host(steps.masks).keys() == steps.wire.keys()
