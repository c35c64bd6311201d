from __future__ import annotations

import numpy as np

from ups_store.building.progress import skipped_notes
from ups_store.errors import SourceError
from ups_store.sources.readers import Skipped


def skipped(samples: list[int], path: str, *, kind: str = "read_failed") -> Skipped:
    error = SourceError(f"can't be read at {samples[0]}", path=path, kind=kind)
    return Skipped(np.array(samples), error)


def test_few_samples_have_a_line_each() -> None:
    found = list(skipped_notes([skipped([3], "a.h5"), skipped([5], "a.h5"), skipped([9], "b.h5")]))
    assert found == [
        f"skipped: {name}.h5: can't be read at {i}" for name, i in (("a", 3), ("a", 5), ("b", 9))
    ]


def test_many_samples_with_one_fault_are_counted() -> None:
    many = [skipped([i], "a.h5") for i in range(1, 2001)]
    other_kind = skipped([7], "a.h5", kind="not_finite")
    assert list(skipped_notes([*many, other_kind, skipped([3000, 3001], "a.h5")])) == [
        "skipped: a.h5: can't be read at 1",
        "skipped: a.h5: can't be read at 2",
        "skipped: a.h5: can't be read at 3",
        "skipped: a.h5: 1,999 more samples (read_failed)",
        "skipped: a.h5: can't be read at 7",
    ]


def test_nothing_skipped_tells_nothing() -> None:
    assert list(skipped_notes([])) == []
