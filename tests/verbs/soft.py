"""Helpers for tests on the two soft-RoCE devices of tests/vm/run."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import pytest

from jaxrl_sync.transfer.verbs.devices import Choice, choose, scan
from jaxrl_sync.transfer.verbs.endpoint import Endpoint
from jaxrl_sync.transfer.verbs.errors import VerbsError
from jaxrl_sync.transfer.verbs.settings import VerbsSettings

DEVICES = ("rxe0", "rxe1")
ADDRESSES = {"rxe0": "10.77.0.1", "rxe1": "10.77.0.2"}
LONG_S = 120.0  # in an emulated guest on a busy machine
PATIENT = 17
"""``timeout`` of queue pairs: 3.8 s until a silent peer is given up. On a busy machine soft-RoCE sends again
what is merely slow, and Linux 6.1 then takes a write for an invalid one now and then."""
DEBIAN = "/usr/lib/python3/dist-packages"
LEFT_OUT: set[str] = set()
"""Reasons for which tests were rightly skipped in the VM: the end of its run says them aloud."""


def soft_devices() -> None:
    """Skip where the two devices aren't."""
    names = {port.device for port in scan()}
    if not set(DEVICES) <= names:
        pytest.skip(f"needs the RDMA devices rxe0 and rxe1 of tests/vm/run, found {sorted(names)}")


def pyverbs_here() -> None:
    """Debian's bindings serve virtual environments of the same Python; `missing` where there are none."""
    if importlib.util.find_spec("pyverbs") is None:
        sys.path.append(DEBIAN)
    if sys.version_info[:2] != (3, 11) or importlib.util.find_spec("pyverbs") is None:
        missing("python3-pyverbs")


def missing(package: str) -> NoReturn:
    """Skip a test that needs a package; in the VM, which brings all of them for Python 3.11, it fails.

    With another Python the VM's run says aloud what it left out.
    """
    found = "{}.{}".format(*sys.version_info[:2])
    if os.environ.get("RDMA_VM") and found == "3.11":
        pytest.fail(f"{package} is missing in the VM, which is to have it for Python 3.11")
    reason = f"needs {package}, found none for Python {found}"
    if os.environ.get("RDMA_VM"):
        LEFT_OUT.add(reason)
    pytest.skip(reason)


def settings_for(*devices: str, **options: Any) -> VerbsSettings:
    """Settings that name the devices in order, one rail each."""
    options = {"timeout": PATIENT, **options}
    return VerbsSettings(choice=Choice(include=devices), rails=len(devices), **options)


def end_on(*devices: str, pairs: int = 2, sends: int = 64, receives: int = 8, **options: Any) -> Endpoint:
    """An endpoint on one or more devices."""
    settings = settings_for(*devices, **options)
    return Endpoint(settings, f"the peer of {'+'.join(devices)}", pairs=pairs, sends=sends, receives=receives)


def rows(*entries: tuple[int, int, int]) -> npt.NDArray[np.uint64]:
    """Entries of a write: (local offset, remote offset, bytes)."""
    return np.array(entries, np.uint64).reshape(-1, 3)


def bring_up(netdev: str) -> None:
    """An interface that was down, with what it lost (see tests/vm/guest); waits until both ports serve."""
    from tests.transfer.models import until  # brings in jax, which the zygote does without

    ours, theirs = {"veth0": (1, 2), "veth1": (2, 1)}[netdev]
    for command in (
        f"link set {netdev} up",
        f"neigh replace 10.77.0.{theirs} lladdr 52:54:00:77:00:0{theirs} dev {netdev} nud permanent",
        f"route replace 10.77.0.{theirs}/32 dev {netdev} src 10.77.0.{ours} table {99 + ours}",
    ):
        subprocess.run(["ip", *command.split()], check=True)
    until(lambda: all(map(_serves, DEVICES)), LONG_S)


def _serves(device: str) -> bool:
    """Whether an edge would take it: its port is active a moment before its interface is told to be up."""
    try:
        return str(choose(scan(), Choice(include=(device,))).gid.address) == ADDRESSES[device]
    except VerbsError:
        return False
