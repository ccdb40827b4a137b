"""Writers and readers of a channel over real files: bits, chains, layouts, orbax, order of versions."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl_sync.cli import main
from jaxrl_sync.sharding.paths import leaves_by_path
from jaxrl_sync.transfer.errors import MismatchError, TransferError
from jaxrl_sync.transfer.files import FilePublisher, FileReaderConfig, FileSubscriber, FileWriterConfig
from jaxrl_sync.transfer.files.errors import NoVersion
from jaxrl_sync.transfer.version import Version
from tests.files import channels
from tests.files.channels import holds, names, reader, take, target, tree, values, write, writer
from tests.transfer import models


def test_every_version_arrives_bit_for_bit_on_another_layout(tmp_path: Path) -> None:
    with writer(tmp_path / "c") as publisher, reader(tmp_path / "c") as subscriber:
        for number in range(10):
            write(publisher, number)
            version, found = take(subscriber)
            assert version == Version("run", number) and holds(found, number)
            assert subscriber.installed == version and subscriber.poll() is None
        assert subscriber.stats()["anchors"] == 1  # the first one; then deltas, over anchors too
        assert publisher.stats()["anchors"] == 3


def test_a_late_reader_takes_the_nearest_anchor_and_the_deltas_after_it(tmp_path: Path) -> None:
    with writer(tmp_path / "c", keep=9) as publisher:
        write(publisher, *range(7))
        with reader(tmp_path / "c") as subscriber:
            update = subscriber.poll(5)
            assert update is not None
            report = update.prepare()
            assert report.payload == "full+frame" and report.transport == "file"
            assert holds(update.swap(), 6)
            row = {m.version.number: m for m in subscriber._channel.manifests()}  # type: ignore[union-attr]
            assert [n for n in row if row[n].anchor] == [0, 4]


def test_a_reader_that_skips_versions_applies_the_deltas_between(tmp_path: Path) -> None:
    with writer(tmp_path / "c", keep=9, anchor_every=99) as publisher, reader(tmp_path / "c") as subscriber:
        write(publisher, 0)
        take(subscriber)
        write(publisher, 1, 2, 3)
        update = subscriber.poll(5)
        assert update is not None and update.prepare().payload == "frame"
        assert holds(update.swap(), 3)
        assert subscriber.stats()["anchors"] == 1


def test_the_serving_slot_is_untouched_until_the_swap(tmp_path: Path) -> None:
    with writer(tmp_path / "c") as publisher, reader(tmp_path / "c") as subscriber:
        write(publisher, 0)
        _, serving = take(subscriber)
        write(publisher, 1)
        update = subscriber.poll(5)
        assert update is not None
        update.prepare()
        assert holds(serving, 0) and subscriber.installed == Version("run", 0)
        update.discard("not wanted")
        with pytest.raises(TransferError, match="isn't prepared"):
            update.swap()
        again = subscriber.poll(5)
        assert again is not None and again.version == Version("run", 1)
        again.prepare()
        assert holds(again.swap(), 1)


def test_any_version_that_is_kept_can_be_taken(tmp_path: Path) -> None:
    with writer(tmp_path / "c", keep=5) as publisher, reader(tmp_path / "c") as subscriber:
        write(publisher, *range(6))
        for number in (3, 5, 2):
            update = subscriber.offer(Version("run", number))
            update.prepare()
            assert holds(update.swap(), number)
        with pytest.raises(NoVersion):
            subscriber.offer(Version("run", 77))


def test_the_presets_conversion_is_read_as_over_any_other_transport(tmp_path: Path) -> None:
    params = models.trainer_params(3)
    with (
        FilePublisher(tmp_path / "c", params, convert=models.convert) as publisher,
        FileSubscriber(tmp_path / "c", models.engine_target(), models.convert) as subscriber,
    ):
        publisher.publish(params, Version("run", 0)).wait(60)
        assert models.same_bits(take(subscriber)[1], models.convert(params))
        params = jax.tree.map(channels.changed, params)
        publisher.publish(params, Version("run", 1)).wait(60)
        assert models.same_bits(take(subscriber)[1], models.convert(params))


def test_a_conversion_that_needs_something_else_is_refused_by_name(tmp_path: Path) -> None:
    params = models.trainer_params(3)
    wide = models.engine_target()
    with FilePublisher(tmp_path / "c", params, convert=models.convert) as publisher:
        publisher.publish(params, Version("run", 0)).wait(60)
        as_it_is = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), params)
        with FileSubscriber(tmp_path / "c", as_it_is) as subscriber:
            update = subscriber.poll(5)
            assert update is not None
            with pytest.raises(MismatchError, match="isn't stored in the channel"):
                update.prepare()
        with FileSubscriber(tmp_path / "c", wide, models.convert) as subscriber:
            assert models.same_bits(take(subscriber)[1], models.convert(params))


def test_a_reader_reads_only_the_pieces_that_it_needs(tmp_path: Path) -> None:
    grid = models.mesh((2, 2), ("a", "b"))
    big = jax.device_put(
        np.arange(1 << 22, dtype=np.float32).reshape(1 << 12, 1 << 10), NamedSharding(grid, PartitionSpec())
    )
    few = models.mesh((2,), ("x",), 4)

    def rows(params: Any) -> Any:
        return {"w": params["w"][1024:1088]}

    wanted = {
        "w": jax.ShapeDtypeStruct((64, 1 << 10), np.float32, sharding=NamedSharding(few, PartitionSpec("x")))
    }
    with FilePublisher(tmp_path / "c", {"w": big}) as publisher:
        publisher.publish({"w": big}, Version("run", 0)).wait(60)
        with FileSubscriber(tmp_path / "c", wanted, rows) as subscriber:
            _, found = take(subscriber)
            assert np.array_equal(np.asarray(found["w"]), np.asarray(big)[1024:1088])
            assert subscriber.stats()["anchor_bytes"] == 4 << 20  # one piece of the 16 MiB


def test_orbax_restores_an_anchor_onto_another_mesh(tmp_path: Path) -> None:
    import orbax.checkpoint as ocp

    with writer(tmp_path / "c") as publisher:
        write(publisher, 0, 1, 2, 3, 4)
    (anchor,) = [n for n in names(tmp_path / "c", "anchors") if n.startswith("000000000004")]
    wanted = target()
    found = ocp.StandardCheckpointer().restore(tmp_path / "c" / "anchors" / anchor, wanted)
    assert holds(found, 4)
    for path, leaf in leaves_by_path(found).items():
        assert leaf.sharding == leaves_by_path(wanted)[path].sharding
    plain = ocp.PyTreeCheckpointer().restore(tmp_path / "c" / "anchors" / anchor)
    assert np.array_equal(plain["layers"]["scale"], values(4)["layers/scale"])


def test_replay_lists_verifies_and_restores_what_orbax_reads(tmp_path: Path) -> None:
    import orbax.checkpoint as ocp

    with writer(tmp_path / "c", keep=9) as publisher:
        write(publisher, *range(6))

    def replay(*words: str) -> tuple[int, str]:
        command = [sys.executable, "-m", "jaxrl_sync.cli", "replay", str(tmp_path / "c"), *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        return done.returncode, done.stdout + done.stderr

    code, out = replay()
    assert code == 0 and len(out.splitlines()) == 6
    code, out = replay("--verify")
    assert code == 0 and out.count("sound") == 6 and "run:4: sound, by frames and by anchor" in out
    code, out = replay("--version", "5", "--out", str(tmp_path / "out"))
    assert code == 0, out
    assert holds(ocp.StandardCheckpointer().restore(tmp_path / "out", target()), 5)
    code, out = replay("--version", "9", "--out", str(tmp_path / "other"))
    assert code == 4 and "no version '9'" in out and not (tmp_path / "other").exists()
    code, out = replay("--version", "5")
    assert code == 2 and out.count("\n") == 1 and "--version and --out go together" in out
    frames = next((tmp_path / "c" / "objects").glob("000000000005-*-frames"))
    frames.write_bytes(frames.read_bytes()[:-1] + b"?")
    code, out = replay("--verify")
    assert code == 1 and out.count("sound") == 5 and "run:5: BrokenObject" in out


def test_replay_of_a_folder_that_is_no_channel_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "missing", tmp_path / "file"):
        assert main(["replay", str(path)]) == 3
        assert (
            capsys.readouterr().err
            == f"jaxrl-sync: error: {path} is no file channel: it has no file CHANNEL\n"
        )


def test_versions_have_an_order_within_a_lineage(tmp_path: Path) -> None:
    with writer(tmp_path / "c") as publisher:
        write(publisher, 3)
        with pytest.raises(TransferError, match="doesn't come after run:3"):
            publisher.publish(tree(2), Version("run", 2))
    with writer(tmp_path / "c") as publisher:
        with pytest.raises(TransferError, match="which the channel has"):
            publisher.publish(tree(3), Version("run", 3))
        write(publisher, 4)
        with pytest.raises(TransferError, match="can't be part of a file name"):
            publisher.publish(tree(5), Version("../x", 5))
        with pytest.raises(MismatchError, match="missing"):
            FilePublisher.publish(_unchecked(publisher), {"embed": tree(5)["embed"]}, Version("run", 5))


def _unchecked(publisher: FilePublisher) -> FilePublisher:
    """The writer as it is before the first tree."""
    publisher._checked = False
    return publisher


def test_another_lineage_begins_with_an_anchor_and_readers_follow_it(tmp_path: Path) -> None:
    with writer(tmp_path / "c", keep=9) as publisher, reader(tmp_path / "c") as subscriber:
        write(publisher, 0, 1)
        take(subscriber)
        write(publisher, 1, lineage="resumed")
        version, found = take(subscriber)
        assert version == Version("resumed", 1) and holds(found, 1)
        assert subscriber.stats()["anchors"] == 2


def test_while_one_version_is_written_only_the_newest_waits(tmp_path: Path) -> None:
    with writer(tmp_path / "c") as publisher:
        tickets = [publisher.publish(tree(n), Version("run", n)) for n in range(12)]
        states = [t.wait(60).state for t in tickets]
        assert states[-1] == "committed" and set(states) <= {"committed", "superseded"}
        assert publisher.drain(10)
        stats = publisher.stats()
        assert stats["committed"] == states.count("committed")
        assert stats["superseded"] == states.count("superseded")
    with reader(tmp_path / "c") as subscriber:
        assert holds(take(subscriber)[1], 11)


def test_the_published_tree_may_be_donated_at_once(tmp_path: Path) -> None:
    update = jax.jit(lambda x: jax.tree.map(lambda leaf: leaf * 0, x), donate_argnums=0)
    with writer(tmp_path / "c") as publisher, reader(tmp_path / "c") as subscriber:
        for number in range(3):
            params = tree(number)
            ticket = publisher.publish(params, Version("run", number))
            jax.block_until_ready(update(params))
            ticket.wait(60)
            assert holds(take(subscriber)[1], number)


def test_a_tree_may_come_as_an_iterator_of_paths_and_arrays(tmp_path: Path) -> None:
    with writer(tmp_path / "c") as publisher, reader(tmp_path / "c") as subscriber:
        publisher.publish(iter(leaves_by_path(tree(2)).items()), Version("run", 2)).wait(60)
        assert holds(take(subscriber)[1], 2)


def test_a_reader_waits_for_a_channel_that_is_not_there_yet(tmp_path: Path) -> None:
    with reader(tmp_path / "c") as subscriber:
        assert subscriber.poll(0.05) is None and subscriber.versions() == []
        with writer(tmp_path / "c") as publisher:
            assert subscriber.poll(0.05) is None
            write(publisher, 0)
            assert holds(take(subscriber)[1], 0)


def test_a_delta_takes_a_fraction_of_an_anchor(tmp_path: Path) -> None:
    """One element in 29 changes; random values, so what zstd does to real updates isn't in it."""
    with writer(tmp_path / "c", keep=9) as publisher:
        write(publisher, 0)
        outcome = publisher.publish(tree(1), Version("run", 1)).wait(60)
        assert outcome.anchor_bytes == 0
        assert 0.02 < outcome.density < 0.05
        stats = publisher.stats()
        assert outcome.delta_bytes < stats["anchor_bytes"] / 3, (outcome, stats)


@pytest.mark.parametrize(
    ("options", "kind"),
    [({"anchor_every": 0}, "anchor_every"), ({"keep": 0}, "keep"), ({"rate_bytes_s": 0}, "rate_bytes_s")],
)
def test_settings_that_make_no_sense_are_refused(options: dict[str, Any], kind: str) -> None:
    with pytest.raises(ValueError, match=kind):
        FileWriterConfig(**options)
    with pytest.raises(ValueError, match="world is empty"):
        FileReaderConfig(rank=1, size=2)
