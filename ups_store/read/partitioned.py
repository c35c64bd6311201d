"""`PartitionedStore`: a split in partitions, one file a machine, seen as one store (spec 2.4)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from ups_store.errors import FormatError, SpecError
from ups_store.format.array_spec import ArraySpec
from ups_store.format.identity import config_hash, describe_differences, differences
from ups_store.format.metadata import ArrayMeta, dtype_name
from ups_store.read.gather import Indices, check_effect, check_indices, check_output, names_of, window_of
from ups_store.read.preload import Mode, PreloadReport
from ups_store.read.store import Store
from ups_store.read.verify import Report
from ups_store.system.paths import PARTITION_KEY


class PartitionedStore:
    """Partitions of one split as one store: samples are numbered through, `gather` takes from any of them.

    Opened by `ups_store.open(pattern)`. Reads like a `Store`, except that no array is one piece of memory:
    `store[name]` refuses, `sample` and `gather` work.

    Attributes:
        path: The pattern.
        partitions: The open partitions, in order.
        identity: The identity document that one file with all samples would have.
        config_hash: Its sha256: equal to that of the store built as one file.
        is_partial: False.
    """

    is_partial = False

    def __init__(self, pattern: Path, partitions: Sequence[Store]) -> None:
        self.path = pattern
        self.partitions = tuple(partitions)
        self.identity = _whole_identity(pattern, self.partitions)
        self.config_hash = config_hash(self.identity)
        self._ends = np.cumsum([len(partition) for partition in self.partitions])

    def __len__(self) -> int:
        """N, the number of samples of all partitions."""
        return int(self._ends[-1])

    __iter__ = None

    def __contains__(self, name: object) -> bool:
        return name in self.partitions[0]

    def __repr__(self) -> str:
        where = f"{len(self)} samples in {len(self.partitions)} partitions"
        return f"<ups_store.PartitionedStore {self.path.name}: {where}>"

    @property
    def attrs(self) -> Mapping[str, Any]:
        """Attributes of the root group, those of the first partition."""
        return self.partitions[0].attrs

    @property
    def arrays(self) -> dict[str, ArraySpec]:
        """The arrays with a sample axis, shapes (N, ...)."""
        return {
            name: ArraySpec((len(self), *spec.shape[1:]), spec.dtype, dims=spec.dims, attrs=spec.attrs)
            for name, spec in self.partitions[0].arrays.items()
        }

    @property
    def constants(self) -> dict[str, npt.NDArray[Any]]:
        """The arrays without a sample axis, equal in all partitions."""
        return self.partitions[0].constants

    @property
    def dims(self) -> dict[str, tuple[str, ...]]:
        """Dimension names of every array."""
        return self.partitions[0].dims

    @property
    def nbytes(self) -> int:
        """Length of all files in bytes."""
        return sum(partition.nbytes for partition in self.partitions)

    @property
    def committed(self) -> npt.NDArray[np.bool_]:
        """Which samples are there, bool, shape (N,): all."""
        return np.ones(len(self), bool)

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        """A constant.

        Raises:
            SpecError: For an array with a sample axis: it lies in several files.
        """
        if name in self.partitions[0].constants:
            return self.partitions[0][name]
        raise SpecError(
            "its samples lie in several files, so it is no single array",
            path=self.path,
            array=name,
            hint="use gather or sample, or make one file with `ups-store concat`",
        )

    def sample(self, index: int) -> dict[str, npt.NDArray[Any]]:
        """All arrays of one sample as read-only views, as `Store.sample`."""
        samples = check_indices([index], len(self), path=self.path)
        number = int(np.searchsorted(self._ends, samples[0], side="right"))
        return self.partitions[number].sample(int(samples[0]) - self._first(number))

    def gather(
        self,
        indices: Indices,
        names: Sequence[str] | None = None,
        *,
        start: int | Indices | None = None,
        length: int | None = None,
        stride: int = 1,
        out: Mapping[str, npt.NDArray[Any]] | None = None,
        num_threads: int | None = None,
    ) -> dict[str, npt.NDArray[Any]]:
        """Copy samples, or windows of them, into a batch; arguments, result and errors as `Store.gather`.

        Where samples come from several partitions, they are copied twice.
        """
        names = None if names is None else names_of(names)
        samples = check_indices(indices, len(self), path=self.path)
        numbers = np.searchsorted(self._ends, samples, side="right")
        options: dict[str, Any] = {"stride": stride, "num_threads": num_threads}
        present = np.unique(numbers).tolist() or [0]
        if len(present) == 1:
            local = samples - self._first(present[0])
            options |= {"start": start, "length": length, "out": out}
            partition: Store = self.partitions[present[0]]
            return partition.gather(local, names, **options)
        metas = self._metas(names)
        is_window = start is not None or length is not None or stride != 1
        check_effect(metas, is_window, out, path=self.path)
        windows = [window_of(m, len(samples), start=start, length=length, stride=stride) for m in metas]
        window = next((window for window in windows if window is not None), None)
        result: dict[str, npt.NDArray[Any]] = {}
        for number in present:
            rows = np.flatnonzero(numbers == number)
            if window is not None:
                options |= {"start": window.start[rows], "length": window.length}
            batch = self.partitions[number].gather(samples[rows] - self._first(number), names, **options)
            for name, values in batch.items():
                if name not in result:
                    result[name] = _output(name, values, len(samples), out)
                result[name][rows] = values
        return result

    def preload(self, mode: Mode = "auto", **options: Any) -> list[PreloadReport]:
        """Bring all partitions into memory, a report each; arguments and errors as `Store.preload`."""
        return [partition.preload(mode, **options) for partition in self.partitions]

    def residency(self) -> float:
        """Share of the files that lies in RAM, 0 to 1."""
        return sum(partition.residency() * partition.nbytes for partition in self.partitions) / max(
            1, self.nbytes
        )

    def verify(
        self, *, num_threads: int | None = None, progress: Callable[[int], None] | None = None
    ) -> list[Report]:
        """Check every byte of every partition; a report per partition, as `Store.verify`."""
        return [partition.verify(num_threads=num_threads, progress=progress) for partition in self.partitions]

    def close(self) -> None:
        """Let go of all partitions. Closing twice is allowed."""
        for partition in self.partitions:
            partition.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return PartitionedStore, (
            self.path,
            self.partitions,
        )  # each partition checks that it is still the same

    def _metas(self, names: Sequence[str] | None) -> list[ArrayMeta]:
        arrays = self.arrays
        if not arrays.keys() >= set(names or ()):
            self.partitions[0].gather([], names)  # fails, and says why
        chosen = arrays if names is None else {name: arrays[name] for name in names}
        return [
            ArrayMeta(name, tuple(spec.shape), dtype_name(spec.dtype), tuple(spec.dims or ()))
            for name, spec in chosen.items()
        ]

    def _first(self, number: int) -> int:
        return int(self._ends[number]) - len(self.partitions[number])


def _output(
    name: str, values: npt.NDArray[Any], num_samples: int, out: Mapping[str, npt.NDArray[Any]] | None
) -> npt.NDArray[Any]:
    """Memory for the whole batch of an array of which `values` is a part."""
    shape = (num_samples, *values.shape[1:])
    if out is None or name not in out:
        return np.empty(shape, values.dtype)
    check_output(name, values.dtype, shape, out[name])
    return out[name]


def _whole_identity(pattern: Path, partitions: Sequence[Store]) -> dict[str, Any]:
    """The identity of all partitions together; they must be made from the same, in the right order."""
    first = _without_partition(partitions[0].identity, sum(map(len, partitions)))
    for number, partition in enumerate(partitions):
        found = partition.identity.get("content", {}).get(PARTITION_KEY)
        if found != [number, len(partitions)]:
            raise FormatError(
                "partition of a store",
                path=partition.path,
                kind="partitions",
                clause="2.4",
                expected=f"partition {[number, len(partitions)]} by its identity",
                found=found,
                hint="give every file the name that it was built under",
            )
        differing = differences(_without_partition(partition.identity, sum(map(len, partitions))), first)
        if differing:
            raise FormatError(
                f"not made from the same as partition 0:\n{describe_differences(differing)}",
                path=partition.path,
                kind="partitions",
                clause="2.4",
                hint=f"build the partitions of {pattern.name} again with one configuration",
            )
    return first


def _without_partition(identity: Mapping[str, Any], num_samples: int) -> dict[str, Any]:
    content = {key: value for key, value in identity.get("content", {}).items() if key != PARTITION_KEY}
    arrays = {
        name: {**array, "shape": [num_samples, *array["shape"][1:]]} if "sample" in array["dims"] else array
        for name, array in identity.get("arrays", {}).items()
    }
    return {**identity, "arrays": arrays, "content": content}
