"""One split = one file: a mapped, checked, resumable Zarr v3 store.

`write` makes one of anything iterable, `create` and `join` take commits, `open` reads;
`docs/format/spec.md` says what lies in the file.
"""

from __future__ import annotations

from ups_store.lazy import attach

TYPE_CHECKING = False  # as type checkers take it; to import `typing` takes longer than all else here
if TYPE_CHECKING:
    from types import ModuleType

__version__ = "0.1.0"

_lazy, __all__ = attach(__name__, __file__)
_GONE = {  # and what to write instead
    "DownloadError": "catch SourceError, which has its kinds",
    "ExternalDataError": "catch SourceError, which has its kinds and `outer`",
    "PartsWriter": "`ups_store.write` takes samples of an unknown number, `append` adds to a pattern",
    "ReadOnlyError": "catch AccessError, of kind 'read_only'",
    "StalledError": "it ends the process by itself, with exit code 4",
    "StoreSet": "`ups_store.open` of a pattern such as days-*.zarr.zip gives PartitionedStore",
    "cached_in": "write `ups_store.cached(path, identity, function)`, with the arguments in the identity",
    "write_parts": "write `ups_store.write(path, samples, identity=...)`, which needs no number of samples; "
    "what is to grow is written by `ups_store.append('days-*.zarr.zip', samples, key=...)`",
}


def __getattr__(name: str) -> object:
    if name in _GONE:
        raise AttributeError(f"ups_store.{name} is gone: {_GONE[name]}")
    return _lazy(name)


_ABOVE = {  # what stands above the modules that use it
    "device": "torch.device",
    "open": "read.open",
    "packed": "packed.store",
    "remote": "remote.store",
    "xarray": "read.xarray",
}


def module_above(name: str) -> ModuleType:
    """Import a module that uses the caller's: what knows the kinds of stores, and shows them."""
    from importlib import import_module

    return import_module(f"ups_store.{_ABOVE[name]}")


def __dir__() -> list[str]:
    return sorted(__all__)
