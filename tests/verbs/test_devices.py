"""The scan of devices, ports and GIDs over a made-up /sys, and the choice with its reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jaxrl_sync.cli import main
from jaxrl_sync.transfer.verbs import counters
from jaxrl_sync.transfer.verbs.cli import describe, lines
from jaxrl_sync.transfer.verbs.devices import Choice, Port, chain, choose, distance, rails, scan
from jaxrl_sync.transfer.verbs.errors import VerbsError

LINK_LOCAL = "fe80:0000:0000:0000:5054:00ff:fe77:0001"
IPV4 = "0000:0000:0000:0000:0000:ffff:0a4d:0001"
IPV6 = "2001:0db8:0000:0000:0000:0000:0000:0001"
ZERO = ":".join(["0000"] * 8)


def make(
    root: Path,
    device: str,
    gids: list[tuple[str, str, str]],
    *,
    state: str = "4: ACTIVE",
    layer: str = "Ethernet",
    rate: str = "100 Gb/sec (4X EDR)",
    numa: int = 0,
    pkeys: tuple[str, ...] = ("0xffff",),
    pci: str = "",
) -> None:
    """A device with one port; ``gids`` are (text, kind, interface), ``pci`` its chain of buses."""
    port = root / "ib" / device / "ports" / "1"
    for folder in ("gids", "gid_attrs/types", "gid_attrs/ndevs"):
        (port / folder).mkdir(parents=True)
    place = root / "devices" / (pci or f"platform/{device}")
    place.mkdir(parents=True, exist_ok=True)
    (port.parents[1] / "device").symlink_to(place)
    (place / "numa_node").write_text(f"{numa}\n")
    (port / "pkeys").mkdir()
    for index, key in enumerate(pkeys):
        (port / "pkeys" / str(index)).write_text(key + "\n")
    for name, text in [("state", state), ("link_layer", layer), ("rate", rate), ("lid", "0x1a")]:
        (port / name).write_text(text + "\n")
    for index, (gid, kind, netdev) in enumerate(gids):
        (port / "gids" / str(index)).write_text(gid + "\n")
        if kind:
            (port / "gid_attrs" / "types" / str(index)).write_text(kind + "\n")
            (port / "gid_attrs" / "ndevs" / str(index)).write_text(netdev + "\n")


def ports(root: Path, down: tuple[str, ...] = ()) -> list[Port]:
    for name in ("eth0", "eth1", "docker0"):
        (root / "net" / name).mkdir(parents=True, exist_ok=True)
        (root / "net" / name / "operstate").write_text("down\n" if name in down else "up\n")
    return scan(root / "ib", root / "net")


def test_prefers_a_routable_v2_address_wherever_it_stands(tmp_path: Path) -> None:
    table = [(LINK_LOCAL, "IB/RoCE v1", "eth0"), (LINK_LOCAL, "RoCE v2", "eth0"), (ZERO, "", "")]
    make(tmp_path, "mlx5_0", [*table, (IPV4, "IB/RoCE v1", "eth0"), (IPV4, "RoCE v2", "eth0")])
    chosen = choose(ports(tmp_path))
    assert (chosen.gid.index, chosen.port.lid, chosen.port.rate_gbps) == (4, 0x1A, 100.0)
    assert chosen.reason == "mlx5_0:1 (Ethernet, NUMA 0, 100 Gb/s, ACTIVE), GID 4: RoCE v2, 10.77.0.1 on eth0"


def test_only_ipv6_is_fine_and_link_local_the_last_resort(tmp_path: Path) -> None:
    make(tmp_path, "a", [(LINK_LOCAL, "RoCE v2", "eth0"), (IPV6, "RoCE v2", "eth0")])
    assert choose(ports(tmp_path)).gid.index == 1
    assert choose(ports(tmp_path), Choice(cidr="fe80::/10")).reason.endswith("reaches the same link only")


def test_unreadable_entries_hide_nothing(tmp_path: Path) -> None:
    make(tmp_path, "a", [("", "", ""), ("not a gid", "RoCE v2", "eth0"), (IPV4, "RoCE v2", "eth0")])
    (tmp_path / "ib" / "a" / "ports" / "1" / "gids" / "0").unlink()
    (tmp_path / "ib" / "a" / "ports" / "1" / "gids" / "0").mkdir()
    assert choose(ports(tmp_path)).gid.index == 2


def test_overlays_and_interfaces_that_are_down_come_last_or_not_at_all(tmp_path: Path) -> None:
    make(tmp_path, "a", [(IPV4, "RoCE v2", "docker0"), (IPV6, "RoCE v2", "eth1")])
    assert choose(ports(tmp_path)).gid.index == 1
    assert choose(ports(tmp_path, down=("eth1",))).gid.index == 0
    with pytest.raises(VerbsError, match="interface eth1 is down"):
        choose(ports(tmp_path, down=("eth1",)), Choice(family=6))


def test_override_and_its_error(tmp_path: Path) -> None:
    make(tmp_path, "a", [(LINK_LOCAL, "IB/RoCE v1", "eth0"), (IPV4, "RoCE v2", "eth0")])
    assert "as configured" in choose(ports(tmp_path), Choice(gid_index=0)).reason
    with pytest.raises(VerbsError, match=r"a:1 has no GID 3 as configured; it has \[0, 1\]"):
        choose(ports(tmp_path), Choice(gid_index=3))


def test_ports_near_then_fast_then_by_name(tmp_path: Path) -> None:
    good = [(IPV4, "RoCE v2", "eth0")]
    make(tmp_path, "b", good, numa=0)
    make(tmp_path, "a", good, numa=1, rate="400 Gb/sec (4X NDR)")
    make(tmp_path, "c", good, numa=0, state="1: DOWN", rate="400 Gb/sec (4X NDR)")
    make(tmp_path, "d", good, numa=0, rate="200 Gb/sec (4X HDR)")
    found = ports(tmp_path)
    assert choose(found, Choice(numa=0)).port.device == "d"
    assert choose(found).port.device == "a"
    assert choose(found, Choice(exclude=("a", "d:1"))).port.device == "b"
    assert choose(found, Choice(include=("b*",))).port.device == "b"


def test_every_refusal_says_why(tmp_path: Path) -> None:
    with pytest.raises(VerbsError, match="the kernel lists no RDMA device"):
        choose(scan(tmp_path / "none"))
    make(tmp_path, "a", [], state="1: DOWN")
    with pytest.raises(
        VerbsError, match=r"no usable RDMA port \(a:1: DOWN, expected ACTIVE: check cable and"
    ):
        choose(ports(tmp_path))
    with pytest.raises(VerbsError, match="a:1: not among b"):
        choose(ports(tmp_path), Choice(include=("b",)))


def test_empty_table_and_v1_only_are_named(tmp_path: Path) -> None:
    make(tmp_path, "a", [(ZERO, "", "")])
    with pytest.raises(VerbsError, match="a:1 has no usable GID .the table is empty"):
        choose(ports(tmp_path))
    make(tmp_path, "b", [(IPV4, "IB/RoCE v1", "eth0")])
    with pytest.raises(VerbsError, match="b:1 has no usable GID .0: RoCE v1 isn't routed"):
        choose(ports(tmp_path))


def test_infiniband_needs_no_address(tmp_path: Path) -> None:
    make(tmp_path, "a", [(LINK_LOCAL, "IB/RoCE v1", "")], layer="InfiniBand")
    assert choose(ports(tmp_path)).reason.endswith("GID 0: InfiniBand GID")


GOOD = [(IPV4, "RoCE v2", "eth0")]


def test_partition_key_is_found_by_value_full_members_first(tmp_path: Path) -> None:
    make(tmp_path, "a", GOOD, pkeys=("0xffff", "0x0000", "0x0012", "0x8012", "0x0034"))
    found = ports(tmp_path)
    assert choose(found).pkey_index == 0
    chosen = choose(found, Choice(pkey=0x0012))
    assert (chosen.pkey_index, chosen.reason.endswith(", P_Key 3: 0x8012")) == (3, True)
    assert choose(found, Choice(pkey=0x8034)).pkey_index == 4
    with pytest.raises(
        VerbsError, match="a:1 has no P_Key 0x0056 as configured; it has 0xffff, 0x0012, 0x80"
    ):
        choose(found, Choice(pkey=0x56))
    with pytest.raises(VerbsError, match="no P_Key 0x8000"):
        choose(found, Choice(pkey=0x8000))


def gpu(root: Path, chain_: str, numa: int) -> Path:
    """A GPU at the end of a chain of buses; the folder of links by address."""
    folder = root / "devices" / chain_
    folder.mkdir(parents=True)
    (folder / "numa_node").write_text(f"{numa}\n")
    (root / "pci").mkdir(exist_ok=True)
    (root / "pci" / folder.name).symlink_to(folder)
    return root / "pci"


def test_distance_walks_the_ancestors(tmp_path: Path) -> None:
    """Not by prefixes of paths: 0000:00:01.0 and 0000:00:01.00 would be told apart, buses 0 and 1 too."""
    switch = "pci0000:00/0000:00:01.0/0000:01:00.0"
    pci = gpu(tmp_path, f"{switch}/0000:02:00.0/0000:03:00.0", 0)
    for name, where, numa in [
        ("near", f"{switch}/0000:02:01.0/0000:04:00.0", 0),
        ("root", "pci0000:00/0000:00:02.0/0000:05:00.0", 0),
        ("node", "pci0000:10/0000:10:01.0/0000:11:00.0", 0),
        ("far", "pci0000:80/0000:80:01.0/0000:81:00.0", 1),
    ]:
        make(tmp_path, name, GOOD, numa=numa, pci=where)
    choice = Choice(near="0000:03:00.0")
    found = {port.device: distance(port, choice, pci) for port in ports(tmp_path)}
    assert {name: steps for name, (steps, _) in found.items()} == {"near": 0, "root": 1, "node": 2, "far": 3}
    assert found["near"][1] == "behind one switch with 0000:03:00.0"
    assert found["far"][1] == "on NUMA node 1, memory on 0"
    assert chain(tmp_path / "ib" / "near" / "device")[0] == "pci0000:00"
    with pytest.raises(VerbsError, match="no PCI device 0000:99:00.0 is here"):
        distance(ports(tmp_path)[0], Choice(near="0000:99:00.0"), pci)


def test_rails_are_different_ports_and_face_each_other(tmp_path: Path) -> None:
    make(tmp_path, "b", GOOD, rate="400 Gb/sec (4X NDR)")
    make(tmp_path, "a", GOOD)
    make(tmp_path, "c", GOOD, rate="400 Gb/sec (4X NDR)")
    make(tmp_path, "d", GOOD, state="1: DOWN")
    found = ports(tmp_path)

    def names(count: int, include: tuple[str, ...] = ()) -> list[str]:
        return [chosen.port.name for chosen in rails(found, Choice(include), count)]

    assert names(1) == ["b:1"] and names(2) == ["b:1", "c:1"] and names(3) == ["a:1", "b:1", "c:1"]
    assert names(2, ("c", "a:1")) == ["c:1", "a:1"], "as named"
    with pytest.raises(VerbsError, match="4 rails are wanted, usable ports are b:1, c:1, a:1"):
        names(4)
    with pytest.raises(VerbsError, match="d:1: DOWN"):
        names(2, ("a", "d"))
    with pytest.raises(VerbsError, match="2 rails are wanted, but of a:1, a:1 one is named twice"):
        names(2, ("a", "a:1"))


def test_counters_of_a_port(tmp_path: Path) -> None:
    make(tmp_path, "a", GOOD)
    folder = tmp_path / "ib" / "a" / "ports" / "1"
    for kind, name, text in [
        ("counters", "port_xmit_data", "1000"),
        ("counters", "unreadable", "N/A (no PMA)"),
        ("hw_counters", "completer_retry_err", "3"),
        ("hw_counters", "rcvd_pkts", "7"),
    ]:
        (folder / kind).mkdir(exist_ok=True)
        (folder / kind / name).write_text(text + "\n")
    before = counters.read("a", 1, tmp_path / "ib")
    assert before == {"port_xmit_data": 1000, "completer_retry_err": 3, "rcvd_pkts": 7}
    assert counters.read("b", 1, tmp_path / "ib") == {}
    after = {**before, "port_xmit_data": 1500, "completer_retry_err": 5, "rcvd_pkts": 2}
    changes = counters.moved(before, after)
    assert changes == {"port_xmit_data": 500, "completer_retry_err": 2, "rcvd_pkts": 2}
    assert counters.trouble(changes) == {"completer_retry_err": 2}


def test_command_line_shows_ports_ranks_and_the_choice(fake_path: str, tmp_path: Path) -> None:
    make(tmp_path, "a", [(LINK_LOCAL, "IB/RoCE v1", "eth0"), (IPV4, "RoCE v2", "eth0")])
    text = "\n".join(lines(describe(Choice(), tmp_path / "ib")))
    assert "port       a:1 ACTIVE, Ethernet, 100 Gb/s, NUMA 0" in text
    assert "GID 0   unusable RoCE v1 isn't routed" in text
    assert "GID 1   rank 0   RoCE v2, 10.77.0.1 on eth0" in text
    assert text.splitlines()[-1].startswith("chosen     a:1 (Ethernet")
    assert "memlock" in text
    assert "device      RDMA device a not found among 2" in text


def test_command_line_asks_devices_that_open(fake_path: str, tmp_path: Path) -> None:
    make(tmp_path, "fake0", [*GOOD, *GOOD], pci="pci0000:00/0000:00:01.0/0000:01:00.0")
    folder = tmp_path / "ib" / "fake0" / "ports" / "1" / "hw_counters"
    folder.mkdir()
    (folder / "completer_retry_err").write_text("3\n")
    found = describe(Choice(), tmp_path / "ib")
    port = found["ports"][0]
    assert port["device"]["max_qp_wr"] == 4096 and port["device"]["active_mtu"] == 1024
    assert (port["pci"], port["pkeys"]) == ("pci0000:00/0000:00:01.0/0000:01:00.0", ["0xffff"])
    text = "\n".join(lines(found))
    assert "device      firmware fake-1, MTU 1024, messages up to 8388608 bytes, takes dmabufs" in text
    assert "counted     completer_retry_err 3" in text
    assert "2 rails are wanted" in describe(Choice(), tmp_path / "ib", 2)["chosen"]["error"]


def test_command_line_without_devices(fake_path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verbs", "--device", "nothing-like-this"]) == 3
    out = capsys.readouterr().out
    assert "chosen     none: no usable RDMA port" in out
    assert main(["verbs", "--json"]) in (0, 3)
    assert set(json.loads(capsys.readouterr().out)) >= {"library", "ports", "chosen", "memlock_bytes"}
