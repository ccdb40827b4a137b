"""`./dev bench sparsity`: how fast deltas are made.

`./dev bench sparsity compare`: what a publisher's comparison takes, on the host and by jitted encoders.
`./dev bench sparsity density`: how sparse updates are. `./dev bench sparsity sizes`: bytes of positions and
of frames on W1, whatever the machine. `./dev bench sparsity sync`: whole synchronisations, sparse against
full, over throttled links.
"""

from __future__ import annotations

import os
import sys

from jaxrl_sync.launch.environment import huge_pages

os.environ.setdefault("JAX_PLATFORMS", "cpu")


def main() -> int:
    """The first argument chooses the part; the rest are its own. Memory is that of a run's processes."""
    if os.environ != (env := huge_pages(os.environ)):
        os.execve(sys.executable, sys.orig_argv, env)
    if sys.argv[1:2] == ["density"]:
        import density

        sys.argv[1:2] = []
        found: int = density.main()
        return found
    if sys.argv[1:2] == ["sync"]:
        import sync

        return sync.main(sys.argv[2:])
    if sys.argv[1:2] == ["sizes"]:
        import sizes

        return sizes.main(sys.argv[2:])
    if sys.argv[1:2] == ["compare"]:
        import compare

        return compare.main(sys.argv[2:])
    import speed

    return speed.main(sys.argv[2:] if sys.argv[1:2] == ["speed"] else sys.argv[1:])


if __name__ == "__main__":
    raise SystemExit(main())
