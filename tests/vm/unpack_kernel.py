#!/usr/bin/env python3
"""``unpack_kernel.py VMLINUZ VMLINUX``: the kernel inside a packed one.

Emulated code would take 10 s to unpack it at each boot.
Where no compression is recognised the packed kernel is copied: it boots too.
"""

import gzip
import lzma
import shutil
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

XZ, GZIP = b"\xfd7zXZ\0", b"\x1f\x8b\x08"


def payload(packed: bytes, magic: bytes, unpack: Callable[[bytes], bytes]) -> bytes | None:
    """The first stream that begins with ``magic`` and holds an ELF file."""
    at = packed.find(magic)
    while at >= 0:
        try:
            found = unpack(packed[at:])
        except (lzma.LZMAError, zlib.error, gzip.BadGzipFile):
            found = b""
        if found.startswith(b"\x7fELF"):
            return found
        at = packed.find(magic, at + 1)
    return None


def main(source: Path, target: Path) -> None:
    """Write the kernel of ``source`` to ``target``."""
    packed = source.read_bytes()
    found = payload(packed, XZ, lambda data: lzma.LZMADecompressor().decompress(data))
    found = found or payload(packed, GZIP, lambda data: zlib.decompressobj(31).decompress(data))
    if found:
        target.write_bytes(found)
    else:
        shutil.copyfile(source, target)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
