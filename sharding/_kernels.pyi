"""CPU kernels in C: see cext/kernels.h for the layout of the tables. Both release the GIL."""

from typing_extensions import Buffer

MAX_DIMS: int
HAS_AVX2: int

def copy_table(
    entries: Buffer, source_addresses: Buffer, target_addresses: Buffer, threads: int, streaming: int, /
) -> None: ...
def sum_table(entries: Buffer, source_addresses: Buffer, sums: Buffer, threads: int, /) -> None: ...
