"""Shared memory of slots: reserved at once, private, proved by a nonce, cleaned after a kill."""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxrl_sync.transfer.clean import remove_leftovers, remove_mine, remove_stale
from jaxrl_sync.transfer.errors import ResourceError, TransferError
from jaxrl_sync.transfer.memory import HEADER_BYTES, ForeignMemory, PrivateMemory, SharedMemory

RUN = f"test{os.getpid()}"


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    yield
    remove_leftovers(RUN)


def mine() -> list[str]:
    return [n for n in os.listdir("/dev/shm") if n.startswith(f"jaxrl_sync-{RUN}-")]


def test_segment_is_private_and_goes_with_close() -> None:
    segment = SharedMemory(RUN, 8192)
    info = os.stat(f"/dev/shm/{segment.name}")
    assert stat.S_IMODE(info.st_mode) == 0o600 and info.st_blocks * 512 >= 4096 + 8192
    segment.data[:3] = b"abc"
    other = ForeignMemory(segment.name, segment.nonce.hex(), 8192, RUN)
    assert bytes(other.data[:3]) == b"abc"
    answer = other.answer()
    assert segment.answered_with(answer.hex()) and not segment.answered_with("00" * 32)
    other.data[5] = 7
    assert segment.data[5] == 7
    other.close()
    segment.close()
    segment.close()
    assert mine() == []


def test_a_replaced_segment_is_out_of_reach_of_who_still_maps_it() -> None:
    old = SharedMemory(RUN, 4096)
    writer = ForeignMemory(old.name, old.nonce.hex(), 4096, RUN)
    old.close()
    new = SharedMemory(RUN, 4096)
    writer.data[:] = b"\xff" * 4096
    assert bytes(new.data) == bytes(4096)
    writer.close()
    new.close()


def test_what_is_not_our_segment_is_refused(tmp_path: Path) -> None:
    segment = SharedMemory(RUN, 4096)
    nonce = segment.nonce.hex()
    with pytest.raises(TransferError, match="another nonce"):
        ForeignMemory(segment.name, "00" * 32, 4096, RUN)
    with pytest.raises(TransferError, match="bytes"):
        ForeignMemory(segment.name, nonce, 8192, RUN)
    for name in (
        f"../shm/{segment.name}",
        f"jaxrl_sync-{RUN}-../../etc/passwd",
        "jaxrl_sync-other-1_1-" + "0" * 16,
    ):
        with pytest.raises(TransferError, match="isn't of this run"):
            ForeignMemory(name, nonce, 4096, RUN)
    link = f"jaxrl_sync-{RUN}-1_1-{'a' * 16}"
    os.symlink(tmp_path / "target", f"/dev/shm/{link}")
    with pytest.raises(TransferError, match="can't be opened"):
        ForeignMemory(link, nonce, 4096, RUN)
    os.chmod(f"/dev/shm/{segment.name}", 0o644)
    with pytest.raises(TransferError, match="mode 644"):
        ForeignMemory(segment.name, nonce, 4096, RUN)
    segment.close()


def test_memory_that_can_not_be_mapped_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Out of descriptors: the link ended with a traceback, tcp wasn't tried, and /dev/shm was "too small"."""

    def full(*_: object) -> mmap.mmap:
        raise OSError(errno.EMFILE, "Too many open files")

    segment = SharedMemory(RUN, 4096)
    try:
        with monkeypatch.context() as patched:
            patched.setattr(mmap, "mmap", full)
            with pytest.raises(TransferError, match="can't be mapped here: Too many open files"):
                ForeignMemory(segment.name, segment.nonce.hex(), 4096, RUN)
            with pytest.raises(ResourceError, match="can't map a slot of 8192 bytes of .*: Too many"):
                SharedMemory(RUN, 4096)
    finally:
        segment.close()


def test_private_memory_looks_alike() -> None:
    private = PrivateMemory(4096)
    assert private.name == "" and len(private.data) == 4096
    private.close()


def test_memory_that_nobody_has_is_a_named_error() -> None:
    with pytest.raises(ResourceError, match=f"a slot needs {1 << 60} bytes of memory"):
        PrivateMemory(1 << 60)


def test_a_segment_that_was_replaced_meanwhile_has_no_answer() -> None:
    segment = SharedMemory(RUN, 4096)
    other = ForeignMemory(segment.name, segment.nonce.hex(), 4096, RUN)
    answer = other.answer()
    segment.close()
    assert not segment.answered_with(answer.hex())
    other.close()


def test_too_little_room_is_a_named_error_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(ResourceError, match=r"/dev/shm is too small: a slot needs 12288 bytes") as caught:
        SharedMemory(RUN, 8192)
    assert caught.value.exit_code == 3 and mine() == []


def test_memory_is_reserved_in_pieces_that_fit_between_two_signals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where an interrupted call begins anew, a profiler's timer kept one for the whole slot from ending."""
    real, pieces = os.posix_fallocate, list[tuple[int, int]]()

    def reserve(fd: int, offset: int, length: int) -> None:
        pieces.append((offset, length))
        real(fd, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", reserve)
    segment = SharedMemory(RUN, 9 << 20)
    segment.close()
    ends = [offset + length for offset, length in pieces]
    assert [offset for offset, _ in pieces] == [0, *ends[:-1]] and ends[-1] == HEADER_BYTES + (9 << 20)
    assert max(length for _, length in pieces) <= 1 << 20


def test_who_is_interrupted_while_memory_is_reserved_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(fd: int, offset: int, length: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "posix_fallocate", interrupt)
    with pytest.raises(KeyboardInterrupt):
        SharedMemory(RUN, 8192)
    assert mine() == []


@pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("unshare"), reason="mounting needs root and unshare"
)
def test_a_tiny_dev_shm_is_a_named_error_and_no_sigbus() -> None:
    code = (
        "from jaxrl_sync.transfer.memory import SharedMemory\n"
        "from jaxrl_sync.transfer.errors import ResourceError\n"
        "SharedMemory('tiny', 40000).data[:] = b'x' * 40000\n"
        "try:\n    SharedMemory('tiny', 1 << 20)\nexcept ResourceError as e:\n    print(e, e.exit_code)\n"
    )
    script = f'mount -t tmpfs -o size=128k tmpfs /dev/shm && exec "{sys.executable}" -c "$0"'
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", script, code], capture_output=True, text=True, timeout=60
    )
    if "Operation not permitted" in done.stderr:
        pytest.skip("this machine doesn't let us mount")
    assert done.returncode == 0, done.stderr
    assert "too small" in done.stdout and done.stdout.strip().endswith("3")


def test_segments_of_the_dead_are_found_and_those_of_the_living_kept() -> None:
    code = f"import time\nfrom jaxrl_sync.transfer.memory import SharedMemory as M\ns = M('{RUN}', 4096)\n"
    child = subprocess.Popen(
        [sys.executable, "-c", code + "print(s.name, flush=True); time.sleep(60)"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    name = child.stdout.readline().strip()
    own = SharedMemory(RUN, 4096)
    assert remove_stale(RUN) == []
    child.send_signal(signal.SIGKILL)
    child.wait(60)
    child.stdout.close()
    assert remove_stale(RUN) == [name]
    assert mine() == [own.name]
    assert remove_leftovers(RUN) == [own.name]
    last = SharedMemory(RUN, 4096)
    assert last.name in remove_mine() and mine() == []
    own.close()
    last.close()


def test_cleaning_needs_neither_jax_nor_numpy() -> None:
    code = "import sys, jaxrl_sync.transfer.clean; print([m for m in ('jax', 'numpy') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert out.stdout.strip() == "[]"
