"""`concat` and `split`: stores from the samples of finished stores, in blocks, resumable."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ups_store.errors import SpecError, StoreError
from ups_store.format.metadata import ArraySpec
from ups_store.read.base import AnyStore
from ups_store.read.open import open_store
from ups_store.read.several import common_attrs, parts_of
from ups_store.system.files import Progress
from ups_store.system.paths import check_store_name, path_of
from ups_store.write.create import create, identity_of
from ups_store.write.described import Described
from ups_store.write.target import check_not_source, check_sound, check_target
from ups_store.write.writer import StoreWriter

COPY_BYTES = 32 << 20

Paths = Sequence[str | os.PathLike[str]]


@dataclass(frozen=True)
class StoreSlice:
    """Consecutive samples of one file.

    Attributes:
        store: A finished store, mapped or packed.
        first: First sample.
        end: Sample past the last one.
    """

    store: AnyStore
    first: int
    end: int

    def __len__(self) -> int:
        return self.end - self.first

    def to_json(self) -> dict[str, Any]:
        """As an identity document names it: what it was made from, its very bytes, which samples."""
        return {
            "config_hash": self.store.config_hash,
            "fingerprint": self.store.fingerprint,
            "samples": [self.first, self.end],
        }


def concat_stores(
    stores: Sequence[AnyStore],
    target: str | os.PathLike[str],
    *,
    force: bool = False,
    verify: bool = True,
    progress: Progress | None = None,
) -> Path:
    """Make one store of the samples of several, in their order.

    Attributes that all of them have with the same value are kept; the identity names their config hashes.
    An interrupted run is continued.

    Args:
        stores: Finished stores of any kind with the same arrays (dtypes, shapes of a sample, dimensions) and
            constants.
        target: The store to make.
        force: Whether to replace what is there: a finished store, and an unfinished one of something else.
        verify: Whether to check every byte of the sources first.
        progress: Called with the number of payload bytes that were copied since the last call.
    Raises:
        SpecError: If they differ, kind "concat_mismatch"; names the array and the difference. If the target
            exists, kind "exists", or is one of them, forced or not, kind "same_file".
        CorruptChunkError: If one of them is damaged.
    """
    if not stores:
        raise SpecError("nothing to concatenate", kind="concat", expected="one store or more", found="none")
    path = path_of(target)
    check_not_source(path, [part.path for store in stores for part in parts_of(store)])
    check_target(path, force=force)
    for other in stores[1:]:
        _check_alike(stores[0], other)
    parts = [StoreSlice(file, 0, len(file)) for store in stores for file in parts_of(store)]
    if verify:
        for store in stores:
            check_sound(store)
    return _write(parts, Path(target), kind="concat", force=force, progress=progress)


def split_store(
    store: AnyStore,
    targets: Paths,
    *,
    samples: Sequence[tuple[int, int]],
    force: bool = False,
    verify: bool = True,
    progress: Progress | None = None,
) -> list[Path]:
    """Make stores of ranges of a store's samples.

    An interrupted run is continued: targets that it finished, by their identities, stay as they are.

    Args:
        store: A finished store of any kind: mapped, packed, or in partitions.
        targets: The stores to make.
        samples: `(first, past_last)` sample of each; see `ranges_of_fractions`.
        force: Whether to replace what is there: finished stores, and unfinished ones of something else.
        verify: Whether to check every byte of the source first.
        progress: Called with the number of payload bytes that were copied since the last call.
    Raises:
        SpecError: For a range outside the store, or another number of ranges than targets. If a target is
            something else that exists, kind "exists", or the store, forced or not, kind "same_file".
        CorruptChunkError: If the store is damaged.
    """
    names = [path_of(target) for target in targets]
    if not names or len(names) != len(samples) or len(set(names)) < len(names):
        found = f"{len(names)} targets, {len(samples)} ranges"
        raise SpecError("targets", kind="split", expected="distinct ones, one per range", found=found)
    for first, end in samples:
        if not 0 <= first < end <= len(store):
            expected = f"0 <= first < end <= {len(store)}"
            raise SpecError(
                "sample range", kind="split", path=store.path, expected=expected, found=f"{first}:{end}"
            )
    for name in names:
        check_store_name(name)
    parts = {name: _parts(store, *edges) for name, edges in zip(names, samples, strict=True)}
    done = set() if force else {name for name, here in parts.items() if _is_made(name, here)}
    for name in parts.keys() - done:
        check_not_source(name, [part.path for part in parts_of(store)])
        check_target(name, force=force)
    if verify:
        check_sound(store)
    for name in names:
        if name not in done:
            _write(parts[name], name, kind="split", force=force, progress=progress)
    return names


def _parts(store: AnyStore, first: int, end: int) -> list[StoreSlice]:
    """Samples `first` to `end` of a store, file by file; at least one."""
    parts, offset = [], 0
    for file in parts_of(store):
        here = StoreSlice(file, max(first - offset, 0), min(end - offset, len(file)))
        if here.first < here.end:
            parts.append(here)
        offset += len(file)
    return parts


def _is_made(target: Path, parts: list[StoreSlice]) -> bool:
    """Whether an earlier run of the same split finished this target."""
    arguments = _create_arguments(parts, "split")
    arguments.pop("attrs")
    try:
        with open_store(target) as found:
            return bool(found.identity_document == identity_of(**arguments))
    except (StoreError, OSError):
        return False


def ranges_of_fractions(num_samples: int, fractions: Sequence[float]) -> list[tuple[int, int]]:
    """Consecutive ranges that cover all samples, their sizes as near to the fractions as can be.

    Args:
        num_samples: N.
        fractions: Share of each range, positive, 1 in sum.
    Raises:
        SpecError: For other fractions, or if a range would be empty.
    """
    is_valid = all(math.isfinite(f) and f > 0 for f in fractions) and abs(sum(fractions) - 1) < 1e-6
    if not is_valid:
        raise SpecError("fractions", kind="split", expected="positive numbers, 1 in sum", found=fractions)
    edges = [round(num_samples * sum(fractions[:i])) for i in range(len(fractions))] + [num_samples]
    ranges = list(pairwise(edges))
    if any(first >= end for first, end in ranges):
        expected = f"at least one of the {num_samples} samples for each"
        raise SpecError("fractions", kind="split", expected=expected, found=fractions)
    return ranges


def _check_alike(model: AnyStore, other: AnyStore) -> None:
    """Refuse stores whose samples can't stand in one array, or whose constants differ."""
    left, right = _geometry(model), _geometry(other)
    for name in sorted(left.keys() | right.keys()):
        if left.get(name) != right.get(name):
            raise _mismatch(model, other, name, left.get(name, "absent"), right.get(name, "absent"))
    constants = other.constants
    for name, value in model.constants.items():
        if value.tobytes() != constants[name].tobytes():
            raise _mismatch(model, other, name, "the same values", "other values of the constant")


