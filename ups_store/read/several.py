"""`PartitionedStore`: several stores seen as one: partitions of a split (spec 2.4), a pattern, or a list."""

from __future__ import annotations

import glob
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ups_store.errors import FormatError, SpecError
from ups_store.format.metadata import ArrayMeta
from ups_store.format.root import RootMeta, config_hash, describe_differences, differences
from ups_store.printable import counted
from ups_store.read.base import AnyStore
from ups_store.read.gather import BatchArguments, Samples, batch_memory, check_indices, window_of
from ups_store.read.preload import PreloadReport, Request
from ups_store.read.verify import Report
from ups_store.system.paths import find_partitions, partition_of


class PartitionedStore(AnyStore):
    """Several stores as one: samples are numbered through, `gather` takes from any of them.

    Opened by `ups_store.open` of a pattern or a list. They are the partitions of one split, made from the
    same, or stores of the same arrays and constants, each made from its own. Reads like a `Store`, except
    that no array is one piece of memory: `store[name]` refuses, `sample` and `gather` work.

    Attributes:
        path: The pattern; of a list its first file.
        partitions: The open stores, in order.
        network: That of the first one that doesn't lie on a local file system.
        identity_document: Of partitions the one that one file with all samples would have; of other stores
            theirs, if they are equal, else one that names their hashes; `config_hash` is its hash.
        attrs: Those that all of them have with the same value.
    """

    def __init__(self, pattern: Path, partitions: Sequence[AnyStore]) -> None:
        self.partitions: tuple[AnyStore, ...] = tuple(partitions)
        is_split = any(store.identity_document.get("partition") for store in self.partitions)
        document = (_whole_identity if is_split else _common_identity)(pattern, self.partitions)
        attrs = common_attrs([partition.attrs for partition in self.partitions])
        self._ends = np.cumsum([len(partition) for partition in self.partitions])
        self._firsts = (self._ends - [len(partition) for partition in self.partitions]).tolist()
        num_samples = int(self._ends[-1])
        metas = []
        for name, meta in self.partitions[0].metas.items():
            length = num_samples
            if meta.is_ragged:
                length = sum(partition.metas[name].shape[0] for partition in self.partitions)
            metas.append(meta if meta.is_constant else replace(meta, shape=(length, *meta.sample_shape)))
        version = max(partition.version for partition in self.partitions)
        root = RootMeta(version, config_hash(document), document, attrs)
        super().__init__(pattern, root, metas, num_samples)
        self.nbytes = sum(partition.nbytes for partition in self.partitions)
        self.network = next(filter(None, (partition.network for partition in self.partitions)), None)
        codecs = {partition.codec for partition in self.partitions}
        self.codec = codecs.pop() if len(codecs) == 1 else "mixed"

    def _summary(self) -> list[str]:
        kind = "partition" if self.partitions[0].partition else "store"
        return [counted(len(self.partitions), kind), f"{self.nbytes:,} bytes"]

    @property
    def access(self) -> str:
        """Tell how samples are got, as `Store.access`; "mixed" if not from all partitions alike."""
        kinds = {partition.access for partition in self.partitions}
        return kinds.pop() if len(kinds) == 1 else "mixed"

    @property
    def fingerprint(self) -> str:
        """The partitions' fingerprints, in order; that of one file with the same samples is another."""
        return " ".join(partition.fingerprint for partition in self.partitions)

    def whole(self, name: str) -> npt.NDArray[Any]:
        """Give a constant, read-only, equal in all partitions; other arrays lie in several files."""
        if self._meta(name).is_constant:
            constant: npt.NDArray[Any] = self.partitions[0][name]
            return constant
        self.check_open()
        problem = "its samples lie in several files, so it is no single array"
        hint = "use gather or sample, or make one file with `ups-store concat`"
        raise self._unsupported(problem, hint, array=name)

    def sample(self, index: int) -> dict[str, Any]:
        """Give all arrays of one sample, read-only, by name, as `Store.sample`."""
        self.check_open()
        sample = int(check_indices([index], len(self), path=self.path)[0])
        number = int(np.searchsorted(self._ends, sample, side="right"))
        return self.partitions[number].sample(sample - self._firsts[number])

    def _gather(self, samples: Samples, metas: list[ArrayMeta], arguments: BatchArguments) -> dict[str, Any]:
        """Gather twice what comes from several partitions; views of ragged arrays are never copied."""
        names = [meta.name for meta in metas]
        numbers = np.searchsorted(self._ends, samples, side="right")
        present = np.unique(numbers).tolist() or [int(np.argmax(np.diff(self._ends, prepend=0) > 0))]
        if len(present) == 1:
            number: int = present[0]
            partition, local = self.partitions[number], samples - self._firsts[number]
            return partition.gather(local, names, **arguments._asdict())
        windows = [window_of(meta, len(samples), arguments) for meta in metas]
        times = next((window for window in windows if window is not None), None)
        result: dict[str, npt.NDArray[Any]] = {}
        for number in present:
            rows = np.flatnonzero(numbers == number)
            mine = arguments._replace(out=None)
            if times is not None:
                mine = mine._replace(start=times.start[rows], length=times.length)
            partition, local = self.partitions[number], samples[rows] - self._firsts[number]
            batch = partition.gather(local, names, **mine._asdict())
            for meta in metas:
                values = batch[meta.name]
                if meta.name not in result:
                    result[meta.name] = batch_memory(meta, (len(samples), *values.shape[1:]), arguments.out)
                result[meta.name][rows] = values
        return result

    def _lengths_of(self, name: str) -> Samples:
        return np.concatenate([partition.lengths(name) for partition in self.partitions])

    def _views_of(
        self, name: str, samples: Samples, *, decode: bool, num_threads: int | None = None
    ) -> list[Any]:
        numbers = np.searchsorted(self._ends, samples, side="right")
        views: list[Any] = [None] * len(samples)
        for number in np.unique(numbers).tolist():
            rows = np.flatnonzero(numbers == number)
            local = samples[rows] - self._firsts[number]
            partial = self.partitions[number]._views_of(name, local, decode=decode, num_threads=num_threads)
            for row, view in zip(rows.tolist(), partial, strict=True):
                views[row] = view
        return views

    def _preload(self, request: Request) -> PreloadReport:
        """Preload all partitions, one after the other."""
        if request.samples is not None:
            hint = "preload the partition that has them: `store.partitions[i].preload(...)`"
            raise SpecError("preload argument 'samples'", kind="samples", path=self.path, hint=hint)
        reports = [partition._preload(request) for partition in self.partitions]
        return PreloadReport.joined(self.path, reports)

    def residency(self) -> float:
        """Give the share of the files that lies in RAM, 0 to 1."""
        resident = sum(partition.residency() * partition.nbytes for partition in self.partitions)
        return resident / max(1, self.nbytes)

    def verify(
        self, *, num_threads: int | None = None, progress: Callable[[int], None] | None = None
    ) -> Report:
        """Check every byte of every partition; see `AnyStore.verify`."""
        reports = [
            partition.verify(num_threads=num_threads, progress=progress) for partition in self.partitions
        ]
        return Report.joined(self.path, reports, self._firsts)

    def check_open(self) -> None:
        """Fail after `close`, with `StoreClosedError`."""
        self.partitions[0].check_open()

    def close(self) -> None:
        """Let go of all partitions. Closing twice is allowed."""
        for partition in self.partitions:
            partition.close()

    def __reduce__(self) -> tuple[Any, ...]:
        # Each partition checks that it is still the same.
        return type(self), (self.path, self.partitions)


