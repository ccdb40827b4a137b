"""What the machine itself can do, as processes that answer JSON lines: ``python floors.py ROLE '{json}'``."""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

CHUNK_BYTES = 4 << 20


def say(**message: Any) -> None:
    """One line to the bench."""
    print(json.dumps(message), flush=True)


def side_by_side(works: list[Callable[[], None]]) -> None:
    """All at once, each in its thread."""
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def cuts(size: int, parts: int) -> list[tuple[int, int]]:
    """Equal pieces at multiples of a page."""
    at = [size * i // parts // 4096 * 4096 for i in range(parts)] + [size]
    return list(zip(at, at[1:], strict=False))


def memcpy(options: dict[str, Any]) -> None:
    """Copies the bytes between two touched buffers on threads, once per line."""
    size = options["bytes"]
    source, target = np.ones(size, np.uint8), np.zeros(size, np.uint8)
    say(ready=True)
    for _ in sys.stdin:
        start = time.monotonic()
        pieces = cuts(size, options["threads"])
        side_by_side([lambda a=a, b=b: np.copyto(target[a:b], source[a:b]) for a, b in pieces])
        say(seconds=time.monotonic() - start)


def source(options: dict[str, Any]) -> None:
    """Sends the bytes over as many connections, once per line; ends when the sink has all of them."""
    data = memoryview(np.ones(options["bytes"], np.uint8))
    address = "127.0.0.1", options["port"]
    lanes = [socket.create_connection(address) for _ in range(options["connections"])]
    say(ready=True)
    for _ in sys.stdin:
        start = time.monotonic()
        pieces = cuts(len(data), len(lanes))
        side_by_side(
            [lambda s=s, a=a, b=b: _send(s, data[a:b]) for s, (a, b) in zip(lanes, pieces, strict=True)]
        )
        say(seconds=time.monotonic() - start)


def _send(lane: socket.socket, piece: memoryview) -> None:
    lane.sendall(piece)
    if lane.recv(1) != b"k":
        raise SystemExit("the sink is gone")


def sink(options: dict[str, Any]) -> None:
    """Receives them into one touched buffer, with calls as large as it likes."""
    into = memoryview(np.ones(options["bytes"], np.uint8))
    with socket.create_server(("127.0.0.1", 0)) as server:
        say(ready=True, port=server.getsockname()[1])
        pieces = cuts(len(into), options["connections"])
        lanes = [server.accept()[0] for _ in pieces]
    side_by_side(
        [lambda s=s, a=a, b=b: _drain(s, into[a:b]) for s, (a, b) in zip(lanes, pieces, strict=True)]
    )


def _drain(lane: socket.socket, piece: memoryview) -> None:
    while True:
        done = 0
        while done < len(piece):
            got = lane.recv_into(piece[done : done + CHUNK_BYTES], 0, socket.MSG_WAITALL)
            if not got:
                return
            done += got
        lane.sendall(b"k")


if __name__ == "__main__":
    {"memcpy": memcpy, "source": source, "sink": sink}[sys.argv[1]](json.loads(sys.argv[2]))
