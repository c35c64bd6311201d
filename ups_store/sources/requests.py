"""What a reader can be asked for: what a file holds, and samples of it.

A request is pickled, sent to a reader process and run there. Anything with the attributes of `Request` will
do, so long as the process can import its class.

What a reader process and its supervisor say to each other; without HDF5, which the supervisor needn't.

The request for the digest of a source file.

Digests of source files: of all bytes, or of the structure and some blocks.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import blake3
import h5py
import numpy as np
import numpy.typing as npt

from ups_store.errors import SourceError, StoreError
from ups_store.format.metadata import dtype_of
from ups_store.sources.contents import EVERYTHING, Selection, SourceInfo
from ups_store.sources.hdf5 import open_hdf5, translated
from ups_store.sources.parameters import ValueRange
from ups_store.sources.slots import Placed
from ups_store.sources.source_files import FileState
from ups_store.sources.tasks import Task
from ups_store.system.mappings import page_aligned

if TYPE_CHECKING:
    from ups_store.sources.reader_process import Reader
    from ups_store.sources.source import Source


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


MAX_MESSAGE_BYTES = 200_000  # what a Unix socket takes at once by default

STACK_SIGNAL = signal.SIGUSR1  # makes a reader write its stacks to stderr, also from inside a C call


@dataclass(frozen=True)
class Done:
    """A request succeeded."""

    request_id: int
    placed: tuple[Placed, ...]
    value: object


@dataclass(frozen=True)
class Failed:
    """A request failed; is_transient: so that another attempt may succeed."""

    request_id: int
    error: StoreError
    is_transient: bool


DigestKind = Literal["full", "sampled"]


@dataclass(frozen=True)
class DigestRequest:
    """Read a file for its digest; see `DigestCache.digest`.

    Attributes:
        path: The file.
        kind: "full": of all bytes; "sampled": of the size, the HDF5 structure, and some blocks.
        size: Length of the file in bytes.
    """

    path: Path
    kind: DigestKind
    size: int
    subject = "the digest"
    first_sample = None

    def run(self, reader: Reader) -> str:
        """The digest, blake3 in hexadecimal digits; tells bytes as they are read."""
        pass  # HDF5: only where it is read

        reader.doing("digesting")
        if self.kind == "full":
            return full_digest(self.path, reader.progressed)
        return sampled_digest(self.path, self.size, reader.progressed)


Progress = Callable[[int], None]

_READ_BYTES = 1 << 20  # stays in the processor's cache between reading and hashing

_NUM_BLOCKS = 64  # of a sampled digest

_BLOCK_BYTES = 64 << 10


def full_digest(path: Path, progress: Progress) -> str:
    """Of all bytes; `progress` is told numbers of bytes as they are read."""
    hasher = blake3.blake3(max_threads=blake3.blake3.AUTO)
    buffer = page_aligned(_READ_BYTES).data
    with _opened(path) as file:
        while nbytes := file.readinto(buffer):
            hasher.update(buffer[:nbytes])
            progress(nbytes)
    return hasher.hexdigest()


def sampled_digest(path: Path, size: int, progress: Progress) -> str:
    """Of the size, the HDF5 structure and evenly spaced blocks of a file of `size` bytes."""
    hasher = blake3.blake3(f"{size}\n{_structure(path)}\n".encode())
    with _opened(path) as file:
        for i in range(_NUM_BLOCKS):
            file.seek(max(0, size - _BLOCK_BYTES) * i // (_NUM_BLOCKS - 1))
            hasher.update(file.read(_BLOCK_BYTES))
            progress(size // _NUM_BLOCKS)
    return hasher.hexdigest()


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[FileIO]:
    try:
        with open(path, "rb", buffering=0) as file:
            yield file
    except OSError as error:
        raise SourceError(f"source can't be read ({error.strerror})", kind="unreadable", path=path) from error


def _structure(path: Path) -> str:
    """Every dataset of an HDF5 file with shape, dtype and chunks, sorted."""
    lines: list[str] = []

    def note(name: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset):
            lines.append(f"{name} {item.shape} {item.dtype.str} {item.chunks}")

    with open_hdf5(path) as file, translated("can't read the structure", path=path):
        file.visititems(note)
    return "\n".join(sorted(lines))