def parts_of(store: AnyStore) -> tuple[AnyStore, ...]:
    """Give the stores that are one file each: the partitions, or the store itself."""
    return store.partitions if isinstance(store, PartitionedStore) else (store,)


def _whole_identity(pattern: Path, partitions: Sequence[AnyStore]) -> dict[str, Any]:
    """Make the identity document of a split; its partitions must be of the same, in the right order."""
    documents = [dict(partition.identity_document) for partition in partitions]
    numbers = [document.pop("partition", None) for document in documents]
    num, num_samples = len(partitions), sum(map(len, partitions))
    for number, partition in enumerate(partitions):
        hint = f"build the partitions of {pattern.name} again with one configuration"
        end, first = num_samples * (number + 1) // num, num_samples * number // num
        problem, values = "", dict[str, Any]()
        if numbers[number] != [number, num]:
            hint = "give every file the name that it was built under"
            problem = "partition of a store"
            values = {"expected": f"partition {[number, num]} by its identity", "found": numbers[number]}
        elif differing := differences(documents[number], documents[0]):
            problem = f"not made from the same as partition 0:\n{describe_differences(differing)}"
        elif len(partition) != end - first:
            problem, values = "number of samples", {"expected": end - first, "found": len(partition)}
        if problem:
            path = partition.path
            raise FormatError(problem, path=path, kind="partitions", clause="2.4", hint=hint, **values)
    return documents[0]


def _common_identity(pattern: Path, stores: Sequence[AnyStore]) -> dict[str, Any]:
    """Make the identity document of stores of the same arrays: theirs if all are equal, else its own."""
    keys = ("arrays", "constants")
    geometries = [{key: store.identity_document.get(key) for key in keys} for store in stores]
    for store, geometry in zip(stores, geometries, strict=True):
        differing = differences(geometry, geometries[0])
        if differing:
            raise FormatError(
                f"other arrays than in the first store:\n{describe_differences(differing)}",
                path=store.path,
                kind="partitions",
                hint=f"move it away: {pattern.name} names stores of the same arrays and constants",
            )
    first = dict(stores[0].identity_document)
    hashes = list(dict.fromkeys(store.config_hash for store in stores))
    return first if len(hashes) == 1 else {**first, "content": {"kind": "stores", "parents": hashes}}


def files_of(pattern: Path) -> list[Path]:
    """List the files that a pattern names: all partitions of a split, else those that match, by name."""
    names = glob.escape(pattern.name).replace("[*]", "*")  # a star is all that means something, in the name
    paths = sorted(pattern.parent.glob(names))
    if not paths or any(partition_of(path.name) for path in paths):
        return find_partitions(pattern)
    return paths


def common_attrs(documents: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Give what all of them say."""
    return {
        key: value
        for key, value in documents[0].items()
        if all(key in other and other[key] == value for other in documents[1:])
    }
