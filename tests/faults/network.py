"""Hosts of a test: each with a network and a mount namespace of its own and its own /dev/shm, or plain names.

A *switch* namespace holds a bridge with every host on an isolated port: hosts reach the switch, where the
fault proxy listens, and not each other. Nothing but processes holds the namespaces, and those end with their
standard input: whatever kills the test, nothing stays. As root through ``unshare -nm``, else ``-Urnm``. Where
neither is allowed (or ``JAXRL_SYNC_FAULTS_NET=loopback``) hosts are names for this machine: bytes still go
through the proxy, but memory is shared.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.faults.proxy_client import ROOT, ProxyClient

CHOICE = "JAXRL_SYNC_FAULTS_NET"
NETWORK = "10.213"
COMMAND_S = 20.0


class NetworkError(Exception):
    """A namespace, a device or a queue could not be made; the message is the command's own."""


@functools.cache
def ways() -> tuple[str, ...] | None:
    """How namespaces can be made here, as arguments of unshare; None where that is refused or unwanted."""
    choice = os.environ.get(CHOICE, "auto")
    if choice not in ("auto", "loopback", "namespaces"):
        raise ValueError(f"{CHOICE}={choice!r}, expected auto, loopback or namespaces")
    if choice == "loopback":
        return None
    tools = [name for name in ("unshare", "nsenter", "ip") if shutil.which(name) is None]
    why = f"{' and '.join(tools)} missing" if tools else ""
    for flags in () if tools else (("-nm",), ("-Urnm",)):
        probe = "ip link add t0 type bridge && ip link add t1 type veth peer name t2"
        done = subprocess.run(
            ["unshare", *flags, "sh", "-c", probe], capture_output=True, text=True, timeout=COMMAND_S
        )
        if done.returncode == 0:
            return flags
        why = done.stderr.strip()
    if choice == "namespaces":
        raise NetworkError(f"no namespaces: {why}")
    warnings.warn(f"NO NAMESPACES ({why}): hosts share this machine's network and /dev/shm", stacklevel=2)
    return None


class Space:
    """A process that holds a network and a mount namespace. Owns it: ``close()``."""

    def __init__(self, command: Sequence[str], entered: bool) -> None:
        """``command`` makes the namespaces; ``entered``: they belong to a user namespace of ours."""
        script = "mount -t tmpfs -o mode=1777 tmpfs /dev/shm && ip link set lo up && echo up && exec cat"
        pipe = subprocess.PIPE
        self._holder = subprocess.Popen(
            [*command, "sh", "-c", script], stdin=pipe, stdout=pipe, stderr=pipe, text=True
        )
        self._entered = entered
        assert self._holder.stdout is not None and self._holder.stderr is not None
        if self._holder.stdout.readline().strip() != "up":
            raise NetworkError(self._holder.stderr.read().strip())
        self.pid = self._holder.pid

    def wrap(self, command: Sequence[str]) -> list[str]:
        """The command as it runs in here; the process keeps its id, its pipes and its signals."""
        user = ["-U", "--preserve-credentials"] if self._entered else []
        return ["nsenter", "-t", str(self.pid), *user, "-n", "-m", f"--wd={ROOT}", *command]

    def run(self, *command: str) -> str:
        """Run a command in here to its end; its output. NetworkError with what it said."""
        done = subprocess.run(self.wrap(command), capture_output=True, text=True, timeout=COMMAND_S)
        if done.returncode:
            raise NetworkError(f"{' '.join(command)}: {done.stderr.strip()}")
        return done.stdout

    def close(self) -> None:
        """Let the namespaces go. Idempotent."""
        for stream in (self._holder.stdin, self._holder.stdout, self._holder.stderr):
            if stream is not None:
                stream.close()
        try:
            self._holder.wait(5)
        except subprocess.TimeoutExpired:
            self._holder.kill()
            self._holder.wait(5)


class Host:
    """One machine of the test: ``address`` is where its processes listen."""

    def __init__(self, name: str, address: str, space: Space | None, site: str = "") -> None:
        self.name, self.address, self.space, self.site = name, address, space, site

    def wrap(self, command: Sequence[str]) -> list[str]:
        """The command as it runs on this host."""
        return self.space.wrap(command) if self.space is not None else list(command)

    def segments(self, prefix: str) -> list[str]:
        """Names in this host's /dev/shm that start with ``prefix``."""
        names = self.space.run("ls", "/dev/shm").split() if self.space else os.listdir("/dev/shm")
        return sorted(name for name in names if name.startswith(prefix))

    def processes(self) -> list[int]:
        """Ids of the processes in this host's network namespace; none are known without one."""
        if self.space is None:
            return []
        return [pid for pid in _pids() if _namespace(pid) == _namespace(self.space.pid)]


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def _namespace(pid: int) -> str:
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/{pid}/ns/net")
    return ""


