"""CPU kernels in C: see cext/kernels.h for the layout of the tables. Both release the GIL."""

from typing_extensions import Buffer

MAX_DIMS: int
HAS_AVX2: int

def copy_table(
    entries: Buffer, source_addresses: Buffer, target_addresses: Buffer, threads: int, streaming: int, /
) -> None: ...
def stream_table(
    fd: int, receive: bool, entries: Buffer, addresses: Buffer, skip: int, limit: int, /
) -> tuple[int, int]: ...
def summed_table(
    entries: Buffer,
    source_addresses: Buffer,
    target_addresses: Buffer,
    sums: Buffer,
    threads: int,
    streaming: int,
    /,
) -> None: ...
def sum_table(entries: Buffer, source_addresses: Buffer, sums: Buffer, threads: int, /) -> None: ...

# Deltas and their codings (cext/delta.h; formats in docs/payloads.md). Contiguous, aligned buffers; the GIL
# is released. Positions are strictly ascending uint32; values are the unsigned bits of elements of 1, 2 or 4
# bytes. Encoders return the true size and store what fits; decoders raise ValueError, never leave a buffer.

def gaps_encode(positions: Buffer, width: int, out: Buffer, /) -> int: ...
def gaps_decode(data: Buffer, width: int, elements: int, positions: Buffer, /) -> None: ...
def rice_encode(positions: Buffer, parameter: int, out: Buffer, /) -> int: ...
def rice_decode(data: Buffer, parameter: int, elements: int, positions: Buffer, /) -> None: ...
def zigzag(new: Buffer, old: Buffer, itemsize: int, codes: Buffer, /) -> None: ...
def unzigzag(codes: Buffer, old: Buffer, itemsize: int, new: Buffer, /) -> None: ...
def ulp_encode(new: Buffer, old: Buffer, itemsize: int, codes: Buffer, escapes: Buffer, /) -> int: ...
def ulp_decode(codes: Buffer, escapes: Buffer, old: Buffer, itemsize: int, new: Buffer, /) -> None: ...
def delta_compare(
    old: Buffer,
    new: Buffer,
    itemsize: int,
    positions: Buffer,
    new_out: Buffer,
    old_out: Buffer | None,
    threads: int,
    /,
) -> int: ...
def delta_mask(
    words: Buffer, new: Buffer, itemsize: int, positions: Buffer, new_out: Buffer, threads: int, /
) -> int: ...
def delta_fused(
    old: Buffer,
    new: Buffer,
    itemsize: int,
    kind: int,
    gaps: Buffer,
    values: Buffer,
    escapes: Buffer,
    threads: int,
    /,
) -> tuple[int, int, int]: ...
def delta_apply(
    buffer: Buffer,
    itemsize: int,
    positions: Buffer,
    values: Buffer,
    kind: int,
    old_out: Buffer | None,
    threads: int,
    /,
) -> None: ...
def delta_apply_gaps(
    buffer: Buffer,
    itemsize: int,
    gaps: Buffer,
    values: Buffer,
    escapes: Buffer | None,
    count: int,
    kind: int,
    threads: int = 1,
    /,
) -> None: ...
def places_apply(
    entries: Buffer,
    positions: Buffer,
    codes: Buffer,
    memory: Buffer | None,
    old: Buffer | None,
    index_out: Buffer | None,
    new_out: Buffer | None,
    sums: Buffer,
    itemsize: int,
    kind: int,
    threads: int,
    /,
) -> None: ...
def delta_gather(buffer: Buffer, itemsize: int, positions: Buffer, out: Buffer, /) -> None: ...

# Capsules of XLA FFI handlers; absent where the build had no headers of jaxlib (setup.py).
FFI_API_MINOR: int
ffi_delta_encode: object
ffi_delta_encode_gaps: object
ffi_delta_apply: object
ffi_delta_apply_gaps: object
