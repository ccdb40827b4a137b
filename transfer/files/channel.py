"""A channel that is open: its folders, its id and seal, which versions exist, and the files of each.

A version exists if its manifest does, is whole, and was not committed by a writer after another one had
taken over (`sealed`, see `epochs`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import secrets
import time
from pathlib import Path

from jaxrl_sync.sharding import Correspondence
from jaxrl_sync.sharding.errors import MappingError
from jaxrl_sync.transfer import auth
from jaxrl_sync.transfer.files import names
from jaxrl_sync.transfer.files.config import Trust
from jaxrl_sync.transfer.files.epochs import Epochs, Rules
from jaxrl_sync.transfer.files.errors import BrokenObject, ChannelError, ForeignChannel, NoVersion
from jaxrl_sync.transfer.files.folder import Folder
from jaxrl_sync.transfer.files.manifest import (
    MAX_MANIFEST_BYTES,
    MAX_SCHEMA_BYTES,
    Manifest,
    Part,
    Table,
)
from jaxrl_sync.transfer.files.place import MAX_CHANNEL_BYTES, described
from jaxrl_sync.transfer.files.seal import Seal, is_whole
from jaxrl_sync.transfer.files.stored import Stored
from jaxrl_sync.transfer.version import Version

TORN_S = 2.0
"""A file of a line that isn't whole after so long is of somebody who died."""
LOOK_S = 0.05

logger = logging.getLogger("jaxrl_sync.transfer")


@dataclasses.dataclass(frozen=True)
class Survey:
    """Manifests that count, oldest first; those that don't (yet, or ever); files that hold no manifest."""

    rules: Rules
    manifests: tuple[Manifest, ...]
    fenced: tuple[Manifest, ...]
    unreadable: tuple[Version, ...]


