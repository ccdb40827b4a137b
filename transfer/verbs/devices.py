"""RDMA devices, ports and GIDs of this machine as the kernel lists them, and which one to use and why.

Everything is read from /sys/class/infiniband, entry by entry: in containers and on some drivers single
entries can't be read, and that must not hide the others. Nothing here opens a device.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import os
from collections.abc import Sequence
from pathlib import Path

from jaxrl_sync.transfer.verbs.errors import VerbsError

SYSFS = Path("/sys/class/infiniband")
NETDEVS = Path("/sys/class/net")
PCI = Path("/sys/bus/pci/devices")
MAX_GIDS = 256
MAX_PKEYS = 256
_OVERLAYS = ("docker", "br-", "cni", "flannel", "cali", "virbr", "veth-")
_MAPPED = bytes(10) + b"\xff\xff"


@dataclasses.dataclass(frozen=True)
class Gid:
    """One entry of a port's GID table. ``kind`` is RoCE v1, RoCE v2 or IB, ``netdev`` what it belongs to."""

    index: int
    raw: bytes
    kind: str
    netdev: str = ""
    netdev_up: bool = True

    @property
    def address(self) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
        """The IP address that a RoCE GID is."""
        if self.raw[:12] == _MAPPED:
            return ipaddress.IPv4Address(self.raw[12:])
        return ipaddress.IPv6Address(self.raw)


@dataclasses.dataclass(frozen=True)
class Port:
    """One port of a device. ``rate_gbps`` is speed times width, ``numa`` the device's node or -1.

    ``pkeys`` is the table of partition keys, ``pci`` the chain of buses and bridges down to the device.
    """

    device: str
    number: int
    state: str
    link_layer: str
    rate_gbps: float
    lid: int
    numa: int
    gids: tuple[Gid, ...]
    pkeys: tuple[int, ...] = ()
    pci: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """As filters name it."""
        return f"{self.device}:{self.number}"


@dataclasses.dataclass(frozen=True)
class Choice:
    """What the user wants. Devices as ``mlx5_0``, ``mlx5_0:1``, ``mlx5*``.

    ``gid_index`` overrides the ranking. ``family`` is 4, 6 or 0 for either; ``cidr`` restricts the GID's
    address; ``numa`` is where the memory is, ``near`` the PCI address of a GPU (``0000:3b:00.0``) that it is
    in. ``pkey`` is a partition key by value; without it the first one of the table serves.
    """

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    gid_index: int | None = None
    family: int = 0
    cidr: str = ""
    numa: int = -1
    near: str = ""
    pkey: int | None = None


@dataclasses.dataclass(frozen=True)
class Chosen:
    """A port, its GID, the index of the P_Key, and the reason in words."""

    port: Port
    gid: Gid
    reason: str
    pkey_index: int = 0


def _read(path: Path) -> str:
    """A sysfs file, empty where it can't be read."""
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _parse_gid(text: str) -> bytes:
    try:
        raw = bytes.fromhex(text.replace(":", ""))
    except ValueError:
        return b""
    return raw if len(raw) == 16 else b""


def _gids(folder: Path, link_layer: str, netdevs: Path) -> tuple[Gid, ...]:
    """The entries that are set; an empty slot reads as zeros or as an error."""
    found = []
    for index in range(MAX_GIDS):
        if not (folder / "gids" / str(index)).exists():
            break
        raw = _parse_gid(_read(folder / "gids" / str(index)))
        if not raw or raw == bytes(16):
            continue
        kind = _read(folder / "gid_attrs" / "types" / str(index))
        kind = {"IB/RoCE v1": "IB" if link_layer == "InfiniBand" else "RoCE v1"}.get(kind, kind)
        netdev = _read(folder / "gid_attrs" / "ndevs" / str(index))
        state = _read(netdevs / netdev / "operstate") if netdev else ""
        found.append(Gid(index, raw, kind or "unknown", netdev, state in ("up", "unknown", "")))
    return tuple(found)


def _port(device: Path, folder: Path, netdevs: Path) -> Port:
    layer = _read(folder / "link_layer") or "unknown"
    rate, numa = _read(folder / "rate").split(" "), _read(device / "device" / "numa_node")
    return Port(
        device=device.name,
        number=int(folder.name),
        state=_read(folder / "state").partition(":")[2].strip() or "unknown",
        link_layer=layer,
        rate_gbps=float(rate[0]) if rate[0].replace(".", "", 1).isdigit() else 0.0,
        lid=int(_read(folder / "lid") or "0", 16),
        numa=int(numa) if numa.lstrip("-").isdigit() else -1,
        gids=_gids(folder, layer, netdevs),
        pkeys=_pkeys(folder / "pkeys"),
        pci=chain(device / "device"),
    )


