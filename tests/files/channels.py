"""Helpers of the file channel's tests: trees that are functions of a number, writers, readers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl_sync.sharding.paths import leaves_by_path, nested
from jaxrl_sync.transfer.files import FilePublisher, FileReaderConfig, FileSubscriber, FileWriterConfig
from jaxrl_sync.transfer.version import Version
from tests.transfer.models import mesh

SHAPES: dict[str, tuple[tuple[int, ...], Any, tuple[str | None, ...]]] = {
    "embed/w": ((64, 32), ml_dtypes.bfloat16, ("a", "b")),
    "layers/q": ((2, 32, 4, 8), ml_dtypes.bfloat16, (None, "a", "b", None)),
    "layers/scale": ((2, 32), np.float32, (None, None)),
    "bytes": ((40,), np.int8, ("a",)),
    "half": ((6, 4), np.float16, (None, "b")),
    "step": ((), np.int32, ()),
}


def values(number: int) -> dict[str, np.ndarray[Any, Any]]:
    """What version ``number`` holds: every 29th element differs from one version to the next."""
    found = {}
    for index, (path, (shape, dtype, _)) in enumerate(SHAPES.items()):
        size = int(np.prod(shape))
        bits = np.random.default_rng(index).integers(0, 100, size)
        for n in range(1, number + 1):
            bits[n % 29 :: 29] += n
        found[path] = (bits % 120).astype(np.float32).astype(dtype).reshape(shape)
    return found


def tree(number: int, first: int = 0) -> Any:
    """The same on a 2 x 2 mesh: of this process, or of its world."""
    grid = mesh((2, 2), ("a", "b"), first)

    def put(path: str, value: np.ndarray[Any, Any]) -> jax.Array:
        sharding = NamedSharding(grid, PartitionSpec(*SHAPES[path][2]))
        return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])

    return nested({path: put(path, value) for path, value in values(number).items()})


def target(first: int = 4, cut: bool = True) -> Any:
    """The same tensors on two other devices, cut another way: the tree of shapes for a reader."""
    grid = mesh((2,), ("x",), first)

    def spec(shape: tuple[int, ...]) -> PartitionSpec:
        last = len(shape) - 1
        return PartitionSpec(
            *("x" if cut and n % 2 == 0 and d == last else None for d, n in enumerate(shape))
        )

    return nested(
        {
            path: jax.ShapeDtypeStruct(shape, np.dtype(dtype), sharding=NamedSharding(grid, spec(shape)))
            for path, (shape, dtype, _) in SHAPES.items()
        }
    )


def holds(found: Any, number: int) -> bool:
    """Whether a reader's tree has exactly the bits of version ``number``."""
    expected = values(number)
    leaves = leaves_by_path(found)
    if leaves.keys() != expected.keys():
        return False
    for path, leaf in leaves.items():
        for shard in leaf.addressable_shards:
            part = np.ascontiguousarray(expected[path][shard.index]).reshape(-1).view(np.uint8)
            if not np.array_equal(np.asarray(shard.data).reshape(-1).view(np.uint8), part):
                return False
    return True


def writer(path: Path, token_file: Path | None = None, **options: Any) -> FilePublisher:
    """A writer of the tree as it is."""
    config = FileWriterConfig(**{"anchor_every": 4, "anchor_share": 1e9, "fsync": False, **options})
    return FilePublisher(path, tree(0), token_file=token_file, config=config)


def reader(path: Path, token_file: Path | None = None, **options: Any) -> FileSubscriber:
    """A reader with another layout."""
    config = FileReaderConfig(**{"poll_s": 0.02, **options})
    return FileSubscriber(path, target(), token_file=token_file, config=config)


def write(publisher: FilePublisher, *numbers: int, lineage: str = "run") -> None:
    """Publish these versions one after the other; each is committed when the next one begins."""
    for number in numbers:
        outcome = publisher.publish(tree(number), Version(lineage, number)).wait(60)
        assert outcome.state == "committed"


def take(subscriber: FileSubscriber, timeout_s: float = 10) -> tuple[Version, Any]:
    """Poll, prepare, swap."""
    update = subscriber.poll(timeout_s)
    assert update is not None
    update.prepare()
    return update.version, update.swap()


def names(path: Path, folder: str) -> list[str]:
    """What a folder of the channel holds."""
    return sorted(p.name for p in (path / folder).iterdir())


def changed(leaf: jax.Array) -> jax.Array:
    """Another array of the same sharding."""
    return leaf + jnp.ones((), leaf.dtype)
