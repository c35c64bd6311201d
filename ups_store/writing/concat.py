"""`concat` and `split`: stores from the samples of finished stores, in blocks, resumable."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from ups_store.errors import SpecError, StoreError
from ups_store.format.metadata import ArraySpec
from ups_store.read.base import AnyStore
from ups_store.read.open import open_store
from ups_store.read.several import common_attrs, parts_of
from ups_store.system.files import Progress
from ups_store.system.paths import check_store_name, path_of
from ups_store.writing.create import create
from ups_store.writing.described import Described
from ups_store.writing.plan import identity_of
from ups_store.writing.samples import nbytes_of
from ups_store.writing.target import check_not_source, check_sound, check_target

COPY_BYTES = 32 << 20

Paths = Sequence[str | os.PathLike[str]]


@dataclass(frozen=True)
class StoreSlice:
    """Samples `first` to `end`, the last one not included, of one file, mapped or packed."""

    store: AnyStore
    first: int
    end: int

    def __len__(self) -> int:
        return self.end - self.first


def concat_stores(
    stores: Sequence[AnyStore],
    target: str | os.PathLike[str],
    *,
    force: bool = False,
    verify: bool = True,
    progress: Progress | None = None,
) -> Path:
    """Make one store of the samples of several, in their order; an interrupted run is continued.

    They have the same arrays (dtypes, shapes of a sample, dimensions) and constants, else kind
    "concat_mismatch". Attributes that all of them have with the same value are kept; the identity names their
    config hashes. With `force` a finished store, and an unfinished one of something else, is replaced.
    """
    if not stores:
        raise SpecError("nothing to concatenate", kind="concat", expected="one store or more", found="none")
    path = path_of(target)
    slices = [StoreSlice(file, 0, len(file)) for store in stores for file in parts_of(store)]
    check_not_source(path, [part.store.path for part in slices])
    check_target(path, force=force)
    for other in stores[1:]:
        _check_alike(stores[0], other)
    if verify:
        for store in stores:
            check_sound(store)
    return _copy_slices(slices, Path(target), kind="concat", force=force, progress=progress)


def split_store(
    store: AnyStore,
    targets: Paths,
    *,
    samples: Sequence[tuple[int, int]],
    force: bool = False,
    verify: bool = True,
    progress: Progress | None = None,
) -> list[Path]:
    """Make stores of ranges `(first, past_last)` of a store's samples; see `ranges_of_fractions`.

    An interrupted run is continued: targets that it finished, by their identities, stay as they are.
    """
    names = [path_of(target) for target in targets]
    if not names or len(names) != len(samples) or len(set(names)) < len(names):
        counts = f"{len(names)} targets, {len(samples)} ranges"
        raise SpecError("targets", kind="split", expected="distinct ones, one per range", found=counts)
    for first, end in samples:
        if not 0 <= first < end <= len(store):
            expected, cut = f"0 <= first < end <= {len(store)}", f"{first}:{end}"
            raise SpecError("sample range", kind="split", path=store.path, expected=expected, found=cut)
    for name in names:
        check_store_name(name)
    to_make: dict[Path, list[StoreSlice]] = {}
    for name, (first, end) in zip(names, samples, strict=True):
        slices, offset = [], 0
        for file in parts_of(store):
            here = StoreSlice(file, max(first - offset, 0), min(end - offset, len(file)))
            slices += [here] if here.first < here.end else []
            offset += len(file)
        is_made = False  # by an earlier run of the same split
        if not force:
            arguments = _create_arguments(slices, "split")
            arguments.pop("attrs")
            with contextlib.suppress(StoreError, OSError), open_store(name) as made:
                is_made = made.identity_document == identity_of(**arguments)
        if not is_made:
            to_make[name] = slices
    for name in to_make:
        check_not_source(name, [file.path for file in parts_of(store)])
        check_target(name, force=force)
    if verify:
        check_sound(store)
    for name, slices in to_make.items():
        _copy_slices(slices, name, kind="split", force=force, progress=progress)
    return names


def ranges_of_fractions(num_samples: int, fractions: Sequence[float]) -> list[tuple[int, int]]:
    """Cut all samples into consecutive ranges, their sizes as near to the fractions as can be."""
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
    geometries: list[dict[str, str]] = []
    for store in (model, other):
        geometry = {}
        for name, spec in store.arrays.items():
            encoding = "" if spec.encoding is None else f" ({spec.encoding})"
            geometry[name] = f"{spec.dtype} {tuple(spec.shape[1:])} as a sample{encoding}"
        for name, value in store.constants.items():
            geometry[name] = f"{value.dtype} {value.shape} as the constant"
        geometries.append({name: f"{text}, dimensions {store.dims[name]}" for name, text in geometry.items()})
    constants, others = model.constants, other.constants
    for name in sorted(geometries[0].keys() | geometries[1].keys()):
        one, two = (geometry.get(name, "absent") for geometry in geometries)
        if one == two and name in constants and constants[name].tobytes() != others[name].tobytes():
            one, two = "the same values", "other values of the constant"
        if one != two:
            facts: dict[str, Any] = {"array": name, "expected": one, "found": two}
            problem = f"it can't be joined to {model.path.name}"
            raise SpecError(problem, kind="concat_mismatch", path=other.path, **facts)


def _create_arguments(slices: list[StoreSlice], kind: str) -> dict[str, Any]:
    """Arguments of `create`; the identity names what each slice was made from, its bytes, its samples."""
    model = slices[0].store
    parents = [
        {
            "config_hash": part.store.config_hash,
            "fingerprint": part.store.fingerprint,
            "samples": [part.first, part.end],
        }
        for part in slices
    ]
    arrays = {}
    for name in model.arrays:
        specs = [part.store.arrays[name] for part in slices]
        shape = (sum(map(len, slices)), *specs[0].shape[1:])
        attrs = common_attrs([spec.attrs or {} for spec in specs])
        lengths = None
        if specs[0].is_ragged:
            lengths = np.concatenate([part.store.lengths(name)[part.first : part.end] for part in slices])
        arrays[name] = ArraySpec(shape, specs[0].dtype, specs[0].dims, attrs, lengths, specs[0].encoding)
    return {
        "arrays": arrays,
        "constants": {name: Described(v, model.metas[name].attrs) for name, v in model.constants.items()},
        "dims": {name: model.dims[name] for name in model.constants},
        "identity": {"kind": kind, "parents": parents},
        "attrs": common_attrs([part.store.attrs for part in slices]),
    }


def _copy_slices(
    slices: list[StoreSlice], target: Path, *, kind: str, force: bool, progress: Progress | None
) -> Path:
    on_mismatch: Any = "restart" if force else "raise"
    with create(target, **_create_arguments(slices, kind), on_mismatch=on_mismatch) as writer:
        is_missing = np.zeros(writer.num_samples, bool)
        is_missing[writer.missing()] = True
        offset = 0
        for part in slices:
            store = part.store
            samples = part.first + np.flatnonzero(is_missing[offset : offset + len(part)])
            nbytes = sum(meta.nbytes for meta in store.metas.values() if not meta.is_constant)
            step = max(1, COPY_BYTES // max(1, nbytes // max(1, len(store))))
            for first in range(0, len(samples), step):
                block = samples[first : first + step]
                batch = store.gather(block)
                writer.commit_many(block - part.first + offset, batch)
                if progress is not None:
                    values = (v if isinstance(v, list) else [v] for v in batch.values())
                    progress(sum(nbytes_of(value) for column in values for value in column))
            offset += len(part)
        return writer.finish()
