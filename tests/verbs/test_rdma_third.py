"""The C extension against a third implementation: PyPI's ``ibverbs``, a wheel with bindings of its own."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.verbs.pairs import End, open_end, rows
from tests.verbs.soft import DEVICES, PATIENT, missing, soft_devices

pytestmark = pytest.mark.rdma
MIB = 1 << 20
MTU_4096 = 5
GID = 1


class Theirs:
    """One side over the wheel: a device, memory, and one queue pair."""

    def __init__(self, device: str) -> None:
        ib = self.ib = importlib.import_module("ibverbs")
        access = ib.AccessFlags.LOCAL_WRITE | ib.AccessFlags.REMOTE_WRITE
        self.context = {d.name: d for d in ib.get_device_list()}[device].open()
        self.pd, self.cq = self.context.alloc_pd(), self.context.create_cq(64)
        self.memory: npt.NDArray[np.uint8] = np.zeros(MIB, np.uint8)
        self.region = self.pd.reg_mr(self.memory.ctypes.data, MIB, access)
        self.qp = self.pd.create_qp(ib.QPInitAttr(send_cq=self.cq, recv_cq=self.cq, qp_type=ib.QPType.RC))
        self.info = ib.local_qp_info(
            self.qp, self.context.query_port(1), self.context.query_gid(1, GID), port=1, psn=7
        )
        self.access = access

    def connect(self, end: End) -> None:
        """To the extension's first queue pair."""
        gid = bytes(end.context.query_gid(1, GID))
        remote = self.ib.QPInfo(qp_num=end.qps[0].qp_num, psn=7, lid=0, gid=gid, port=1, mtu=MTU_4096)
        about = {"sgid_index": GID, "access": self.access, "local_psn": 7, "timeout": PATIENT}
        self.ib.connect_rc(self.qp, remote, port=1, **about)

    def await_one(self) -> Any:
        """The next completion."""
        end = time.monotonic() + 60
        while time.monotonic() < end:
            found = list(self.cq.poll(1))
            if found:
                return found[0]
            time.sleep(0.001)
        raise AssertionError("nothing completed")


@pytest.fixture
def sides() -> Iterator[tuple[End, Theirs]]:
    """Both connected to each other; skipped where the wheel isn't installed."""
    soft_devices()
    if importlib.util.find_spec("ibverbs") is None:
        missing("PyPI's ibverbs (in the extra dev)")
    theirs = Theirs(DEVICES[1])
    ours = open_end(DEVICES[0], MIB, 1, 16)
    try:
        qp = ours.qps[0]
        qp.to_init()
        qp.to_rtr(theirs.info.qp_num, 7, MTU_4096, gid=bytes(theirs.info.gid), gid_index=GID)
        theirs.connect(ours)
        qp.to_rts(7, timeout=PATIENT)
        yield ours, theirs
    finally:
        ours.context.close()
        for thing in (theirs.qp, theirs.region, theirs.cq, theirs.pd, theirs.context):
            thing.close()


def test_the_extension_writes_and_they_are_told(sides: tuple[End, Theirs]) -> None:
    ours, theirs = sides
    theirs.qp.post_recv(theirs.ib.RecvWR(wr_id=5, sg_list=[]))
    ours.memory[:] = np.random.default_rng(1).integers(0, 256, MIB, dtype=np.uint8)
    entries = rows((0, 100, 70_001), (70_001, 70_101, MIB - 70_101))
    target = theirs.memory.ctypes.data
    assert ours.qps[0].write(ours.region, entries, target, MIB, theirs.region.rkey, imm=0xABCD) == 3
    told = theirs.await_one()
    assert (int(told.wr_id), int(told.imm_data)) == (5, 0xABCD)
    ours.collect(3, 60.0)
    np.testing.assert_array_equal(theirs.memory[100:], ours.memory[: MIB - 100])
    assert not theirs.memory[:100].any()


def test_they_write_and_the_extension_is_told(sides: tuple[End, Theirs]) -> None:
    ours, theirs = sides
    ib = theirs.ib
    ours.qps[0].receive(1)
    theirs.memory[:] = np.random.default_rng(2).integers(0, 256, MIB, dtype=np.uint8)
    theirs.qp.post_send(
        ib.SendWR(
            wr_id=1,
            sg_list=[ib.SGE(theirs.region, MIB)],
            opcode=ib.WROpcode.RDMA_WRITE_WITH_IMM,
            send_flags=ib.SendFlags.SIGNALED,
            remote_addr=ours.region.address,
            rkey=ours.region.rkey,
            imm_data=77,
        )
    )
    record = ours.collect(1, 60.0)[0]
    assert (record["imm"], record["receive"], record["byte_len"]) == (77, 1, MIB)
    assert int(theirs.await_one().wr_id) == 1
    np.testing.assert_array_equal(ours.memory, theirs.memory)
