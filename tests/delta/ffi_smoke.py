"""Every FFI handler of the build inside of jit, against numpy; run as a script by `test_interpreters.py`.

Prints a line of JSON: versions, the library's digest, the digest of all results.
"""

from __future__ import annotations

import hashlib
import json
import platform
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_sync.sharding import _kernels
from jaxrl_sync.transfer.delta import ffi, sparse
from jaxrl_sync.transfer.delta.bits import OVERWRITE, ULP, XOR
from jaxrl_sync.transfer.delta.decode import stack_coded
from tests.delta.bits import DTYPES, PATTERNS, pair, same_bits

ELEMENTS = 5000


def results() -> list[Any]:
    """What the handlers find and write; asserts that it is what the forms outside of jit do."""
    found: list[Any] = []
    for dtype in DTYPES:
        for pattern in PATTERNS:
            old, new = pair(dtype, ELEMENTS, pattern)
            found += _plain(old, new) + _coded(old, new)
    return found


def _plain(old: Any, new: Any) -> list[Any]:
    wanted = sparse.compare(old, new, keep_old=True)
    room = max(1, wanted.count)
    encode = jax.jit(lambda a, b: ffi.encode(a, b, room, 0, ELEMENTS, True, 2))
    made = [np.asarray(x) for x in encode(jnp.asarray(old), jnp.asarray(new))]
    assert int(made[0]) == wanted.count
    for part, known in zip(made[1:], (wanted.positions, wanted.new, wanted.old), strict=True):
        assert same_bits(part[: wanted.count], known)
    words = np.packbits(np.isin(np.arange(-(-ELEMENTS // 32) * 32), wanted.positions), bitorder="little")
    masked = jax.jit(lambda w, b: ffi.encode_mask(w, b, room, 0, ELEMENTS, 1))
    for part, known in zip(
        masked(jnp.asarray(words.view(np.uint32)), jnp.asarray(new)), made[:3], strict=True
    ):
        assert same_bits(part, known)
    apply = jax.jit(lambda s, p, v, c: ffi.apply(s, p, v, c, 0, ELEMENTS), donate_argnums=0)
    assert same_bits(apply(jnp.array(old), made[1], made[2], made[0]), new)
    return made


def _coded(old: Any, new: Any) -> list[Any]:
    made: list[Any] = []
    for kind in (OVERWRITE, XOR, ULP):
        coded = sparse.compare_coded(old, new, kind)
        rooms = (coded.gaps.size + 1, coded.values.size + 1, coded.escapes.size + 1)
        encode = jax.jit(lambda a, b, k=kind, r=rooms: ffi.encode_coded(a, b, k, r, 0, ELEMENTS, 2))
        sizes, *streams = (np.asarray(x) for x in encode(jnp.asarray(old), jnp.asarray(new)))
        assert [int(n) for n in sizes] == [coded.count, coded.gaps.size, coded.escapes.size]
        for stream, known in zip(streams, (coded.gaps, coded.values, coded.escapes), strict=True):
            assert same_bits(stream[: known.size], known)
        apply = jax.jit(lambda s, g, v, e, n, k=kind: ffi.apply_coded(s, g, v, e, n, k, 0, ELEMENTS))
        assert same_bits(apply(jnp.asarray(old), *stack_coded(coded, rooms)), new)
        made += [sizes, *streams]
    return made


def main() -> None:
    """Refuses to pass where XLA refused the handlers."""
    assert ffi.available(), "no FFI kernels: registration was refused, or the build has none"
    digest = hashlib.sha256()
    for array in results():
        digest.update(array.tobytes())
    library = hashlib.sha256(Path(_kernels.__file__).read_bytes()).hexdigest()
    said = {"python": platform.python_version(), "jax": jax.__version__, "library": library}
    print(json.dumps({**said, "results": digest.hexdigest()}))


if __name__ == "__main__":
    main()
