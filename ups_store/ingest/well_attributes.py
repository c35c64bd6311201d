"""The attributes by which a file of The Well describes itself."""

from __future__ import annotations

from typing import Any

import h5py
import numpy as np

from ups_store.ingest.hdf5 import source_error
from ups_store.ingest.parameters import missing


def expect_group(file: h5py.File, name: str) -> h5py.Group:
    """A group of the file.

    Raises:
        SourceError: Kind "missing_dataset", with what the file holds instead.
    """
    group = file.get(name)
    if isinstance(group, h5py.Group):
        return group
    raise missing(f"no group {name!r}", file, dataset=name)


def spatial_axes(file: h5py.File) -> dict[str, str]:
    """Names of the spatial dimensions in the order of the file, with the letter that each becomes.

    Raises:
        SourceError: Kind "missing_dataset" or "wrong_rank".
    """
    found = names(expect_group(file, "dimensions"), "spatial_dims")
    if not 1 <= len(found) <= 3:
        raise source_error(
            "number of spatial dimensions",
            kind="wrong_rank",
            path=file.filename,
            dataset="dimensions",
            expected="1 to 3",
            found=f"spatial_dims {found}",
        )
    return dict(zip(found, "xyz", strict=False))


def names(group: h5py.Group, attribute: str) -> list[str]:
    """The names that an attribute lists; all members of the group where there is no such attribute."""
    if attribute not in group.attrs:
        return sorted(group) if attribute == "field_names" else []
    listed = np.atleast_1d(group.attrs[attribute])
    return [name.decode() if isinstance(name, bytes) else str(name) for name in listed]


def flags(owner: h5py.Dataset | h5py.Group, attribute: str, *, count: int = 1) -> tuple[bool, ...]:
    """An attribute of so many truth values.

    Raises:
        SourceError: Kind "missing_attribute" or "bad_attribute".
    """
    name = owner.name[1:]
    value: Any = owner.attrs.get(attribute)
    if value is None:
        raise source_error(
            f"no attribute {attribute!r} of {name!r}",
            kind="missing_attribute",
            path=owner.file.filename,
            dataset=name,
            found=", ".join(owner.attrs) or "no attributes",
            hint="without it The Well's format doesn't say which axes the dataset has",
        )
    found = np.atleast_1d(value)
    if found.shape != (count,) or found.dtype.kind not in "biu":
        raise source_error(
            f"attribute {attribute!r} of {name!r}",
            kind="bad_attribute",
            path=owner.file.filename,
            dataset=name,
            expected="true or false" if count == 1 else f"{count} times true or false",
            found=value,
        )
    return tuple(bool(flag) for flag in found)


def leading_axes(owner: h5py.Dataset | h5py.Group) -> str:
    """The axes before the spatial ones: "s" if it varies between samples, "t" if it varies in time."""
    return "".join(
        axis
        for axis, attribute in (("s", "sample_varying"), ("t", "time_varying"))
        if flags(owner, attribute)[0]
    )
