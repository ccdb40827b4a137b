"""How the trainer's versions get out: through the hub to engines, into a folder, or both."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import jax

from jaxrl_sync.config.convert import to_publisher
from jaxrl_sync.config.file_channel import channel_path, to_file_writer
from jaxrl_sync.config.process import ProcessContext
from jaxrl_sync.sharding.layout import Layout
from jaxrl_sync.trainer.axes import Tree
from jaxrl_sync.transfer.errors import TransferError
from jaxrl_sync.transfer.files.announcing import Announcer
from jaxrl_sync.transfer.files.writer import FilePublisher
from jaxrl_sync.transfer.publisher import Publisher
from jaxrl_sync.transfer.version import Version

logger = logging.getLogger("jaxrl_sync.trainer")


class Publishes(Protocol):
    """What the loop needs of ``transfer.Publisher``."""

    def publish(self, tree: Tree, version: Version) -> Any: ...


@dataclasses.dataclass(frozen=True)
class Announced:
    """Versions that only a colocated engine takes: nothing is exported, the hub alone hears of them."""

    announcer: Announcer

    def publish(self, tree: Tree, version: Version) -> None:
        """Tell the hub; the tree stays the caller's."""
        self.announcer.announce(version)


@dataclasses.dataclass
class Beside:
    """Publishes through ``first``, and into a channel that training doesn't depend on: when that fails for
    good (another writer has taken it over), it is left alone.
    """

    first: Publishes
    files: Publishes | None

    def publish(self, tree: Tree, version: Version) -> None:
        """To both; returns once the tree may be donated."""
        self.first.publish(tree, version)
        if self.files is None:
            return
        try:
            self.files.publish(tree, version)
        except TransferError as error:
            logger.error("no version is written to the file channel from %s on: %s", version, error)
            self.files = None


def open_publishers(
    context: ProcessContext,
    stack: contextlib.ExitStack,
    hub_url: str,
    source: Layout,
    convert: Callable[[Any], Any],
    world: str,
) -> Publishes:
    """What the config asks for; ``stack`` closes it. ``world`` is a text that the ranks share."""
    config = context.config
    path = channel_path(config, context.run_dir)
    if config.sync.transport != "file":
        live = _open_live(context, stack, hub_url, source, convert)
        if path is None:
            return live
        return Beside(live, _open_files(context, stack, path, source, convert, world, None))
    assert path is not None  # checked with the config
    announcer = _open_announcer(context, stack, hub_url, source)
    return _open_files(context, stack, path, source, convert, world, announcer.announce)


def _open_live(
    context: ProcessContext,
    stack: contextlib.ExitStack,
    hub_url: str,
    source: Layout,
    convert: Callable[[Any], Any],
) -> Publishes:
    """A publisher; only a word to the hub where every engine lives in the trainer's processes."""
    config = context.config
    if config.engine.placement == "colocated":
        return Announced(_open_announcer(context, stack, hub_url, source))
    live = Publisher(
        hub_url, source, token_file=context.token_file, config=to_publisher(config), convert=convert
    )
    return stack.enter_context(live)


def _open_announcer(
    context: ProcessContext, stack: contextlib.ExitStack, hub_url: str, source: Layout
) -> Announcer:
    config = context.config
    announcer = Announcer(
        hub_url,
        context.token_file,
        model="policy",
        nbytes=source.total_bytes,
        rank=jax.process_index(),
        size=jax.process_count(),
        ttl_s=config.hub.ttl_s,
        timeout_s=config.run.start_timeout_s,
    )
    return stack.enter_context(announcer)


def _open_files(
    context: ProcessContext,
    stack: contextlib.ExitStack,
    path: Path,
    source: Layout,
    convert: Callable[[Any], Any],
    world: str,
    on_committed: Callable[[Version], None] | None,
) -> FilePublisher:
    config = context.config
    files = FilePublisher(
        path,
        source,
        token_file=context.token_file if config.sync.file.sealed else None,
        config=to_file_writer(config),
        convert=convert,
        world=world,
        on_committed=on_committed,
    )
    stack.enter_context(files)
    stack.callback(
        files.drain, config.run.grace_s / 2
    )  # the last version is the one that is looked for later
    return files
