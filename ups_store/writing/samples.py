"""What `write` takes: what is a sample, which arrays samples make, and checks of all others.

Samples come as columns, arrays with a sample axis, or as rows, one after the other. torch, PIL, Hugging Face,
Zarr and xarray are recognised by what their objects can do: none of them is imported here.
"""

from __future__ import annotations

import hashlib
import itertools
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ups_store.errors import SpecError
from ups_store.format.metadata import NAME_PATTERN, SAMPLE_DIM, ArraySpec, dtype_name, dtype_of
from ups_store.writing.described import TIME_UNITS, Described, described, json_attrs
from ups_store.writing.encode import check_unmasked

Names = Sequence[str]
Sample = Mapping[str, Any]

ONLY_NAME = "data"  # of samples that are one array each, where no name is given
_DIGEST_BYTES = 16 << 20  # of an array that are read at once for its digest
_CONVERT = "convert it where the samples are made"


@dataclass(frozen=True)
class Columns:
    """Arrays whose first axis is the sample: nothing has to be found out."""

    num_samples: int
    arrays: Mapping[str, Any]  # what `array[a:b]` can be asked of, shape (N, ...)
    dims: Mapping[str, Sequence[str]] = field(default_factory=dict)  # of arrays, the sample's left out
    constants: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    constant_dims: Mapping[str, Sequence[str]] = field(default_factory=dict)
    attrs: Mapping[str, Any] = field(default_factory=dict)
    is_digested: bool = True  # they lie in memory: where no identity is given, the digest of the values is

    def specs(self) -> dict[str, ArraySpec]:
        """Return their specs."""
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
        """Read consecutive samples of all arrays."""
        return {name: np.asarray(array[first:end]) for name, array in self.arrays.items()}

    def default_identity(self) -> Mapping[str, Any] | None:
        """Digest the values, all of which are read; None where that isn't wanted."""
        return {"content": digest_of({**self.arrays, **self.constants})} if self.is_digested else None


