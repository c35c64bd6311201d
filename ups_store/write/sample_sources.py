"""What `write` can take, as one of two things: columns with a sample axis, or samples one after the other."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ups_store.errors import SpecError
from ups_store.format.metadata import SAMPLE_DIM, ArraySpec, dtype_name
from ups_store.write.described import TIME_UNITS, Described, described, json_attrs
from ups_store.write.encode import check_unmasked
from ups_store.write.sample_values import ONLY_NAME, Names, arrays_of_names, named_values

_DIGEST_BYTES = 16 << 20  # of an array that are read at once for its digest

Identity: TypeAlias = Callable[[], Mapping[str, Any] | None]


@dataclass(frozen=True)
class Columns:
    """Arrays whose first axis is the sample: nothing has to be found out.

    Attributes:
        num_samples: N.
        arrays: What `array[a:b]` can be asked of, by name, shape (N, ...).
        dims: Names of their dimensions, where they have some, the sample's left out.
        constants: Arrays without a sample axis that come with them.
        constant_dims: Names of the dimensions of those.
        attrs: Attributes that come with them.
        is_digested: Whether a digest of the values is their identity where none is given: they lie in memory.
    """

    num_samples: int
    arrays: Mapping[str, Any]
    dims: Mapping[str, Sequence[str]] = field(default_factory=dict)
    constants: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    constant_dims: Mapping[str, Sequence[str]] = field(default_factory=dict)
    attrs: Mapping[str, Any] = field(default_factory=dict)
    is_digested: bool = True

    def specs(self) -> dict[str, ArraySpec]:
        """Their specs."""
        return {
            name: ArraySpec(
                tuple(array.shape),
                dtype_name(array.dtype),
                dims=(SAMPLE_DIM, *self.dims[name]) if name in self.dims else None,
                attrs=array.attrs if isinstance(array, Described) else None,
            )
            for name, array in self.arrays.items()
        }

    def block(self, first: int, end: int) -> dict[str, npt.NDArray[Any]]:
        """Consecutive samples of all arrays."""
        return {name: np.asarray(array[first:end]) for name, array in self.arrays.items()}

    def digest(self) -> dict[str, Any]:
        """An identity that is a function of the values alone; reads all of them."""
        return {"content": digest_of({**self.arrays, **self.constants})}


def digest_of(arrays: Mapping[str, Any]) -> str:
    """Digest of names, dtypes, shapes and values of arrays, read a block at a time."""
    whole = hashlib.blake2b(digest_size=32)
    for name, given in sorted(arrays.items()):
        array = given if hasattr(given, "dtype") else np.asarray(given)
        whole.update(repr((name, array.dtype.name, tuple(array.shape))).encode())
        rows = max(1, _DIGEST_BYTES * max(1, len(array)) // max(1, array.nbytes)) if array.shape else 1
        for first in range(0, len(array) if array.shape else 1, rows):
            block = np.ascontiguousarray(array[first : first + rows] if array.shape else array)
            little = block.astype(block.dtype.newbyteorder("<"), copy=False)
            whole.update(little.reshape(-1).view(np.uint8).data)
    return f"blake2b:{whole.hexdigest()}"


@dataclass(frozen=True)
class Rows:
    """Samples one by one.

    Attributes:
        num_samples: How many, None where that comes out at the end only.
        begin: Gives the samples, named, from a number on.
        can_skip: Whether those before the number aren't made at all.
        default_identity: What the samples say of themselves; None where they say nothing.
        array_attrs: Attributes by array.
    """

    num_samples: int | None
    begin: Callable[[int], Iterator[dict[str, Any]]]
    can_skip: bool
    default_identity: Identity = lambda: None
    array_attrs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def source_of(samples: Any, names: Names | None = None) -> Columns | Rows:
    """What samples are: columns if an array of all is at hand, else rows.

    Raises:
        SpecError: If they are neither; if columns differ in their number of samples.
    """
    _check_no_table(samples)
    if hasattr(samples, "coords") and (hasattr(samples, "data_vars") or hasattr(samples, "to_dataset")):
        return _of_xarray(samples, names)
    if hasattr(samples, "arrays") and hasattr(samples, "attrs") and callable(samples.arrays):
        return _of_zarr(samples, names)
    if isinstance(samples, Mapping):
        return _of_columns(samples, names)
    if hasattr(samples, "shape") and hasattr(samples, "dtype"):
        return _of_columns({_only_name(names): samples}, None)
    if isinstance(samples, str | bytes) or not (hasattr(samples, "__iter__") or _is_map_style(samples)):
        raise SpecError(
            "samples",
            kind="argument",
            expected="an iterable of samples, a data set, or arrays",
            found=type(samples).__name__,
        )
    if _is_map_style(samples):
        return _of_dataset(samples, names)
    return Rows(None, lambda first: _counted(samples, names, first), can_skip=False)


def _check_no_table(samples: Any) -> None:
    """Refuse tables of pandas, Polars and Arrow, whose columns have to be chosen, and several data sets."""
    hint = None
    if hasattr(samples, "columns") and hasattr(samples, "to_numpy"):
        hint = "give its columns: {name: frame[name].to_numpy() for name in frame.columns}"
    elif hasattr(samples, "column_names") and hasattr(samples, "to_pydict"):
        hint = "give its columns: {name: table[name].to_numpy() for name in table.column_names}"
    elif isinstance(samples, Mapping) and any(hasattr(each, "with_format") for each in samples.values()):
        hint = f"write them one by one, such as samples[{next(iter(samples))!r}]"
    if hint is not None:
        expected, found = "arrays by name, or one data set", f"a {type(samples).__name__}"
        raise SpecError("samples", kind="argument", expected=expected, found=found, hint=hint)


def _only_name(names: Names | None) -> str:
    """The name of one array."""
    if names is None:
        return ONLY_NAME
    if len(names) != 1:
        raise SpecError("names", kind="names", expected="one, of the one array", found=list(names))
    return names[0]


def _is_map_style(samples: Any) -> bool:
    """Whether samples can be asked for by number; torch's iterable data sets only look as if."""
    if any(cls.__name__ == "IterableDataset" for cls in type(samples).__mro__):
        return False
    return hasattr(samples, "__len__") and hasattr(samples, "__getitem__")


