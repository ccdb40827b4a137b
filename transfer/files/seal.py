"""Seals: how a file of a channel proves that it is whole and, where a run token is used, who wrote it.

Without a token the seal is xxh3-128, which guards against faults. With one, documents carry an HMAC-SHA256
and objects a keyed BLAKE2b, under keys that are derived from the token and the channel's id: whoever can
write the folder but lacks the token can't make a reader take other weights.

A document is one line, ``jaxrl-sync KIND 1 BYTES SEAL``, then that many bytes of JSON.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import json
from typing import Any

import xxhash

from jaxrl_sync.transfer.files.errors import BrokenObject, ForeignChannel

_FORMAT = "1"
_MAX_LINE = 256


def is_whole(data: bytes) -> bool:
    """Whether a document has all the bytes that its first line says: where there are no hard links, one
    appears before it is complete."""
    line, _, body = data.partition(b"\n")
    words = line[:_MAX_LINE].split(b" ")
    return len(words) == 5 and words[3] == str(len(body)).encode()


@dataclasses.dataclass(frozen=True)
class Seal:
    """``key`` is empty where no token is used."""

    key: bytes = dataclasses.field(default=b"", repr=False)

    @classmethod
    def of(cls, token: str | None, channel: str = "") -> Seal:
        """The seal of a channel; with an empty id that of the CHANNEL file itself."""
        if token is None:
            return cls()
        return cls(hmac.new(bytes.fromhex(token), b"jaxrl_sync files " + channel.encode(), "sha256").digest())

    def of_object(self, data: Any) -> str:
        """32 hexadecimal digits over an object or a piece of one."""
        if self.key:
            return hashlib.blake2b(data, digest_size=16, key=self.key).hexdigest()
        return xxhash.xxh3_128_hexdigest(data)

    def check_object(self, data: Any, expected: str, what: str) -> None:
        """BrokenObject unless ``data`` gives ``expected``."""
        if not hmac.compare_digest(self.of_object(data).encode(), expected.encode("utf-8", "replace")):
            raise BrokenObject(f"{what}: its bytes don't give the digest that its table has")

    def _of_document(self, kind: str, body: bytes) -> str:
        message = kind.encode() + b"\0" + body
        if self.key:
            return hmac.new(self.key, message, "sha256").hexdigest()
        return xxhash.xxh3_128_hexdigest(message)

    def document(self, kind: str, value: dict[str, Any]) -> bytes:
        """``value`` as the bytes of a sealed document."""
        body = json.dumps(value, separators=(",", ":")).encode()
        return f"jaxrl-sync {kind} {_FORMAT} {len(body)} {self._of_document(kind, body)}\n".encode() + body

    def open(self, kind: str, data: bytes, where: str) -> dict[str, Any]:
        """The value of a document. BrokenObject, ForeignChannel where only the seal is another's."""
        line, _, body = data[:_MAX_LINE].partition(b"\n")
        words = line.decode("ascii", "replace").split(" ")
        body = data[len(line) + 1 :]
        if len(words) != 5 or words[:3] != ["jaxrl-sync", kind, _FORMAT]:
            raise BrokenObject(f"{where} isn't a {kind} of format {_FORMAT}")
        if words[3] != str(len(body)):
            raise BrokenObject(f"{where} has {len(body)} bytes after its first line, which says {words[3]}")
        if not hmac.compare_digest(self._of_document(kind, body).encode(), words[4].encode()):
            if self.key:
                raise ForeignChannel(f"{where} isn't sealed with this run's token")
            raise BrokenObject(f"{where}: its content doesn't give its seal")
        try:
            value = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise BrokenObject(f"{where} isn't JSON: {error}") from error
        if not isinstance(value, dict):
            raise BrokenObject(f"{where} holds {type(value).__name__}, expected an object")
        return value
