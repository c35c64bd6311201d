"""Specs from the first samples: dtypes, shapes, which arrays are ragged; and checks of all others."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ups_store.errors import SpecError
from ups_store.format.metadata import NAME_PATTERN, ArraySpec, dtype_name, dtype_of

Sample = Mapping[str, Any]


def specs_of(samples: Sequence[Sample], *, ragged: Collection[str] = ()) -> dict[str, ArraySpec]:
    """What arrays the samples make, the number of samples None.

    Text and bytes are ragged; so is an array whose first axis differs in length between the samples, or that
    is named.

    Args:
        samples: The first samples, as `named_values` gives them; at least one.
        ragged: Arrays whose first axis may differ in samples that come later.
    Raises:
        SpecError: If they don't agree in anything but that; if `ragged` names what can't be.
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
    return {name: _spec_of(name, [each[name] for each in samples], name in ragged) for name in first}


def _check_names(sample: Sample, first: Sample, number: int) -> None:
    if sample.keys() == first.keys():
        return
    missing, more = sorted(first.keys() - sample.keys()), sorted(sample.keys() - first.keys())
    found = [f"without {', '.join(missing)}"] * bool(missing) + [f"also {', '.join(more)}"] * bool(more)
    raise SpecError(
        "a sample has other arrays than the first one",
        kind="arrays",
        sample=number,
        expected=", ".join(first),
        found="; ".join(found),
        hint="every sample has every array: fill in what is missing, such as an empty text",
    )


def _spec_of(name: str, values: Sequence[Any], is_ragged: bool) -> ArraySpec:
    if not NAME_PATTERN.fullmatch(name):
        expected = "letters, digits, '_', '.' and '-', at most 128"
        raise SpecError("the name of an array", kind="names", expected=expected, found=repr(name))
    for kind, encoding in ((str, "utf-8"), (bytes, "bytes")):
        if isinstance(values[0], kind):
            for number, value in enumerate(values):
                if not isinstance(value, kind):
                    raise _differs(name, number, kind.__name__, _shown(value))
            return ArraySpec((None, None), "uint8", encoding=encoding)  # type: ignore[arg-type]
    arrays = []
    for number, value in enumerate(values):
        if isinstance(value, str | bytes):
            raise _differs(name, number, _shown(values[0]), _shown(value))
        arrays.append(np.asarray(value))
    dtype = _common_dtype(name, values, arrays)
    shapes = [array.shape for array in arrays]
    return _with_shapes(name, shapes, dtype, is_ragged)


def _common_dtype(name: str, values: Sequence[Any], arrays: Sequence[np.ndarray[Any, Any]]) -> Any:
    """The dtype of all; Python's own numbers may be whole in one sample and not in another."""
    if all(not hasattr(value, "dtype") for value in values):
        return np.result_type(*arrays).name
    for number, array in enumerate(arrays):
        if array.dtype.newbyteorder("=") != arrays[0].dtype.newbyteorder("="):
            raise _differs(name, number, f"{arrays[0].dtype}, as in sample 0", str(array.dtype))
    try:
        return dtype_name(arrays[0].dtype)
    except SpecError as error:
        error.array, error.hint = name, "convert it where the samples are made"
        raise


def _with_shapes(name: str, shapes: Sequence[tuple[int, ...]], dtype: Any, is_ragged: bool) -> ArraySpec:
    first = shapes[0]
    for number, shape in enumerate(shapes):
        if len(shape) != len(first) or shape[1:] != first[1:]:
            expected = f"shape {_with_free_axis(first)}, as in sample 0"
            raise _differs(name, number, expected, f"shape {shape}")
    if not is_ragged and len({*shapes}) == 1:
        return ArraySpec((None, *first), dtype)
    if not first:
        raise SpecError("a number can't be ragged", kind="ragged", array=name)
    return ArraySpec((None, None, *first[1:]), dtype)