@dataclass(frozen=True)
class Rows:
    """Samples one by one."""

    num_samples: int | None  # None where that comes out at the end only
    begin: Callable[[int], Iterator[dict[str, Any]]]  # gives the samples, named, from a number on
    can_skip: bool  # those before the number aren't made at all
    default_identity: Callable[[], Mapping[str, Any] | None] = lambda: None  # what they say of themselves
    array_attrs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def digest_of(arrays: Mapping[str, Any]) -> str:
    """Digest names, dtypes, shapes and values of arrays, read a block at a time."""
    whole = hashlib.blake2b(digest_size=32)
    for name, value in sorted(arrays.items()):
        array = value if hasattr(value, "dtype") else np.asarray(value)
        whole.update(repr((name, array.dtype.name, tuple(array.shape))).encode())
        rows = max(1, _DIGEST_BYTES * max(1, len(array)) // max(1, array.nbytes)) if array.shape else 1
        for first in range(0, len(array) if array.shape else 1, rows):
            block = np.ascontiguousarray(array[first : first + rows] if array.shape else array)
            little = block.astype(block.dtype.newbyteorder("<"), copy=False)
            whole.update(little.reshape(-1).view(np.uint8).data)
    return f"blake2b:{whole.hexdigest()}"


def source_of(samples: Any, names: Names | None = None) -> Columns | Rows:
    """Take samples as columns if an array of all is at hand, else as rows."""
    hint = None  # for tables of pandas, Polars and Arrow, whose columns have to be chosen, and many data sets
    if hasattr(samples, "columns") and hasattr(samples, "to_numpy"):
        hint = "give its columns: {name: frame[name].to_numpy() for name in frame.columns}"
    elif hasattr(samples, "column_names") and hasattr(samples, "to_pydict"):
        hint = "give its columns: {name: table[name].to_numpy() for name in table.column_names}"
    elif isinstance(samples, Mapping) and any(hasattr(value, "with_format") for value in samples.values()):
        hint = f"write them one by one, such as samples[{next(iter(samples))!r}]"
    if hint is not None:
        facts: dict[str, Any] = {"found": f"a {type(samples).__name__}", "hint": hint}
        raise SpecError("samples", kind="argument", expected="arrays by name, or one data set", **facts)
    if hasattr(samples, "coords") and (hasattr(samples, "data_vars") or hasattr(samples, "to_dataset")):
        return _of_xarray(samples, names)
    if hasattr(samples, "arrays") and hasattr(samples, "attrs") and callable(samples.arrays):
        return _of_zarr(samples, names)
    if isinstance(samples, Mapping):
        return _of_columns(samples, names)
    if hasattr(samples, "shape") and hasattr(samples, "dtype"):
        return _of_columns({_only_name(names): samples}, None)
    # torch's iterable data sets only look as if they could be asked for by number.
    is_iterable = any(cls.__name__ == "IterableDataset" for cls in type(samples).__mro__)
    is_numbered = hasattr(samples, "__len__") and hasattr(samples, "__getitem__") and not is_iterable
    if isinstance(samples, str | bytes) or not (hasattr(samples, "__iter__") or is_numbered):
        expected = "an iterable of samples, a data set, or arrays"
        raise SpecError("samples", kind="argument", expected=expected, found=type(samples).__name__)
    if is_numbered:
        return _of_dataset(samples, names)

    def begin(first: int) -> Iterator[dict[str, Any]]:
        for number, sample in enumerate(itertools.islice(iter(samples), first, None), first):
            yield named_values(sample, names, number=number)

    return Rows(None, begin, can_skip=False)


def _only_name(names: Names | None) -> str:
    """Return the name of one array."""
    if names is None:
        return ONLY_NAME
    if len(names) != 1:
        raise SpecError("names", kind="names", expected="one, of the one array", found=list(names))
    return names[0]


def _chosen(names: Names | None, columns: Mapping[str, Any]) -> dict[str, Any]:
    """Choose the columns that are named, in this order; all where none is."""
    if names is None:
        return dict(columns)
    missing = [name for name in names if name not in columns]
    if missing:
        expected = f"some of {', '.join(map(str, columns))}"
        raise SpecError("no such array", kind="names", expected=expected, found=missing[0])
    return {name: columns[name] for name in names}


def _of_dataset(samples: Any, names: Names | None) -> Rows:
    """Take a sequence, a torch data set, or one of Hugging Face, whose features have dtypes and names."""
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

    identity = None if fingerprint is None else {"huggingface_fingerprint": str(fingerprint)}
    return Rows(len(samples), begin, True, default_identity=lambda: identity, array_attrs=attrs)


def _of_columns(columns: Mapping[str, Any], names: Names | None) -> Columns | Rows:
    """Take arrays by name; a column of texts, or of arrays of different shapes, makes rows of all."""
    columns = _chosen(names, columns)
    if not columns:
        raise SpecError("samples", kind="argument", expected="at least one array", found="an empty dict")
    counts = {}
    for name, column in columns.items():
        column = as_value(column, str(name), number=0) if hasattr(column, "detach") else column
        column = columns[name] = described(str(name), column)
        check_unmasked(column, str(name))
        shape = getattr(column, "shape", None)  # of a Zarr array, which has no length
        if not shape and (shape == () or not hasattr(column, "__len__") or isinstance(column, str | bytes)):
            facts: dict[str, Any] = {"array": str(name), "found": type(column).__name__}
            hint = "an array without a sample axis goes to `constants`"
            raise SpecError("no sample axis", kind="shape", hint=hint, **facts)
        counts[name] = int(shape[0]) if shape else len(column)
    first, num_samples = next(iter(counts.items()))
    for name, count in counts.items():
        if count != num_samples:
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

    def identity() -> dict[str, Any]:
        whole = hashlib.blake2b(digest_size=32)
        for sample in begin(0):
            for name, value in sorted(sample.items()):
                if isinstance(value, str | bytes):
                    raw = value.encode() if isinstance(value, str) else value
                    whole.update(repr((name, type(value).__name__, len(raw))).encode() + raw)
                else:
                    whole.update(repr((name, digest_of({name: value}))).encode())
        return {"content": f"blake2b:{whole.hexdigest()}"}

    attrs = {name: column.attrs for name, column in columns.items() if isinstance(column, Described)}
    return Rows(num_samples, begin, True, default_identity=identity, array_attrs=attrs)


def _is_numbers(column: Any) -> bool:
    kind = getattr(getattr(column, "dtype", None), "kind", "O")
    return hasattr(column, "shape") and kind not in "OUSMmT"


def _of_zarr(group: Any, names: Names | None) -> Columns:
    """Take a Zarr group: its arrays by name, read a block at a time."""
    arrays = _chosen(names, dict(group.arrays()))
    columns = _of_columns(arrays, None)
    assert isinstance(columns, Columns)
    dims = {}
    for name, array in arrays.items():
        named = getattr(getattr(array, "metadata", None), "dimension_names", None)
        named = named or array.attrs.get("_ARRAY_DIMENSIONS")
        if named and all(named):
            dims[name] = tuple(named[1:])
    return replace(columns, dims=dims, attrs=json_attrs(group.attrs), is_digested=False)


def _of_xarray(dataset: Any, names: Names | None) -> Columns:
    """Take an xarray data set: variables along its sample dimension, the others as constants.

    The dimension is "sample" if there is one, else the first one of the first variable. Times become whole
    nanoseconds, with units that xarray decodes; coordinates that are text are kept among the attributes.
    """
    if not hasattr(dataset, "data_vars"):
        name = dataset.name if dataset.name and names is None else _only_name(names)
        dataset = dataset.to_dataset(name=name)
    chosen = dataset if names is None else dataset[list(_chosen(names, dict(dataset.variables)))]
    chosen_names = [name for name in (names or dataset.data_vars) if name not in chosen.coords]
    if not chosen_names:
        raise SpecError("samples", kind="argument", expected="at least one variable", found="none")
    first = next((chosen[name] for name in chosen_names if chosen[name].dims), None)
    along = "sample" if "sample" in dataset.dims else first.dims[0] if first is not None else "sample"
    arrays, dims, constants, constant_dims, texts = {}, {}, {}, {}, {}
    for name in (*chosen_names, *chosen.coords):
        variable = chosen[name].variable
        other_dims = tuple(map(str, (dim for dim in variable.dims if dim != along)))
        name = str(name)
        if variable.dtype.kind in "OUT" and name not in chosen_names and along not in variable.dims:
            texts[name] = {"dims": list(other_dims), "values": variable.values.tolist()}
        elif not _is_numbers(variable) and variable.dtype.kind not in TIME_UNITS:
            facts: dict[str, Any] = {"array": name, "expected": "numbers", "found": f"dtype {variable.dtype}"}
            hint = "convert it first, or leave it out"
            raise SpecError("it can't be stored", kind="dtype", hint=hint, **facts)
        elif along in variable.dims:
            arrays[name], dims[name] = described(name, variable.transpose(along, ...)), other_dims
        elif name != along:
            constants[name], constant_dims[name] = described(name, variable), other_dims
    attrs = json_attrs(dataset.attrs) | ({"text_coordinates": json_attrs(texts)} if texts else {})
    num_samples = int(dataset.sizes[along])
    return Columns(num_samples, arrays, dims, constants, constant_dims, attrs, is_digested=False)


def named_values(sample: Any, names: Names | None, *, number: int) -> dict[str, Any]:
    """Return a sample as arrays, numbers, `str` and `bytes` by name, dicts within it as `outer.inner`.

    Tuples, lists and single values are named by `names`; mappings and named tuples have names of their own.
    """
    has_names = isinstance(sample, Mapping) or hasattr(sample, "_asdict")
    if names is not None and has_names:
        raise SpecError(
            "names without effect",
            kind="no_effect",
            sample=number,
            expected="samples that are tuples, or one value each",
            found=f"a {type(sample).__name__}, which has names",
            hint="leave out `names`; to take some values only, choose them where the samples are made",
        )
    if has_names:
        pairs = list(_flattened(sample if isinstance(sample, Mapping) else sample._asdict()))
    else:
        is_one = not isinstance(sample, tuple | list)
        values = [sample] if is_one else list(sample)
        given_names = list(names) if names is not None else [ONLY_NAME] if is_one else []
        if len(given_names) != len(values):
            example = ", ".join(repr(f"name{i}") for i in range(len(values)))
            raise SpecError(
                "a sample has no names for its values",
                kind="names",
                sample=number,
                expected="a dict of arrays by name" if names is None else f"{len(given_names)} values",
                found="one value" if is_one else f"a {type(sample).__name__} of {len(values)} values",
                hint=f"say names=[{example}], with names that you choose",
            )
        pairs = list(zip(given_names, values, strict=True))
    named = dict(pairs)
    if len(named) < len(pairs):
        flat = [name for name, _ in pairs]
        raise SpecError(
            "two values have one name",
            kind="names",
            sample=number,
            expected="names that differ, those in inner dicts written as 'outer.inner'",
            found=repr(next(name for name in flat if flat.count(name) > 1)),
            hint="rename one of them",
        )
    return {name: as_value(value, name, number=number) for name, value in named.items()}


def _flattened(sample: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in sample.items():
        if isinstance(value, Mapping):
            yield from _flattened(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def as_value(value: Any, name: str, *, number: int) -> Any:
    """Return one value as an array, a Python number, `str` or `bytes`; `SpecError` for anything else."""
    check_unmasked(value, name, sample=number)
    if isinstance(value, str):
        return str(value)  # of NumPy's own kind, too
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    is_plain = isinstance(value, bool | int | float | np.ndarray | np.generic)
    if not is_plain and hasattr(value, "detach") and hasattr(value, "numpy"):
        tensor = value.detach().cpu()
        if str(tensor.dtype) != "torch.bfloat16":
            return tensor.numpy()
        bits = tensor.contiguous().view(sys.modules["torch"].uint16)
        return bits.numpy().view(dtype_of("bfloat16"))
    array, flaw = value, None
    if not is_plain:
        try:
            array = np.asarray(value)  # lists, images, all that has `__array__`
        except (ValueError, TypeError) as error:
            flaw = str(error)
    dtype = getattr(array, "dtype", None)
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
        flaw = "of more than 64 bits"
    elif isinstance(dtype, np.dtype) and dtype.kind in "OUSM":
        if dtype.kind in "US" and not array.ndim:
            return as_value(array[()], name, number=number)
        flaw = "an array of texts" if dtype.kind in "US" else f"an array of dtype {dtype}"
    if flaw is None:
        return array
    raise SpecError(
        "it can't be stored",
        kind="value",
        array=name if NAME_PATTERN.fullmatch(name) else repr(name),
        sample=number,
        expected="numbers of one shape, a str or bytes",
        found=f"{type(value).__name__} ({flaw})",
        hint="leave it out, or convert it where the samples are made",
    )


def nbytes_of(value: Any) -> int:
    """Count the bytes of one value of a sample, or of an array."""
    if isinstance(value, str):
        return len(value) if value.isascii() else len(value.encode("utf-8", "surrogatepass"))
    return len(value) if isinstance(value, bytes) else np.asarray(value).nbytes


def specs_of(samples: Sequence[Sample], *, ragged: Collection[str] = ()) -> dict[str, ArraySpec]:
    """Find what arrays the first samples make, the number of samples None.

    Text and bytes are ragged; so is an array whose first axis differs in length between the samples, or that
    is named. `SpecError` if they don't agree in anything but that.
    """
    first = samples[0]
    if not first:
        hint = "give the values of each sample by name"
        raise SpecError("a sample has no arrays", kind="arrays", sample=0, expected="one", hint=hint)
    for number, sample in enumerate(samples):
        _check_names(sample, first, number)
    unknown = sorted({*ragged} - first.keys())
    if unknown:
        raise SpecError("ragged", kind="names", expected=f"some of {', '.join(first)}", found=unknown[0])
    return {name: _spec_of(name, [sample[name] for sample in samples], name in ragged) for name in first}


def _check_names(sample: Sample, first: Iterable[str], number: int) -> None:
    names = {*first}
    if sample.keys() == names:
        return
    missing, more = sorted(names - sample.keys()), sorted(sample.keys() - names)
    others = [f"without {', '.join(missing)}"] * bool(missing) + [f"also {', '.join(more)}"] * bool(more)
    raise SpecError(
        "a sample has other arrays than the first one",
        kind="arrays",
        sample=number,
        expected=", ".join(first),
        found="; ".join(others),
        hint="every sample has every array: fill in what is missing, such as an empty text",
    )


def _spec_of(name: str, values: Sequence[Any], is_ragged: bool) -> ArraySpec:
    if not NAME_PATTERN.fullmatch(name):
        expected = "letters, digits, '_', '.' and '-', at most 128"
        raise SpecError("the name of an array", kind="names", expected=expected, found=repr(name))
    kind = next((kind for kind in (str, bytes) if isinstance(values[0], kind)), None)
    for number, value in enumerate(values):
        if kind is not None and not isinstance(value, kind):
            raise _differs(name, number, kind.__name__, _kind_of(value))
        if kind is None and isinstance(value, str | bytes):
            raise _differs(name, number, _kind_of(values[0]), _kind_of(value))
    if kind is not None:
        return ArraySpec((None, None), "uint8", encoding="utf-8" if kind is str else "bytes")
    arrays = [np.asarray(value) for value in values]
    dtype, shape = arrays[0].dtype, arrays[0].shape
    if all(not hasattr(value, "dtype") for value in values):  # Python's, whole in some samples only
        dtype = np.result_type(*arrays)
        arrays = [array.astype(dtype) for array in arrays]
    for number, array in enumerate(arrays):
        if array.dtype.newbyteorder("=") != dtype.newbyteorder("="):
            raise _differs(name, number, f"{dtype}, as in sample 0", str(array.dtype))
        if array.ndim != len(shape) or array.shape[1:] != shape[1:]:
            free = _shape_text((None, *shape[1:]) if shape else ())
            raise _differs(name, number, f"shape {free}, as in sample 0", f"shape {array.shape}")
    try:
        stored = dtype_name(dtype)
    except SpecError as error:
        error.array, error.hint = name, _CONVERT
        raise
    if not is_ragged and len({array.shape for array in arrays}) == 1:
        return ArraySpec((None, *shape), stored)
    if not shape:
        raise SpecError("a number can't be ragged", kind="ragged", array=name)
    return ArraySpec((None, None, *shape[1:]), stored)


def _differs(name: str, number: int, expected: str, found: str) -> SpecError:
    return SpecError(
        "a sample doesn't fit to the first one",
        kind="mixed",
        array=name,
        sample=number,
        expected=expected,
        found=found,
        hint=f"only the first axis may differ in length; {_CONVERT}, or pad or cut it there",
    )


def _kind_of(value: Any) -> str:
    if isinstance(value, str | bytes):
        return type(value).__name__
    array = np.asarray(value)
    return f"{array.dtype} of shape {array.shape}"


def _shape_text(shape: Sequence[int | None]) -> str:
    """Show a shape: "(*, 3)" where the first axis may differ."""
    sizes = ["*" if size is None else str(size) for size in shape]
    return f"({sizes[0]},)" if len(sizes) == 1 else f"({', '.join(sizes)})"


class SampleCheck:
    """Compares samples with specs, found from `num_seen` samples; says clearly where one contradicts them."""

    def __init__(self, specs: Mapping[str, ArraySpec], *, num_seen: int) -> None:
        self._specs, self._num_seen = specs, num_seen
        self._dtypes = {name: dtype_of(dtype_name(spec.dtype)) for name, spec in specs.items()}

    def __call__(self, sample: Sample, number: int) -> dict[str, Any]:
        """Return the sample's values as arrays of the declared dtypes; `SpecError` if it doesn't fit."""
        if sample.keys() != self._specs.keys():
            _check_names(sample, self._specs, number)
        values = {}
        for name, spec in self._specs.items():
            values[name] = value = sample[name]
            is_text = isinstance(value, str | bytes)
            if is_text != (spec.encoding is not None):
                numbers = f"{spec.dtype} of shape {_shape_text(spec.shape[1:])}"
                kinds = {"utf-8": "str", "bytes": "bytes", None: numbers}
                raise self._contradiction(name, number, kinds[spec.encoding], _kind_of(value))
            if is_text:
                continue
            array, dtype = np.asarray(value), self._dtypes[name]
            tail = tuple(spec.shape[2:] if spec.is_ragged else spec.shape[1:])
            shape = array.shape[1:] if spec.is_ragged and array.ndim else array.shape
            if shape != tail or (spec.is_ragged and not array.ndim):
                expected = f"shape {_shape_text(spec.shape[1:])}"
                raise self._contradiction(name, number, expected, f"shape {array.shape}")
            if array.dtype.newbyteorder("<") == dtype:
                continue
            if hasattr(value, "dtype") or not np.can_cast(array.dtype, dtype, "same_kind"):
                raise self._contradiction(name, number, str(dtype), str(array.dtype))
            values[name] = cast = array.astype(dtype)  # of Python's, such as 1 among floating-point ones
            if isinstance(value, int) and cast.item() != value:
                raise self._contradiction(name, number, f"numbers that {dtype} can hold", str(value))
        return values

    def _contradiction(self, name: str, number: int, expected: str, found: str) -> SpecError:
        spec, hint = self._specs[name], _CONVERT
        if expected.startswith("shape") and not spec.is_ragged and len(spec.shape) > 1:
            hint = f"say ragged=[{name!r}] and on_mismatch='restart' if its first axis differs; else pad it"
        seen = f", as in the first {self._num_seen:,}" if self._num_seen else ""
        return SpecError(
            "a sample contradicts the ones before it",
            kind="mixed",
            array=name,
            sample=number,
            expected=f"{expected}{seen}",
            found=found,
            hint=hint,
        )


def uncounted(spec: ArraySpec) -> ArraySpec:
    """Return the spec of an array of another number of samples, and of rows, that isn't known."""
    return replace(spec, shape=(None, *spec.shape[1:]), lengths=None)


def with_counts(
    specs: Mapping[str, ArraySpec],
    num_samples: int,
    lengths: Mapping[str, npt.NDArray[np.int64]] | None = None,
) -> dict[str, ArraySpec]:
    """Return specs of arrays of so many samples, with the numbers of rows of ragged ones."""
    return {
        name: replace(spec, shape=(num_samples, *spec.shape[1:]), lengths=(lengths or {}).get(name))
        for name, spec in specs.items()
    }
