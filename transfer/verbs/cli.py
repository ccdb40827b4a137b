"""``jaxrl-sync verbs``: what RDMA this machine has, which port and GID would be chosen and why."""

from __future__ import annotations

import json
import platform
import resource
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxrl_sync.sharding.command_line import Parser
from jaxrl_sync.transfer.verbs import counters
from jaxrl_sync.transfer.verbs.devices import SYSFS, Choice, Port, distance, rails, rank, scan
from jaxrl_sync.transfer.verbs.errors import VerbsError
from jaxrl_sync.transfer.verbs.handshake import MTU_BYTES
from jaxrl_sync.transfer.verbs.native import native
from jaxrl_sync.transfer.verbs.regions import MODULES, PEER_MODULES

_HUGE = Path("/sys/kernel/mm/hugepages")


def describe(choice: Choice = Choice(), sysfs: Path = SYSFS, count: int = 1) -> dict[str, Any]:  # noqa: B008
    """Everything about verbs on this machine as JSON; what is missing is a text under ``error``.

    ``count`` is how many rails are wanted.
    """
    ports = scan(sysfs)
    found: dict[str, Any] = {
        "versions": {"python": platform.python_version(), "kernel": platform.release()},
        "library": _library(),
        "memlock_bytes": _memlock(),
        "huge_pages": _huge_pages(),
        "peer_memory_modules": [m for m in PEER_MODULES if (MODULES / m).exists()],
        "ports": [_port(port, choice, sysfs) for port in ports],
    }
    try:
        found["chosen"] = {"reason": " and ".join(c.reason for c in rails(ports, choice, count))}
    except VerbsError as error:
        found["chosen"] = {"error": str(error)}
    return found


def _library() -> dict[str, Any]:
    try:
        module = native()
        return {"name": module.library_name(), "features": module.features()}
    except VerbsError as error:
        return {"error": str(error)}


def _memlock() -> int | None:
    """Bytes that may be locked; None without a limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def _huge_pages() -> dict[str, int]:
    """Free huge pages by size."""
    return {
        folder.name.removeprefix("hugepages-"): int((folder / "free_hugepages").read_text())
        for folder in sorted(_HUGE.glob("hugepages-*"))
    }


def _device(port: Port) -> dict[str, Any]:
    """What only an open device says: limits, the MTU in use, whether it takes dmabufs."""
    try:
        with native().Context(port.device) as context:
            state = context.query_port(port.number)
            return {
                **context.query_device(),
                "active_mtu": MTU_BYTES.get(state["active_mtu"], 0),
                "max_message_bytes": state["max_message_bytes"],
                "dmabuf": context.dmabuf_supported(),
            }
    except VerbsError as error:
        return {"error": str(error)}


def _distance(port: Port, choice: Choice) -> dict[str, Any]:
    try:
        steps, words = distance(port, choice)
    except VerbsError as error:
        return {"error": str(error)}
    return {"steps": steps, "reason": words}


def _port(port: Port, choice: Choice, sysfs: Path) -> dict[str, Any]:
    gids = []
    for gid in port.gids:
        grade, reason = rank(gid, port, choice)
        row = {"index": gid.index, "address": str(gid.address), "kind": gid.kind, "netdev": gid.netdev}
        gids.append({**row, "rank": grade, "reason": reason})
    return {
        "name": port.name,
        "state": port.state,
        "link_layer": port.link_layer,
        "rate_gbps": port.rate_gbps,
        "lid": port.lid,
        "numa": port.numa,
        "pci": "/".join(port.pci),
        "pkeys": [f"0x{key:04x}" for key in port.pkeys],
        "distance": _distance(port, choice),
        "device": _device(port),
        "counters": counters.read(port.device, port.number, sysfs),
        "gids": gids,
    }


def lines(found: dict[str, Any]) -> list[str]:
    """The same for people."""
    library, limit = found["library"], found["memlock_bytes"]
    if "error" in library:
        out = [f"library    {library['error']}"]
    else:
        has = ", ".join(sorted(n for n, yes in library["features"].items() if yes)) or "nothing optional"
        out = [f"library    {library['name']} ({has})"]
    out.append(f"memlock    {'unlimited' if limit is None else f'{limit} bytes: registering more fails'}")
    huge = ", ".join(f"{free} free of {size}" for size, free in found["huge_pages"].items())
    out.append(f"huge pages {huge or 'none configured'}")
    direct = ", ".join(found["peer_memory_modules"]) or "no peer memory module"
    dmabuf = (
        "dmabuf in the library" if library.get("features", {}).get("dmabuf") else "no dmabuf in the library"
    )
    out.append(f"GPU direct {direct}; {dmabuf}")
    for port in found["ports"]:
        numa = f", NUMA {port['numa']}" if port["numa"] >= 0 else ""
        rate = f"{port['rate_gbps']:g} Gb/s"
        out.append(f"port       {port['name']} {port['state']}, {port['link_layer']}, {rate}{numa}")
        device = port["device"]
        if "error" in device:
            out.append(f"  device      {device['error']}")
        else:
            sizes = f"MTU {device['active_mtu']}, messages up to {device['max_message_bytes']} bytes"
            out.append(
                f"  device      firmware {device['firmware'] or '-'}, {sizes}, " + _dmabuf(device["dmabuf"])
            )
        bad = counters.trouble({name: value for name, value in port["counters"].items() if value})
        if bad:
            out.append("  counted     " + ", ".join(f"{name} {value}" for name, value in bad.items()))
        for gid in port["gids"]:
            grade = "unusable" if gid["rank"] < 0 else f"rank {gid['rank']}"
            out.append(f"  GID {gid['index']:<3} {grade:<8} {gid['reason']}")
    chosen = found["chosen"]
    out.append(f"chosen     {chosen.get('reason') or 'none: ' + chosen['error']}")
    return out


def _dmabuf(supported: bool) -> str:
    return "takes dmabufs" if supported else "no dmabufs"


def main(words: Sequence[str]) -> int:
    """Print it; 3 if there is no port to use. ``bench`` measures instead."""
    if words[:1] == ["bench"]:
        from jaxrl_sync.transfer.bench.cli import main as bench_main

        return bench_main(words[1:])
    parser = Parser("jaxrl-sync verbs", description=__doc__)
    parser.add_argument("--device", action="append", default=[], help="only this: mlx5_0, mlx5_0:1, mlx5*")
    parser.add_argument("--exclude", action="append", default=[], help="not this")
    parser.add_argument("--gid-index", type=int, help="instead of the best one")
    parser.add_argument("--pkey", type=lambda text: int(text, 0), help="partition key by value: 0x8012")
    parser.add_argument("--near", default="", help="PCI address of a GPU: the nearest port is taken")
    parser.add_argument("--rails", type=int, default=1, help="how many ports")
    parser.add_argument("--json", action="store_true", help="for programs and bug reports")
    options = parser.parse_args(words)
    wishes = {"gid_index": options.gid_index, "pkey": options.pkey, "near": options.near}
    choice = Choice(tuple(options.device), tuple(options.exclude), **wishes)
    found = describe(choice, count=max(1, options.rails))
    print(json.dumps(found, indent=2) if options.json else "\n".join(lines(found)))
    return 3 if "error" in found["chosen"] or "error" in found["library"] else 0
