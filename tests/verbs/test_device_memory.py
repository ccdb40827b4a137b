"""Edges whose slot is a GPU's memory, over the fake: a file stands in for a dmabuf, a stub for the driver."""

from __future__ import annotations

import ctypes
import dataclasses
import mmap
import os
import socket
import threading
import time
import types
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxrl_sync.transfer.errors import MismatchError, TransferError
from jaxrl_sync.transfer.transports.verbs import VerbsReceiver, VerbsSender
from jaxrl_sync.transfer.verbs import cuda, opened, rail, regions
from jaxrl_sync.transfer.verbs.devices import Choice, Gid, Port
from jaxrl_sync.transfer.verbs.endpoint import Endpoint, touched
from jaxrl_sync.transfer.verbs.errors import VerbsError
from jaxrl_sync.transfer.verbs.handshake import remote_of
from jaxrl_sync.transfer.verbs.opened import Registered, open_device
from jaxrl_sync.transfer.verbs.regions import DeviceMemory, Region, region_of
from jaxrl_sync.transfer.verbs.settings import VerbsSettings
from jaxrl_sync.transfer.wire import Connection
from tests.verbs.fakelib import Fake
from tests.verbs.zygote import Order, data, edge_and_slot, moved

ORDER = Order("send", 0, "fake0", piece=10_001, runs=3, seed=7)
OFFSET = 4096 + 256
AT = 0x7F5500000000 + 256
"""Where the memory of the GPU that isn't there would be."""


class Gpu:
    """A file as the memory of a GPU, with a slot of the order's size in it."""

    def __init__(self, dmabuf: bool = True, why: str = "") -> None:
        _, self.layout = edge_and_slot(ORDER)
        self.fd = os.memfd_create("gpu")
        os.ftruncate(self.fd, OFFSET + self.layout.total_bytes + 4096)
        self.calls: list[str] = []
        described = (os.dup(self.fd), OFFSET) if dmabuf else (-1, 0)
        region = Region(
            "cuda", AT, self.layout.total_bytes, self, lambda: self.calls.append("ready"),
            lambda: self.calls.append("flush"), described, why,
        )  # fmt: skip
        self.memory = DeviceMemory(region)

    @property
    def content(self) -> bytes:
        return os.pread(self.fd, ORDER.size, OFFSET)

    @property
    def around(self) -> bytes:
        """What nobody may write."""
        end = OFFSET + self.layout.total_bytes
        return os.pread(self.fd, OFFSET, 0) + os.pread(self.fd, 4096, end)

    def close(self) -> None:
        self.memory.close()
        os.close(self.fd)