class Network:
    """The hosts and the proxy between them. Owns all of it: ``close()`` or ``with``.

    ``site``: hosts of another site are behind a switch of their own, reached over a line of ``rate`` (a token
    bucket on both ends, tc-tbf(8)); those of one site reach each other there. Sites need namespaces.
    """

    def __init__(self, folder: Path) -> None:
        self.real = ways() is not None
        self.hosts: dict[str, Host] = {}
        self._spaces: list[Space] = []
        self._switches: dict[str, Space] = {}
        self._count = 0
        self._folder = folder
        try:
            if self.real:
                self._switch("", 0)
                self.proxy = ProxyClient(folder, self._switches[""].wrap, f"{NETWORK}.0.1")
            else:
                self.proxy = ProxyClient(folder)
        except BaseException:
            self._close_spaces()
            raise

    @property
    def switch(self) -> Host:
        """The machine of the proxy: it reaches every host and every host reaches it."""
        return Host("switch", self.proxy.host, self._switches.get(""))

    def _unshare(self, inside: Space | None) -> Space:
        flags = ways()
        assert flags is not None
        if inside is None:
            space = Space(["unshare", *flags], entered="-Urnm" in flags)
        else:
            space = Space(inside.wrap(["unshare", "-nm"]), entered="-Urnm" in flags)
        self._spaces.append(space)
        return space

    def _switch(self, site: str, number: int) -> Space:
        space = self._unshare(self._switches.get(""))
        self._switches[site] = space
        space.run("ip", "link", "add", "bridge", "type", "bridge")
        space.run("ip", "addr", "add", f"{NETWORK}.{number}.1/24", "dev", "bridge")
        space.run("ip", "link", "set", "bridge", "up")
        return space

    def site(self, name: str, rate: str = "") -> None:
        """Another site, and the line to it: ``rate`` as tc writes it (100mbit), unlimited without."""
        number = len(self._switches)
        home, there = self._switches[""], self._switch(name, number)
        line = ("ip", "link", "add", f"line{number}", "type", "veth", "peer", "name", "line", "netns")
        home.run(*line, str(there.pid))
        ends = ((home, f"line{number}", 1), (there, "line", 2))
        for space, device, last in ends:
            space.run("ip", "addr", "add", f"{NETWORK}.{100 + number}.{last}/24", "dev", device)
            space.run("ip", "link", "set", device, "up")
            space.run("sysctl", "-qw", "net.ipv4.ip_forward=1")
            if rate:
                bucket = ("tbf", "rate", rate, "burst", "64kb", "latency", "50ms")
                space.run("tc", "qdisc", "add", "dev", device, "root", *bucket)
        home.run("ip", "route", "add", f"{NETWORK}.{number}.0/24", "via", f"{NETWORK}.{100 + number}.2")
        there.run("ip", "route", "add", "default", "via", f"{NETWORK}.{100 + number}.1")

    def host(self, name: str, site: str = "", isolated: bool = True) -> Host:
        """Another host."""
        if not self.real:
            if site:
                raise NetworkError(f"host {name} of site {site!r}: sites need namespaces")
            self.hosts[name] = Host(name, "127.0.0.1", None)
            return self.hosts[name]
        self._count += 1
        number = list(self._switches).index(site)
        address, port = f"{NETWORK}.{number}.{self._count + 1}", f"port{self._count}"
        switch = self._switches[site]
        space = self._unshare(self._switches[""])
        switch.run("ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", str(space.pid))
        switch.run("ip", "link", "set", port, "master", "bridge", "up")
        if isolated:
            switch.run("ip", "link", "set", port, "type", "bridge_slave", "isolated", "on")
        space.run("ip", "addr", "add", f"{address}/24", "dev", "eth0")
        space.run("ip", "link", "set", "eth0", "up")
        space.run("ip", "route", "add", "default", "via", f"{NETWORK}.{number}.1")
        self._name(space, name, address)
        self.hosts[name] = Host(name, address, space, site)
        return self.hosts[name]

    def _name(self, space: Space, name: str, address: str) -> None:
        """This machine's name means the host's own address in there: jax looks it up for its collectives."""
        path = self._folder / f"hosts-{name}"
        path.write_text(f"127.0.0.1 localhost\n{address} {os.uname().nodename} {name}\n")
        space.run("mount", "--bind", str(path), "/etc/hosts")

    @contextlib.contextmanager
    def unplugged(self, name: str) -> Iterator[None]:
        """A host's cable is out for the length of a block: packets are lost, nobody is told."""
        space = self.hosts[name].space
        if space is None:
            raise NetworkError(f"host {name} has no cable: no namespaces here")
        space.run("ip", "link", "set", "eth0", "down")
        try:
            yield
        finally:
            space.run("ip", "link", "set", "eth0", "up")
            gateway = f"{self.hosts[name].address.rpartition('.')[0]}.1"
            space.run("ip", "route", "replace", "default", "via", gateway)

    def close(self) -> None:
        """End the proxy and let the namespaces go. Idempotent."""
        self.proxy.close()
        self._close_spaces()

    def _close_spaces(self) -> None:
        while self._spaces:
            self._spaces.pop().close()

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextlib.contextmanager
def throttled_pair(rate: str) -> Iterator[tuple[Host, Host]]:
    """Two hosts and a cable of a rate (as tc writes it; "" for none) between them, without a proxy."""
    with tempfile.TemporaryDirectory(prefix="jaxrl-sync-net-") as folder, Network(Path(folder)) as network:
        if not network.real:
            raise NetworkError("a throttled line needs namespaces (root, or user namespaces), ip and tc")
        pair = network.host("a", isolated=False), network.host("b", isolated=False)
        for host in pair if rate else ():
            assert host.space is not None
            bucket = ("tbf", "rate", rate, "burst", "1mb", "latency", "50ms")
            host.space.run("tc", "qdisc", "add", "dev", "eth0", "root", *bucket)
        yield pair
