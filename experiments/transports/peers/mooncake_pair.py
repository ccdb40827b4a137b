"""Mooncake's transfer engine over tcp, one WRITE of all bytes: JSON lines."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
import time
from typing import Any

import numpy as np
from mooncake.engine import TransferEngine


def engine(size: int) -> tuple[Any, Any, str]:
    """An engine, its registered and touched buffer, and its address."""
    made = TransferEngine()
    if made.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") != 0:
        raise SystemExit("mooncake: initialize failed")
    buffer = np.ones(size, np.uint8)
    if made.register_memory(buffer.ctypes.data, size) != 0:
        raise SystemExit("mooncake: register_memory failed")
    return made, buffer, f"127.0.0.1:{made.get_rpc_port()}"


def receiver(size: int) -> None:
    """Says where its buffer lies, then waits."""
    _, buffer, address = engine(size)
    print(json.dumps({"address": address, "pointer": buffer.ctypes.data}), flush=True)
    sys.stdin.readline()
    print(json.dumps({"good": bool((buffer == 7).all())}), flush=True)


def read(stream: Any) -> Any:
    """The next JSON line; the engine logs to stdout too."""
    for line in stream:
        if line.startswith("{"):
            return json.loads(line)
    raise SystemExit("mooncake: the receiver ended")


def main() -> None:
    """Per line on stdin one repetition; for "check" the receiver says whether the bytes arrived."""
    options = json.loads(sys.argv[1])
    size = options["bytes"]
    if options.get("role") == "receiver":
        receiver(size)
        return
    told = json.dumps({**options, "role": "receiver"})
    with subprocess.Popen(
        [sys.executable, __file__, told], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdin is not None
        said = read(other.stdout)
        made, buffer, _ = engine(size)
        buffer[:] = 7
        print(
            json.dumps({"version": importlib.metadata.version("mooncake-transfer-engine-non-cuda")}),
            flush=True,
        )
        for line in sys.stdin:
            if "check" in line:
                break
            start = time.monotonic()
            if made.transfer_sync_write(said["address"], buffer.ctypes.data, said["pointer"], size) != 0:
                raise SystemExit("mooncake: transfer failed")
            print(json.dumps({"seconds": time.monotonic() - start}), flush=True)
        other.stdin.write("\n")
        other.stdin.flush()
        good = read(other.stdout)["good"]
    print(json.dumps({"good": good}), flush=True)


if __name__ == "__main__":
    main()
