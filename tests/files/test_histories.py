"""Random histories of one channel: any bits and densities, writers that come and go, readers that skip."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl_sync.transfer.files import FilePublisher, FileReaderConfig, FileSubscriber, FileWriterConfig
from jaxrl_sync.transfer.version import Version
from tests.transfer.models import mesh

SHAPE = (24, 20)
DTYPES = (ml_dtypes.bfloat16, np.float32, np.int8)
Bits = dict[str, np.ndarray[Any, Any]]

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["publish", "publish", "publish", "take", "late", "writer", "lineage"]),
        st.sampled_from([0.0, 0.002, 0.02, 0.3, 1.0]),
        st.integers(0, 1 << 31),
    ),
    min_size=4,
    max_size=16,
)


def changed(bits: Bits, density: float, seed: int) -> Bits:
    """Other bits (NaNs, both zeros, anything) in a share of the elements."""
    rng = np.random.default_rng(seed)
    found = {}
    for name, old in bits.items():
        new = old.copy()
        hit = rng.random(old.size) < density
        new[hit] = rng.integers(0, 1 << (8 * old.itemsize), int(hit.sum()), dtype=np.uint64).astype(old.dtype)
        found[name] = new
    return found


def placed(bits: Bits) -> Any:
    """On a 2 x 2 mesh."""
    sharding = NamedSharding(mesh((2, 2), ("a", "b")), PartitionSpec("a", "b"))
    whole = {
        name: flat.view(dtype).reshape(SHAPE)
        for (name, flat), dtype in zip(bits.items(), DTYPES, strict=True)
    }
    return {
        name: jax.make_array_from_callback(SHAPE, sharding, value.__getitem__)
        for name, value in whole.items()
    }


def wanted() -> Any:
    """On two other devices, cut another way."""
    sharding = NamedSharding(mesh((2,), ("x",), 4), PartitionSpec("x"))
    return {str(i): jax.ShapeDtypeStruct(SHAPE, np.dtype(d), sharding=sharding) for i, d in enumerate(DTYPES)}


def same(found: Any, bits: Bits) -> bool:
    """Bit for bit."""
    for name, leaf in found.items():
        whole = bits[name].view(leaf.dtype).reshape(SHAPE)
        for shard in leaf.addressable_shards:
            part = np.ascontiguousarray(whole[shard.index]).view(np.uint8)
            if not np.array_equal(np.ascontiguousarray(np.asarray(shard.data)).view(np.uint8), part):
                return False
    return True


class History:
    """A writer, a reader, and what each version holds."""

    def __init__(self, path: Path) -> None:
        self.path, self.versions = path, dict[Version, Bits]()
        self.bits: Bits = {
            str(i): np.zeros(SHAPE[0] * SHAPE[1], f"u{np.dtype(d).itemsize}") for i, d in enumerate(DTYPES)
        }
        self.lineage, self.number = 0, 0
        self.writer, self.reader = self._open_writer(), self._open_reader()

    def _open_writer(self) -> FilePublisher:
        config = FileWriterConfig(keep=3, anchor_every=3, fsync=False, frame_bytes=1000)
        return FilePublisher(self.path, placed(self.bits), config=config)

    def _open_reader(self) -> FileSubscriber:
        return FileSubscriber(self.path, wanted(), config=FileReaderConfig(poll_s=0.01))

    def step(self, kind: str, density: float, seed: int) -> None:
        """One thing happens; whatever is read is what was written."""
        if kind == "publish":
            self.bits = changed(self.bits, density, seed)
            version = Version(f"l{self.lineage}", self.number)
            self.number += 1
            self.versions[version] = self.bits
            self.writer.publish(placed(self.bits), version).wait(60)
        elif kind == "take":
            self.take(self.reader)
        elif kind == "late":
            with self._open_reader() as late:
                self.take(late)
        elif kind == "writer":
            self.writer.close()
            self.writer = self._open_writer()
        else:
            self.lineage += 1

    def take(self, reader: FileSubscriber) -> None:
        """The newest one, if it is new."""
        update = reader.poll()
        if update is not None:
            assert update.version == list(self.versions)[-1]
            update.prepare()
            assert same(update.swap(), self.versions[update.version])
        elif self.versions:
            assert reader.installed == list(self.versions)[-1]

    def close(self) -> None:
        """Everything that is kept can be read."""
        for version in self.reader.versions():
            update = self.reader.offer(version)
            update.prepare()
            assert same(update.swap(), self.versions[version])
        self.reader.close()
        self.writer.close()


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(STEPS)
def test_whatever_happens_to_a_channel_readers_hold_what_was_published(
    steps: list[tuple[str, float, int]],
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        history = History(Path(folder) / "c")
        try:
            for step in steps:
                history.step(*step)
        finally:
            history.close()
