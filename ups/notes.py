"""What people are told while something works, a sentence at a time."""

from __future__ import annotations

from collections.abc import Callable

Note = Callable[[str], None]  # takes one sentence, without a line break at its end


def nobody(text: str) -> None:
    """Tells nobody."""


def each_once(note: Note) -> Note:
    """Tells every sentence the first time it is said; for those that several parts of a run find alike."""
    told: set[str] = set()

    def tell(text: str) -> None:
        if text not in told:
            told.add(text)
            note(text)

    return tell
