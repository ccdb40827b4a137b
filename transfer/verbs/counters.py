"""Counters that the device keeps of each port, as the kernel lists them: bytes, packets, retransmissions."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from jaxrl_sync.transfer.verbs.devices import SYSFS

FOLDERS = ("counters", "hw_counters")
TROUBLE = (
    "retry",  # completer_retry_err, local_ack_timeout_err of others
    "timeout",
    "rnr",
    "out_of_sequence",
    "seq_err",
    "packet_seq",
    "discard",
    "errors",
    "err",
    "wait",  # port_xmit_wait: congestion
    "cnp",
    "ecn",
)
"""Words in names of counters that stand still on a healthy path."""


def read(device: str, port: int, sysfs: Path = SYSFS) -> dict[str, int]:
    """Every counter of a port by name. Empty where the driver has none; what can't be read is left out."""
    found: dict[str, int] = {}
    for folder in FOLDERS:
        for path in sorted((sysfs / device / "ports" / str(port) / folder).glob("*")):
            try:
                found[path.name] = int(path.read_text())
            except (OSError, ValueError):
                continue
    return found


def moved(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    """By how much each counter moved, without those that didn't. One that was cleared counts anew."""
    changes = {name: now - before.get(name, 0) for name, now in after.items()}
    return {name: by if by >= 0 else after[name] for name, by in changes.items() if by}


def trouble(changes: Mapping[str, int]) -> dict[str, int]:
    """Those that tell of losses, retries, congestion or errors."""
    return {name: by for name, by in changes.items() if any(word in name for word in TROUBLE)}
