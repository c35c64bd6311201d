"""Numbers that characterise a simulation: attributes and single values of an HDF5 file."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ups_store.errors import SourceError
from ups_store.sources.contents import Part
from ups_store.sources.hdf5 import get_dataset, h5py, read_whole, source_error, translated, tree

# PDEBench's root attributes that are parameters, in lower case, and what we call them.
_NUMBER = r"\d+(?:\.\d*)?(?:e[+-]?\d+)?"
_PARAMETERS = {name: name for name in ("nu", "beta", "rho", "eta", "zeta", "mach")} | {"m": "mach"}


@dataclass(frozen=True)
class NumberPart(Part):
    """One number for every sample: a dataset with a single value, or an attribute.

    Attributes:
        attribute: Name of the attribute of `dataset`, which may be a group; empty for its value.
        asked_by: What asks for it, for messages.
    """

    axes: str = ""
    attribute: str = ""
    asked_by: str = ""

    def read(self, file: h5py.File, name: str, *, sample: int | None = None) -> float:
        """The number; `name` is the part's path, in the group of `sample` where there are groups.

        Raises:
            SourceError: Kind "missing_dataset", "missing_attribute", "bad_parameter" or "read_failed".
        """
        if self.attribute:
            owner = name.rstrip("/") or "/"
            return read_attribute(file, owner, self.attribute, asked_by=self.asked_by, sample=sample)
        dataset = get_dataset(file, name, sample=sample)
        what = f"dataset {name!r}"
        if dataset.size != 1:
            raise _no_number(file, what, f"shape {dataset.shape}", dataset=name, sample=sample)
        value = read_whole(dataset, name, path=file.filename, sample=sample)
        return _number(file, what, value, dataset=name, sample=sample)


def root_parameters(file: h5py.File) -> dict[str, float]:
    """The root attributes that PDEBench has for parameters, by our names for them."""
    spelled: dict[str, str] = {}
    for attribute in sorted(file.attrs):
        name = _PARAMETERS.get(attribute.lower())
        if name is None:
            continue
        if name in spelled:
            raise _ambiguous(file, spelled[name], attribute, name)
        spelled[name] = attribute
    values = {name: read_attribute(file, "/", attribute) for name, attribute in spelled.items()}
    for name, value in values.items():
        match = re.search(rf"(?:^|_){name}({_NUMBER})(?=[_.]|$)", Path(file.filename).stem, re.IGNORECASE)
        if match and math.isfinite(value) and not math.isclose(float(match[1]), value, rel_tol=1e-6):
            raise source_error(
                f"attribute {spelled[name]!r} isn't the number in the file's name",
                kind="ambiguous_parameter",
                path=file.filename,
                expected=match[1],
                found=value,
                hint="correct the attribute, or rename the file",
            )
    return values


def _ambiguous(file: h5py.File, one: str, other: str, name: str) -> SourceError:
    return source_error(
        f"attributes {one!r} and {other!r} are both parameter {name!r}",
        kind="ambiguous_parameter",
        path=file.filename,
        expected="one of them",
        found=f"{file.attrs[one]} and {file.attrs[other]}",
        hint="remove the wrong one",
    )


def read_attribute(
    file: h5py.File, owner: str, attribute: str, *, asked_by: str = "", sample: int | None = None
) -> float:
    """An attribute that is one number, of the object `owner`.

    Args:
        file: The file.
        owner: HDF5 path of the group or dataset that has it; "/" for the file.
        attribute: Its name.
        asked_by: What asks for it, for messages.
        sample: Sample that it belongs to, where it belongs to one.
    """
    with translated("can't read attributes", path=file.filename, dataset=owner, sample=sample):
        found = file.get(owner)
        attributes = {} if found is None else found.attrs
        value = attributes.get(attribute)
        names = list(attributes)
    if found is None:
        raise missing(f"no group or dataset {owner!r}", file, dataset=owner, asked_by=asked_by, sample=sample)
    if value is None:
        raise source_error(
            f"no attribute {attribute!r} of {owner!r}{_asked(asked_by)}",
            kind="missing_attribute",
            path=file.filename,
            dataset=owner,
            sample=sample,
            found=", ".join(names) or "no attributes",
            hint=nearest(attribute, names),
        )
    return _number(file, f"attribute {attribute!r}{_asked(asked_by)}", value, dataset=owner, sample=sample)


def _number(file: h5py.File, what: str, value: Any, *, dataset: str, sample: int | None) -> float:
    number: np.ndarray[Any, Any] = np.asarray(value)
    if number.size == 1 and number.dtype.kind in "fiub":
        return float(number.item())
    found = f"text {value!r}" if isinstance(value, str | bytes) else number.tolist()
    raise _no_number(file, what, found, dataset=dataset, sample=sample)


def _no_number(file: h5py.File, what: str, found: object, **facts: Any) -> SourceError:
    return source_error(
        what, kind="bad_parameter", path=file.filename, expected="one number", found=found, **facts
    )


def missing(
    problem: str, file: h5py.File, *, dataset: str, asked_by: str = "", sample: int | None = None
) -> SourceError:
    """The error for something that a file lacks, beside what it holds.

    Args:
        problem: What is missing.
        file: Where it is missing.
        dataset: Its HDF5 path.
        asked_by: What asks for it.
        sample: Sample that it belongs to, where it belongs to one.
    """
    return source_error(
        problem + _asked(asked_by),
        kind="missing_dataset",
        path=file.filename,
        dataset=dataset,
        sample=sample,
        found=tree(file),
    )


def nearest(name: str, known: Iterable[str]) -> str | None:
    """A hint that names the nearest of the known names, if one is near; other capitals are nearest."""
    names = list(known)
    near = [each for each in names if each.lower() == name.lower()]
    near = near or difflib.get_close_matches(name, names, n=1)
    return f"did you mean {near[0]!r}?" if near else None


def _asked(asked_by: str) -> str:
    return f", which {asked_by} asks for" if asked_by else ""
