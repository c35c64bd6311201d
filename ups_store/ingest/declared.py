"""The layout that a configuration declares for a user's own files (docs/layouts.md)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np

from ups_store.ingest.contents import Contents, Part, StoredArray, fields_axes
from ups_store.ingest.declared_lookup import Lookup, sample_groups
from ups_store.ingest.hdf5 import source_error
from ups_store.ingest.layout import Layout
from ups_store.ingest.parameters import read_attribute
from ups_store.tasks import Task

if TYPE_CHECKING:
    from ups_store.declaration import LayoutDeclaration, ParameterDeclaration


class Declared(Layout):
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
        """As declared; that it is there is checked in the first sample's group.

        Raises:
            SourceError: Kind "missing_dataset", "missing_group", "missing_attribute", "wrong_rank",
                "shapes_differ" or "bad_parameter".
        """
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
