"""What a reader can be asked for: what a file holds, and samples of it.

A request is pickled, sent to a reader process and run there. Anything with the attributes of `Request` will
do, so long as the process can import its class.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from ups_store.errors import SourceError
from ups_store.format.metadata import dtype_of
from ups_store.ingest.file_state import FileState
from ups_store.ingest.info import EVERYTHING, Selection, SourceInfo
from ups_store.ingest.value_range import ValueRange
from ups_store.tasks import Task

if TYPE_CHECKING:
    from ups_store.ingest.reader_process import Reader
    from ups_store.ingest.source import Source

MAX_SAMPLES = 8192  # of one request: two numbers each, in a message of at most `MAX_MESSAGE_BYTES`


class Request(Protocol):
    """Something to be done by a reader with one file."""

    @property
    def path(self) -> Path:
        """The file, for messages."""
        ...

    @property
    def subject(self) -> str:
        """What of the file is concerned, for messages, such as "samples 4..7"."""
        ...

    @property
    def first_sample(self) -> int | None:
        """First sample concerned, numbered as in the file, for messages."""
        ...

    def run(self, reader: Reader) -> object:
        """Do it; arrays go where `reader.place` says, and a small result may be returned (pickled).

        Raises:
            SourceError: Passed on to whoever asked.
        """
        ...


@dataclass(frozen=True)
class DescribeRequest:
    """Open a file and say what it holds; see `open_source`."""

    path: Path
    task: Task | None = None
    selection: Selection = EVERYTHING
    subject = "the structure"
    first_sample = None

    def run(self, reader: Reader) -> SourceInfo:
        """Open the file; it stays open for the samples that will be asked for.

        Returns:
            What it holds; its constants, which may be longer than a message, are placed instead.
        """
        with reader.opened(self.path, task=self.task, selection=self.selection) as source:
            info = source.info
        for name, values in info.constants.items():
            reader.place(name, values.shape, values.dtype)[...] = values
        return replace(info, constants={})


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
        state: The file as it has to be; by default as it is when the reader opens it.
    """

    path: Path
    task: Task | None
    selection: Selection
    samples: npt.NDArray[np.int64]
    indices: npt.NDArray[np.int64]
    dtypes: Mapping[str, str]
    check_finite: bool = False
    with_ranges: bool = True
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
        """Read, cast and check.

        Returns:
            The range of values of each array, if that is wanted.

        Raises:
            SourceError: As `open_source` and `Source.read_into`; kind "source_changed"; kind "not_finite".
        """
        with reader.opened(self.path, task=self.task, selection=self.selection, state=self.state) as source:
            arrays = {
                name: reader.place(name, (len(self.indices), *array.shape), dtype_of(self.dtypes[name]))
                for name, array in source.info.arrays.items()
            }
            with np.errstate(over="ignore", invalid="ignore"):  # Inf and NaN are counted, not warned about
                source.read_into(arrays, self.indices.tolist(), told=reader.reading)
            if not (self.with_ranges or self.check_finite):
                return {}
            reader.doing("checking")
            ranges = {name: ValueRange.of(values) for name, values in arrays.items()}
            for name, values in arrays.items() if self.check_finite else ():
                if not ranges[name].is_finite:
                    raise self._not_finite(name, values, source)
        return ranges

    def _not_finite(self, name: str, cast: npt.NDArray[Any], source: Source) -> SourceError:
        """The error about the first sample of the batch that isn't finite, by its number in the file."""
        bad = ~np.isfinite(cast).reshape(len(cast), -1)
        row = int(np.flatnonzero(bad.any(axis=1))[0])
        stored = source.read([int(self.indices[row])])[name]
        overflowed = bool(np.isfinite(stored).all())
        return SourceError(
            f"{int(bad[row].sum())} of {bad.shape[1]} values are not finite"
            + (f" as {cast.dtype}" if overflowed else "")
            + _others(int(bad.any(axis=1).sum()), len(bad)),
            kind="not_finite",
            path=self.path,
            array=name,
            sample=int(self.indices[row]),
            hint="choose a wider --cache-dtype" if overflowed else "mend the source, or --on-nan keep",
        )


def _others(num_bad: int, num_read: int) -> str:
    """How much more of what was read together is concerned; samples are numbered as in the file."""
    if num_read == 1:
        return ", sample numbered as in the file"
    return (
        f", the first of {num_bad} such samples among the {num_read} read together, numbered as in the file"
    )
