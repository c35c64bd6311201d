"""What the files of one store, and the samples of one file, have in common: above all their grid."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ups_store.errors import SourceError
from ups_store.ingest.info import SourceInfo


def check_same_grid(infos: Sequence[SourceInfo]) -> None:
    """Raise unless the files can make one store: one grid, the same arrays, channels and parameters.

    Raises:
        SourceError: Kind "grids_differ", naming both files and what differs.
    """
    for other in infos[1:]:
        first_facts, other_facts = _facts(infos[0]), _facts(other)
        for what in {**first_facts, **other_facts}:
            shown = difference(first_facts.get(what), other_facts.get(what))
            if shown is not None:
                raise SourceError(
                    f"{what} isn't that of {infos[0].path}",
                    kind="grids_differ",
                    path=other.path,
                    expected=shown[0],
                    found=shown[1],
                    hint="files of one store share their grid; use data.files to choose",
                )


def _facts(info: SourceInfo) -> dict[str, Any]:
    """What files of one store have in common, by what people call it."""
    return {
        "layout": (info.layout, info.layout_version),
        "channels": info.channels,
        "boundary": dict(info.boundary),
        "parameters": sorted(info.parameters),
        **{f"array {name!r}": (array.shape, array.dtype, array.dims) for name, array in info.arrays.items()},
        **{f"coordinate {name!r}": values for name, values in info.constants.items()},
    }


def difference(expected: Any, found: Any) -> tuple[Any, Any] | None:
    """What to show of two facts that differ: of coordinates in short; None if they are equal."""
    if not isinstance(expected, np.ndarray) and not isinstance(found, np.ndarray):
        return None if expected == found else (_shown(expected), _shown(found))
    if expected is None or found is None or (expected.shape, expected.dtype) != (found.shape, found.dtype):
        return _shown(expected), _shown(found)
    unequal = np.flatnonzero(expected != found)
    if not unequal.size:
        return None
    first = unequal[0]
    return f"{expected[first]!s} at index {first}", f"{found[first]!s}"


def _shown(fact: Any) -> Any:
    if isinstance(fact, np.ndarray):
        return f"{len(fact)} {fact.dtype} values {fact[0]!s}..{fact[-1]!s}"
    return "none" if fact is None else fact
