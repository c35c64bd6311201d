"""How large the inputs are: `UPS_BENCH=quick` (the default) or `full`."""

from __future__ import annotations

import os
from dataclasses import dataclass

MIB = 1 << 20


@dataclass(frozen=True)
class Scale:
    """Sizes of inputs, numbers of repetitions."""

    name: str  # "quick" or "full"
    store_mib: int  # size of the stores that are read; larger than any processor cache
    write_mib: int  # bytes that are written once per side of a pair
    read_pairs: int  # pairs of measurements where one takes less than 10 ms
    write_pairs: int  # pairs where one takes about a second
    process_pairs: int  # pairs where each starts processes
    method_sizes: tuple[int, ...]  # bytes per sample at which the methods of `gather` are compared
    batch_mib: tuple[int, ...]  # batch sizes of `commit_many`


QUICK = Scale("quick", 256, 256, 401, 5, 9, (4096, 16384, 102_400), (4, 64))
FULL = Scale("full", 1024, 512, 2001, 9, 25, (4096, 8192, 16384, 32768, 102_400, 1 << 20), (4, 16, 64))
SCALE = FULL if os.environ.get("UPS_BENCH") == "full" else QUICK
