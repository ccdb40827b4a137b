"""A writer as a process of its own: ``python -m tests.files.child PATH LINEAGE FIRST COUNT [HALT]``.

It says a line per committed version. With HALT it stops (SIGSTOP) right before it commits the manifest of the
last one, as a writer does whose machine hangs, and goes on when it is continued.
"""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path
from typing import Any


def halt_before(publisher: Any, name: str) -> None:
    """Have the process stop itself between all checks and the commit of one manifest."""
    folder = publisher._channel["versions"]
    commit = folder.commit

    def halted(file: str, data: bytes, sync: bool = True) -> None:
        if file == name:
            print("halted", flush=True)
            # to this very thread: of a signal to the process another thread may stop us, a moment too late
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
        commit(file, data, sync)

    folder.commit = halted


def main() -> None:
    """Write versions until they are all there."""
    import tests.conftest  # noqa: F401  eight devices
    from jaxrl_sync.transfer.errors import TransferError
    from jaxrl_sync.transfer.files.names import version_name
    from jaxrl_sync.transfer.version import Version
    from tests.files.channels import tree, writer

    path, lineage, first, count = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    with writer(path, keep=3, anchor_every=3, fsync=True) as publisher:
        if len(sys.argv) > 5:
            halt_before(publisher, version_name(Version(lineage, first + count - 1)))
        print("open", flush=True)
        for number in range(first, first + count):
            try:
                publisher.publish(tree(number), Version(lineage, number)).wait(60)
            except TransferError as error:
                print(f"failed {type(error).__name__}", flush=True)
                return
            print(number, flush=True)


if __name__ == "__main__":
    main()
