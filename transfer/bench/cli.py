"""``jaxrl-sync verbs bench``: bandwidth and latency between two processes, with what arrived compared.

One side listens, the other connects and measures; or --loopback, where a second process of this machine
listens. RDMA WRITEs through queue pairs (verbs), or whole versions through Publisher and Subscriber (verbs,
shm, tcp). Both sides prove one token, as all connections here do: --token-file, made by the one that listens.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from jaxrl_sync.sharding.errors import UserError
from jaxrl_sync.transfer import auth, wire
from jaxrl_sync.transfer.bench import queue_pairs, weights
from jaxrl_sync.transfer.bench.shape import BenchError, Result, Shape, Through, parse_bytes
from jaxrl_sync.transfer.errors import DeadlineError, TransferError
from jaxrl_sync.transfer.verbs.devices import Choice
from jaxrl_sync.transfer.wire import Connection

HANDSHAKE_S = 60.0
ACCEPT_S = 600.0
_ITERS = {"queue-pairs": 1000, "weights": 20}


class BenchUsageError(UserError):
    """A command line that can't be understood."""

    exit_code = 2


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        raise BenchUsageError(f"{message} (see `{self.prog} --help`)")


def parser() -> argparse.ArgumentParser:
    """The options."""
    found = _Parser(prog="jaxrl-sync verbs bench", description=__doc__, allow_abbrev=False)
    where = found.add_mutually_exclusive_group(required=True)
    where.add_argument("--loopback", action="store_true", help="with a second process of this machine")
    where.add_argument("--listen", metavar="HOST:PORT", help="be the other side of one measurement")
    where.add_argument("--connect", metavar="HOST:PORT", help="measure against the side that listens there")
    found.add_argument("--token-file", metavar="F", help="--listen makes it if it isn't there")
    found.add_argument("--transport", choices=["verbs", "shm", "tcp"], default="verbs")
    through = "RDMA WRITEs, or whole versions; default: queue-pairs for verbs"
    found.add_argument("--through", choices=["queue-pairs", "weights"], help=through)
    found.add_argument("--size", default="1MiB", help="bytes of a message or version: 4096, 64k, 1MiB")
    found.add_argument("--iters", type=int, help="messages or versions (1000, 20)")
    found.add_argument("--qps", type=int, default=1, help="queue pairs")
    found.add_argument("--depth", type=int, default=128, help="writes on their way per queue pair")
    found.add_argument("--region", default="0", help="bytes of memory that is written (16 messages)")
    found.add_argument("--scattered", action="store_true", help="to random offsets")
    found.add_argument("--pings", type=int, default=200, help="round trips for the latency")
    found.add_argument("--checked", type=int, default=64, help="messages or versions that are compared")
    found.add_argument("--seed", type=int, default=0, help="of bytes and offsets")
    found.add_argument("--timeout", type=float, default=600.0, metavar="S", help="on every step")
    found.add_argument("--device", action="append", default=[], help="port of this side: mlx5_0, mlx5_0:1")
    found.add_argument("--peer-device", action="append", default=[], help="of the other side of --loopback")
    found.add_argument("--json", action="store_true", help="one JSON object")
    return found


def shape_of(options: argparse.Namespace) -> Shape:
    """What the options ask for. BenchUsageError."""
    through: Through = options.through or ("queue-pairs" if options.transport == "verbs" else "weights")
    try:
        return Shape(
            transport=options.transport,
            through=through,
            size_bytes=parse_bytes(options.size),
            iters=options.iters or _ITERS[through],
            qps=options.qps,
            depth=options.depth,
            region_bytes=parse_bytes(options.region),
            scattered=options.scattered,
            pings=options.pings,
            checked=options.checked,
            seed=options.seed,
            timeout_s=options.timeout,
        )
    except (ValueError, BenchError) as error:
        raise BenchUsageError(str(error)) from error


def listen(options: argparse.Namespace) -> int:
    """Serve one client, then end. The first line on stdout says where it listens."""
    if not options.token_file:
        raise BenchUsageError("--listen needs --token-file: the other side must have the same")
    if not Path(options.token_file).exists():
        auth.create_token(options.token_file)
    token = auth.load_token(options.token_file)
    host, _, port = options.listen.rpartition(":")
    if not host or not port.isdecimal():
        raise BenchUsageError(f"--listen {options.listen}, expected HOST:PORT")
    with wire.listen(host.strip("[]"), int(port)) as listener:
        bound, found = listener.getsockname()[:2]
        print(json.dumps({"listening": f"{bound}:{found}"}), flush=True)
        listener.settimeout(ACCEPT_S)
        try:
            sock, address = listener.accept()
        except TimeoutError as error:
            raise DeadlineError(f"nobody connected within {ACCEPT_S:g} s") from error
    with Connection(_proved(sock, token), f"{address[0]}:{address[1]}") as connection:
        try:
            _serve(connection, Choice(tuple(options.device)), token)
        except (UserError, OSError) as error:
            with contextlib.suppress(TransferError):
                connection.send({"kind": "failed", "reason": str(error)}, timeout_s=HANDSHAKE_S)
            raise
    return 0


def _proved(sock: socket.socket, token: str) -> socket.socket:
    try:
        auth.accept(sock, token, auth.run_id_of(token), HANDSHAKE_S)
    except BaseException:
        sock.close()
        raise
    return sock


def _serve(connection: Connection, choice: Choice, token: str) -> None:
    message = queue_pairs.expect(connection, "open", HANDSHAKE_S)
    shape = Shape.from_json(message.get("shape"))
    if shape.through == "queue-pairs":
        queue_pairs.serve(connection, shape, message.get("side"), choice)
    else:
        weights.serve(connection, shape, choice, token)


def connect(address: str, token_file: str, shape: Shape, choice: Choice) -> Result:
    """Measure against the side that listens at ``address``. TransferError, VerbsError."""
    token = auth.load_token(token_file)
    sock = wire.dial(address, HANDSHAKE_S)
    try:
        auth.connect(sock, token, auth.run_id_of(token), {"purpose": "bench"}, HANDSHAKE_S)
    except BaseException:
        sock.close()
        raise
    with Connection(sock, address) as connection:
        if shape.through == "queue-pairs":
            return queue_pairs.measure(connection, shape, choice)
        return weights.measure(connection, shape, choice, token)


@contextlib.contextmanager
def _listener(devices: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Another process that listens: its address, and the file with the token. It is ended at the end."""
    with tempfile.TemporaryDirectory(prefix="jaxrl-sync-bench-") as folder:
        token_file = str(Path(folder) / "token")
        command = [sys.executable, "-m", "jaxrl_sync.cli", "verbs", "bench", "--listen", "127.0.0.1:0"]
        command += ["--token-file", token_file, *[word for name in devices for word in ("--device", name)]]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise BenchError(f"the other process ended with code {process.wait()}")
            yield json.loads(line)["listening"], token_file
            process.wait(HANDSHAKE_S)
        finally:
            process.kill()
            process.communicate()


def main(words: Sequence[str]) -> int:
    """Measure, print; the exit code."""
    options = parser().parse_args(words)
    if options.listen:
        return listen(options)
    shape, choice = shape_of(options), Choice(tuple(options.device))
    if options.loopback:
        with _listener(options.peer_device or options.device) as (address, token_file):
            result = connect(address, token_file, shape, choice)
    else:
        if not options.token_file:
            raise BenchUsageError("--connect needs --token-file, a copy of the other side's")
        result = connect(options.connect, options.token_file, shape, choice)
    print(json.dumps(result.to_json()) if options.json else "\n".join(result.lines()))
    return 0
