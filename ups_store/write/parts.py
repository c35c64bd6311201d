"""`write_parts` and `append`: stores whose number of samples, or of rows, isn't known beforehand (spec 15).

The geometry of a store is fixed when it is created. So samples are collected, and each buffer of them is
published as a part: a small store, whole or not there. At the end the parts become one file, or a set.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt

from ups_store.errors import (
    BuildLockedError,
    FormatError,
    IdentityMismatchError,
    SpecError,
    StoreClosedError,
    StoreNotFoundError,
)
from ups_store.format.array_spec import ArraySpec
from ups_store.format.build_tail import BUILDER_LOCK
from ups_store.format.layout import ArrayLayout, Layout
from ups_store.format.manifest import MAX_PARTS, SetPart, number_of_part, pack_manifest, part_name
from ups_store.format.metadata import ArrayMeta, dtype_of
from ups_store.read.base import spec_of
from ups_store.read.catalog import Catalog, fingerprint_of, read_finished
from ups_store.read.ragged import read_offsets, sample_extent
from ups_store.read.recovery import building_path
from ups_store.read.store_file import read_constant
from ups_store.read.store_set import manifest_path, parts_folder, read_manifest, stem_of
from ups_store.system import files, locks
from ups_store.system.paths import path_of
from ups_store.system.progress import Progress
from ups_store.system.replacement import real_place, replace_file
from ups_store.write.blueprint import Blueprint, blueprint_of
from ups_store.write.building import failures_as_errors
from ups_store.write.create import check_replaceable, create
from ups_store.write.encode import Arrays, as_payload, encoded_text
from ups_store.write.merge import merge_parts
from ups_store.write.target import publish_file

BUFFER_BYTES = 256 << 20
LOCK_NAME = "lock"

_BLOCK_BYTES = 16 << 20  # of samples of equal shape, which are committed together
_MAX_ROWS = 16384  # of a block
_RESTART = "on_mismatch='restart'"

Sample = Mapping[str, Any]
Samples = Iterable[Sample] | Callable[[int], Iterable[Sample]]


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


class _Buffer:
    """Samples that wait to become a part; copies, so that the caller may go on using its memory.

    Those of equal shape are copied into blocks that are used again for the next part: touching new memory
    takes as long as the copy.
    """

    def __init__(self, metas: Mapping[str, ArrayMeta]) -> None:
        self._fixed = {name: meta for name, meta in metas.items() if not meta.is_ragged}
        self._blocks: list[dict[str, npt.NDArray[Any]]] = []
        self._rows = max(1, _BLOCK_BYTES // max(1, sum(meta.sample_nbytes for meta in self._fixed.values())))
        self._rows = min(self._rows, _MAX_ROWS)
        self.ragged: dict[str, list[npt.NDArray[Any]]] = {n: [] for n, m in metas.items() if m.is_ragged}
        self.num_samples = self.nbytes = 0

    def add(self, sample: Mapping[str, npt.NDArray[Any]]) -> None:
        number, row = divmod(self.num_samples, self._rows)
        if number == len(self._blocks):
            self._blocks.append(
                {
                    n: np.empty((self._rows, *m.sample_shape), dtype_of(m.dtype))
                    for n, m in self._fixed.items()
                }
            )
        for name, memory in self._blocks[number].items():
            memory[row] = sample[name]
            self.nbytes += sample[name].nbytes
        for name, samples in self.ragged.items():
            samples.append(np.array(sample[name], order="C"))
            self.nbytes += samples[-1].nbytes
        self.num_samples += 1

    def batches(self) -> Iterator[tuple[range, Arrays]]:
        """Numbers of samples and their arrays, as `commit_many` takes them."""
        for first in range(0, self.num_samples, self._rows):
            samples = range(first, min(first + self._rows, self.num_samples))
            block = self._blocks[first // self._rows]
            batch: dict[str, Any] = {name: memory[: len(samples)] for name, memory in block.items()}
            batch |= {name: rows[first : samples.stop] for name, rows in self.ragged.items()}
            yield samples, batch

    def clear(self) -> None:
        """Forget the samples."""
        self.num_samples = self.nbytes = 0
        for rows in self.ragged.values():
            rows.clear()


def write_parts(
    path: str | os.PathLike[str],
    arrays: Mapping[str, ArraySpec],
    *,
    constants: Mapping[str, npt.ArrayLike] | None = None,
    dims: Mapping[str, Sequence[str]] | None = None,
    identity: Mapping[str, Any],
    attrs: Mapping[str, Any] | None = None,
    merge: bool = True,
    buffer_bytes: int = BUFFER_BYTES,
    on_mismatch: Literal["raise", "restart"] = "raise",
) -> PartsWriter:
    """Write a store whose number of samples, or of the rows of each, isn't known beforehand.

    Samples are collected up to `buffer_bytes` and then published as a part, `NAME.parts/00017.zarr.zip`,
    which no interruption takes away: the next run of the same identity continues behind the parts that it
    finds.

    Args:
        path: Where the store will be, `NAME.zarr.zip`; of a set the manifest, `NAME.zarr.json`.
        arrays: Arrays with a sample axis; the number of samples in their shapes is None.
        constants: Arrays without a sample axis, as for `create`; likewise `dims`, `identity` and `attrs`.
        dims: Dimension names of constants.
        identity: Everything that decides the bytes.
        attrs: Attributes of the root group.
        merge: Whether `finish` makes one file of the parts; else they stay, as a set that can be appended to.
        buffer_bytes: Samples that are collected in memory, at least one.
        on_mismatch: What to do with parts of another identity, or of other samples, that were left over.
    Raises:
        SpecError: If no store can be made from these arguments; if there is a set already, kind "exists".
        IdentityMismatchError: If unfinished parts were made from something else.
        BuildLockedError: If another process writes them.
    """
    target = path_of(real_place(path_of(path)), suffix_nbytes=32)
    if on_mismatch not in ("raise", "restart"):
        raise SpecError("on_mismatch", kind="argument", expected="raise or restart", found=repr(on_mismatch))
    manifest = manifest_path(target)
    if files.exists(manifest):
        hint = "`ups_store.append` adds to it; else remove it, and its parts, or choose another name"
        raise SpecError("there is a set", kind="exists", path=manifest, hint=hint)
    recipe = Recipe(dict(arrays), constants or {}, dims or {}, identity, attrs or {})
    goal = target.with_name(f"{stem_of(target)}.zarr.zip") if merge else manifest
    check_replaceable(goal, force=on_mismatch == "restart")
    return PartsWriter(goal, recipe, buffer_bytes=buffer_bytes, restart=on_mismatch == "restart")


def append(
    path: str | os.PathLike[str],
    *,
    identity: Mapping[str, Any] | None = None,
    buffer_bytes: int = BUFFER_BYTES,
    on_mismatch: Literal["raise", "restart"] = "raise",
) -> PartsWriter:
    """Add samples to a set: new parts, then the manifest that names them, in one step at `finish`.

    Stores that have the set open keep it as it was.

    Args:
        path: The set's manifest, `NAME.zarr.json`.
        identity: What the new samples were made from; by default what the last part was made from.
        buffer_bytes: See `write_parts`.
        on_mismatch: See `write_parts`; what an interrupted `append` left is continued like what it left.
    Raises:
        StoreNotFoundError: If there is no set.
        FormatError: If the manifest isn't one.
        IdentityMismatchError: If an interrupted `append` added something else.
        BuildLockedError: If another process writes to the set.
    """
    manifest = manifest_path(path_of(real_place(path_of(path)), suffix_nbytes=32))
    named = read_manifest(manifest)
    recipe = _recipe_of(parts_folder(manifest) / named[-1].name)
    if identity is not None:
        recipe = replace(recipe, identity=identity)
    return PartsWriter(manifest, recipe, buffer_bytes=buffer_bytes, restart=on_mismatch == "restart")


class PartsWriter:
    """Takes samples one by one; made by `write_parts` and `append`.

    Args:
        goal: The store, or the manifest of the set, that `finish` makes.
        recipe: What the parts are made from.
        buffer_bytes: See `write_parts`.
        restart: Whether to remove unfinished parts of something else.

    Attributes:
        path: What `finish` makes.
        num_found: Samples that an interrupted run left in finished parts; these are passed over.
        num_samples: Samples so far, those passed over included.
        fd: Descriptor of the lock of the parts; -1 after closing, and in forked children.
    """

    def __init__(self, goal: Path, recipe: Recipe, *, buffer_bytes: int, restart: bool) -> None:
        self.path, self._recipe, self._buffer_bytes = goal, recipe, buffer_bytes
        self._folder = parts_folder(goal)
        self._metas = _metas_of(recipe)
        self._config_hash = recipe.blueprint(0, {name: [] for name in recipe.ragged}).root.config_hash
        self._is_set = goal == manifest_path(goal)
        self._buffer, self.num_samples = _Buffer(self._metas), 0
        self.fd = _locked(self._folder)
        locks.close_on_fork(self)
        try:
            self._named = read_manifest(goal) if self._is_set and files.exists(goal) else ()
            self._first = 1 + max((int(part.name[:5]) for part in self._named), default=-1)
            self._parts = self._take_up(restart)
        except BaseException:
            self.close()
            raise
        self._ends = list(itertools.accumulate(part.count for part in self._parts))
        self.num_found = self._ends[-1] if self._ends else 0

    def add(self, sample: Sample) -> None:
        """Take the next sample: every array by name, copied; of a ragged one with any number of rows.

        The first `num_found` samples of a run that continues another are passed over. The first and the last
        of each part that there is are compared with what it holds.

        Raises:
            SpecError: If an array is missing, unknown, or of another shape or dtype.
            IdentityMismatchError: If a sample that is passed over is another than the part holds.
            CommitError: If a part didn't become durable, `DiskFullError` if there was no room for it.
        """
        self._check_open()
        values = self._checked(sample)
        if self.num_samples < self.num_found:
            self._pass_over(values)
        else:
            self._buffer.add(values)
        self.num_samples += 1
        if self._buffer.nbytes >= self._buffer_bytes:
            self.flush()

    def extend(self, samples: Samples) -> None:
        """Take samples from an iterable, which must begin as it did in the run that this one continues.

        Args:
            samples: An iterable of samples; or a function of the number of samples that there are already,
                which gives those that follow: then nothing is passed over, nor compared.
        """
        self._check_open()
        if callable(samples):
            self.num_samples = max(self.num_samples, self.num_found)
            samples = samples(self.num_samples)
        for sample in samples:
            self.add(sample)

    def flush(self) -> None:
        """Publish the samples that are waiting as a part; nothing happens if there are none."""
        self._check_open()
        if self._buffer.num_samples:
            self._publish()
            self._buffer.clear()

    def finish(self, *, progress: Progress | None = None) -> Path:
        """Publish what is waiting, and then all samples as one file, or as a set; closes the writer.

        Args:
            progress: Called with the number of bytes that were merged since the last call.
        Returns:
            `path`.
        Raises:
            IdentityMismatchError: If there were fewer samples than the parts hold that were continued.
            CommitError: If it didn't become durable, `DiskFullError` if there is no room: the parts stay.
        """
        self._check_open()
        if self.num_samples < self.num_found:
            raise self._not_repeated(f"{self.num_found} samples or more", f"the end after {self.num_samples}")
        self.flush()
        if self._is_set:
            self._name_parts()
        else:
            self._merge(progress)
        self.close()
        return self.path

    def close(self) -> None:
        """Release the parts: finished ones stay, samples that are waiting don't."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            files.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self.fd < 0:
            raise StoreClosedError("the writer is closed", path=self.path, hint="call `write_parts` again")

    def _checked(self, sample: Sample) -> dict[str, npt.NDArray[Any]]:
        if not isinstance(sample, Mapping) or sample.keys() != self._metas.keys():
            found = sorted(sample) if isinstance(sample, Mapping) else type(sample).__name__
            raise SpecError(
                "all arrays of a sample are added together",
                kind="arrays",
                expected=sorted(self._metas),
                found=found,
            )
        return {name: _payload(sample[name], meta) for name, meta in self._metas.items()}

    def _publish(self) -> None:
        """Make a part of the samples in the buffer."""
        number = self._first + len(self._parts)
        if number >= MAX_PARTS:
            hint = "use a larger `buffer_bytes`"
            raise SpecError("too many parts", kind="limits", clause="15.1", expected=MAX_PARTS, hint=hint)
        lengths = {name: list(map(len, rows)) for name, rows in self._buffer.ragged.items()}
        recipe, path = self._recipe, self._folder / part_name(number)
        files.remove(building_path(path))  # what a killed run began: its samples may have been others
        with create(
            path,
            recipe.specs(self._buffer.num_samples, lengths),
            constants=recipe.constants,
            dims=recipe.dims,
            identity=recipe.identity,
            attrs=recipe.attrs,
            durability="lazy",  # a part counts when it is finished, and finishing syncs
        ) as writer:
            for samples, batch in self._buffer.batches():
                writer.commit_many(samples, batch)
            writer.finish()
        self._parts.append(_part_of(path, _catalog_of(path)))

    def _take_up(self, restart: bool) -> list[SetPart]:
        """Finished parts of an interrupted run of the same; all others that no manifest names are removed."""
        there = {part.name for part in self._named}
        numbers = [number_of_part(name) for name in files.names_in(self._folder) if name not in there]
        left = {number for number in numbers if number is not None}
        parts: list[SetPart] = []
        while (number := self._first + len(parts)) in left:
            part = self._same_part(self._folder / part_name(number), restart)
            if part is None:
                break
            parts.append(part)
        kept = range(self._first, self._first + len(parts))
        for number in sorted(left - {*kept}, reverse=True):
            files.remove(self._folder / part_name(number))
        return parts

    def _same_part(self, path: Path, restart: bool) -> SetPart | None:
        try:
            catalog = _catalog_of(path)
        except FormatError:
            if restart:
                return None
            raise
        found = catalog.root.config_hash
        if found == self._config_hash:
            return _part_of(path, catalog)
        if restart:
            return None
        raise IdentityMismatchError(
            "the unfinished parts were made from something else",
            path=path,
            expected=f"config hash {self._config_hash}",
            found=found,
            hint=f"finish them with what they were begun with, or say {_RESTART}",
        )

    def _pass_over(self, values: dict[str, npt.NDArray[Any]]) -> None:
        number = int(np.searchsorted(self._ends, self.num_samples, side="right"))
        first = self._ends[number] - self._parts[number].count
        if self.num_samples not in (first, self._ends[number] - 1):
            return
        path, sample = self._folder / self._parts[number].name, self.num_samples - first
        layout = _catalog_of(path).layout
        with files.opened(path) as fd:
            for name, value in values.items():
                if _bytes_of(fd, layout, layout.arrays[name], sample) != value.tobytes():
                    raise self._not_repeated("the sample that the part holds", f"another {name!r}")

    def _not_repeated(self, expected: str, found: str) -> IdentityMismatchError:
        return IdentityMismatchError(
            f"the samples don't begin as in the run that this one continues, at sample {self.num_samples}",
            kind="not_repeated",
            path=self._folder,
            expected=expected,
            found=found,
            hint=f"give them in the same order, or say {_RESTART} to begin from scratch",
        )

    def _merge(self, progress: Progress | None) -> None:
        paths = [self._folder / part.name for part in self._parts]
        if len(paths) == 1 and _catalog_of(paths[0]).root.attrs == self._recipe.attrs:
            with files.opened(paths[0]) as fd:
                publish_file(fd, paths[0], self.path, force=True)
        else:
            num_samples, lengths = _whole(paths, self._recipe.ragged)
            blueprint = self._recipe.blueprint(num_samples, lengths)
            with failures_as_errors(self.path, blueprint.layout, "the parts were not merged"):
                merge_parts(paths, self.path, blueprint, progress=progress)
        for path in reversed(paths):  # what an interruption leaves begins with the first part
            files.remove(path)
        files.remove(self._folder / LOCK_NAME)
        files.remove_folder(self._folder)

    def _name_parts(self) -> None:
        """Have the manifest name the new parts, too."""
        if not self._named and not self._parts:
            self._publish()  # so that the set has arrays
        if self._parts:
            replace_file(self.path, pack_manifest((*self._named, *self._parts)))
            files.sync_folder(self.path.parent)


