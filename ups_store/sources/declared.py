"""The layout that a configuration declares for your own files (docs/guides/layouts.md).

What is missing in a file is an error that names the key that asks for it.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ups_store.errors import SourceError
from ups_store.sources.contents import AXIS_NAMES, Contents, Part, StoredArray, fields_axes
from ups_store.sources.convention import Convention
from ups_store.sources.hdf5 import h5py, source_error, translated, tree
from ups_store.sources.parameters import NumberPart, missing, nearest, read_attribute
from ups_store.sources.source_files import natural_key
from ups_store.sources.tasks import Task

if TYPE_CHECKING:
    from ups_store.sources.declaration import (
        DatasetDeclaration,
        FieldDeclaration,
        LayoutDeclaration,
        ParameterDeclaration,
    )

_SEARCHED = 1000  # datasets among which the nearest name is looked for


class Declared(Convention):
    """Every error names the key of the configuration that asks for what isn't there.

    Args:
        task: Name of the task whose layout it is.
        declaration: Where its files keep what.
    """

    name = "declared"
    version = 1

    def __init__(self, task: str, declaration: LayoutDeclaration) -> None:
        self._key = f"tasks.{task}.layout"
        self._declaration = declaration

    def matches(self, file: h5py.File) -> bool:
        """Every file of the task is meant to be of this layout."""
        return True

    def describe(self, file: h5py.File, task: Task | None) -> Contents:
        """As declared; that it is there is checked in the first sample's group."""
        declared = self._declaration
        groups = sample_groups(file, declared.groups, key=f"{self._key}.groups") if declared.groups else ()
        lookup = Lookup(file, groups=groups, key=self._key)
        parts, channels = [], list[str]()
        for i, each in enumerate(declared.fields):
            parts.append(lookup.part(f"fields[{i}]", each))
            channels += lookup.channels(f"fields[{i}]", each)
        arrays = {"fields": StoredArray(fields_axes(len(declared.space)), tuple(parts))}
        for name, array in declared.arrays.items():
            arrays[name] = _stored(lookup.part(f"arrays.{name}", array))
        for name, parameter in declared.parameters.items():
            if not self._is_of_file(parameter):
                arrays[name] = StoredArray("s", (lookup.number(f"parameters.{name}", parameter),))
        coordinates = {
            str(axis): lookup.coordinate(f"coordinates.{axis}", coordinate.dataset, axis)
            for axis, coordinate in declared.coordinates.items()
            if coordinate.dataset is not None
        }
        return Contents(
            ndim=len(declared.space),
            channels=tuple(channels),
            arrays=arrays,
            coordinates=coordinates,
            groups=groups,
        )

    def parameters(self, file: h5py.File) -> dict[str, float]:
        """Attributes of the file, and what its name says."""
        found = {}
        for name, each in self._declaration.parameters.items():
            key = f"{self._key}.parameters.{name}"
            if each.file_name is not None:
                found[name] = _from_name(file, each.file_name, key=f"{key}.file_name")
            elif self._is_of_file(each) and each.attribute is not None:
                owner = each.of or "/"
                found[name] = read_attribute(file, owner, each.attribute, asked_by=f"{key}.attribute")
        return found

    def boundary(self, file: h5py.File, task: Task | None) -> Mapping[str, str]:
        """What the configuration says."""
        return task.boundary if task else {}

    def computed_coordinates(self, lengths: Mapping[str, int]) -> dict[str, np.ndarray[Any, Any]]:
        """Those that are declared by their step."""
        return {
            axis: each.start + each.step * np.arange(lengths[axis], dtype=np.float64)
            for axis, each in self._declaration.coordinates.items()
            if each.step is not None
        }

    def _is_of_file(self, parameter: ParameterDeclaration) -> bool:
        """Whether its value holds for all samples of the file by declaration."""
        if parameter.dataset is not None:
            return False
        is_of_group = self._declaration.groups is not None and not (parameter.of or "").startswith("/")
        return parameter.file_name is not None or not is_of_group


def _stored(part: Part) -> StoredArray:
    """An array of one dataset, its axes in the order of a store; repeated if all samples share it."""
    return StoredArray("s" + "".join(axis for axis in "tzyxk" if axis in part.axes), (part,))


def _from_name(file: h5py.File, pattern: str, *, key: str) -> float:
    name = Path(file.filename).name
    match = re.search(pattern, name)
    try:
        return float(match[1] if match else "")
    except (TypeError, ValueError):  # a group that took no part in the match is None
        raise source_error(
            f"no number in the file's name, where {key} looks for one",
            kind="bad_parameter",
            path=file.filename,
            expected=f"a number that matches {pattern!r}",
            found=name,
        ) from None


