"""Builds the fake libibverbs and gives its knobs and counts to tests."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from jaxrl_sync.transfer.verbs.devices import Gid, Port

HERE = Path(__file__).parent
ABI = HERE.parents[1] / "cext" / "verbs"
ANY_CHANCE = 65536


class Knobs(ctypes.Structure):
    """``struct fake_knobs`` of fake/fake.h."""

    _fields_ = [
        ("seed", ctypes.c_uint64),
        ("hold", ctypes.c_uint32),
        ("chance_delay", ctypes.c_uint32),
        ("chance_duplicate", ctypes.c_uint32),
        ("chance_partial", ctypes.c_uint32),
        ("partial_errno", ctypes.c_uint32),
        ("short_poll", ctypes.c_uint32),
        ("fail_status", ctypes.c_uint32),
        ("fail_at", ctypes.c_uint64),
        ("register_limit", ctypes.c_uint64),
        ("modify_errno", ctypes.c_uint32),
        ("modify_state", ctypes.c_uint32),
        ("refuse_inline", ctypes.c_uint32),
        ("lossy_reset", ctypes.c_uint32),
        ("create_errno", ctypes.c_uint32),
        ("chance_late", ctypes.c_uint32),
        ("chance_rnr", ctypes.c_uint32),
        ("chance_event", ctypes.c_uint32),
        ("gone", ctypes.c_uint32),
        ("refuse_relaxed", ctypes.c_uint32),
        ("dmabuf_errno", ctypes.c_uint32),
        ("without_ece", ctypes.c_uint32),
        ("port_state", ctypes.c_uint32),
        ("max_mr_bytes", ctypes.c_uint64),
        ("register_fail_at", ctypes.c_uint64),
    ]


class Counts(ctypes.Structure):
    """``struct fake_counts`` of fake/fake.h."""

    _fields_ = [
        *[(name, ctypes.c_int64) for name in ("contexts", "pds", "mrs", "cqs", "channels", "qps")],
        *[
            (name, ctypes.c_uint64)
            for name in (
                "registered_bytes",
                "executed",
                "posts",
                "overruns",
                "unacked",
                "registrations",
                "events",
                "arms",
                "asks",
            )
        ],
    ]


class Fake:
    """The loaded library. ``knobs`` are live; ``set`` clears them all and sets some, under its lock."""

    def __init__(self, path: str) -> None:
        library = ctypes.CDLL(path)
        self.knobs = Knobs.in_dll(library, "fake_knobs")
        self.counts = Counts.in_dll(library, "fake_counts")
        self._library = library

    def set(self, **knobs: int) -> None:
        """All faults off but these."""
        self._library.fake_set(ctypes.byref(Knobs(**knobs)), 0)

    def alive(self) -> dict[str, int]:
        """How many of each object exist, and completion events not acknowledged."""
        names = ("contexts", "pds", "mrs", "cqs", "channels", "qps", "unacked")
        return {name: getattr(self.counts, name) for name in names}

    def async_event(self, qp_num: int, kind: int, number: int) -> None:
        """An asynchronous event on the device of a queue pair."""
        assert self._library.fake_async_of(qp_num, kind, number) == 0

    def kill(self, qp_num: int) -> None:
        """The process behind this queue pair is gone."""
        assert self._library.fake_kill(qp_num) == 0


def build() -> str | None:
    """Path of the library, compiled once per content of its sources; None without a compiler."""
    compiler = shutil.which(os.environ.get("CC", "gcc"))
    if compiler is None:
        return None
    sources = sorted((HERE / "fake").iterdir()) + [ABI / "ibv_abi.h"]
    flags = ["-std=gnu11", "-O2", "-g", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-pthread"]
    flags += os.environ.get("JAXRL_SYNC_FAKE_CFLAGS", "").split()
    digest = hashlib.sha256(b"".join(s.read_bytes() for s in sources) + repr(flags).encode()).hexdigest()[:16]
    path = Path(tempfile.gettempdir()) / f"jaxrl-sync-fake-{os.getuid()}" / f"libfakeibverbs-{digest}.so"
    if not path.exists():
        path.parent.mkdir(mode=0o700, exist_ok=True)
        fresh = path.with_suffix(f".{os.getpid()}")
        command = [compiler, *flags, f"-I{ABI}", *[str(s) for s in sources if s.suffix == ".c"]]
        command += [f"-Wl,--version-script={HERE / 'fake' / 'fake.map'}", "-o", str(fresh)]
        subprocess.run(command, check=True, timeout=120)
        fresh.rename(path)
    return str(path)


def made_up_port(device: str, last: int, layer: str = "Ethernet") -> Port:
    """A port as the kernel would list it."""
    gid = Gid(1, bytes(10) + b"\xff\xff" + bytes([10, 77, 0, last]), "RoCE v2", "eth0")
    return Port(device, 1, "ACTIVE", layer, 100.0, 0, -1, (gid,))
