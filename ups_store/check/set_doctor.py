"""What is the matter with a set: its manifest, and each part that it names (spec 15)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ups_store.check.doctor import ADVICE, Diagnosis, Status, examine, missing, what_is_wrong
from ups_store.check.loose_parts import loose_parts
from ups_store.errors import FormatError, StoreError, StoreNotFoundError, VersionTooNewError
from ups_store.format.manifest import SetPart, number_of_part
from ups_store.read.open import open_any
from ups_store.read.store_set import check_part, parts_folder, read_manifest
from ups_store.system import files

_COPY_PART = "copy the part again from where the set came, or write the set again"
_SAVE_PART = f"{_COPY_PART}; `doctor PART --salvage OUT` copies what verifies of it into a store of its own"


def advice_in_set(status: Status) -> str:
    """What to do about a part: only the part that the manifest names can take its place."""
    is_salvable = status in (Status.DAMAGED, Status.TRUNCATED, Status.IDENTITY_LOST)
    others = (Status.TOO_NEW, Status.COMPLETE)
    return _SAVE_PART if is_salvable else ADVICE[status] if status in others else _COPY_PART


@dataclass(frozen=True, eq=False)
class SetDiagnosis:
    """What `examine_set` found.

    Attributes:
        path: The manifest.
        status: Of the whole: SET if everything is sound.
        problems: What is wrong with the manifest, or with parts that are sound by themselves.
        parts: Of each part that it names, in order; of all parts that are there if it can't be read.
        counts: Samples of each part by the manifest; none if it can't be read.
        loose: Parts that it doesn't name.
    """

    path: Path
    status: Status
    problems: tuple[str, ...]
    parts: tuple[Diagnosis, ...]
    counts: tuple[int, ...]
    loose: tuple[Path, ...]

    @property
    def num_samples(self) -> int:
        """N, by the manifest."""
        return sum(self.counts)

    @property
    def samples(self) -> tuple[range | None, ...]:
        """The samples of the set that each part has; None where the manifest doesn't say."""
        if not self.counts:
            return (None,) * len(self.parts)
        ends = itertools.accumulate(self.counts)
        return tuple(range(end - count, end) for end, count in zip(ends, self.counts, strict=True))

    def to_json(self) -> dict[str, Any]:
        """The same as JSON values."""
        parts = [
            {
                **part.to_json(),
                "advice": advice_in_set(part.status),
                "samples": None if samples is None else [samples.start, samples.stop],
            }
            for part, samples in zip(self.parts, self.samples, strict=True)
        ]
        return {
            "path": str(self.path),
            "status": self.status.value,
            "num_samples": self.num_samples,
            "problems": list(self.problems),
            "advice": ADVICE[self.status],
            "parts": parts,
            "loose_parts": list(map(str, self.loose)),
        }


def examine_set(manifest: Path, *, progress: Callable[[int], None] | None = None) -> SetDiagnosis:
    """Classify every part of a set and check every sample of it; nothing is changed.

    Args:
        manifest: Its manifest.
        progress: Called with the number of bytes that were checked since the last call.
    Raises:
        StoreNotFoundError: If there is no manifest.
    """
    try:
        named = read_manifest(manifest)
    except FormatError as error:
        status = Status.TOO_NEW if isinstance(error, VersionTooNewError) else Status.SET_DAMAGED
        parts = [examine(path, progress=progress) for path in _parts_there(manifest)]
        return SetDiagnosis(manifest, status, (what_is_wrong(error),), tuple(parts), (), ())
    parts = [_examine_part(manifest, part, progress) for part in named]
    problems = _problems_together(manifest, parts)
    status = (
        Status.SET if not problems and all(part.status.is_sound for part in parts) else Status.SET_DAMAGED
    )
    counts = tuple(part.count for part in named)
    return SetDiagnosis(
        manifest, status, problems, tuple(parts), counts, tuple(loose_parts(parts_folder(manifest)))
    )


def files_of_set(manifest: Path) -> list[Path]:
    """The parts that are there of those that a manifest names; all that are there if it can't be read."""
    try:
        named = {part.name for part in read_manifest(manifest)}
    except FormatError:
        return _parts_there(manifest)
    return [path for path in _parts_there(manifest) if path.name in named]


def _parts_there(manifest: Path) -> list[Path]:
    folder = parts_folder(manifest)
    names = files.names_in(folder) if folder.is_dir() else []
    return sorted(folder / name for name in names if number_of_part(name) is not None)


def _examine_part(manifest: Path, part: SetPart, progress: Callable[[int], None] | None) -> Diagnosis:
    path = parts_folder(manifest) / part.name
    try:
        found = examine(path, progress=progress)
    except StoreNotFoundError:
        return missing(path)
    if not found.status.is_sound:
        return found
    try:
        with open_any(path) as store:
            check_part(store, part, manifest)
    except FormatError as error:
        return replace(found, status=Status.OTHER_STORE, problems=(what_is_wrong(error),))
    return found


def _problems_together(manifest: Path, parts: Sequence[Diagnosis]) -> tuple[str, ...]:
    """What is wrong with parts that are sound one by one, such as arrays that differ (spec 15.2)."""
    if not all(part.status.is_sound for part in parts):
        return ()
    try:
        open_any(manifest).close()
    except StoreError as error:
        return (str(error),)
    return ()