def sample_groups(file: h5py.File, pattern: str, *, key: str) -> tuple[str, ...]:
    """The groups that match a glob pattern, numbers in their names sorted by value."""
    with translated("can't list the groups", path=file.filename):
        found = sorted(_matching(file, "", pattern.strip("/")), key=natural_key)
    if found:
        return tuple(found)
    raise source_error(
        f"no group matches {pattern!r}, which {key} asks for",
        kind="missing_group",
        path=file.filename,
        dataset=pattern,
        found=tree(file),
    )


def _matching(file: h5py.File, folder: str, pattern: str) -> Iterator[str]:
    first, _, rest = pattern.partition("/")
    for name in fnmatch.filter(file[folder or "/"], first):
        path = f"{folder}/{name}".strip("/")
        if file.get(path, getclass=True) is h5py.Group:
            yield from _matching(file, path, rest) if rest else (path,)


class Lookup:
    """What one file has of what is declared.

    Args:
        file: The file.
        groups: The samples' groups, if each has its own; what isn't there in the first is missed.
        key: Key of the layout in the configuration.
    """

    def __init__(self, file: h5py.File, *, groups: tuple[str, ...], key: str) -> None:
        self._file = file
        self._key = key
        self._where = Contents(ndim=0, channels=(), arrays={}, coordinates={}, groups=groups)

    def part(self, key: str, declared: DatasetDeclaration) -> Part:
        """A declared dataset with its axes."""
        dataset = self._dataset(f"{key}.dataset", declared.dataset)
        if dataset.ndim != len(declared.letters):
            raise self._wrong_rank(f"{key}.axes", self._path(declared.dataset), dataset, declared.letters)
        return Part(declared.dataset, declared.letters)

    def channels(self, key: str, declared: FieldDeclaration) -> tuple[str, ...]:
        """Names of its channels: the declared ones, or the dataset's own name, numbered."""
        dataset = self._dataset(f"{key}.dataset", declared.dataset)
        count = dict(zip(declared.letters, dataset.shape, strict=True)).get("c", 1)
        name = declared.dataset.rpartition("/")[2]
        names = declared.channels or ((name,) if count == 1 else tuple(f"{name}_{i}" for i in range(count)))
        if len(names) == count:
            return names
        raise source_error(
            f"number of channels of dataset {declared.dataset!r} in {self._key}.{key}.channels",
            kind="shapes_differ",
            path=self._file.filename,
            dataset=declared.dataset,
            expected=f"{count}, as its shape is {dataset.shape}",
            found=f"{len(names)}: {', '.join(names)}",
        )

    def coordinate(self, key: str, name: str, axis: str) -> Part:
        """A coordinate: one row for all samples, or one for each, which have to agree."""
        dataset = self._dataset(key, name)
        if dataset.ndim in (1, 2):
            return Part(name, "s" * (dataset.ndim - 1) + axis)
        raise self._wrong_rank(key, self._path(name), dataset, axis)

    def number(self, key: str, declared: ParameterDeclaration) -> Part:
        """A parameter that samples have for themselves, or a single value in a dataset."""
        if declared.attribute is not None:
            part = NumberPart(
                declared.of or "", attribute=declared.attribute, asked_by=f"{self._key}.{key}.attribute"
            )
            part.read(self._file, self._where.dataset_path(part), sample=0)
            return part
        assert declared.dataset is not None, key
        dataset = self._dataset(f"{key}.dataset", declared.dataset)
        is_in_group = self._where.groups and not declared.dataset.startswith("/")
        if dataset.ndim == 1 and dataset.shape != (1,) and not is_in_group:
            return Part(declared.dataset, "s")
        single = NumberPart(declared.dataset, asked_by=f"{self._key}.{key}.dataset")
        single.read(self._file, self._where.dataset_path(single))
        return single

    def _path(self, name: str) -> str:
        return self._where.dataset_path(Part(name, ""))

    def _dataset(self, key: str, name: str) -> h5py.Dataset:
        path = self._path(name)
        with translated("can't open", path=self._file.filename, dataset=path):
            found = self._file.get(path)
        if isinstance(found, h5py.Dataset):
            return found
        error = missing(f"no dataset {path!r}", self._file, dataset=path, asked_by=f"{self._key}.{key}")
        error.hint = nearest(path, self._names())
        raise error

    def _names(self) -> list[str]:
        """Paths of datasets, to find the nearest."""
        names: list[str] = []

        def note(name: str, item: object) -> bool | None:
            if isinstance(item, h5py.Dataset):
                names.append(name)
            return True if len(names) >= _SEARCHED else None  # True ends the visit

        with translated("can't list the datasets", path=self._file.filename):
            self._file["/"].visititems(note)
        return names

    def _wrong_rank(self, key: str, name: str, dataset: h5py.Dataset, axes: str) -> SourceError:
        return source_error(
            f"dataset {name!r} has another rank than {self._key}.{key} says",
            kind="wrong_rank",
            path=self._file.filename,
            dataset=name,
            expected=f"({', '.join(AXIS_NAMES[axis] for axis in axes)})",
            found=f"shape {dataset.shape}",
        )
