"""jax.experimental.transfer: W1 as arrays of one device, pulled by another process: JSON lines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
import w1
from jax.experimental import transfer
from jax.sharding import SingleDeviceSharding


def server() -> Any:
    """A transfer server of this process, on loopback."""
    return transfer.start_transfer_server(jax.devices()[0].client, "127.0.0.1:0", ["127.0.0.1:0"])


def puller(options: dict[str, Any]) -> None:
    """Per line {"uuid", "address"}: pulls all tensors and says how long it took."""
    made, link = server(), None
    where = SingleDeviceSharding(jax.devices()[0])
    specs = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=where)
        for shape, _ in w1.shapes(options["scale"]).values()
    ]
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        link = link or made.connect(command["address"])
        start = time.monotonic()
        found = link.pull(command["uuid"], specs)
        jax.block_until_ready(found)
        first = np.asarray(found[0]).view(np.uint16).ravel()[:1000].tolist()
        print(json.dumps({"seconds": time.monotonic() - start, "first": first}), flush=True)
        del found


def main() -> None:
    """Per line on stdin one repetition; "check" tells whether the bytes arrived."""
    options = json.loads(sys.argv[1])
    if options.get("role") == "puller":
        puller(options)
        return
    told = json.dumps({**options, "role": "puller"})
    rng = np.random.default_rng(0)
    arrays = [
        jax.device_put(jnp.asarray(rng.integers(0, 1 << 16, shape, dtype=np.uint16)).view(jnp.bfloat16))
        for shape, _ in w1.shapes(options["scale"]).values()
    ]
    expected = np.asarray(arrays[0]).view(np.uint16).ravel()[:1000].tolist()
    made, good = server(), True
    with subprocess.Popen(
        [sys.executable, __file__, told], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdin is not None and other.stdout is not None
        other.stdout.readline()
        print(json.dumps({"version": jax.__version__}), flush=True)
        for uuid, line in enumerate(sys.stdin):
            if "check" in line:
                break
            made.await_pull(uuid, arrays)
            other.stdin.write(json.dumps({"uuid": uuid, "address": made.address()}) + "\n")
            other.stdin.flush()
            answer = json.loads(other.stdout.readline())
            good = good and answer["first"] == expected
            print(json.dumps({"seconds": answer["seconds"]}), flush=True)
        other.stdin.close()
        other.wait(20)
    print(json.dumps({"good": good}), flush=True)


if __name__ == "__main__":
    main()
