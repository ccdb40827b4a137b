"""NIXL over UCX, one registered buffer on each side, one WRITE of all bytes: JSON lines."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import time
from typing import Any

import numpy as np


def agent(name: str, size: int) -> tuple[Any, Any, Any]:
    """An agent, its touched buffer and the registered descriptors."""
    from nixl_cu12._api import nixl_agent, nixl_agent_config

    made = nixl_agent(name, nixl_agent_config(backends=["UCX"]))
    buffer = np.ones(size, np.uint8)
    place = [(buffer.ctypes.data, size, 0, "")]
    made.register_memory(place, "DRAM")
    return made, buffer, made.get_xfer_descs([p[:3] for p in place], "DRAM")


def receiver(size: int) -> None:
    """Says who it is and where its buffer lies, then waits; progress runs in NIXL's thread."""
    made, buffer, descs = agent("receiver", size)
    said = {"metadata": made.get_agent_metadata().hex(), "descs": made.get_serialized_descs(descs).hex()}
    print(json.dumps(said), flush=True)
    sys.stdin.readline()
    print(json.dumps({"good": bool((buffer == 7).all())}), flush=True)


def main() -> None:
    """Per line on stdin one repetition; for "check" the receiver says whether the bytes arrived."""
    options = json.loads(sys.argv[1])
    size = options["bytes"]
    os.environ["UCX_TLS"] = options["tls"]
    if options.get("role") == "receiver":
        receiver(size)
        return
    told = json.dumps({**options, "role": "receiver"})
    with subprocess.Popen(
        [sys.executable, __file__, told], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None and other.stdin is not None
        line = other.stdout.readline()
        while line and not line.startswith("{"):
            line = other.stdout.readline()
        said = json.loads(line)
        made, buffer, descs = agent("sender", size)
        buffer[:] = 7
        name = made.add_remote_agent(bytes.fromhex(said["metadata"]))
        remote = made.deserialize_descs(bytes.fromhex(said["descs"]))
        handle = made.initialize_xfer("WRITE", descs, remote, name)
        print(json.dumps({"version": importlib.metadata.version("nixl-cu12")}), flush=True)
        for line in sys.stdin:
            if "check" in line:
                break
            start = time.monotonic()
            state = made.transfer(handle)
            while state != "DONE":
                if state == "ERR":
                    raise SystemExit("nixl: transfer failed")
                state = made.check_xfer_state(handle)
            print(json.dumps({"seconds": time.monotonic() - start}), flush=True)
        other.stdin.write("\n")
        other.stdin.flush()
        good = json.loads(other.stdout.readline())["good"]
    print(json.dumps({"good": good}), flush=True)


if __name__ == "__main__":
    main()
    os._exit(0)  # NIXL 1.5.1 ends with a segmentation fault when the interpreter takes it down