def _counted(samples: Iterable[Any], names: Names | None, first: int) -> Iterator[dict[str, Any]]:
    for number, sample in enumerate(itertools.islice(iter(samples), first, None), first):
        yield named_values(sample, names, number=number)


def _of_dataset(samples: Any, names: Names | None) -> Rows:
    """A sequence, a torch data set, or one of Hugging Face, whose features have dtypes and names."""
    fingerprint = getattr(samples, "_fingerprint", None)
    attrs: dict[str, dict[str, Any]] = {}
    if fingerprint is not None and hasattr(samples, "features") and hasattr(samples, "with_format"):
        for name, feature in (samples.features or {}).items():
            classes = getattr(getattr(feature, "feature", feature), "names", None)  # of lists of labels, too
            attrs |= {name: {"names": list(classes)}} if classes else {}
        samples = samples.with_format("numpy", dtype=None)  # else float64 becomes float32, int32 int64

    def begin(first: int) -> Iterator[dict[str, Any]]:
        for number in range(first, len(samples)):
            yield named_values(samples[number], names, number=number)

    def identity() -> Mapping[str, Any] | None:
        return None if fingerprint is None else {"huggingface_fingerprint": str(fingerprint)}

    return Rows(len(samples), begin, can_skip=True, default_identity=identity, array_attrs=attrs)


def _of_columns(columns: Mapping[str, Any], names: Names | None) -> Columns | Rows:
    """Arrays by name; a column of texts, or of arrays of different shapes, makes rows of all."""
    columns = arrays_of_names(names, columns)
    if not columns:
        raise SpecError("samples", kind="argument", expected="at least one array", found="an empty dict")
    if any(hasattr(column, "detach") for column in columns.values()):
        columns = {name: _as_array(column) for name, column in columns.items()}
    columns = {name: described(str(name), column) for name, column in columns.items()}
    for name, column in columns.items():
        check_unmasked(column, str(name))
    counts = {name: _length(name, column) for name, column in columns.items()}
    num_samples = next(iter(counts.values()))
    for name, count in counts.items():
        if count != num_samples:
            first = next(iter(counts))
            raise SpecError(
                "arrays of different numbers of samples",
                kind="shape",
                array=name,
                expected=f"{num_samples}, as {first!r} has",
                found=count,
                hint="the first axis of every array is the sample; an array without one goes to `constants`",
            )
    if all(_is_numbers(column) for column in columns.values()):
        return Columns(num_samples, columns)

    def begin(first: int) -> Iterator[dict[str, Any]]:
        for number in range(first, num_samples):
            sample = {name: column[number] for name, column in columns.items()}
            yield named_values(sample, None, number=number)

    attrs = {name: column.attrs for name, column in columns.items() if isinstance(column, Described)}
    return Rows(num_samples, begin, True, default_identity=lambda: _digest_of_rows(begin), array_attrs=attrs)


