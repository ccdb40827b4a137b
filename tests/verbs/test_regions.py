"""Memory regions of the extension over the fake: life, limits, keys, registration."""

from __future__ import annotations

import errno
import subprocess
import sys
import tempfile

import pytest

from jaxrl_sync.transfer import _verbs
from jaxrl_sync.transfer.verbs.errors import VerbsError
from tests.verbs.fakelib import Fake
from tests.verbs.pairs import pair, rows, write


def test_region_holds_its_buffer_until_closed(fake: Fake) -> None:
    memory = bytearray(4096)
    with _verbs.Context("fake0") as context:
        region = _verbs.MemoryRegion(context, memory)
        with pytest.raises(BufferError):
            memory.append(0)
        region.close()
        memory.append(0)
        with pytest.raises(BufferError):
            _verbs.MemoryRegion(context, bytes(8))


def test_region_in_flight_refuses_to_close(fake: Fake) -> None:
    with pair() as (left, right):
        fake.knobs.hold = 1
        assert write(left, right, rows((0, 0, 100))) == 1
        with pytest.raises(BufferError, match="1 batches of work requests still read"):
            left.region.close()
        fake.knobs.hold = 0
        left.collect(1)
        left.region.close()


def test_registration_errors_name_limit_and_need(fake: Fake) -> None:
    with _verbs.Context("fake0") as context:
        fake.knobs.register_limit = fake.counts.registered_bytes + 5000
        kept = _verbs.MemoryRegion(context, bytearray(4096))
        with pytest.raises(VerbsError, match="registering 4096 bytes") as caught:
            _verbs.MemoryRegion(context, bytearray(4096))
        assert caught.value.errno == errno.ENOMEM
        kept.close()
        with pytest.raises(VerbsError, match="1 to 4294967296 at once"):
            _verbs.MemoryRegion(context, bytearray(0))
        code = (
            "import resource, sys; resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))\n"
            "from tests.verbs.fakelib import Fake; import os\n"
            "Fake(os.environ['JAXRL_SYNC_IBVERBS']).knobs.register_limit = 65536\n"
            "from jaxrl_sync.transfer import _verbs\n"
            "with _verbs.Context('fake0') as c:\n"
            "  try: _verbs.MemoryRegion(c, bytearray(1 << 20))\n"
            "  except OSError as e: print(e)"
        )
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
        assert (
            "registering 1048576 bytes, but only 65536 may be locked (raise it: `ulimit -l" in run.stdout
        ), run


def test_dmabuf_and_relaxed_ordering(fake: Fake) -> None:
    with _verbs.Context("fake0") as context, tempfile.TemporaryFile() as file:
        file.truncate(8192)
        region = _verbs.MemoryRegion(context, dmabuf_fd=file.fileno(), length=4096, offset=4096, iova=0x7000)
        assert (region.address, region.nbytes, region.relaxed_ordering) == (0x7000, 4096, False)
        with pytest.raises(VerbsError, match="4096 bytes of dmabuf 99999: Bad file descriptor"):
            _verbs.MemoryRegion(context, dmabuf_fd=99999, length=4096)
        with pytest.raises(ValueError, match="either a buffer or dmabuf_fd"):
            _verbs.MemoryRegion(context)
        assert _verbs.MemoryRegion(context, bytearray(64), relaxed_ordering=True).relaxed_ordering


def test_relaxed_ordering_falls_back(fake: Fake) -> None:
    with _verbs.Context("fake0") as context:
        fake.knobs.refuse_relaxed = 1
        region = _verbs.MemoryRegion(context, bytearray(64), remote_write=True, relaxed_ordering=True)
        assert not region.relaxed_ordering and region.rkey
        assert not _verbs.MemoryRegion(context, bytearray(64)).relaxed_ordering
        fake.knobs.register_limit = 1
        with pytest.raises(VerbsError, match="registering 64 bytes"):
            _verbs.MemoryRegion(context, bytearray(64), relaxed_ordering=True)


def test_dmabuf_support_is_asked_and_refusals_say_what_to_do(fake: Fake) -> None:
    with _verbs.Context("fake0") as context, tempfile.TemporaryFile() as file:
        file.truncate(8192)
        assert context.dmabuf_supported()
        with pytest.raises(VerbsError, match="offset 0 and iova 0x10 of a dmabuf differ within a page"):
            _verbs.MemoryRegion(context, dmabuf_fd=file.fileno(), length=64, iova=0x10)
        for number in (errno.EOPNOTSUPP, errno.EPROTONOSUPPORT):
            fake.knobs.dmabuf_errno = number
            assert not context.dmabuf_supported()
            with pytest.raises(VerbsError, match="the device can't: stage through host memory"):
                _verbs.MemoryRegion(context, dmabuf_fd=file.fileno(), length=4096)


def test_registrations_are_counted_and_timed(fake: Fake) -> None:
    with pair(4096) as (left, right):
        before = left.context.registrations
        assert (before, left.context.registered_bytes) == (1, 4096) and left.context.registration_ns > 0
        write(left, right, rows((0, 0, 100)))
        left.collect(1)
        assert left.context.registrations == before, "a transfer registers nothing"


def test_device_with_small_regions_says_so(fake: Fake) -> None:
    fake.knobs.max_mr_bytes = 8192
    with _verbs.Context("fake0") as context:
        assert context.query_device()["max_mr_size"] == 8192
        with pytest.raises(VerbsError, match="registering 8193 bytes, the device takes 1 to 8192 at once"):
            _verbs.MemoryRegion(context, bytearray(8193))


def test_writes_outside_of_a_region_are_refused_before_posting(fake: Fake) -> None:
    with pair(1000) as (left, right):
        for bad in [
            (0, 0, 1001),
            (1, 0, 1000),
            (0, 1, 1000),
            (2**64 - 1, 0, 1),
            (0, 0, 0),
            (0, 2**64 - 4, 8),
        ]:
            with pytest.raises(ValueError, match="write 1 of"):
                write(left, right, rows((0, 0, 1000), bad))
        with pytest.raises(ValueError, match="rows of three uint64"):
            left.qps[0].write(left.region, bytearray(20), 0, 8, 1)
        assert left.qps[0].posted == 0 and left.cq.polled == 0


def test_key_of_a_closed_region_is_a_remote_access_error(fake: Fake) -> None:
    with pair() as (left, right):
        address, nbytes, rkey = right.region.address, right.region.nbytes, right.region.rkey
        right.region.close()
        left.qps[0].write(left.region, rows((0, 0, 100)), address, nbytes, rkey)
        assert left.collect(1)["status"].tolist() == [10]