def _metas_of(recipe: Recipe) -> dict[str, ArrayMeta]:
    for name, spec in recipe.arrays.items():
        if isinstance(spec, ArraySpec) and spec.lengths is not None:
            expected = "none: they are counted as samples are added"
            raise SpecError("lengths", kind="lengths", array=name, expected=expected, found="lengths")
    layout = recipe.blueprint(0, {name: [] for name in recipe.ragged}).layout
    return {a.meta.name: a.meta for a in layout.per_sample if not a.meta.is_companion}


def _payload(value: Any, meta: ArrayMeta) -> npt.NDArray[Any]:
    """A sample as bytes of the declared dtype; of a ragged array of any number of rows."""
    if not meta.is_ragged:
        return as_payload(value, meta, meta.sample_shape)
    rows = encoded_text(value, meta)
    shape = np.shape(rows)
    return as_payload(rows, meta, (*(shape[:1] or (0,)), *meta.sample_shape))


def _catalog_of(path: Path) -> Catalog:
    with files.opened(path) as fd:
        return read_finished(fd, path)


def _part_of(path: Path, catalog: Catalog) -> SetPart:
    count, config_hash = catalog.layout.num_samples, catalog.root.config_hash
    return SetPart(path.name, count, config_hash, fingerprint_of(catalog))