@pytest.fixture(autouse=True)
def ports(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    def port(device: str, last: int) -> Port:
        gid = Gid(1, bytes(10) + b"\xff\xff" + bytes([10, 77, 0, last]), "RoCE v2", "eth0")
        return Port(device, 1, "ACTIVE", "Ethernet", 100.0, 0, -1, (gid,))

    monkeypatch.setattr(rail, "scan", lambda: [port("fake0", 1), port("fake1", 2)])


@pytest.fixture
def connections() -> Iterator[tuple[Connection, Connection]]:
    ours, theirs = socket.socketpair()
    near, far = Connection(ours, "engine-0.0"), Connection(theirs, "trainer.0")
    yield near, far
    near.close()
    far.close()


def settings(device: str, **options: Any) -> VerbsSettings:
    values = {"chunk_bytes": 4096, "ring": 3, "queue_pairs": 2, **options}
    return VerbsSettings(choice=Choice(include=(device,)), **values)


def sync(
    connections: tuple[Connection, Connection], slot: Any, views: Any, rounds: int = 1, **options: Any
) -> str:
    """So many versions of the edge into ``slot``; the receiver's reason."""
    (edge, layout), (near, far) = edge_and_slot(ORDER), connections
    receiver = VerbsReceiver(edge, settings("fake1", **options), far, [slot])
    try:
        sender = VerbsSender(edge, settings("fake0"), receiver.describe(), near, layout)
        try:
            receiver.connect(sender.describe())
            for _ in range(rounds):
                ready, deadline = receiver.ready(slot), time.monotonic() + 60
                call = threading.Thread(target=sender.send, args=(ready, {(0, "w"): data(ORDER)}, deadline))
                call.start()
                receiver.receive(views, deadline)
                call.join()
        finally:
            sender.close()
    finally:
        receiver.close()
    return receiver.reason


@pytest.mark.parametrize("parts", [1 << 40, 8192])
@pytest.mark.parametrize("faults", [{}, {"seed": 3, "chance_delay": 20000}])
def test_versions_are_written_to_a_gpus_memory_and_flushed_before_use(
    fake: Fake, connections: tuple[Connection, Connection], parts: int, faults: dict[str, int]
) -> None:
    gpu = Gpu()
    try:
        fake.set(**faults)
        slot = types.SimpleNamespace(memory=gpu.memory)
        before = fake.counts.registrations
        reason = sync(connections, slot, {}, 2, min_run_bytes=4096, max_region_bytes=parts)
        assert "placed" in reason and gpu.calls == ["flush", "flush"]
        assert gpu.content == moved(ORDER).tobytes() and not any(gpu.around)
        slot_parts, ring_parts = (max(1, -(-n // parts)) for n in (gpu.layout.total_bytes, 3 * 4096))
        arena, doorbells = 1, 2
        made = fake.counts.registrations - before - arena - doorbells - ring_parts
        assert made == slot_parts, "once, however many rounds"
    finally:
        gpu.close()


@pytest.mark.parametrize("case", ["device", "driver", "backend"])
def test_without_a_dmabuf_the_edge_is_staged_and_says_why(
    fake: Fake,
    connections: tuple[Connection, Connection],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    case: str,
) -> None:
    monkeypatch.setattr(regions, "MODULES", tmp_path)
    gpu = Gpu(case != "driver", "GPU 0 or its driver has no dmabufs")
    words = "fake1 or this libibverbs takes no dmabufs"
    if case == "device":
        fake.knobs.dmabuf_errno = 95
    elif case == "driver":
        words = "GPU memory without a dmabuf (GPU 0 or its driver has no dmabufs) or a peer memory module"
    else:
        words = "GPU memory takes the native backend of verbs"
        monkeypatch.setattr(
            opened.OpenDevice, "refusal", lambda self, region: real(_like_pyverbs(self), region)
        )
    slot, host = types.SimpleNamespace(memory=gpu.memory), np.zeros(gpu.layout.total_bytes, np.uint8)
    try:
        reason = sync(connections, slot, gpu.layout.views(host.data), min_run_bytes=1)
        assert f"staged through host memory: {words}" in reason
        assert host[: ORDER.size].tobytes() == moved(ORDER).tobytes() and not any(gpu.content)
        with pytest.raises(TransferError, match="placement is 'placed', but .*: 'auto' would stage"):
            sync(connections, slot, {}, placement="placed")
        device = open_device("native", "fake1")
        try:
            with pytest.raises(VerbsError, match="bytes can't be registered with fake1: ") as refused:
                device.register_slot(gpu.memory, 1 << 40)
            assert words in str(refused.value)
        finally:
            device.give_back()
    finally:
        gpu.close()


real = opened.OpenDevice.refusal


def _like_pyverbs(device: Any) -> Any:
    return types.SimpleNamespace(name=device.name, context=object())


def test_a_refused_dmabuf_leaves_nothing_registered(fake: Fake) -> None:
    gpu, device = Gpu(), open_device("native", "fake0")
    try:
        before = fake.counts.mrs
        fake.knobs.register_limit = fake.counts.registered_bytes + 2 * 8192
        with pytest.raises(VerbsError, match="registering 8192 bytes of dmabuf"):
            Registered(device.borrow(), gpu.memory.region, 8192, remote_write=True)
        assert fake.counts.mrs == before
    finally:
        device.give_back()
        gpu.close()


def test_with_a_peer_memory_module_the_address_is_registered(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(regions, "MODULES", tmp_path)
    (tmp_path / "nvidia_peermem").mkdir()
    stand_in = mmap.mmap(-1, 8192)
    where = ctypes.addressof(ctypes.c_char.from_buffer(stand_in))
    region, device = Region("cuda", where, 8192, None), open_device("native", "fake0")
    try:
        assert device.refusal(region) == ""
        registered = Registered(device.borrow(), region, 4096, remote_write=True)
        assert [part.address for part in registered.parts] == [where, where + 4096]
        registered.close()
    finally:
        device.give_back()


def test_memory_that_closes_gives_its_registration_and_descriptor_up(fake: Fake) -> None:
    gpu, device = Gpu(), open_device("native", "fake0")
    try:
        before, (fd, _) = fake.counts.mrs, gpu.memory.region.dmabuf
        made = device.register_slot(gpu.memory, 1 << 40)
        assert device.register_slot(gpu.memory, 1 << 40) is made and fake.counts.mrs == before + 1
        assert (made.address, made.nbytes) == (AT, gpu.layout.total_bytes)
        gpu.memory.close()
        gpu.memory.close()
        assert fake.counts.mrs == before
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
        assert "it was closed" in device.refusal(gpu.memory.region)
    finally:
        device.give_back()
        os.close(gpu.fd)


@pytest.mark.parametrize("kind", ["pinned_host", "device"])
def test_an_array_can_be_sent_from_where_it_lies_once_it_is_ready(fake: Fake, kind: str) -> None:
    values = np.random.default_rng(0).integers(0, 256, 8192, dtype=np.uint8)
    at = jax.sharding.SingleDeviceSharding(jax.devices()[1], memory_kind=kind)
    region = region_of(jax.device_put(values, at))
    assert (region.kind, region.nbytes) == ("pinned_host" if kind == "pinned_host" else "host", 8192)
    a, b = (Endpoint(settings(d), "p.0", pairs=1, sends=8, receives=4) for d in ("fake0", "fake1"))
    try:
        a.connect(b.describe())
        b.connect(a.describe())
        target = touched(8192)
        remote = remote_of(b.register(target, remote_write=True).describe(), 1, "memory")
        source = a.register(region, remote_write=False)
        a.write(a.lanes[0], source, np.array([[100, 5, 4000]], np.uint64), remote, time.monotonic() + 60)
        a.events(time.monotonic() + 60, "sending")
        assert bytes(target[5:4005]) == values[100:4100].tobytes()
    finally:
        a.close()
        b.close()


@pytest.mark.parametrize("dmabuf", [True, False])
def test_memory_that_was_closed_keeps_no_array_alive(dmabuf: bool) -> None:
    array = jax.device_put(np.zeros(8192, np.uint8), jax.devices()[1])
    found, alive = region_of(array), weakref.ref(array)
    fd = os.memfd_create("gpu") if dmabuf else -1
    memory = DeviceMemory(dataclasses.replace(found, dmabuf=(fd, 0)))
    del array, found
    assert alive() is not None
    memory.close()
    memory.close()
    assert alive() is None and memory.region.nbytes == memory.nbytes == 8192


def test_an_array_on_several_devices_is_no_region() -> None:
    sharding = jax.sharding.NamedSharding(jax.make_mesh((2,), ("x",)), jax.sharding.PartitionSpec("x"))
    with pytest.raises(MismatchError, match="an array on 2 devices has no single region"):
        region_of(jax.device_put(np.zeros(8, np.uint8), sharding))


class Library:
    """The driver's library: attributes by number, what was called, an error for one name."""

    def __init__(self, attributes: dict[int, int], fails: str = "", lacks: str = "") -> None:
        self.attributes, self.fails, self.lacks = attributes, fails, lacks
        self.calls: list[str] = []
        self.range = 0, 0

    def __getattr__(self, name: str) -> Any:
        if name == self.lacks or not name.startswith("cu"):
            raise AttributeError(name)

        def call(*arguments: Any) -> int:
            self.calls.append(name)
            if name == self.fails:
                return 801
            if name == "cuDeviceGetAttribute":
                ctypes.cast(arguments[0], ctypes.POINTER(ctypes.c_int))[0] = self.attributes.get(
                    arguments[1], 0
                )
            if name == "cuMemGetHandleForAddressRange":
                self.range = arguments[1].value, arguments[2].value
                ctypes.cast(arguments[0], ctypes.POINTER(ctypes.c_int))[0] = 77
            return 0

        return call


def _give(where: Any, value: int) -> None:
    ctypes.cast(where, ctypes.POINTER(ctypes.c_int))[0] = value


def test_a_dmabuf_has_whole_pages_and_a_flush_only_where_writes_are_not_ordered() -> None:
    for attributes, flushes in (({124: 1, 118: 100}, 0), ({124: 1, 118: 0, 117: 1}, 1)):
        library = Library(attributes)
        found = cuda.export(0, 0x7F0000001100, 10_000, library)
        assert (found.fd, found.offset, library.range) == (77, 0x100, (0x7F0000001000, 3 * 4096))
        found.flush()
        assert library.calls.count("cuFlushGPUDirectRDMAWrites") == flushes
        assert library.calls.count("cuCtxPushCurrent_v2") == library.calls.count("cuCtxPopCurrent_v2")


@pytest.mark.parametrize(
    ("library", "words"),
    [
        (Library({}), "GPU 0 or its driver has no dmabufs"),
        (Library({124: 1}), "writes to GPU 0 can't be flushed by the host"),
        (Library({124: 1, 118: 200}, fails="cuInit"), "cuInit failed with CUDA error 801"),
        (
            Library({124: 1, 118: 200}, lacks="cuMemGetHandleForAddressRange"),
            "driver here has no cuMemGetHandleForAddressRange: a newer one",
        ),
    ],
)
def test_a_gpu_without_dmabufs_says_why(library: Library, words: str) -> None:
    with pytest.raises(VerbsError, match=words):
        cuda.export(0, 4096, 4096, library)
    pushed, popped = library.calls.count("cuCtxPushCurrent_v2"), library.calls.count("cuCtxPopCurrent_v2")
    assert pushed == popped


@pytest.mark.skipif(Path("/dev/nvidia0").exists(), reason="there is a GPU here")
def test_without_the_driver_the_reason_is_its_library() -> None:
    with pytest.raises(VerbsError, match="no NVIDIA driver here .libcuda.so.1: "):
        cuda.export(0, 4096, 4096)
