"""One split = one file: a mapped, checked, resumable Zarr v3 store.

`create` and `join` write, `open` reads; `docs/format/spec.md` says what lies in the file.
"""

from typing import TYPE_CHECKING, Any

from ups_store.array_spec import ArraySpec
from ups_store.errors import (
    ArrayNotFoundError,
    BuildInterruptedError,
    BuildLockedError,
    CommitError,
    ConfigError,
    CorruptChunkError,
    DiskFullError,
    FormatError,
    IdentityMismatchError,
    NotCommittedError,
    ReadTimeoutError,
    SampleIndexError,
    SourceError,
    SpecError,
    StoreClosedError,
    StoreError,
    StoreNotFoundError,
    StoreReplacedError,
    TruncatedError,
    VersionTooNewError,
)
from ups_store.layout import FORMAT_VERSION
from ups_store.reader import Store
from ups_store.reader import open_store as open

if TYPE_CHECKING:
    from ups_store.creation import create, join
    from ups_store.writer import Committer, StoreWriter

__all__ = [
    "FORMAT_VERSION",
    "ArrayNotFoundError",
    "ArraySpec",
    "BuildInterruptedError",
    "BuildLockedError",
    "CommitError",
    "Committer",
    "ConfigError",
    "CorruptChunkError",
    "DiskFullError",
    "FormatError",
    "IdentityMismatchError",
    "NotCommittedError",
    "ReadTimeoutError",
    "SampleIndexError",
    "SourceError",
    "SpecError",
    "Store",
    "StoreClosedError",
    "StoreError",
    "StoreNotFoundError",
    "StoreReplacedError",
    "StoreWriter",
    "TruncatedError",
    "VersionTooNewError",
    "create",
    "join",
    "open",
]

_WRITING = {"create": "creation", "join": "creation", "Committer": "writer", "StoreWriter": "writer"}


def __getattr__(name: str) -> Any:
    # A training process only reads: the writing side is imported when it is first asked for.
    if name not in _WRITING:
        raise AttributeError(f"module 'ups_store' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"ups_store.{_WRITING[name]}"), name)
