"""How much memory reading takes: what a reader, and whoever counts on it, has to agree on."""

from __future__ import annotations

# Of one hyperslab: a published file has up to 88 GB, one NS_incom sample 3.1 GB. Below 32 MiB the C library
# gives every hyperslab the memory of the one before (`reader_handle`), which costs no page faults.
BLOCK_BYTES = 24 << 20
USUAL_SLOTS = 2  # of a reader: it fills one while the caller works with the other
USUAL_SLOT_NBYTES = 33 << 20  # a batch of 32 MiB, and what lies between its arrays
