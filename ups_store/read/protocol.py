"""`AnyStore`: what every kind of store can do, whatever its samples lie in; the type of `ups_store.open`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self, overload

import numpy as np
import numpy.typing as npt

from ups_store.format.array_spec import ArraySpec
from ups_store.format.metadata import ArrayMeta
from ups_store.read.gather import Indices
from ups_store.read.ragged_batch import Form

if TYPE_CHECKING:
    from xarray import Dataset

    from ups_store.read.preload import Mode, PreloadReport
    from ups_store.read.verify import Report
    from ups_store.system.progress import Progress


class AnyStore(Protocol):
    """An open store: mapped (`Store`), in partitions, packed, or in a device's memory.

    `Store` explains the members, `BaseStore` the attributes. What a kind can't do, such as giving a packed
    array as one piece of memory, is a `SpecError` of kind "unsupported". Samples are NumPy's arrays, of a
    device store tensors. One mistake is one kind of error in all of them: `SampleIndexError` for a sample
    that isn't there, `ArrayNotFoundError` for a name, `SpecError` of kind "index" for what is no sample
    number (floating-point numbers and masks too), `StoreClosedError` after `close`.
    """

    path: Path
    identity: dict[str, Any]
    identity_document: Mapping[str, Any]
    partition: tuple[int, int] | None
    config_hash: str
    attrs: Mapping[str, Any]
    version: tuple[int, int]
    metas: dict[str, ArrayMeta]
    is_partial: bool
    codec: str

    @property
    def arrays(self) -> dict[str, ArraySpec]:
        """The arrays with a sample axis."""

    @property
    def constants(self) -> dict[str, npt.NDArray[Any]]:
        """The arrays without a sample axis."""

    @property
    def dims(self) -> dict[str, tuple[str, ...]]:
        """Dimension names of every array."""

    @property
    def committed(self) -> npt.NDArray[np.bool_]:
        """Which samples are there, bool, shape (N,)."""

    @property
    def access(self) -> str:
        """How samples are got: "map", "pread", "decode", "remote", "device"; "mixed" of parts that differ."""

    @property
    def has_views(self) -> bool:
        """Whether `store[name]` is a view of the mapped file, without a check that would read it."""

    @property
    def network(self) -> str | None:
        """Name of the network file system that it lies on, or scheme of its URL; None for local ones."""

    @property
    def nbytes(self) -> int:
        """Length of the file, or files, in bytes; of a device store its memory."""

    @property
    def fingerprint(self) -> str:
        """Digest of the content: equal for equal content in one file, mapped or packed."""

    def __len__(self) -> int: ...

    def __contains__(self, name: object) -> bool: ...

    @overload
    def __getitem__(self, key: str) -> npt.NDArray[Any]: ...

    @overload
    def __getitem__(self, key: int | np.integer[Any] | slice) -> dict[str, Any]: ...

    def sample(self, index: int) -> dict[str, Any]:
        """All arrays of one sample by name."""

    def gather(
        self,
        indices: Indices | slice,
        names: Sequence[str] | None = None,
        *,
        start: int | Indices | None = None,
        length: int | None = None,
        stride: int = 1,
        out: Mapping[str, Any] | None = None,
        num_threads: int | None = None,
        ragged: Form = "views",
    ) -> dict[str, Any]:
        """Copy samples, or windows of them, into a batch."""

    def lengths(self, name: str) -> npt.NDArray[np.int64]:
        """Number of rows of every sample of a ragged array, shape (N,)."""

    def to_xarray(self, names: Iterable[str] | None = None) -> Dataset:
        """The store as an xarray data set that reads it when values are asked for."""

    def preload(
        self,
        mode: Mode = "auto",
        *,
        device: str | None = None,
        samples: range | None = None,
        shared: bool = False,
        lock: bool = False,
        margin: float = 0.1,
        num_threads: int | None = None,
        progress: Progress | None = None,
    ) -> PreloadReport:
        """Bring the store into memory before it is read; one report, with `parts`."""

    def residency(self) -> float:
        """Share of the store that lies in RAM, 0 to 1."""

    def verify(
        self, *, num_threads: int | None = None, progress: Callable[[int], None] | None = None
    ) -> Report:
        """Check every byte; one report, with `parts`."""

    def check_open(self) -> None:
        """Fail after `close`, with `StoreClosedError`."""

    def close(self) -> None:
        """Let go of file and memory."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
