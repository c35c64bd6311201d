"""What a configuration says about files of your own: their names, and where they keep what.

This is only a schema: `conventions.Declared` reads such files, `building.config` makes tasks of it. It is the
only module below the build that imports pydantic, and nothing imports it where no layout is declared.
"""

from __future__ import annotations

import contextlib
import difflib
import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from ups_store.errors import ConfigError, SpecError, needs
from ups_store.format.metadata import is_name
from ups_store.system.paths import check_local

with needs("hdf5"):
    from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

# What an axis is called in a configuration: as `contents.AXIS_NAMES`, but for the columns of tensors.
AXIS_LETTERS = {"sample": "s", "time": "t", "z": "z", "y": "y", "x": "x", "channel": "c", "component": "k"}
_SPACES = ("x", "xy", "xyz")
_OWN_NAMES = frozenset(("fields", "x", "y", "z", "t"))

Name = Annotated[str, Field(min_length=1)]


class DeclaredSection(BaseModel):
    """Keys and values; an unknown key is an error, and nothing changes afterwards."""

    # deferred: only what is used builds its schema; all of them take 15 ms of every start
    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)


def local_path(value: object) -> object:
    """Return the value, unless it is a URL; the code that catches the error knows the key."""
    try:
        if isinstance(value, str | Path):
            check_local(value)
    except SpecError as error:
        error.problem, error.found = "", error.path
        raise
    return value


LocalPath = Annotated[Path, BeforeValidator(local_path)]
"""A path in a configuration: a URL is an error that names its key."""


def _wrong(expected: object, found: object, hint: str | None = None) -> ConfigError:
    """Make the error of the value that is being validated; the code that catches it knows the key."""
    return ConfigError("", expected=expected, found=found, hint=hint)


class DatasetDeclaration(DeclaredSection):
    """One dataset that becomes an array, or a part of one."""

    dataset: Name = Field(description="HDF5 path, in the group of a sample where there are groups; from / on")
    axes: str = Field(description="axes in the order of the file, such as 'sample time x channel'")

    @field_validator("axes", mode="before")
    @classmethod
    def _as_words(cls, value: object) -> object:
        """Put one space between words, so that spelling doesn't change the identity."""
        words = re.split(r"[\s,]+", value.strip(" ,()")) if isinstance(value, str) else value
        if not isinstance(words, Sequence):
            return value
        for word in words:
            if word not in AXIS_LETTERS:
                near = difflib.get_close_matches(str(word), AXIS_LETTERS, n=1)
                hint = f"did you mean {near[0]}?" if near else None
                raise _wrong(f"axes among {', '.join(AXIS_LETTERS)}", repr(word), hint)
        if len(set(words)) < len(words):
            raise _wrong("every axis once", " ".join(words))
        return " ".join(words)

    @property
    def letters(self) -> str:
        """Return the axes as letters."""
        return "".join(AXIS_LETTERS[word] for word in self.axes.split())

    @property
    def space(self) -> str:
        """Return the spatial axes among them, sorted."""
        return "".join(sorted(set(self.letters) & set("xyz")))


