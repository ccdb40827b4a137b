"""Ray's object store: an actor puts the bytes, another gets and copies them: JSON lines."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np
import ray


@ray.remote(num_cpus=0)
class Holder:
    """One side, with its own touched buffer."""

    def __init__(self, size: int) -> None:
        self.buffer = np.ones(size, np.uint8)

    def put(self) -> Any:
        """The bytes as an object."""
        return [ray.put(self.buffer)]

    def take(self, refs: Any) -> bool:
        """Into our buffer: weights must outlive the object."""
        np.copyto(self.buffer, ray.get(refs[0]))
        return True


def main() -> None:
    """Per line on stdin one repetition."""
    options = json.loads(sys.argv[1])
    size = options["bytes"]
    ray.init(
        num_cpus=2, include_dashboard=False, object_store_memory=3 * size + (64 << 20),
        logging_level="ERROR", log_to_driver=False,
    )  # fmt: skip
    sender, receiver = Holder.remote(size), Holder.remote(size)
    print(json.dumps({"version": ray.__version__}), flush=True)
    for _ in sys.stdin:
        start = time.monotonic()
        refs = ray.get(sender.put.remote())
        ray.get(receiver.take.remote(refs))
        print(json.dumps({"seconds": time.monotonic() - start}), flush=True)
        del refs
    ray.shutdown()


if __name__ == "__main__":
    main()
