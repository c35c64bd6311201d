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
    from ups_store.read.loader import make_loader
    from ups_store.read.open import open_any as open
    from ups_store.read.partitioned import PartitionedStore
    from ups_store.read.preload import plan_preload
    from ups_store.read.ragged import RaggedArray
    from ups_store.read.store import Store
    from ups_store.read.store_set import StoreSet
    from ups_store.read.windows import Window
    from ups_store.remote.store import RemoteStore
    from ups_store.system.memory import available_bytes as available_memory_bytes
    from ups_store.system.memory import num_cores
    from ups_store.write.batched import BatchedCommits
    from ups_store.write.cached import cached, cached_in
    from ups_store.write.create import create, join
    from ups_store.write.from_iterable import write
    from ups_store.write.parts import PartsWriter, append, write_parts
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
    "PackedStore",
    "PartitionedStore",
    "PartsWriter",
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
    "StoreSet",
    "StoreWriter",
    "TruncatedError",
    "VersionTooNewError",
    "Window",
    "append",
    "available_memory_bytes",
    "cached",
    "cached_in",
    "create",
    "describe_differences",
    "differences",
    "join",
    "load",
    "make_loader",
    "num_cores",
    "open",
    "plan_preload",
    "save",
    "write",
    "write_parts",
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
    "PartsWriter": ("write.parts", "PartsWriter"),
    "RaggedArray": ("read.ragged", "RaggedArray"),
    "RemoteStore": ("remote.store", "RemoteStore"),
    "Window": ("read.windows", "Window"),
    "StoreSet": ("read.store_set", "StoreSet"),
    "append": ("write.parts", "append"),
    "cached": ("write.cached", "cached"),
    "cached_in": ("write.cached", "cached_in"),
    "load": ("write.saved", "load"),
    "make_loader": ("read.loader", "make_loader"),
    "num_cores": ("system.memory", "num_cores"),
    "plan_preload": ("read.preload", "plan_preload"),
    "save": ("write.saved", "save"),
    "write": ("write", ""),  # the room itself, which can be called
    "write_parts": ("write.parts", "write_parts"),
}


def __getattr__(name: str) -> Any:
    # NumPy and each side of the store are imported when they are first asked for: a training process only
    # reads, and `import ups_store` alone costs nothing.
    if name not in __all__:
        raise AttributeError(f"module 'ups_store' has no attribute {name!r}")
    from importlib import import_module

    module, attribute = _HOMES.get(name, ("errors", name))
    found = import_module(f"ups_store.{module}")
    value = globals()[name] = getattr(found, attribute) if attribute else found
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
