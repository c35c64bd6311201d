"""One split = one file: a mapped, checked, resumable Zarr v3 store.

`write` makes one of anything iterable, `create` and `join` take commits, `open` reads;
`docs/format/spec.md` says what lies in the file.
"""

from __future__ import annotations

TYPE_CHECKING = False  # as type checkers take it; to import `typing` takes longer than all else here
if TYPE_CHECKING:
    from typing import Any

    from ups_store.errors import (
        AccessError,
        ArrayNotFoundError,
        BatchTimeoutError,
        BuildInterruptedError,
        BuildLockedError,
        CommitError,
        ConfigError,
        CorruptChunkError,
        DeviceError,
        DiskFullError,
        DownloadError,
        ExternalDataError,
        FormatError,
        IdentityMismatchError,
        MemoryLimitError,
        MissingExtraError,
        NotCommittedError,
        ReadError,
        ReadOnlyError,
        ReadTimeoutError,
        RemoteError,
        SampleIndexError,
        SourceError,
        SpecError,
        StalledError,
        StoreClosedError,
        StoreError,
        StoreNotFoundError,
        StoreReplacedError,
        TruncatedError,
        VersionTooNewError,
    )
    from ups_store.format.array_spec import ArraySpec
    from ups_store.format.identity import describe_differences, differences
    from ups_store.format.root_metadata import FORMAT_VERSION
    from ups_store.packed.store import PackedStore
    from ups_store.read.base import AnyStore
    from ups_store.read.numbered import NumberedStores
    from ups_store.read.open import open_any as open
    from ups_store.read.partitioned import PartitionedStore
    from ups_store.read.ragged import RaggedArray
    from ups_store.read.store import Store
    from ups_store.remote.store import RemoteStore
    from ups_store.system.memory import available_bytes as available_memory_bytes
    from ups_store.system.memory import num_cores
    from ups_store.write.append import append
    from ups_store.write.batched import BatchedCommits
    from ups_store.write.cached import cached
    from ups_store.write.create import create, join
    from ups_store.write.from_iterable import write
    from ups_store.write.saved import load, save
    from ups_store.write.writer import Committer, StoreWriter

__version__ = "0.1.0"

__all__ = [
    "FORMAT_VERSION",
    "AccessError",
    "AnyStore",
    "ArrayNotFoundError",
    "ArraySpec",
    "BatchTimeoutError",
    "BatchedCommits",
    "BuildInterruptedError",
    "BuildLockedError",
    "CommitError",
    "Committer",
    "ConfigError",
    "CorruptChunkError",
    "DeviceError",
    "DiskFullError",
    "DownloadError",
    "ExternalDataError",
    "FormatError",
    "IdentityMismatchError",
    "MemoryLimitError",
    "MissingExtraError",
    "NotCommittedError",
    "NumberedStores",
    "PackedStore",
    "PartitionedStore",
    "RaggedArray",
    "ReadError",
    "ReadOnlyError",
    "ReadTimeoutError",
    "RemoteError",
    "RemoteStore",
    "SampleIndexError",
    "SourceError",
    "SpecError",
    "StalledError",
    "Store",
    "StoreClosedError",
    "StoreError",
    "StoreNotFoundError",
    "StoreReplacedError",
    "StoreWriter",
    "TruncatedError",
    "VersionTooNewError",
    "append",
    "available_memory_bytes",
    "cached",
    "create",
    "describe_differences",
    "differences",
    "join",
    "load",
    "num_cores",
    "open",
    "save",
    "write",
]

_HOMES = {  # module and name there; everything else is an error class
    "AnyStore": ("read.base", "AnyStore"),
    "ArraySpec": ("format.array_spec", "ArraySpec"),
    "BatchedCommits": ("write.batched", "BatchedCommits"),
    "Committer": ("write.writer", "Committer"),
    "FORMAT_VERSION": ("format.root_metadata", "FORMAT_VERSION"),
    "Store": ("read.store", "Store"),
    "StoreWriter": ("write.writer", "StoreWriter"),
    "available_memory_bytes": ("system.memory", "available_bytes"),
    "create": ("write.create", "create"),
    "describe_differences": ("format.identity", "describe_differences"),
    "differences": ("format.identity", "differences"),
    "join": ("write.create", "join"),
    "open": ("read.open", "open_any"),
    "PackedStore": ("packed.store", "PackedStore"),
    "PartitionedStore": ("read.partitioned", "PartitionedStore"),
    "RaggedArray": ("read.ragged", "RaggedArray"),
    "RemoteStore": ("remote.store", "RemoteStore"),
    "NumberedStores": ("read.numbered", "NumberedStores"),
    "append": ("write.append", "append"),
    "cached": ("write.cached", "cached"),
    "load": ("write.saved", "load"),
    "num_cores": ("system.memory", "num_cores"),
    "save": ("write.saved", "save"),
    "write": ("write", ""),  # the room itself, which can be called
}


_GONE = {  # and what to write instead
    "PartsWriter": "`ups_store.write` takes samples of an unknown number, `append` adds to a pattern",
    "StoreSet": "`ups_store.open` of a pattern such as days-*.zarr.zip gives NumberedStores",
    "cached_in": "write `ups_store.cached(path, identity, function)`, with the arguments in the identity",
    "write_parts": "write `ups_store.write(path, samples, identity=...)`, which needs no number of samples; "
    "what is to grow is written by `ups_store.append('days-*.zarr.zip', samples, key=...)`",
}


def __getattr__(name: str) -> Any:
    # NumPy and each side of the store are imported when they are first asked for: a training process only
    # reads, and `import ups_store` alone costs nothing.
    if name in _GONE:
        raise AttributeError(f"ups_store.{name} is gone: {_GONE[name]}")
    if name not in __all__:
        raise AttributeError(f"module 'ups_store' has no attribute {name!r}")
    from importlib import import_module

    module, attribute = _HOMES.get(name, ("errors", name))
    found = import_module(f"ups_store.{module}")
    value = globals()[name] = getattr(found, attribute) if attribute else found
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
