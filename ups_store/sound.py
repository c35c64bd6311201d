"""Nothing is copied from a damaged store: the copy's own checksums would hide the damage."""

from __future__ import annotations

from collections.abc import Callable

from ups_store.errors import CorruptChunkError
from ups_store.read.store import Store


def require_sound(store: Store, *, progress: Callable[[int], None] | None = None) -> None:
    """Check every byte of a finished store; see `Store.verify`.

    Raises:
        CorruptChunkError: Names the first damaged array, sample and byte range.
    """
    found = store.verify(progress=progress)
    if found.ok:
        return
    first, num_more = found.problems[0], len(found.problems) - 1
    hint = "`ups-store verify` lists all problems"
    if found.has_wrong_identity:
        hint = "`ups-store doctor FILE --salvage OUT` copies what verifies"
    raise CorruptChunkError(
        f"damaged: {first.kind} {first.detail}".rstrip() + (f", and {num_more:,} more" if num_more else ""),
        path=store.path,
        array=first.array,
        sample=first.sample,
        byte_range=first.byte_range,
        clause=first.clause,
        hint=hint,
    )