def _geometry(store: AnyStore) -> dict[str, str]:
    arrays: dict[str, Any] = {
        name: (
            spec.dtype,
            tuple(spec.shape[1:]),
            "a sample" if spec.encoding is None else f"a sample ({spec.encoding})",
        )
        for name, spec in store.arrays.items()
    }
    constants = {name: (value.dtype, value.shape, "the constant") for name, value in store.constants.items()}
    return {
        name: f"{dtype} {shape} as {what}, dimensions {store.dims[name]}"
        for name, (dtype, shape, what) in (arrays | constants).items()
    }


def _mismatch(model: AnyStore, other: AnyStore, name: str, expected: str, found: str) -> SpecError:
    return SpecError(
        f"it can't be joined to {model.path.name}",
        kind="concat_mismatch",
        path=other.path,
        array=name,
        expected=expected,
        found=found,
    )


def _write(
    parts: list[StoreSlice], target: Path, *, kind: str, force: bool, progress: Progress | None
) -> Path:
    arguments = _create_arguments(parts, kind)
    with create(target, **arguments, on_mismatch="restart" if force else "raise") as writer:
        _copy(writer, parts, progress or (lambda nbytes: None))
        return writer.finish()


def _create_arguments(parts: list[StoreSlice], kind: str) -> dict[str, Any]:
    model = parts[0].store
    num_samples = sum(map(len, parts))
    return {
        "arrays": {name: _spec(name, num_samples, parts) for name in model.arrays},
        "constants": {n: Described(value, model.metas[n].attrs) for n, value in model.constants.items()},
        "dims": {name: model.dims[name] for name in model.constants},
        "identity": {"kind": kind, "parents": [part.to_json() for part in parts]},
        "attrs": common_attrs([part.store.attrs for part in parts]),
    }


def _spec(name: str, num_samples: int, parts: list[StoreSlice]) -> ArraySpec:
    specs = [part.store.arrays[name] for part in parts]
    shape = (num_samples, *specs[0].shape[1:])
    attrs = common_attrs([spec.attrs or {} for spec in specs])
    lengths, encoding = None, specs[0].encoding
    if specs[0].is_ragged:
        lengths = np.concatenate([part.store.lengths(name)[part.first : part.end] for part in parts])
    return ArraySpec(shape, specs[0].dtype, specs[0].dims, attrs, lengths, encoding)


def _copy(writer: StoreWriter, parts: list[StoreSlice], progress: Progress) -> None:
    is_missing = np.zeros(writer.num_samples, bool)
    is_missing[writer.missing()] = True
    offset = 0
    for part in parts:
        here = part.first + np.flatnonzero(is_missing[offset : offset + len(part)])
        for block in _blocks(part.store, here):
            batch = part.store.gather(block)
            writer.commit_many(block - part.first + offset, batch)
            progress(sum(map(_nbytes, batch.values())))
        offset += len(part)


def _nbytes(values: Any) -> int:
    """Bytes of a batch of one array; of ragged ones a list of samples."""
    if isinstance(values, np.ndarray):
        return values.nbytes
    return sum(len(v.encode()) if isinstance(v, str) else memoryview(v).nbytes for v in values)


def _blocks(store: AnyStore, samples: npt.NDArray[np.int64]) -> Iterator[npt.NDArray[np.int64]]:
    nbytes = sum(meta.nbytes for meta in store.metas.values() if not meta.is_constant)
    sample_nbytes = nbytes // max(1, len(store))
    num = max(1, COPY_BYTES // max(1, sample_nbytes))
    for first in range(0, len(samples), num):
        yield samples[first : first + num]