def _differs(name: str, number: int, expected: str, found: str) -> SpecError:
    return SpecError(
        "a sample doesn't fit to the first one",
        kind="mixed",
        array=name,
        sample=number,
        expected=expected,
        found=found,
        hint="only the first axis may differ in length; convert, pad or cut it where the samples are made",
    )


def _shown(value: Any) -> str:
    if isinstance(value, str | bytes):
        return type(value).__name__
    array = np.asarray(value)
    return f"{array.dtype} of shape {array.shape}"


class SampleCheck:
    """Compares samples with specs; says clearly where one contradicts them.

    Args:
        specs: What arrays there are.
        num_seen: Samples that the specs were found from, for messages; 0 where they were given.
    """

    def __init__(self, specs: Mapping[str, ArraySpec], *, num_seen: int) -> None:
        self._specs, self._num_seen = specs, num_seen
        self._dtypes = {name: dtype_of(dtype_name(spec.dtype)) for name, spec in specs.items()}

    def __call__(self, sample: Sample, number: int) -> dict[str, Any]:
        """The sample's values as arrays of the declared dtypes.

        Raises:
            SpecError: If it doesn't fit; names sample and array.
        """
        if sample.keys() != self._specs.keys():
            _check_names(sample, dict.fromkeys(self._specs), number)
        return {name: self._value(name, sample[name], number) for name in self._specs}

    def _value(self, name: str, value: Any, number: int) -> Any:
        spec = self._specs[name]
        is_text = isinstance(value, str | bytes)
        if is_text != (spec.encoding is not None):
            kinds = {"utf-8": "str", "bytes": "bytes", None: f"{spec.dtype} of shape {shape_of(spec)}"}
            raise self._contradiction(name, number, kinds[spec.encoding], _shown(value))
        if is_text:
            return value
        array = np.asarray(value)
        tail = tuple(spec.shape[2:] if spec.is_ragged else spec.shape[1:])
        found = array.shape[1:] if spec.is_ragged and array.ndim else array.shape
        if found != tail or (spec.is_ragged and not array.ndim):
            raise self._contradiction(name, number, f"shape {shape_of(spec)}", f"shape {array.shape}")
        dtype = self._dtypes[name]
        if array.dtype.newbyteorder("<") == dtype:
            return value
        if hasattr(value, "dtype") or not np.can_cast(array.dtype, dtype, "same_kind"):
            raise self._contradiction(name, number, str(dtype), str(array.dtype))
        cast = array.astype(dtype)  # of Python's numbers, such as 1 among floating-point ones
        if isinstance(value, int) and cast.item() != value:
            raise self._contradiction(name, number, f"numbers that {dtype} can hold", str(value))
        return cast

    def _contradiction(self, name: str, number: int, expected: str, found: str) -> SpecError:
        spec = self._specs[name]
        hint = "convert it where the samples are made"
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


def shape_of(spec: ArraySpec) -> str:
    """The shape of one sample, for messages: "(*, 3)" where it is ragged."""
    return _shape_text(spec.shape[1:])


def _with_free_axis(shape: tuple[int, ...]) -> str:
    """A shape whose first axis may differ, if it has one."""
    return _shape_text((None, *shape[1:]) if shape else ())


def _shape_text(shape: Sequence[int | None]) -> str:
    sizes = ["*" if size is None else str(size) for size in shape]
    return f"({sizes[0]},)" if len(sizes) == 1 else f"({', '.join(sizes)})"


def uncounted(spec: ArraySpec) -> ArraySpec:
    """The spec of an array of another number of samples, and of rows, that isn't known."""
    return replace(spec, shape=(None, *spec.shape[1:]), lengths=None)


def counted_specs(specs: Mapping[str, ArraySpec], num_samples: int) -> dict[str, ArraySpec]:
    """The specs of a store with so many samples, none of them ragged."""
    return {name: replace(spec, shape=(num_samples, *spec.shape[1:])) for name, spec in specs.items()}