def _pkeys(folder: Path) -> tuple[int, ...]:
    """The table by index; 0 where an entry is empty or can't be read."""
    found = []
    for index in range(MAX_PKEYS):
        if not (folder / str(index)).exists():
            break
        text = _read(folder / str(index))
        found.append(int(text, 16) if text.startswith("0x") else 0)
    return tuple(found)


def chain(device: Path) -> tuple[str, ...]:
    """Root bus, bridges and address of a PCI device in this order; empty for what isn't on a PCI bus."""
    parts = Path(os.path.realpath(device)).parts
    roots = [i for i, part in enumerate(parts) if part.startswith("pci") and ":" in part]
    return parts[roots[0] :] if roots else ()


def scan(sysfs: Path = SYSFS, netdevs: Path = NETDEVS) -> list[Port]:
    """Every port, by device name and number; empty where the kernel has no RDMA."""
    if not sysfs.is_dir():
        return []
    ports = []
    for device in sorted(sysfs.iterdir()):
        folders = (device / "ports").glob("[0-9]*")
        ports += [_port(device, f, netdevs) for f in sorted(folders, key=lambda f: int(f.name))]
    return ports


def rank(gid: Gid, port: Port, choice: Choice) -> tuple[int, str]:
    """How good a GID is (0 is best) and why; -1 if it can't serve."""
    if port.link_layer == "InfiniBand":
        return 0, "InfiniBand GID"
    if gid.kind != "RoCE v2":
        return -1, f"{gid.kind} isn't routed; RoCE v2 is wanted"
    address = gid.address
    if choice.family and address.version != choice.family:
        return -1, f"{address} isn't IPv{choice.family}"
    if choice.cidr and address not in ipaddress.ip_network(choice.cidr):
        return -1, f"{address} is outside of {choice.cidr}"
    if not gid.netdev_up:
        return -1, f"interface {gid.netdev} is down"
    if address.is_link_local:
        return 4, f"RoCE v2, {address} is link-local: reaches the same link only"
    if gid.netdev.startswith(_OVERLAYS):
        return 3, f"RoCE v2 on the overlay {gid.netdev}"
    if not gid.netdev:
        return 2, f"RoCE v2, {address}, interface unknown"
    return (0 if address.version == 4 else 1), f"RoCE v2, {address} on {gid.netdev}"


def best_gid(port: Port, choice: Choice) -> tuple[Gid, str]:
    """The GID to use on a port. VerbsError that lists every entry and what is wrong with it."""
    if choice.gid_index is not None:
        for gid in port.gids:
            if gid.index == choice.gid_index:
                return gid, f"GID {gid.index} as configured ({gid.kind}, {gid.address})"
        have = [g.index for g in port.gids]
        raise VerbsError(0, f"{port.name} has no GID {choice.gid_index} as configured; it has {have}")
    ranked = [(*rank(gid, port, choice), gid) for gid in port.gids]
    usable = sorted((r for r in ranked if r[0] >= 0), key=lambda r: (r[0], r[2].index))
    if not usable:
        why = "; ".join(f"{g.index}: {reason}" for _, reason, g in ranked) or "the table is empty"
        raise VerbsError(0, f"{port.name} has no usable GID ({why}); give its interface an address")
    _, reason, gid = usable[0]
    return gid, f"GID {gid.index}: {reason}"


def pkey_index(port: Port, pkey: int | None) -> int:
    """Where the table of a port has a partition key, full membership (bit 15) first. VerbsError if nowhere.

    Limited and full members of a partition differ in that bit only, and either value finds both.
    """
    if pkey is None:
        return 0
    same = [i for i, value in enumerate(port.pkeys) if value & 0x7FFF == pkey & 0x7FFF and value & 0x7FFF]
    if not same:
        have = ", ".join(f"0x{value:04x}" for value in port.pkeys if value) or "none"
        raise VerbsError(0, f"{port.name} has no P_Key 0x{pkey:04x} as configured; it has {have}")
    return min(same, key=lambda i: (not port.pkeys[i] & 0x8000, i))


