"""The test's hold on the fault proxy: starts it as a process, tells it what to break, asks what it saw."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.faults.rules import Edge, Rule

ROOT = Path(__file__).parents[2]
START_S, ANSWER_S = 30.0, 60.0


class ProxyError(Exception):
    """The proxy refused a command or is gone."""


class ProxyClient:
    """Owns a proxy process and the socket to it: ``close()`` or ``with``. Any thread may call it."""

    def __init__(
        self, folder: Path, wrap: Callable[[Sequence[str]], list[str]] = list, host: str = "127.0.0.1"
    ) -> None:
        """``wrap`` puts a command into a namespace, ``host`` is where the proxy listens there."""
        self.host = host
        path = folder / "proxy.sock"
        command = wrap([sys.executable, "-m", "tests.faults.proxy", str(path)])
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        if self.process.stdout.readline().strip() != "ready":
            self.process.wait(10)
            raise ProxyError(f"the proxy ended with code {self.process.returncode}")
        self._sock = socket.socket(socket.AF_UNIX)
        self._sock.settimeout(ANSWER_S)
        here = os.open(folder, os.O_RDONLY)  # a path longer than a Unix address may be
        try:
            self._sock.connect(f"/proc/self/fd/{here}/proxy.sock")
        finally:
            os.close(here)
        self._file = self._sock.makefile("rw", encoding="utf8")
        self._lock = threading.Lock()

    def _ask(self, do: str, **fields: Any) -> dict[str, Any]:
        with self._lock:
            try:
                self._file.write(json.dumps({"do": do, **fields}) + "\n")
                self._file.flush()
                line = self._file.readline()
            except OSError as error:
                raise ProxyError(f"the proxy is gone: {error}") from error
        if not line:
            raise ProxyError("the proxy is gone")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise ProxyError(answer["error"])
        return answer

    def listen(self, edge: Edge | None = None, port: int = 0) -> str:
        """``host:port`` of a listener for one edge, or of a door whose callers name theirs (see `dial`)."""
        fields = dataclasses.asdict(edge) if edge is not None else None
        return f"{self.host}:{self._ask('listen', host=self.host, port=port, edge=fields)['port']}"

    def enforce(self, rule: Rule) -> int:
        """Put a rule in force; its id."""
        return int(self._ask("enforce", **dataclasses.asdict(rule))["id"])

    def clear(self, number: int | None = None) -> None:
        """Lift one rule, or all."""
        self._ask("clear", id=number)

    @contextlib.contextmanager
    def broken(self, rule: Rule) -> Iterator[int]:
        """A rule in force for the length of a block."""
        number = self.enforce(rule)
        try:
            yield number
        finally:
            self.clear(number)

    def fired(self, number: int, timeout_s: float) -> dict[str, Any] | None:
        """Where a rule's trigger was met, waiting for it; None when it wasn't in time."""
        left = timeout_s
        while left > 0:
            event = self._ask("fired", id=number, timeout_s=min(left, 5.0))["event"]
            if event is not None:
                found: dict[str, Any] = event
                return found
            left -= 5.0
        return None

    def counts(self) -> dict[Edge, tuple[int, int]]:
        """Bytes delivered (up, down) on every edge so far, on connections that are gone too."""
        rows = self._ask("counts")["counts"]
        return {Edge(r["source"], r["target"], r["kind"]): (r["up"], r["down"]) for r in rows}

    def opened(self) -> dict[Edge, int]:
        """How many connections were opened on every edge so far."""
        rows = self._ask("opened")["opened"]
        return {Edge(r["source"], r["target"], r["kind"]): r["times"] for r in rows}

    def connections(self) -> list[Edge]:
        """The edge of every connection that is open now."""
        return [Edge(**row) for row in self._ask("connections")["connections"]]

    def close(self) -> None:
        """End the proxy. Idempotent."""
        for stream in (self._file, self._sock, self.process.stdin, self.process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)

    def __enter__(self) -> ProxyClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def dial(door: str, edge: Edge, timeout_s: float) -> socket.socket:
    """A connection to ``edge.target`` through a door of the proxy: the first line names the edge."""
    host, _, port = door.rpartition(":")
    sock = socket.create_connection((host, int(port)), timeout=timeout_s)
    sock.sendall(json.dumps(dataclasses.asdict(edge)).encode() + b"\n")
    return sock
