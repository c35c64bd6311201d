"""What is asked of a reader about a source: what it holds, samples of it, its digest.

Nothing here imports HDF5, which a supervisor doesn't need.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from ups_store.errors import SourceError
from ups_store.format.metadata import dtype_of
from ups_store.sources.casting import holding, largest
from ups_store.sources.contents import EVERYTHING, Selection, SourceInfo
from ups_store.sources.file_state import FileState
from ups_store.sources.reader import Call, Reader
from ups_store.sources.tasks import Task
from ups_store.sources.value_range import ValueRange

if TYPE_CHECKING:
    from ups_store.sources.source import Source

MAX_SAMPLES = 8192  # of one request: two numbers each, in a message of at most `MAX_MESSAGE_BYTES`
DigestKind = Literal["full", "sampled"]


def describe_request(
    path: Path, task: Task | None = None, selection: Selection = EVERYTHING, follow: Path | None = None
) -> Call:
    """Ask what a file holds, see `open_source`; it stays open for the samples that will be asked for."""
    return Call(_describe, (path, task, selection, follow), path, "the structure")


def _describe(
    reader: Reader, path: Path, task: Task | None, selection: Selection, follow: Path | None
) -> SourceInfo:
    with reader.opened(path, task=task, selection=selection, follow=follow) as source:
        return source.info


def digest_request(path: Path, kind: DigestKind, size: int) -> Call:
    """Ask for the digest of a file of so many bytes, blake3 in hexadecimal digits.

    Args:
        path: The file.
        kind: "full": of all bytes; "sampled": of the size, the HDF5 structure, and some blocks.
        size: Length of the file in bytes, of which progress is reported.
    """
    return Call(_digest, (path, kind, size), path, "the digest")


def _digest(reader: Reader, path: Path, kind: DigestKind, size: int) -> str:
    from ups_store.sources import digest  # HDF5: only where it is read

    reader.doing("digesting")
    if kind == "full":
        return digest.full_digest(path, reader.progressed)
    return digest.sampled_digest(path, size, reader.progressed)


@dataclass(frozen=True, eq=False)
class ReadRequest:
    """Read samples of one file in the dtypes of a store.

    Attributes:
        path: The file.
        task: What the file is meant to be.
        selection: Reduction while reading.
        samples: What the caller calls the samples, such as their numbers in the store; shape (B,), at most
            `MAX_SAMPLES`.
        indices: Their numbers in the file, shape (B,).
        dtypes: Name of the dtype that each array is cast to.
        check_finite: Whether NaN and Inf are an error.
        with_ranges: Whether to find the range of values of each array, which `check_finite` does, too.
        follow: Folder below which other files may lie that it takes data from; None: there may be none.
        state: The file, and those, as they have to be; by default as they are when the reader opens them.
    """

    path: Path
    task: Task | None
    selection: Selection
    samples: npt.NDArray[np.int64]
    indices: npt.NDArray[np.int64]
    dtypes: Mapping[str, str]
    check_finite: bool = False
    with_ranges: bool = True
    follow: Path | None = None
    state: FileState | None = None

    def __post_init__(self) -> None:
        assert 0 < len(self.indices) == len(self.samples) <= MAX_SAMPLES, len(self.indices)

    @property
    def subject(self) -> str:
        """The samples, by their numbers in the file."""
        first, last = self.indices[0], self.indices[-1]
        return f"sample {first}" if len(self.indices) == 1 else f"samples {first}..{last}"

    @property
    def first_sample(self) -> int:
        """First sample, numbered as in the file."""
        return int(self.indices[0])

    def run(self, reader: Reader) -> dict[str, ValueRange]:
        """Read, cast and check."""
        with reader.opened(
            self.path, task=self.task, selection=self.selection, follow=self.follow, state=self.state
        ) as source:
            arrays = {
                name: reader.place(name, (len(self.indices), *array.shape), dtype_of(self.dtypes[name]))
                for name, array in source.info.arrays.items()
            }
            losses = source.read_into(arrays, self.indices.tolist(), note=reader.reading)
            if not (self.with_ranges or self.check_finite):
                return {}
            reader.doing("checking")
            ranges = {
                name: replace(
                    ValueRange.of(values),
                    num_underflow=losses[name].num_zero,
                    num_overflow=losses[name].num_inf,
                    num_flat=losses[name].num_flat,
                )
                for name, values in arrays.items()
            }
            for name, values in arrays.items() if self.check_finite else ():
                if not ranges[name].is_finite:
                    raise self._not_finite(name, values, source)
        return ranges

    def _not_finite(self, name: str, cast: npt.NDArray[Any], source: Source) -> SourceError:
        """The error about the first sample of the batch that isn't finite, by its number in the file."""
        bad = ~np.isfinite(cast).reshape(len(cast), -1)
        row = int(np.flatnonzero(bad.any(axis=1))[0])
        stored = ValueRange.of(source.read([int(self.indices[row])])[name])
        facts: dict[str, Any] = {"path": self.path, "array": name, "sample": int(self.indices[row])}
        counts = f"{int(bad[row].sum())} of {bad.shape[1]} values"
        others = _others(int(bad.any(axis=1).sum()), len(bad))
        if stored.is_finite:
            return SourceError(
                f"the cast to {cast.dtype} made {counts} infinite{others}",
                kind="not_finite",
                expected=f"values within {largest(cast.dtype):.6g}",
                found=f"{stored.minimum:.6g} to {stored.maximum:.6g}",
                hint=f"cache.dtype={holding(stored.minimum, stored.maximum)} holds them",
                **facts,
            )
        hint = "mend the source, or data.on_nan=keep"
        if source.info.decoded:
            hint = f"{' and '.join(source.info.decoded)} may say that there is none: {hint}"
        return SourceError(f"{counts} are not finite{others}", kind="not_finite", hint=hint, **facts)


def _others(num_bad: int, num_read: int) -> str:
    """How much more of what was read together is concerned; samples are numbered as in the file."""
    if num_read == 1:
        return ", sample numbered as in the file"
    return (
        f", the first of {num_bad} such samples among the {num_read} read together, numbered as in the file"
    )