def _recipe_of(path: Path) -> Recipe:
    """What a part was made from."""
    catalog = _catalog_of(path)
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


def _bytes_of(fd: int, layout: Layout, array: ArrayLayout, sample: int) -> bytes:
    """The payload of one sample."""
    if array.meta.is_ragged:
        first, end = sample_extent(fd, layout.ragged[array.meta.name], sample)
    else:
        first = array.slot(sample)[0]
        end = first + array.meta.sample_nbytes
    return files.read_at(fd, first, end - first)


def _whole(paths: Sequence[Path], ragged: Sequence[str]) -> tuple[int, dict[str, npt.NDArray[np.int64]]]:
    """Number of samples in all parts, and the lengths of ragged ones."""
    num_samples, lengths = 0, {name: [np.zeros(0, np.int64)] for name in ragged}
    for path in paths:
        layout = _catalog_of(path).layout
        num_samples += layout.num_samples
        with files.opened(path) as fd:
            for name in ragged:
                lengths[name].append(np.diff(read_offsets(fd, layout.ragged[name], path=path)))
    return num_samples, {name: np.concatenate(parts) for name, parts in lengths.items()}


def _locked(folder: Path) -> int:
    """Descriptor of the lock that the writer of these parts holds; the folder is made if need be.

    Raises:
        BuildLockedError: If another process, or this one, writes them.
    """
    if not folder.parent.is_dir():
        raise StoreNotFoundError("no such folder", path=folder.parent, hint="create it first")
    with contextlib.suppress(FileExistsError):
        folder.mkdir()
        files.sync_folder(folder.parent)
    lock = folder / LOCK_NAME
    while True:
        try:
            fd = files.open_existing(lock, writable=True)
        except StoreNotFoundError:
            try:
                fd = files.create_new(lock)
            except FileExistsError:
                continue
            except FileNotFoundError:  # the writer before finished, and removed the folder
                return _locked(folder)
        if not locks.try_lock(fd, BUILDER_LOCK):
            files.close(fd)
            hint = "wait for it, or close the first writer"
            raise BuildLockedError("another writer writes these parts", path=folder, hint=hint)
        if files.is_file_at(fd, lock):
            return fd
        files.close(fd)