def _length(name: str, column: Any) -> int:
    shape = getattr(column, "shape", None)  # of a Zarr array, which has no length
    if shape:
        return int(shape[0])
    if shape == () or not hasattr(column, "__len__") or isinstance(column, str | bytes):
        found, hint = type(column).__name__, "an array without a sample axis goes to `constants`"
        raise SpecError("no sample axis", kind="shape", array=str(name), found=found, hint=hint)
    return len(column)


def _as_array(column: Any) -> Any:
    return named_values({"column": column}, None, number=0)["column"] if hasattr(column, "detach") else column


def _is_numbers(column: Any) -> bool:
    kind = getattr(getattr(column, "dtype", None), "kind", "O")
    return hasattr(column, "shape") and kind not in "OUSMmT"


def _digest_of_rows(begin: Callable[[int], Iterator[dict[str, Any]]]) -> dict[str, Any]:
    """An identity that is a function of the values alone, of columns that lie in memory."""
    whole = hashlib.blake2b(digest_size=32)
    for sample in begin(0):
        for name, value in sorted(sample.items()):
            if isinstance(value, str | bytes):
                raw = value.encode() if isinstance(value, str) else value
                whole.update(repr((name, type(value).__name__, len(raw))).encode() + raw)
            else:
                whole.update(repr((name, digest_of({name: value}))).encode())
    return {"content": f"blake2b:{whole.hexdigest()}"}


def _of_zarr(group: Any, names: Names | None) -> Columns:
    """A Zarr group: its arrays by name, read a block at a time."""
    found = arrays_of_names(names, dict(group.arrays()))
    made = _of_columns(found, None)
    assert isinstance(made, Columns)
    dims = {}
    for name, array in found.items():
        named = getattr(getattr(array, "metadata", None), "dimension_names", None)
        named = named or array.attrs.get("_ARRAY_DIMENSIONS")
        if named and all(named):
            dims[name] = tuple(named[1:])
    attrs = json_attrs(group.attrs)
    return Columns(made.num_samples, made.arrays, dims=dims, attrs=attrs, is_digested=False)


def _of_xarray(dataset: Any, names: Names | None) -> Columns:
    """An xarray data set: variables along its sample dimension, the others as constants.

    The dimension is "sample" if there is one, else the first one of the first variable. Times become whole
    nanoseconds, with units that xarray decodes; coordinates that are text are kept among the attributes.
    """
    if not hasattr(dataset, "data_vars"):
        dataset = dataset.to_dataset(
            name=dataset.name if dataset.name and names is None else _only_name(names)
        )
    chosen = dataset if names is None else dataset[list(arrays_of_names(names, dict(dataset.variables)))]
    wanted = [name for name in (names or dataset.data_vars) if name not in chosen.coords]
    if not wanted:
        raise SpecError("samples", kind="argument", expected="at least one variable", found="none")
    first = next((chosen[name] for name in wanted if chosen[name].dims), None)
    along = "sample" if "sample" in dataset.dims else first.dims[0] if first is not None else "sample"
    arrays, dims, constants, constant_dims, texts = {}, {}, {}, {}, {}
    for name in (*wanted, *chosen.coords):
        variable = chosen[name].variable
        rest = tuple(map(str, (dim for dim in variable.dims if dim != along)))
        name = str(name)
        if variable.dtype.kind in "OUT" and name not in wanted and along not in variable.dims:
            texts[name] = {"dims": list(rest), "values": variable.values.tolist()}
        elif not _is_numbers(variable) and variable.dtype.kind not in TIME_UNITS:
            expected, found = "numbers", f"dtype {variable.dtype}"
            hint = "convert it first, or leave it out"
            raise SpecError(
                "it can't be stored", kind="dtype", array=name, expected=expected, found=found, hint=hint
            )
        elif along in variable.dims:
            arrays[name], dims[name] = described(name, variable.transpose(along, ...)), rest
        elif name != along:
            constants[name], constant_dims[name] = described(name, variable), rest
    attrs = json_attrs(dataset.attrs) | ({"text_coordinates": json_attrs(texts)} if texts else {})
    num_samples = int(dataset.sizes[along])
    return Columns(num_samples, arrays, dims, constants, constant_dims, attrs, is_digested=False)
