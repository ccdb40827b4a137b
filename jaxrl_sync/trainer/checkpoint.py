"""Checkpoints: state, optimizer, random key and data cursor of one committed version, through orbax.

A checkpoint is a folder named by its version number; it appears by rename once complete, and what lacks a
part is not seen. Training goes on while it is written: ``save`` returns once nothing that a later update
donates is needed any more. Arrays are stored under their paths, so that they restore onto any mesh and any
number of processes. Whoever restores continues in a new lineage, whose parent is the checkpoint's version.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from jaxrl_sync.sharding.errors import UserError
from jaxrl_sync.trainer.axes import Tree
from jaxrl_sync.trainer.state import TrainState
from jaxrl_sync.transfer.version import Version

FORMAT = 1
WRITE_TIMEOUT_S = 300


class CheckpointError(UserError, RuntimeError):
    """A checkpoint that is missing or does not fit the model that it is restored into."""

    exit_code = 3


@dataclasses.dataclass(frozen=True)
class Meta:
    """What a checkpoint says beside its arrays: its version, where its lineage came from, the data cursor."""

    version: Version
    parent: Version | None
    cursor: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        parent = None if self.parent is None else dataclasses.asdict(self.parent)
        return {
            "format": FORMAT,
            "version": dataclasses.asdict(self.version),
            "parent": parent,
            "cursor": dict(self.cursor),
        }

    @classmethod
    def of_json(cls, data: Mapping[str, Any]) -> Meta:
        if data.get("format") != FORMAT:
            raise CheckpointError(f"checkpoint format {data.get('format')!r}: expected {FORMAT}")
        parent = data["parent"]
        return cls(Version(**data["version"]), parent and Version(**parent), data["cursor"])


def flatten(tree: Any) -> dict[str, Any]:
    """The leaves of a state or a parameter tree by path, in the tree's order."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


class Checkpoints:
    """The last ``keep`` checkpoints in ``folder``. Owns orbax's manager: ``close()`` or ``with``.

    ``save``, ``wait`` and ``restore`` are collective over the processes of the world. One checkpoint is
    written at a time.
    """

    def __init__(self, folder: Path, keep: int = 2) -> None:
        self.folder = folder.absolute()
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep,
            enable_async_checkpointing=True,
            create=True,
            async_options=ocp.AsyncOptions(timeout_secs=WRITE_TIMEOUT_S),
        )
        handlers = {
            "state": ocp.StandardCheckpointHandler(),
            "reference": ocp.StandardCheckpointHandler(),
            "meta": ocp.JsonCheckpointHandler(),
        }
        self._manager = ocp.CheckpointManager(self.folder, options=options, item_handlers=handlers)

    def newest(self) -> int | None:
        """Number of the newest complete checkpoint, or None; waits for one that is being written."""
        self.wait()
        complete = [n for n in self._manager.all_steps() if self._complete(n)]
        return max(complete, default=None)

    def _complete(self, number: int) -> bool:
        folder = self.folder / str(number)
        return (folder / "state").is_dir() and (folder / "meta").is_dir()

    def save(self, state: TrainState, meta: Meta, reference: Tree | None = None) -> None:
        """Begin to write one checkpoint, and drop the oldest beyond ``keep`` once it is complete.

        Waits for the one before it, raising what that failed with, and until the state may be donated.
        """
        self.wait()
        items = {
            "state": ocp.args.StandardSave(flatten(_lasting(state))),
            "meta": ocp.args.JsonSave(meta.to_json()),
        }
        if reference is not None:
            items["reference"] = ocp.args.StandardSave(flatten(reference))
        number = meta.version.number
        if not self._manager.save(number, args=ocp.args.Composite(**items)):
            raise CheckpointError(
                f"checkpoint {number} was not written: {self.folder} has "
                f"{sorted(self._manager.all_steps())}, expected only earlier ones"
            )

    def wait(self) -> None:
        """Until what is being written is complete. ``CheckpointError`` if that failed."""
        try:
            self._manager.wait_until_finished()
        except Exception as error:  # whatever the thread that writes has met
            raise CheckpointError(f"{self.folder}: a checkpoint was not written: {error}") from error

    def meta(self, number: int | None = None) -> Meta:
        """What checkpoint ``number`` (default: the newest) says of itself; else ``CheckpointError``."""
        number = self.newest() if number is None else number
        if number is None or not self._complete(number):
            raise CheckpointError(f"no complete checkpoint in {self.folder}, expected one to resume from")
        found = self._read(number, "meta", ocp.args.JsonRestore())
        try:
            return Meta.of_json(found)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise self._damaged(number, "meta", error) from error

    def restore(
        self, target: TrainState, number: int | None = None, reference: Tree | None = None
    ) -> tuple[TrainState, Meta, Tree | None]:
        """State, meta and reference of a checkpoint, on the shardings of the abstract arguments."""
        meta = self.meta(number)
        state: TrainState = self._restore(meta.version.number, "state", target)
        frozen = None if reference is None else self._restore(meta.version.number, "reference", reference)
        return state, meta, frozen

    def _restore(self, number: int, item: str, target: Any) -> Any:
        wanted = flatten(target)
        try:
            stored = self._manager.item_metadata(number).get(item)
            shapes = {} if stored is None else {n: tuple(leaf.shape) for n, leaf in dict(stored).items()}
        except Exception as error:  # what orbax, its stores and its JSON say of bytes that aren't theirs
            raise self._damaged(number, item, error) from error
        for name, leaf in wanted.items():
            if shapes.get(name) != tuple(leaf.shape):
                raise CheckpointError(
                    f"checkpoint {self.folder}/{number}: {item}/{name} has shape {shapes.get(name)}, "
                    f"expected {tuple(leaf.shape)}"
                )
        found = self._read(number, item, ocp.args.StandardRestore(wanted))
        return jax.tree.unflatten(jax.tree.structure(target), [found[name] for name in wanted])

    def _read(self, number: int, item: str, how: Any) -> Any:
        try:
            return self._manager.restore(number, args=ocp.args.Composite(**{item: how}))[item]
        except Exception as error:  # as above
            raise self._damaged(number, item, error) from error

    def _damaged(self, number: int, item: str, error: Exception) -> CheckpointError:
        said = str(error).strip().split("\n")[0][:300] or type(error).__name__
        return CheckpointError(f"checkpoint {self.folder}/{number}: {item} can't be read: {said}")

    def drop_after(self, number: int, barrier: Callable[[], object] = lambda: None) -> None:
        """Remove checkpoints later than ``number``: a resume from it makes them another history's.

        All ranks of the world meet in ``barrier``, so that none still sees what rank 0 removes.
        """
        self.wait()
        for later in [n for n in self._manager.all_steps() if n > number]:
            if jax.process_index() == 0:
                shutil.rmtree(self.folder / str(later), ignore_errors=True)
        barrier()
        self._manager.reload()

    def close(self) -> None:
        """Wait for what is being written, raising ``CheckpointError`` if it failed; idempotent."""
        try:
            self.wait()
        finally:
            self._manager.close()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None or jax.process_count() == 1:  # after a failure the peers may never complete theirs
            self.close()


def _lasting(state: TrainState) -> TrainState:
    """``state`` in buffers that no update donates while they are written.

    From an accelerator the arrays are copied to the host before ``save`` returns; on CPU the host's arrays
    are the state's own buffers, hence a copy.
    """
    if jax.default_backend() != "cpu":
        return state
    copied: TrainState = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))(state)
    jax.block_until_ready(copied)
    return copied
