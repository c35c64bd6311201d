"""The errors: sentences, attributes, places in the tree, pickling of every class."""

from __future__ import annotations

import copy
import inspect
import pickle
from pathlib import Path

import pytest

import ups_store
from ups_store import errors
from ups_store.errors import StoreError

CLASSES = [
    cls for _, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, StoreError)
]  # so that no class is forgotten
ALSO = {
    "StoreNotFoundError": FileNotFoundError,
    "ArrayNotFoundError": KeyError,
    "SampleIndexError": IndexError,
    "StoreClosedError": ValueError,
    "SpecError": ValueError,
    "ConfigError": ValueError,
    "DiskFullError": OSError,
    "DeviceError": RuntimeError,
    "MissingExtraError": ImportError,
    "BatchTimeoutError": TimeoutError,
    "AccessError": PermissionError,
    "ReadError": OSError,
}
EXIT_CODES = {  # design brief, section 4
    "SpecError": 2,
    "ConfigError": 2,
    "MissingExtraError": 2,
    "SourceError": 3,
    "RemoteError": 3,
    "ReadError": 3,
    "ReadTimeoutError": 4,
    "BatchTimeoutError": 4,
    "BuildInterruptedError": 5,
    "DiskFullError": 6,
    "IdentityMismatchError": 7,
    "BuildLockedError": 8,
}
VALUES = {
    "path": "a.zarr.zip",
    "array": "u",
    "sample": 7,
    "byte_range": (8192, 12288),
    "clause": "5.2",
    "expected": "1f2e3d4c",
    "found": "99aabbcc",
    "hint": "verify it",
}


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({}, "crc32c"),
        ({"path": "a.zip"}, "a.zip: crc32c"),
        ({"path": Path("b") / "a.zip"}, "b/a.zip: crc32c"),
        ({"array": "u"}, "array 'u': crc32c"),
        ({"sample": 0}, "sample 0: crc32c"),
        ({"byte_range": (0, 64)}, "bytes 0..64: crc32c"),
        ({"expected": 1}, "crc32c: expected 1"),
        ({"found": 0}, "crc32c: found 0"),
        ({"expected": 1, "found": 0}, "crc32c: expected 1, found 0"),
        ({"clause": "5.2"}, "crc32c (spec 5.2)"),
        ({"hint": "verify it"}, "crc32c; verify it"),
        (
            VALUES,
            "a.zarr.zip, array 'u', sample 7, bytes 8192..12288: crc32c: expected 1f2e3d4c, found 99aabbcc"
            " (spec 5.2); verify it",
        ),
    ],
)
def test_sentence_says_where_what_and_what_to_do(values: dict[str, object], sentence: str) -> None:
    assert str(StoreError("crc32c", **values)) == sentence  # type: ignore[arg-type]


@pytest.mark.parametrize("cls", CLASSES)
def test_error_says_and_carries_what_it_knows_whatever_its_other_base(cls: type[StoreError]) -> None:
    """KeyError would show the repr of its argument, OSError its number."""
    assert str(cls("no such thing", path="a.zip", hint="look")) == "a.zip: no such thing; look"
    error = cls("crc32c", **VALUES)  # type: ignore[arg-type]
    assert {key: getattr(error, key) for key in VALUES} == VALUES
    assert (error.problem, error.kind) == ("crc32c", cls.kind)
    assert cls("crc32c", kind="of_its_own", exit_code=9).exit_code == 9
    assert cls.exit_code == EXIT_CODES.get(cls.__name__, 1)
    builtin = next(base for base in cls.__mro__ if base.__module__ == "builtins")
    assert builtin is ALSO.get(cls.__name__, Exception)
    # Who raises a format error knows what is wrong with the file, seldom where another copy is.
    plain = cls("crc32c")
    assert (plain.hint is not None) == issubclass(cls, errors.FormatError)
    if issubclass(cls, errors.FormatError):
        assert str(plain) == f"crc32c; {plain.hint}"


@pytest.mark.parametrize("cls", CLASSES)
def test_error_survives_pickling(cls: type[StoreError]) -> None:
    """Errors of worker processes reach the user whole, attributes of single classes too."""
    error = cls("crc32c", kind="of_its_own", **VALUES)  # type: ignore[arg-type]
    error.differences = {"a.b": (1, 2)}  # type: ignore[attr-defined]
    for copied in (lambda error: pickle.loads(pickle.dumps(error)), copy.copy):
        other = copied(error)
        assert type(other) is cls
        assert (str(other), other.__dict__, other.args) == (str(error), error.__dict__, error.args)
        if isinstance(error, OSError):
            error.errno, error.strerror = 5, "Input/output error"
            again = copied(error)
            assert (again.errno, again.strerror) == (5, "Input/output error")


def test_kinds_of_classes_are_distinct_and_end_in_error() -> None:
    assert len({cls.kind for cls in CLASSES}) == len(CLASSES)
    assert all(cls.__name__.endswith("Error") and cls.__doc__ for cls in CLASSES)


def test_package_exports_every_error_and_says_what_to_catch_instead_of_one_that_is_gone() -> None:
    assert {cls.__name__ for cls in CLASSES} <= set(ups_store.__all__)
    with pytest.raises(AttributeError, match="catch AccessError, of kind 'read_only'"):
        _ = ups_store.ReadOnlyError


def test_format_errors_are_caught_together() -> None:
    assert issubclass(errors.TruncatedError, errors.FormatError)
    assert issubclass(errors.VersionTooNewError, errors.FormatError)
    assert issubclass(errors.ReadTimeoutError, errors.SourceError)
