"""Hostile frames: sound ones to start from, mutations of them, and what must hold for any bytes at all."""

from __future__ import annotations

import dataclasses
import random
import struct
import time

import numpy as np
import xxhash

from jaxrl_sync.transfer.codec import frame, positions, rice, values
from jaxrl_sync.transfer.errors import TransferError
from jaxrl_sync.transfer.version import Version

LIMIT = 1 << 16
"""Elements that the receiver of a hostile frame expects at most in a section."""

HEAD = frame.Head("5eed" * 16, Version("aaaaaaaaaaaa", 3), Version("aaaaaaaaaaaa", 4), 0, 1)


def sound_frames() -> list[bytes]:
    """Frames of every coding over small sections of every width."""
    rng = np.random.default_rng(0)
    frames = []
    kinds: tuple[values.Kind, ...] = ("overwrite", "xor", "ulp")
    for number, coding in enumerate(position_codings()):
        changes, codings = [], []
        for itemsize in (1, 2, 4, 8):
            elements = 1000
            count = {"none": 0, "all": elements}.get(coding.kind, 40)
            places = np.sort(rng.choice(elements, count, replace=False)).astype(np.uint32)
            where = None if coding.kind == "all" else places
            old, new = (rng.integers(0, 255, count).astype(f"<u{itemsize}") for _ in range(2))
            kind = kinds[(number + itemsize) % 3]
            changes.append(frame.Changes(elements, where, values.codes_of(new, old, kind), kind))
            codings.append(frame.Coding(coding, kind, zstd=bool(number % 2)))
        frames.append(bytes(frame.encode(HEAD, changes, codings)))
    return frames


def position_codings() -> list[positions.Coding]:
    """Every position coding, with and without zstd where it may have it."""
    plain = [positions.Coding(k) for k in ("none", "all", "bitmap", "u32", "gap16", "gap8")]
    packed = [dataclasses.replace(c, zstd=True) for c in plain if c.kind in ("bitmap", "gap16", "gap8")]
    return [*plain, *packed, positions.Coding("rice", 4), positions.Coding("rice", rice.guess(40, 1000))]


def resealed(data: bytes) -> bytes:
    """The same bytes with sizes and digest made right, so that what lies behind these checks is reached."""
    if len(data) < 36:
        return data
    head = struct.unpack_from("<I", data, 8)[0]
    body = data[20:-16]
    head = min(max(head, 20), 20 + len(body))
    prefix = struct.pack("<4sHHIQ", frame.MAGIC, frame.FORMAT, 0, head, len(body) - (head - 20))
    return prefix + body + xxhash.xxh3_128_digest(prefix + body)


def take(data: bytes) -> bool:
    """Decode any bytes as a receiver would; whether they were a frame. Anything but a named error escapes."""
    try:
        found = frame.decode(data)
        found.check(HEAD.plan, HEAD.source_process, HEAD.target_process)
    except TransferError:
        return False
    expected = [(min(s.elements, LIMIT), s.itemsize) for s in found.head.sections[:64]]
    try:
        decoded = found.sections(expected)
    except TransferError:
        return False
    for changes in decoded:
        places = changes.positions
        if places is None:
            assert changes.codes.size == changes.elements
            continue
        assert places.dtype == np.uint32 and places.size == changes.codes.size
        assert not places.size or (int(places[-1]) < changes.elements and bool(np.all(np.diff(places) > 0)))
    return True


def mutated(data: bytes, rng: random.Random) -> bytes:
    """A few bytes changed, cut out, doubled or exchanged, often with the sizes and the digest made right."""
    out = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(out)) if out else 0
        match rng.randrange(7):
            case 0 if out:
                out[at] ^= 1 << rng.randrange(8)
            case 1 if out:
                out[at] = rng.choice((0, 1, 127, 128, 254, 255))
            case 2:
                del out[at : at + rng.randint(1, 40)]
            case 3:
                out[at:at] = out[at : at + rng.randint(1, 40)]
            case 4:
                out[at:at] = rng.randbytes(rng.randint(1, 9))
            case 5 if len(out) > 8:
                value = rng.choice((0, 1, 2**16, 2**32, 2**63, 2**64 - 1, rng.getrandbits(64)))
                out[at : at + 8] = struct.pack("<Q", value)
            case _:
                out[at : at + 8] = out[rng.randrange(len(out) or 1) :][:8]
    return resealed(bytes(out)) if rng.random() < 0.9 else bytes(out)


def run(seconds: float, seed: int, at_least: int = 200) -> tuple[int, int]:
    """Mutate for so long and so often: (frames tried, frames that were taken).

    An input that breaks something escapes, and one that takes 5 s of this process's CPUs.
    """
    rng, corpus = random.Random(seed), sound_frames()
    tried = taken = 0
    end = time.monotonic() + seconds
    while time.monotonic() < end or tried < at_least:
        for _ in range(200):
            data = mutated(rng.choice(corpus), rng)
            start = time.process_time()
            try:
                ok = take(data)
            except Exception as error:
                raise AssertionError(f"{error!r} for {data.hex()}") from error
            assert time.process_time() - start < 5, f"{data.hex()} took {time.process_time() - start:.1f} s"
            tried, taken = tried + 1, taken + ok
            if ok and len(corpus) < 500:
                corpus.append(data)
    return tried, taken
