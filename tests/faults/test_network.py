"""Hosts in namespaces: what they share, what they don't, and that nothing of them stays."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.network import Network, NetworkError, ways
from tests.faults.rules import Edge

LISTEN = (
    "import socket; s = socket.create_server(('0.0.0.0', 7000)); print('up', flush=True); c, _ = s.accept()"
)
SERVE = f"{LISTEN}; c.sendall(c.recv(9))"
SINK = f"{LISTEN}; n = 0\nwhile d := c.recv(1 << 20): n += len(d)\nprint(n)"
DIAL = "import socket, sys; s = socket.create_connection((sys.argv[1], int(sys.argv[2])), float(sys.argv[3]))"
CALL = f"{DIAL}; s.sendall(b'hello'); print(s.recv(9))"
PATIENCE_S = "30"
"""Where it must get through, however slow this machine is just now."""
POUR = f"{DIAL}; s.sendall(bytes(2000000))"


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    if ways() is None:
        pytest.skip("NO NAMESPACES HERE: hosts of their own are not tested")
    with Network(tmp_path_factory.mktemp("network")) as made:
        for name in ("a", "b"):
            made.host(name)
        yield made


def python(network: Network, host: str, code: str, *arguments: str) -> subprocess.Popen[str]:
    command = network.hosts[host].wrap([sys.executable, "-c", code, *arguments])
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_hosts_have_their_own_shared_memory(network: Network) -> None:
    path = "/dev/shm/jaxrl_sync-test-of-hosts"
    space = network.hosts["a"].space
    assert space is not None
    space.run("touch", path)
    assert network.hosts["a"].segments("jaxrl_sync-test-of") == ["jaxrl_sync-test-of-hosts"]
    assert network.hosts["b"].segments("jaxrl_sync-test-of") == [] and not os.path.exists(path)


def test_hosts_reach_the_proxy_and_not_each_other(network: Network) -> None:
    server = python(network, "a", SERVE)
    try:
        assert server.stdout is not None and server.stdout.readline() == "up\n"
        address = network.hosts["a"].address
        direct = python(network, "b", CALL, address, "7000", "3")
        edge = Edge("b", f"{address}:7000", "data")
        through = python(network, "b", CALL, *network.proxy.listen(edge).rsplit(":", 1), PATIENCE_S)
        assert through.communicate(timeout=60)[0] == "b'hello'\n"
        assert network.proxy.counts()[edge] == (5, 5)
        out, err = direct.communicate(timeout=60)
        assert out == "" and ("timed out" in err or "No route" in err)
        assert server.wait(60) == 0
    finally:
        server.kill()
        server.communicate()


def test_a_host_without_its_cable_is_silent_and_comes_back(network: Network) -> None:
    server = python(network, "a", SERVE)
    try:
        assert server.stdout is not None and server.stdout.readline() == "up\n"
        edge = Edge("b", f"{network.hosts['a'].address}:7000", "data")
        where = network.proxy.listen(edge).rsplit(":", 1)
        with network.unplugged("b"):
            assert python(network, "b", CALL, *where, "3").communicate(timeout=60)[0] == ""
        assert python(network, "b", CALL, *where, PATIENCE_S).communicate(timeout=60)[0] == "b'hello'\n"
    finally:
        server.kill()
        server.communicate()


def test_a_process_on_a_host_keeps_its_id_and_is_seen_there(network: Network) -> None:
    child = python(network, "b", "import os,time; print(os.getpid(), flush=True); time.sleep(60)")
    try:
        assert child.stdout is not None and int(child.stdout.readline()) == child.pid
        assert child.pid in network.hosts["b"].processes()
        assert child.pid not in network.hosts["a"].processes()
    finally:
        child.kill()
        child.communicate()


def test_another_site_is_behind_a_line_of_a_rate(tmp_path: Path) -> None:
    if ways() is None:
        pytest.skip("NO NAMESPACES HERE: sites are not tested")
    with Network(tmp_path) as network:
        network.site("far", "80mbit")
        network.host("c", site="far", isolated=False)
        network.host("d", site="far", isolated=False)
        seconds = {}
        for sender in ("d", "switch"):
            server = python(network, "c", SINK)
            assert server.stdout is not None and server.stdout.readline() == "up\n"
            start = time.monotonic()
            host = network.switch if sender == "switch" else network.hosts[sender]
            subprocess.run(
                host.wrap([sys.executable, "-c", POUR, network.hosts["c"].address, "7000", PATIENCE_S]),
                check=True,
                timeout=60,
            )
            assert server.communicate(timeout=60)[0] == "2000000\n"
            seconds[sender] = time.monotonic() - start
        assert seconds["switch"] >= 0.19  # 16 Mbit less the bucket's burst, at 80 Mb/s


def test_namespaces_go_with_their_network(tmp_path: Path) -> None:
    if ways() is None:
        pytest.skip("NO NAMESPACES HERE")
    network = Network(tmp_path)
    host = network.host("e")
    assert host.space is not None
    pid = host.space.pid
    network.close()
    assert not os.path.exists(f"/proc/{pid}")
    network.close()


def test_an_unknown_way_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXRL_SYNC_FAULTS_NET", "magic")
    ways.cache_clear()
    try:
        with pytest.raises(ValueError, match="magic"):
            ways()
        monkeypatch.setenv("JAXRL_SYNC_FAULTS_NET", "loopback")
        assert ways() is None
    finally:
        ways.cache_clear()


def test_sites_need_namespaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXRL_SYNC_FAULTS_NET", "loopback")
    ways.cache_clear()
    try:
        with Network(tmp_path) as network:
            assert network.host("a").address == "127.0.0.1"
            with pytest.raises(NetworkError, match="sites need namespaces"):
                network.host("b", site="far")
    finally:
        ways.cache_clear()