class FieldDeclaration(DatasetDeclaration):
    """Channels of `fields`; those of all declarations are joined in their order."""

    channels: tuple[Name, ...] = Field((), description="their names; by default the dataset's, numbered")

    @model_validator(mode="after")
    def _one_name_each(self) -> FieldDeclaration:
        if "k" in self.letters:
            raise _wrong("axis channel", "component", "components of arrays other than fields are so called")
        if len(self.channels) > 1 and "c" not in self.letters:
            raise _wrong("one channel, as there is no channel axis", ", ".join(self.channels))
        return self

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the channels; none where only the file knows how many there are."""
        return self.channels or (() if "c" in self.letters else (self.dataset.rpartition("/")[2],))


class ArrayDeclaration(DatasetDeclaration):
    """An array beside `fields`, such as a coefficient."""

    @model_validator(mode="after")
    def _no_channels(self) -> ArrayDeclaration:
        if "c" in self.letters:
            hint = "one dimension name has one length: fields have channel"
            raise _wrong("axis component", "channel", hint)
        return self


class CoordinateDeclaration(DeclaredSection):
    """Where an axis has its coordinate from: a dataset, or a constant step."""

    dataset: Name | None = Field(None, description="HDF5 path of the values")
    step: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="distance, where no dataset has it"
    )
    start: float = Field(0.0, allow_inf_nan=False, description="first value, with step")

    @model_validator(mode="after")
    def _one_of(self) -> CoordinateDeclaration:
        if (self.dataset is None) == (self.step is None):
            raise _wrong("either dataset or step", "both" if self.dataset else "neither")
        return self


class ParameterDeclaration(DeclaredSection):
    """Where a number per sample has its value from."""

    dataset: Name | None = Field(None, description="HDF5 path: a value per sample, or one for all")
    attribute: Name | None = Field(None, description="attribute of the file, or of the sample's group")
    of: Name | None = Field(None, description="HDF5 path of what has the attribute, if it isn't that")
    file_name: Name | None = Field(None, description="regular expression with one group, for the file's name")

    @model_validator(mode="after")
    def _one_of(self) -> ParameterDeclaration:
        keys = [key for key in ("dataset", "attribute", "file_name") if getattr(self, key) is not None]
        if len(keys) != 1:
            raise _wrong("one of dataset, attribute and file_name", " and ".join(keys) or "none")
        if self.of is not None and self.attribute is None:
            raise _wrong("of together with attribute", keys[0])
        return self

    @field_validator("file_name")
    @classmethod
    def _one_group(cls, value: str | None) -> str | None:
        with contextlib.suppress(re.error):
            if value is None or re.compile(value).groups == 1:
                return value
        raise _wrong("a regular expression with one group, such as 'nu([0-9.e-]+)'", repr(value))


class LayoutDeclaration(DeclaredSection):
    """Where files of one kind keep what."""

    groups: Name | None = Field(None, description="glob pattern of HDF5 groups, one per sample")
    fields: tuple[FieldDeclaration, ...] = Field(min_length=1, description="datasets that make the fields")
    arrays: dict[str, ArrayDeclaration] = Field({}, description="other arrays, by name")
    coordinates: dict[Literal["x", "y", "z", "t"], CoordinateDeclaration] = Field({}, description="by axis")
    parameters: dict[str, ParameterDeclaration] = Field({}, description="numbers per sample, by name")

    @field_validator("coordinates", mode="before")
    @classmethod
    def _from_paths(cls, value: object) -> object:
        if not isinstance(value, Mapping):
            return value
        return {axis: {"dataset": item} if isinstance(item, str) else item for axis, item in value.items()}

    @field_validator("arrays", "parameters")
    @classmethod
    def _usable_names(cls, value: dict[str, Any]) -> dict[str, Any]:
        for name in value:
            if not is_name(name) or name in _OWN_NAMES:
                raise _wrong(f"names of arrays, other than {', '.join(sorted(_OWN_NAMES))}", repr(name))
        return value

    @model_validator(mode="after")
    def _goes_together(self) -> LayoutDeclaration:
        if self.space not in _SPACES:
            raise _wrong("fields with axes x, or x y, or x y z", " ".join(self.space) or "none of them")
        declared = [*self.fields, *self.arrays.values()]
        beyond = {axis for dataset in declared for axis in dataset.space} | (set(self.coordinates) - {"t"})
        if beyond - set(self.space):
            raise _wrong(f"axes of the fields, {' '.join(self.space)}", " ".join(sorted(beyond)))
        if "t" in self.coordinates and self.is_steady:
            raise _wrong("coordinates of axes of the fields", "t")
        both = set(self.arrays) & set(self.parameters)
        if both:
            raise _wrong("different names for arrays and parameters", ", ".join(sorted(both)))
        in_groups = [dataset.dataset for dataset in declared if self.groups and "s" in dataset.letters]
        if any(not name.startswith("/") for name in in_groups):
            raise _wrong("no axis sample in a sample's own group", in_groups[0])
        return self

    @property
    def space(self) -> str:
        """Return the spatial axes of the fields, sorted."""
        return "".join(sorted({axis for dataset in self.fields for axis in dataset.space}))

    @property
    def is_steady(self) -> bool:
        """Tell whether a sample is one state instead of a trajectory."""
        return not any("t" in dataset.letters for dataset in self.fields)

    @property
    def channels(self) -> tuple[str, ...]:
        """Return the names of all channels; none where only the file knows how many there are."""
        names = [dataset.names for dataset in self.fields]
        return tuple(itertools.chain(*names)) if all(names) else ()


class TaskDeclaration(DeclaredSection):
    """A task of a user's own."""

    files: dict[Literal["all", "train", "val", "test"], tuple[Name, ...]] = Field(
        {}, description="glob patterns below the root: of each split, or of all, to be cut by the rule"
    )
    test_part: Literal["first", "last"] = Field("last", description="which end of a file is test")
    boundary: dict[Literal["x", "y", "z"], Name] = Field({}, description="type of boundary by axis")
    ndim: Literal[1, 2, 3] | None = Field(None, description="number of spatial axes; needed without layout")
    layout: LayoutDeclaration | None = Field(None, description="by default it is recognised by content")

    @field_validator("files", mode="before")
    @classmethod
    def _of_all(cls, value: object) -> object:
        by_split = value if isinstance(value, Mapping) else {"all": value}
        names = {"valid": "val", "validation": "val"}
        return {
            names.get(split, split): patterns.split(",") if isinstance(patterns, str) else patterns
            for split, patterns in by_split.items()
        }

    @model_validator(mode="after")
    def _knows_its_axes(self) -> TaskDeclaration:
        if "all" in self.files and len(self.files) > 1:
            raise _wrong("files of all, or of each split", ", ".join(self.files))
        known = len(self.layout.space) if self.layout else self.ndim
        if known is None:
            hint = "without a layout nothing says how many axes are spatial"
            raise _wrong("ndim or layout", "neither", hint)
        if self.ndim not in (None, known):
            raise _wrong(f"ndim {known}, as the layout's fields have it", self.ndim)
        if not set(self.boundary) <= set("xyz"[:known]):
            raise _wrong(f"boundary of {', '.join('xyz'[:known])}", ", ".join(self.boundary))
        return self