class Channel:
    """Owns descriptors of the folders: ``close()`` or ``with``. Thread-safe."""

    def __init__(self, root: Folder, token: str | None, model: str | None) -> None:
        """Of an existing channel; takes ``root`` over. ForeignChannel, BrokenObject, NoVersion."""
        self.root = root
        self.where = root.where
        self._folders: dict[str, Folder] = {}
        self._manifests: dict[Version, Manifest] = {}
        self._stored: dict[str, Stored] = {}
        self._refused: set[Version] = set()
        try:
            about = described(self.root, token)
            self.id = str(about.get("id"))
            self.model = str(about.get("model"))
            if model is not None and self.model != model:
                raise ForeignChannel(f"{self.where} is of model {self.model!r}, expected {model!r}")
            self.run_id = about.get("run_id")
            self.seal = Seal.of(token, self.id)
            for name in names.FOLDERS:
                self._folders[name] = root.child(name)
            self.epochs = Epochs(self["epochs"], self.seal)
        except BaseException:
            self.close()
            raise

    @classmethod
    def open(
        cls, path: str | Path, trust: Trust, token: str | None = None, model: str | None = None
    ) -> Channel:
        """The channel at ``path``. NoVersion where there is none yet; UnsafePath, ForeignChannel."""
        return cls(Folder.root(path, trust), token, model)

    @classmethod
    def create(cls, path: str | Path, trust: Trust, token: str | None, model: str) -> Channel:
        """The channel at ``path``, made if there is none. Two that make it at once get the same one."""
        root = Folder.root(path, trust, create=True)
        try:
            for name in names.FOLDERS:
                root.child(name, create=True).close()
            _remove_torn(root)
            if root.mtime_s(names.CHANNEL) is None:
                fresh = {
                    "id": secrets.token_hex(8),
                    "model": model,
                    "run_id": auth.run_id_of(token) if token is not None else None,
                    "made_s": time.time(),
                }
                with contextlib.suppress(ChannelError):  # another one was first
                    root.commit(names.CHANNEL, Seal.of(token).document("channel", fresh))
        except BaseException:
            root.close()
            raise
        return cls(root, token, model)

    def __getitem__(self, folder: str) -> Folder:
        return self._folders[folder]

    @property
    def removed(self) -> bool:
        """Whether the folders that are open here were removed since; there may be others in their place."""
        return any(folder.removed for folder in (self.root, *self._folders.values()))

    def versions(self) -> list[Version]:
        """Whatever has a manifest's name, by number."""
        found = (names.version_of(n) for n in self["versions"].names())
        return [v for v in found if v is not None]

    def manifests(self) -> list[Manifest]:
        """All versions that exist, in the order in which they were committed.

        Torn, foreign and unsafe manifests are no versions: they are left out, with a line in the log. Reads
        only manifests that are new.
        """
        return list(self.survey().manifests)

    def survey(self) -> Survey:
        """What is there now, by the same rules throughout."""
        now = self.versions()
        known = {v: self._manifests[v] for v in now if v in self._manifests}
        unreadable = []
        for version in now:
            if version not in known:
                try:
                    known[version] = self.read_manifest(version)
                except NoVersion:
                    continue
                except ChannelError as error:
                    unreadable.append(version)
                    if version not in self._refused:
                        logger.warning("%s", error)
        self._refused = set(unreadable)
        self._manifests = known
        rules = (
            self.epochs.rules()
        )  # read after the manifests: who took over before one was committed is here
        found = sorted(known.values(), key=lambda m: (m.epoch, m.sequence))
        valid = tuple(m for m in found if rules.valid(m.epoch, m.sequence))
        return Survey(rules, valid, tuple(m for m in found if m not in valid), tuple(unreadable))

    def manifest(self, version: Version) -> Manifest:
        """The manifest of a version that exists, read now. NoVersion, BrokenObject, ForeignChannel."""
        made = self.read_manifest(version)
        if not self.epochs.rules().valid(made.epoch, made.sequence):
            raise NoVersion(f"version {version} was written to {self.where} by a writer that was fenced off")
        return made

    def read_manifest(self, version: Version) -> Manifest:
        """The manifest itself, whoever committed it."""
        name = names.version_name(version)
        folder = self["versions"]
        where = f"{folder.where}/{name}"
        data = self.seal.open("manifest", folder.read(name, MAX_MANIFEST_BYTES), where)
        made = Manifest.of_json(data, where)
        if made.channel != self.id:
            raise ForeignChannel(f"{where} is of channel {made.channel!r}, expected {self.id!r}")
        if made.version != version:
            raise BrokenObject(f"{where} speaks of version {made.version}, expected {version}")
        return made

    def stored(self, schema: str) -> Stored:
        """What a schema says is stored; kept. BrokenObject."""
        if schema not in self._stored:
            where = f"{self['schemas'].where}/{schema}"
            data = self["schemas"].read(schema, MAX_SCHEMA_BYTES)
            line, _, body = data.partition(b"\n")
            self.seal.check_object(body, line.decode("ascii", "replace"), where)
            try:
                made = Stored.of(Correspondence.from_bytes(body))
            except MappingError as error:
                raise BrokenObject(f"{where} isn't a schema: {error}") from error
            if made.digest != schema:
                raise BrokenObject(f"{where} holds schema {made.digest}")
            self._stored[schema] = made
        return self._stored[schema]

    def add_schema(self, stored: Stored) -> None:
        """Have a schema in the channel; half of one, of a writer that died, is replaced."""
        folder, body = self["schemas"], stored.schema
        data = self.seal.of_object(body).encode() + b"\n" + body
        with contextlib.suppress(NoVersion):
            if folder.read(stored.digest, MAX_SCHEMA_BYTES) == data:
                return
            folder.remove(stored.digest)
        with contextlib.suppress(ChannelError):  # another rank was first
            folder.commit(stored.digest, data)

    def table(self, part: Part, slabs: int) -> Table:
        """The table of one rank of a version. BrokenObject, NoVersion."""
        where = f"{self['objects'].where}/{part.table}"
        with self["objects"].open(part.table) as file:
            if file.nbytes != part.nbytes:
                raise BrokenObject(f"{where} has {file.nbytes} bytes, its manifest says {part.nbytes}")
            data = bytes(file.read(part.nbytes))
        self.seal.check_object(data, part.digest, where)
        try:
            value = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise BrokenObject(f"{where} isn't JSON: {error}") from error
        if not isinstance(value, dict):
            raise BrokenObject(f"{where} holds {type(value).__name__}, expected an object")
        return Table.of_json(value, where, part.rank, slabs)

    def close(self) -> None:
        """Idempotent."""
        for folder in self._folders.values():
            folder.close()
        self.root.close()

    def __enter__(self) -> Channel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _remove_torn(root: Folder) -> None:
    """Make room for a CHANNEL file where the last attempt to write one died in the middle of it."""
    deadline = time.monotonic() + TORN_S
    with contextlib.suppress(NoVersion):
        while not is_whole(root.read(names.CHANNEL, MAX_CHANNEL_BYTES)):
            if time.monotonic() >= deadline:
                root.remove(names.CHANNEL)
                return
            time.sleep(LOOK_S)
