"""The files of parts: what they are made from, what they hold, and the lock of their writer (spec 15)."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ups_store.errors import BuildLockedError, CommitError, SpecError, StoreNotFoundError
from ups_store.format.build_tail import BUILDER_LOCK
from ups_store.format.layout import ArrayLayout, Layout
from ups_store.format.manifest import SetPart
from ups_store.format.metadata import ArrayMeta, ArraySpec
from ups_store.read.base import spec_of
from ups_store.read.catalog import Catalog, fingerprint_of, read_finished
from ups_store.read.ragged import read_offsets, sample_extent
from ups_store.read.recovery import BUILDING_SUFFIX
from ups_store.read.store_file import read_at, read_constant
from ups_store.system import files, locks
from ups_store.write.blueprint import Blueprint, blueprint_of
from ups_store.write.building import not_done

LOCK_NAME = "lock"
_BEGUN = re.compile(r"\d{5}\.zarr\.zip" + re.escape(BUILDING_SUFFIX) + r"(\.[0-9a-f]{16})?")
_MAX_ROUNDS = 100  # in which other writers may begin and end


@dataclass(frozen=True)
class Recipe:
    """What `create` is given for every part, but the number of samples and their lengths."""

    arrays: Mapping[str, ArraySpec]
    constants: Mapping[str, npt.ArrayLike]
    dims: Mapping[str, Sequence[str]]
    identity: Mapping[str, Any]
    attrs: Mapping[str, Any]

    def specs(self, num_samples: int, lengths: Mapping[str, Any]) -> dict[str, ArraySpec]:
        """The arrays of a store with so many samples."""
        return {
            name: replace(spec, shape=(num_samples, *spec.shape[1:]), lengths=lengths.get(name))
            for name, spec in self.arrays.items()
        }

    def blueprint(self, num_samples: int, lengths: Mapping[str, Any]) -> Blueprint:
        """The store with so many samples."""
        specs = self.specs(num_samples, lengths)
        return blueprint_of(specs, self.constants, self.dims, self.identity, self.attrs)

    @property
    def ragged(self) -> list[str]:
        """Names of the ragged arrays."""
        return [name for name, spec in self.arrays.items() if spec.is_ragged]


def metas_of(recipe: Recipe) -> dict[str, ArrayMeta]:
    """Metadata of the arrays that samples have."""
    for name, spec in recipe.arrays.items():
        if isinstance(spec, ArraySpec):
            _check_uncounted(name, spec)
    layout = recipe.blueprint(0, {name: [] for name in recipe.ragged}).layout
    return {a.meta.name: a.meta for a in layout.per_sample if not a.meta.is_companion}


def _check_uncounted(name: str, spec: ArraySpec) -> None:
    """Refuse numbers that are counted as samples are added, and would have no effect."""
    if spec.lengths is not None:
        expected = "none: they are counted as samples are added"
        raise SpecError("lengths", kind="lengths", array=name, expected=expected, found="lengths")
    if len(spec.shape) and spec.shape[0] is not None:
        expected, found = "None first: samples are counted as they are added", tuple(spec.shape)
        hint = "where N is known, `ups_store.create` writes the store in one file from the start"
        raise SpecError("shape", kind="shape", array=name, expected=expected, found=found, hint=hint)


def catalog_of(path: Path) -> Catalog:
    """What a finished part holds and where."""
    with files.opened(path) as fd:
        return read_finished(fd, path)


def part_of(path: Path, catalog: Catalog) -> SetPart:
    """What a manifest says of a part."""
    count, config_hash = catalog.layout.num_samples, catalog.root.config_hash
    return SetPart(path.name, count, config_hash, fingerprint_of(catalog))


def recipe_of(path: Path) -> Recipe:
    """What a part was made from."""
    catalog = catalog_of(path)
    metas = [array.meta for array in catalog.layout.arrays.values() if not array.meta.is_companion]
    with files.opened(path) as fd:
        constants = {
            meta.name: read_constant(fd, catalog.layout.arrays[meta.name], path=path)
            for meta in metas
            if meta.is_constant
        }
    return Recipe(
        {meta.name: spec_of(meta, None) for meta in metas if not meta.is_constant},
        constants,
        {name: catalog.layout.arrays[name].meta.dims for name in constants},
        catalog.root.identity["content"],
        catalog.root.attrs,
    )


def bytes_of(fd: int, layout: Layout, array: ArrayLayout, sample: int) -> bytes:
    """The payload of one sample."""
    if array.meta.is_ragged:
        first, end = sample_extent(fd, layout.ragged[array.meta.name], sample)
    else:
        first = array.slot(sample)[0]
        end = first + array.meta.sample_nbytes
    return read_at(fd, first, end - first)


def whole_of(paths: Sequence[Path], ragged: Sequence[str]) -> tuple[int, dict[str, npt.NDArray[np.int64]]]:
    """Number of samples in all parts, and the lengths of ragged ones."""
    num_samples, lengths = 0, {name: [np.zeros(0, np.int64)] for name in ragged}
    for path in paths:
        layout = catalog_of(path).layout
        num_samples += layout.num_samples
        with files.opened(path) as fd:
            for name in ragged:
                lengths[name].append(np.diff(read_offsets(fd, layout.ragged[name], path=path)))
    return num_samples, {name: np.concatenate(parts) for name, parts in lengths.items()}


def remove_begun_parts(folder: Path, manifest: Path) -> None:
    """Remove what killed writers left of parts and of a manifest that they had begun, under the lock."""
    for name in filter(_BEGUN.fullmatch, files.names_in(folder)):
        remove_left(folder / name)
    begun = re.compile(re.escape(manifest.name) + r"\.[0-9a-f]{16}")  # by `replace_file`
    for name in filter(begun.fullmatch, files.names_in(manifest.parent)):
        remove_left(manifest.with_name(name))


def remove_left(path: Path) -> None:
    """Remove what a run left that isn't continued, if it is there.

    Raises:
        CommitError: If that fails, such as where a folder has the name.
    """
    try:
        files.remove(path)
    except OSError as error:
        hint = "remove it, or check your permissions of the folder"
        raise CommitError(f"it can't be removed ({error.strerror})", path=path, hint=hint) from error


def locked(folder: Path) -> int:
    """Descriptor of the lock that the writer of these parts holds; the folder is made if need be.

    Raises:
        BuildLockedError: If another process, or this one, writes them.
    """
    if not folder.parent.is_dir():
        raise StoreNotFoundError("no such folder", path=folder.parent, hint="create it first")
    try:
        for _ in range(_MAX_ROUNDS):
            fd = _opened_lock(folder)
            if fd is None:
                continue
            try:
                if not locks.try_lock(fd, BUILDER_LOCK):
                    hint = "wait for it, or close the first writer"
                    raise BuildLockedError("another writer writes these parts", path=folder, hint=hint)
                if files.is_file_at(fd, folder / LOCK_NAME):
                    return fd
            except BaseException:
                files.close(fd)
                raise
            files.close(fd)  # the writer before ended this moment
    except OSError as error:
        raise not_done("the parts were not begun", folder, error) from error
    problem = "the parts were not begun: other writers begin and end, or a link there points to nothing"
    raise CommitError(problem, path=folder, hint="look into the folder, and try again")


def _opened_lock(folder: Path) -> int | None:
    """Descriptor of the file that is to be locked, made with its folder if need be; None: try again."""
    with contextlib.suppress(StoreNotFoundError):
        return files.open_existing(folder / LOCK_NAME, writable=True)
    with contextlib.suppress(FileExistsError):
        files.create_folder(folder)
        files.sync_folder(folder.parent)
    with contextlib.suppress(FileExistsError, FileNotFoundError):  # another writer began, or ended, just now
        return files.create_new(folder / LOCK_NAME)
    return None


def unlock(fd: int, folder: Path) -> None:
    """Release the lock of `locked`, and remove its file, and the folder if nothing else is in it."""
    try:
        with contextlib.suppress(OSError):  # whatever is left, the next writer takes it up
            if files.is_file_at(fd, folder / LOCK_NAME):
                files.remove(folder / LOCK_NAME)
            files.remove_folder(folder)
    finally:
        files.close(fd)
