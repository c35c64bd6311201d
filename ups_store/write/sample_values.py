"""What people call a sample (tensors, images, tuples, dicts in dicts) as arrays, text and bytes by name.

torch, PIL and Hugging Face are recognised by what their objects can do: none of them is imported here.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ups_store.errors import SpecError
from ups_store.format.metadata import NAME_PATTERN
from ups_store.write.encode import check_unmasked

Names = Sequence[str]

ONLY_NAME = "data"  # of samples that are one array each, where no name is given


def named_values(sample: Any, names: Names | None, *, number: int) -> dict[str, Any]:
    """A sample as arrays, numbers, `str` and `bytes` by name.

    Args:
        sample: A mapping of names, dicts within it as `outer.inner`; or a tuple, a list or one value, which
            `names` name; named tuples have names of their own.
        names: Names of the values where samples are no mappings.
        number: Of the sample, for messages.
    Raises:
        SpecError: If it has no names, or holds what is neither numbers nor text nor bytes; of `names` for a
            sample that has some, kind "no_effect".
    """
    if names is not None and (isinstance(sample, Mapping) or hasattr(sample, "_asdict")):
        raise SpecError(
            "names without effect",
            kind="no_effect",
            sample=number,
            expected="samples that are tuples, or one value each",
            found=f"a {type(sample).__name__}, which has names",
            hint="leave out `names`; to take some values only, choose them where the samples are made",
        )
    named = _by_name(sample, number) if isinstance(sample, Mapping) else _zipped(sample, names, number)
    return {name: as_value(value, name, number=number) for name, value in named.items()}


def _by_name(sample: Mapping[Any, Any], number: int) -> dict[str, Any]:
    """A mapping without mappings in it."""
    pairs = list(_flattened(sample))
    named = dict(pairs)
    if len(named) == len(pairs):
        return named
    names = [name for name, _ in pairs]
    twice = next(name for name in names if names.count(name) > 1)
    raise SpecError(
        "two values have one name",
        kind="names",
        sample=number,
        expected="names that differ, those in inner dicts written as 'outer.inner'",
        found=repr(twice),
        hint="rename one of them",
    )


def _flattened(sample: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in sample.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _flattened(value, f"{name}.")
        else:
            yield name, value


def _zipped(sample: Any, names: Names | None, number: int) -> dict[str, Any]:
    """A sample that isn't a mapping."""
    if hasattr(sample, "_asdict"):
        return _by_name(sample._asdict(), number)
    is_one = not isinstance(sample, tuple | list)
    values = [sample] if is_one else list(sample)
    wanted = list(names) if names is not None else [ONLY_NAME] if is_one else []
    if len(wanted) == len(values):
        return dict(zip(wanted, values, strict=True))
    what = "one value" if is_one else f"a {type(sample).__name__} of {len(values)} values"
    example = ", ".join(repr(f"name{i}") for i in range(len(values)))
    raise SpecError(
        "a sample has no names for its values",
        kind="names",
        sample=number,
        expected="a dict of arrays by name" if names is None else f"{len(wanted)} values",
        found=what,
        hint=f"say names=[{example}], with names that you choose",
    )


def as_value(value: Any, name: str, *, number: int) -> Any:
    """One value as an array, a Python number, `str` or `bytes`.

    Raises:
        SpecError: For anything else, such as None, a list of texts, or masked elements.
    """
    check_unmasked(value, name, sample=number)
    if isinstance(value, str):
        return str(value)  # of NumPy's own kind, too
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if isinstance(value, bool | int | float | np.ndarray | np.generic):
        return _checked(value, value, name, number)
    if hasattr(value, "detach") and hasattr(value, "numpy"):
        return _of_tensor(value)
    try:
        array = np.asarray(value)  # lists, images, all that has `__array__`
    except (ValueError, TypeError) as error:
        raise _no_value(value, name, number, str(error)) from error
    return _checked(array, value, name, number)


def _of_tensor(tensor: Any) -> Any:
    tensor = tensor.detach().cpu()
    if str(tensor.dtype) != "torch.bfloat16":
        return tensor.numpy()
    from ups_store.format.metadata import dtype_of

    return tensor.contiguous().view(sys.modules["torch"].uint16).numpy().view(dtype_of("bfloat16"))


def _checked(value: Any, given: Any, name: str, number: int) -> Any:
    """The value, unless it can't be stored; `given` is what it was made of."""
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
        raise _no_value(given, name, number, "of more than 64 bits")
    kind = getattr(value, "dtype", np.dtype(type(value)) if isinstance(value, int | float) else None)
    if isinstance(kind, np.dtype) and kind.kind in "OUSM":
        if kind.kind in "US" and not np.ndim(value):
            return as_value(value[()], name, number=number) if isinstance(value, np.ndarray) else value
        found = "an array of texts" if kind.kind in "US" else f"an array of dtype {kind}"
        raise _no_value(given, name, number, found)
    return value


def _no_value(value: Any, name: str, number: int, why: str) -> SpecError:
    return SpecError(
        "it can't be stored",
        kind="value",
        array=name if NAME_PATTERN.fullmatch(name) else repr(name),
        sample=number,
        expected="numbers of one shape, a str or bytes",
        found=f"{type(value).__name__} ({why})",
        hint="leave it out, or convert it where the samples are made",
    )


def arrays_of_names(names: Names | None, found: Mapping[str, Any]) -> dict[str, Any]:
    """The columns that are wanted, in the order of `names`; all without.

    Raises:
        SpecError: If there is no column of a name.
    """
    if names is None:
        return dict(found)
    missing = [name for name in names if name not in found]
    if missing:
        expected = f"some of {', '.join(map(str, found))}"
        raise SpecError("no such array", kind="names", expected=expected, found=missing[0])
    return {name: found[name] for name in names}
