"""Nothing is copied from a damaged store: the copy's own checksums would hide the damage."""

from __future__ import annotations

from collections.abc import Callable

from ups_store.errors import CorruptChunkError
from ups_store.reader import Store


def require_sound(store: Store, *, progress: Callable[[int], None] | None = None) -> None:
    """Check every byte of a finished store; see `Store.verify`.

    Raises:
        CorruptChunkError: Names the first damaged array, sample and byte range.
    """
    found = store.verify(progress=progress)
    if found.ok:
        return
    first = found.problems[0]
    raise CorruptChunkError(
        f"damaged, {len(found.problems)} problems, the first of them {first.kind} {first.detail}".rstrip(),
        path=store.path,
        array=first.array,
        sample=first.sample,
        byte_range=first.byte_range,
        clause=first.clause,
        hint="`ups-store verify` lists all of them",
    )