def distance(port: Port, choice: Choice, pci: Path = PCI) -> tuple[int, str]:
    """How far the port is from the memory, and in words: 0 one switch, 1 one root, 2 one NUMA node, 3 other.

    Found by walking the ancestors of both PCI devices; where nothing is known, 2.
    """
    other = chain(pci / choice.near) if choice.near else ()
    if choice.near and not other:
        raise VerbsError(0, f"no PCI device {choice.near} is here, expected an address as 0000:3b:00.0")
    numa = int(_read(pci / choice.near / "numa_node") or "-1") if other else choice.numa
    shared = 0
    for ours, theirs in zip(port.pci[:-1], other[:-1], strict=False):
        if ours != theirs:
            break
        shared += 1
    if shared > 2:  # root bus, root port, and at least one bridge more
        return 0, f"behind one switch with {choice.near}"
    if shared > 0:
        return 1, f"under one root with {choice.near}"
    if numa >= 0 and port.numa >= 0 and port.numa != numa:
        return 3, f"on NUMA node {port.numa}, memory on {numa}"
    return 2, f"on NUMA node {port.numa}" if port.numa >= 0 else ""


def _matches(pattern: str, port: Port) -> bool:
    name, _, number = pattern.partition(":")
    if number and number != str(port.number):
        return False
    return port.device.startswith(name[:-1]) if name.endswith("*") else port.device == name


def candidates(ports: Sequence[Port], choice: Choice) -> list[Port]:
    """Active ports that the filters leave, best first: near the memory, then fast, then by name.

    VerbsError that says of each port why it is out.
    """
    out, left = [], []
    for port in ports:
        if choice.include and not any(_matches(p, port) for p in choice.include):
            out.append(f"{port.name}: not among {', '.join(choice.include)}")
        elif any(_matches(p, port) for p in choice.exclude):
            out.append(f"{port.name}: excluded")
        elif port.state != "ACTIVE":
            out.append(f"{port.name}: {port.state}, expected ACTIVE: check cable and switch, or `ip link`")
        else:
            left.append(port)
    if not left:
        why = "; ".join(out) or "the kernel lists no RDMA device: load its driver, or use shm or tcp"
        raise VerbsError(0, f"no usable RDMA port ({why})")
    far = {p: distance(p, choice)[0] for p in left}
    return sorted(left, key=lambda p: (far[p], -p.rate_gbps, p.device, p.number))


def _chosen(port: Port, choice: Choice) -> Chosen:
    gid, reason = best_gid(port, choice)
    index = pkey_index(port, choice.pkey)
    where = distance(port, choice)[1] if choice.near else f"NUMA {port.numa}" if port.numa >= 0 else ""
    facts = [port.link_layer, where, f"{port.rate_gbps:g} Gb/s", "ACTIVE"]
    key = f", P_Key {index}: 0x{port.pkeys[index]:04x}" if choice.pkey is not None else ""
    text = f"{port.name} ({', '.join(fact for fact in facts if fact)}), {reason}{key}"
    return Chosen(port, gid, text, index)


def choose(ports: Sequence[Port], choice: Choice = Choice()) -> Chosen:  # noqa: B008
    """The port and GID to use; the reason names what was compared. VerbsError if there is none."""
    failures = []
    for port in candidates(ports, choice):
        try:
            return _chosen(port, choice)
        except VerbsError as error:
            failures.append(str(error))
    raise VerbsError(0, "; ".join(failures))


def rails(ports: Sequence[Port], choice: Choice, count: int) -> list[Chosen]:
    """``count`` different ports, in the order of ``choice.include`` where that names them one by one.

    Else the best ones in the order of their names: rail i of one machine then faces rail i of its like.

    VerbsError if there are fewer: never is one port taken twice, nor a missing one passed over.
    """
    named = [name for name in choice.include if not name.endswith("*")]
    if count == 1:
        return [choose(ports, choice)]
    if len(named) >= count:
        chosen = [choose(ports, dataclasses.replace(choice, include=(name,))) for name in named[:count]]
        names = [c.port.name for c in chosen]
        if len(set(names)) < count:
            raise VerbsError(0, f"{count} rails are wanted, but of {', '.join(names)} one is named twice")
        return chosen
    found, failures = [], []
    for port in candidates(ports, choice):
        try:
            found.append(_chosen(port, choice))
        except VerbsError as error:
            failures.append(str(error))
    if len(found) < count:
        have = ", ".join(c.port.name for c in found) or "none"
        raise VerbsError(0, "; ".join([f"{count} rails are wanted, usable ports are {have}", *failures]))
    return sorted(found[:count], key=lambda c: (c.port.device, c.port.number))
