"""What a build tells of the samples that it skipped: a few lines for each reason, however many they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ups_store.sources.pool import Skipped

_SHOWN = 3  # of a file and a kind of fault; the error at the end names samples too


def skipped_notes(skipped: Sequence[Skipped]) -> Iterator[str]:
    """Lines for people; of one kind of fault in one file the first few, and how many samples have it too."""
    by_reason: dict[tuple[str | None, str], list[Skipped]] = {}
    for item in skipped:
        by_reason.setdefault((item.error.path, item.error.kind), []).append(item)
    for (path, kind), items in by_reason.items():
        for item in items[:_SHOWN]:
            yield f"skipped: {item.error}"
        if others := items[_SHOWN:]:
            yield f"skipped: {path}: {sum(len(item.samples) for item in others):,} more samples ({kind})"
