"""`write_parts` and `append`: stores whose number of samples, or of rows, isn't known beforehand (spec 15).

The geometry of a store is fixed when it is created. So samples are collected, and each buffer of them is
published as a part: a small store, whole or not there. At the end the parts become one file, or a set.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt

from ups_store.errors import CommitError, FormatError, IdentityMismatchError, SpecError, StoreClosedError
from ups_store.format.manifest import MAX_PARTS, SetPart, number_of_part, pack_manifest, part_name
from ups_store.format.metadata import ArraySpec
from ups_store.read.catalog import check_regular
from ups_store.read.store_set import manifest_path, parts_folder, read_manifest, whole_path
from ups_store.system import files, locks
from ups_store.system.memory_file import IN_MEMORY
from ups_store.system.paths import path_of
from ups_store.system.progress import Progress
from ups_store.system.replacement import check_not_read_only, real_place, replace_file
from ups_store.write.building import failures_as_errors
from ups_store.write.create import check_replaceable, create
from ups_store.write.merge import merge_parts
from ups_store.write.part_buffer import PartBuffer, sample_payload
from ups_store.write.part_files import (
    Recipe,
    bytes_of,
    catalog_of,
    locked,
    metas_of,
    part_of,
    recipe_of,
    remove_begun_parts,
    remove_left,
    unlock,
    whole_of,
)
from ups_store.write.target import publish_file, remove_begun

BUFFER_BYTES = 256 << 20
PARTS_NBYTES = 32  # that names of a store's parts are longer than its own

_RESTART = "on_mismatch='restart'"

Sample = Mapping[str, Any]
Samples = Iterable[Sample] | Callable[[int], Iterable[Sample]]


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
        path: Where the store will be, usually `NAME.zarr.zip`; of a set the manifest, `NAME.zarr.json`.
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
        FormatError: If there is something else than a store in its place.
        IdentityMismatchError: If unfinished parts were made from something else.
        BuildLockedError: If another process writes them.
    """
    target = path_of(real_place(path_of(path)), suffix_nbytes=PARTS_NBYTES)
    if os.fspath(path) == IN_MEMORY or buffer_bytes < 0:
        found, expected = f"{path}, buffer_bytes={buffer_bytes}", "a file, and a number of bytes"
        raise SpecError("argument", kind="argument", expected=expected, found=found)
    if on_mismatch not in ("raise", "restart"):
        raise SpecError("on_mismatch", kind="argument", expected="raise or restart", found=repr(on_mismatch))
    recipe = Recipe(dict(arrays), constants or {}, dims or {}, identity, attrs or {})
    goal = whole_path(target) if merge else manifest_path(target)
    restart = on_mismatch == "restart"
    return PartsWriter(goal, recipe, buffer_bytes=buffer_bytes, restart=restart, is_new=True)


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
        SpecError: If there is a finished file instead, kind "not_growing".
        FormatError: If the manifest isn't one.
        IdentityMismatchError: If an interrupted `append` added something else.
        BuildLockedError: If another process writes to the set.
    """
    manifest = manifest_path(path_of(real_place(path_of(path)), suffix_nbytes=PARTS_NBYTES))
    if not files.exists(manifest) and files.exists(whole := whole_path(manifest)):
        hint = "write the new samples as a store and join both by `ups-store concat`; what is to grow is "
        hint += "begun by `write_parts(..., merge=False)`"
        raise SpecError("a store of one file can't grow", kind="not_growing", path=whole, hint=hint)
    named = read_manifest(manifest)
    if on_mismatch != "restart":
        check_not_read_only(manifest, hint=f"`chmod u+w` it, or say {_RESTART}")
    recipe = recipe_of(parts_folder(manifest) / named[-1].name)
    if identity is not None:
        recipe = replace(recipe, identity=identity)
    restart = on_mismatch == "restart"
    return PartsWriter(manifest, recipe, buffer_bytes=buffer_bytes, restart=restart, is_new=False)


def _check_no_set(manifest: Path) -> None:
    """Refuse to begin where there is a set, or anything else of its name."""
    if not files.exists(manifest):
        return
    with files.opened(manifest) as fd:
        check_regular(fd, manifest)
    hint = "`ups_store.append` adds to it; else remove it, and its parts, or choose another name"
    raise SpecError("there is a set", kind="exists", path=manifest, hint=hint)


class PartsWriter:
    """Takes samples one by one; made by `write_parts` and `append`.

    Args:
        goal: The store, or the manifest of the set, that `finish` makes.
        recipe: What the parts are made from.
        buffer_bytes: See `write_parts`.
        restart: Whether to remove unfinished parts of something else.
        is_new: Whether there must be no set yet.

    Attributes:
        path: What `finish` makes.
        num_found: Samples that an interrupted run left in finished parts; these are passed over.
        fd: Descriptor of the lock of the parts; -1 after closing, and in forked children.
    """

    def __init__(self, goal: Path, recipe: Recipe, *, buffer_bytes: int, restart: bool, is_new: bool) -> None:
        self.path, self._recipe, self._buffer_bytes = goal, recipe, buffer_bytes
        self._folder = parts_folder(goal)
        self._metas = metas_of(recipe)
        self._config_hash = recipe.blueprint(0, {name: [] for name in recipe.ragged}).root.config_hash
        self._is_set, self._restarts = goal == manifest_path(goal), restart
        self._buffer, self._num_before, self._is_publishing = PartBuffer(self._metas), 0, False
        self.fd = locked(self._folder)
        locks.close_on_fork(self)
        try:
            if is_new:
                _check_no_set(manifest_path(goal))
                check_replaceable(goal, force=restart)
            self._named = read_manifest(goal) if self._is_set and files.exists(goal) else ()
            self._first = 1 + max((int(part.name[:5]) for part in self._named), default=-1)
            remove_begun_parts(self._folder, manifest_path(goal))
            self._parts = self._take_up(restart)
            remove_begun(goal)
        except BaseException:
            self.close()
            raise
        self._count_found()

    def _count_found(self) -> None:
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
        try:
            values = self._checked(sample)
        except SpecError as error:
            error.sample = self.num_samples
            raise
        if self.num_samples >= self.num_found or not self._is_there(values):
            self._buffer.add(values)
        else:
            self._num_before += 1
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
            self._num_before = max(self._num_before, self.num_found)
            samples = samples(self.num_samples)
        for sample in samples:
            self.add(sample)

    def flush(self, *, attrs: Mapping[str, Any] | None = None) -> None:
        """Publish the samples that are waiting as a part; nothing happens if there are none.

        Args:
            attrs: Root attributes of this part alone, `found_attrs` of the run that continues this one.
        Raises:
            CommitError: As `add`; the writer is of no use after any error or interrupt in here, for only a
                new one can tell whether the part is there.
        """
        self._check_open()
        if self._buffer.num_samples:
            self._is_publishing = True  # unless this returns
            with failures_as_errors(self._folder, self._buffer.nbytes, "the part was not written"):
                self._publish(attrs)
            self._num_before += self._buffer.num_samples
            self._buffer.clear()
            self._is_publishing = False

    def keep(self, num_waiting: int, *, attrs: Mapping[str, Any] | None = None) -> None:
        """Publish the first that are waiting and forget the others; not after a `flush` that failed."""
        if self.fd >= 0 and not self._is_publishing:
            self._buffer.cut(num_waiting)
            self.flush(attrs=attrs)

    @property
    def num_samples(self) -> int:
        """Samples so far, those passed over included."""
        return self._num_before + self._buffer.num_samples

    @property
    def num_waiting(self) -> int:
        """Samples that are in no part yet."""
        return self._buffer.num_samples

    @property
    def waiting_nbytes(self) -> int:
        """Bytes of those."""
        return self._buffer.nbytes

    @property
    def found_attrs(self) -> Mapping[str, Any]:
        """Root attributes of the last part that was found; empty if none was."""
        found = self._parts[-1:] if self.num_found else []
        return catalog_of(self._folder / found[0].name).root.attrs if found else {}

    def finish(self, *, attrs: Mapping[str, Any] | None = None, progress: Progress | None = None) -> Path:
        """Publish what is waiting, and then all samples as one file, or as a set; closes the writer.

        Args:
            attrs: Root attributes of the one file, where they are known only now.
            progress: Called with the number of bytes that were merged since the last call.
        Returns:
            `path`.
        Raises:
            IdentityMismatchError: If there were fewer samples than the parts hold that were continued.
            CommitError: If it didn't become durable, `DiskFullError` if there is no room: the parts stay.
        """
        self._check_open()
        if self.num_samples < self.num_found:
            expected, found = f"{self.num_found} samples or more", f"the end after {self.num_samples}"
            raise self.not_repeated(self.num_samples, expected, found)
        if attrs is not None:
            self._recipe = replace(self._recipe, attrs=attrs)
        self.flush()
        nbytes = sum(files.allocated_bytes(self._folder / part.name) for part in self._parts)
        with failures_as_errors(self.path, nbytes, "the parts were not merged"):
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
            unlock(fd, self._folder)

    def __del__(self) -> None:
        if getattr(self, "fd", -1) >= 0:  # interrupted before anybody had it: the lock isn't kept
            self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self.fd < 0:
            raise StoreClosedError("the writer is closed", path=self.path, hint="call `write_parts` again")
        if self._is_publishing:
            hint = "close it and call `write_parts` again to continue"
            raise CommitError("an earlier part failed, or was interrupted", path=self.path, hint=hint)

    def _checked(self, sample: Sample) -> dict[str, npt.NDArray[Any]]:
        if not isinstance(sample, Mapping) or sample.keys() != self._metas.keys():
            found = sorted(sample) if isinstance(sample, Mapping) else type(sample).__name__
            raise SpecError(
                "all arrays of a sample are added together",
                kind="arrays",
                expected=sorted(self._metas),
                found=found,
            )
        return {name: sample_payload(sample[name], meta) for name, meta in self._metas.items()}

    def _publish(self, attrs: Mapping[str, Any] | None = None) -> None:
        """Make a part of the samples in the buffer."""
        number = self._first + len(self._parts)
        if number >= MAX_PARTS:
            hint = "use a larger `buffer_bytes`"
            raise SpecError("too many parts", kind="limits", clause="15.1", expected=MAX_PARTS, hint=hint)
        recipe, path = self._recipe, self._folder / part_name(number)
        with create(
            path,
            recipe.specs(self._buffer.num_samples, self._buffer.lengths),
            constants=recipe.constants,
            dims=recipe.dims,
            identity=recipe.identity,
            attrs=recipe.attrs if attrs is None else attrs,
            durability="lazy",  # a part counts when it is finished, and finishing syncs
        ) as writer:
            for samples, batch in self._buffer.batches():
                writer.commit_many(samples, batch)
            writer.finish()
        self._parts.append(part_of(path, catalog_of(path)))

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
            remove_left(self._folder / part_name(number))
        return parts

    def _same_part(self, path: Path, restart: bool) -> SetPart | None:
        try:
            catalog = catalog_of(path)
        except FormatError:
            if restart:
                return None
            raise
        found = catalog.root.config_hash
        if found == self._config_hash:
            return part_of(path, catalog)
        if restart:
            return None
        raise IdentityMismatchError(
            "the unfinished parts were made from something else",
            path=path,
            expected=f"config hash {self._config_hash}",
            found=found,
            hint=f"finish them with what they were begun with, or say {_RESTART}",
        )

    def _is_there(self, values: dict[str, npt.NDArray[Any]]) -> bool:
        """Whether a part that was found holds the sample; with "restart" one that begins otherwise goes."""
        number = int(np.searchsorted(self._ends, self.num_samples, side="right"))
        first = self._ends[number] - self._parts[number].count
        if self.num_samples not in (first, self._ends[number] - 1):
            return True
        differing = self.differing(self.num_samples, values)
        if differing is None:
            return True
        if not self._restarts or self.num_samples != first:
            raise self.not_repeated(
                self.num_samples, "the sample that the part holds", f"another {differing!r}"
            )
        self._drop_parts(number)
        return False

    def differing(self, sample: int, values: Sample) -> str | None:
        """The first array of which a finished part that was found holds another sample; None if none does."""
        number = int(np.searchsorted(self._ends, sample, side="right"))
        path, row = (
            self._folder / self._parts[number].name,
            sample - self._ends[number] + self._parts[number].count,
        )
        layout, checked = catalog_of(path).layout, self._checked(values)
        with files.opened(path) as fd:
            for name, value in checked.items():
                if bytes_of(fd, layout, layout.arrays[name], row) != value.tobytes():
                    return name
        return None

    def drop_found(self) -> None:
        """Remove the parts of an interrupted run, before anything was added."""
        self._drop_parts(0)

    def _drop_parts(self, number: int) -> None:
        """Remove the parts of an interrupted run from this one on, the last first."""
        for part in reversed(self._parts[number:]):
            remove_left(self._folder / part.name)
        self._parts = self._parts[:number]
        self._count_found()

    def not_repeated(self, sample: int, expected: str, found: str) -> IdentityMismatchError:
        """The error for samples that aren't those of the run that this one continues."""
        return IdentityMismatchError(
            f"the samples don't begin as in the run that this one continues, at sample {sample}",
            kind="not_repeated",
            path=self._folder,
            expected=expected,
            found=found,
            hint=f"give them in the same order; {_RESTART} begins again where a part begins otherwise, and "
            "`ups-store gc --delete` removes parts that no manifest names",
        )

    def _merge(self, progress: Progress | None) -> None:
        paths = [self._folder / part.name for part in self._parts]
        if len(paths) == 1 and catalog_of(paths[0]).root.attrs == self._recipe.attrs:
            with files.opened(paths[0]) as fd:
                publish_file(fd, paths[0], self.path, force=True)
        else:
            num_samples, lengths = whole_of(paths, self._recipe.ragged)
            blueprint = self._recipe.blueprint(num_samples, lengths)
            merge_parts(paths, self.path, blueprint, progress=progress)
        with contextlib.suppress(OSError):  # the store is there; the next call removes them
            for path in reversed(paths):  # what an interruption leaves begins with the first part
                files.remove(path)

    def _name_parts(self) -> None:
        """Have the manifest name the new parts, too."""
        if not self._named and not self._parts:
            self._publish()  # so that the set has arrays
        if self._parts:
            replace_file(self.path, pack_manifest((*self._named, *self._parts)))
            files.sync_folder(self.path.parent)
