"""`to_xarray`: a store as an xarray data set, whose variables read it when they are asked for values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ups_store.errors import ArrayNotFoundError, NotCommittedError, SpecError, needs
from ups_store.format.metadata import SAMPLE_DIM, ArrayMeta, dtype_of
from ups_store.format.ragged import companion_names
from ups_store.read.gather import Samples
from ups_store.read.ragged import RaggedArray

with needs("xarray"):
    import xarray as xr
    from xarray.backends import BackendArray
    from xarray.core import indexing

CHUNK_BYTES = 64 << 20  # of the largest array, in a chunk of Dask: its scheduler takes about 1 ms for each

Key = tuple[Any, ...]
Read = Callable[[Key], npt.NDArray[Any]]


class _Store(Protocol):
    """What is used of an `AnyStore`, whose module imports this one."""

    path: Path
    attrs: Mapping[str, Any]
    metas: dict[str, ArrayMeta]

    @property
    def access(self) -> str: ...
    @property
    def committed(self) -> npt.NDArray[np.bool_]: ...
    @property
    def has_views(self) -> bool: ...
    def __len__(self) -> int: ...
    def __getitem__(self, key: str) -> npt.NDArray[Any]: ...
    def check_open(self) -> None: ...
    def gather(self, indices: Samples, names: Sequence[str]) -> dict[str, Any]: ...
    def lengths(self, name: str) -> Samples: ...


class LazyArray(BackendArray):
    """What a variable holds in place of values; picklable as the store is, which it refers to.

    Args:
        shape: Its shape.
        dtype: Its dtype.
        read: Gives the values at a key with a number, a slice, or an array of numbers for every axis, each
            axis by itself.
    """

    def __init__(self, shape: tuple[int, ...], dtype: npt.DTypeLike, read: Read) -> None:
        self.shape, self.dtype, self._read = shape, np.dtype(dtype), read

    def __getitem__(self, key: Any) -> Any:
        return indexing.explicit_indexing_adapter(key, self.shape, indexing.IndexingSupport.OUTER, self._read)


def dataset_of(store: _Store, names: Iterable[str] | None = None) -> xr.Dataset:
    """See `AnyStore.to_xarray`; closing the data set doesn't close the store."""
    lazy = {name: _copied_on_write(variable) for name, variable in variables_of(store, names).items()}
    return xr.Dataset(lazy, attrs=dict(store.attrs))


def variables_of(store: _Store, names: Iterable[str] | None = None) -> dict[str, xr.Variable]:
    """The variables of a store by name, nothing of which is read yet.

    Raises:
        NotCommittedError: If the store is unfinished.
        ArrayNotFoundError: If it lacks a name; also a KeyError.
        SpecError: For a store in a device's memory, kind "unsupported".
    """
    store.check_open()
    if store.access == "device":
        hint = "make the data set of the store that was preloaded"
        raise SpecError("a device's memory in xarray", kind="unsupported", path=store.path, hint=hint)
    if not store.committed.all():
        raise NotCommittedError("the store is unfinished", path=store.path, hint="finish its build first")
    chosen = list(store.metas if names is None else names)
    unknown = [name for name in chosen if name not in store.metas]
    if unknown:
        expected = f"one of {', '.join(store.metas)}"
        raise ArrayNotFoundError(f"no array {unknown[0]!r}", path=store.path, expected=expected)
    return {name: variable for array in chosen for name, variable in _variables(store, store.metas[array])}


def _variables(store: _Store, meta: ArrayMeta) -> Iterator[tuple[str, xr.Variable]]:
    """An array as a variable; of a ragged one its rows and its offsets, text as an array of `str`."""
    if meta.encoding is not None:
        texts = LazyArray((len(store),), object, partial(_texts, store, meta))
        yield meta.name, _variable(store, meta, (SAMPLE_DIM,), texts)
        return
    array = LazyArray(meta.shape, dtype_of(meta.dtype), partial(_values, store, meta))
    yield meta.name, _variable(store, meta, meta.dims, array)
    if meta.is_ragged:
        name = companion_names(meta.name)["offsets"]
        offsets = LazyArray((len(store) + 1,), np.int64, partial(_offsets_at, store, meta))
        yield name, xr.Variable((f"{name}_dim_0",), indexing.LazilyIndexedArray(offsets))


def _variable(store: _Store, meta: ArrayMeta, dims: tuple[str, ...], array: LazyArray) -> xr.Variable:
    encoding = {}
    if SAMPLE_DIM in dims:
        encoding["preferred_chunks"] = {SAMPLE_DIM: _chunk_samples(store)}
    lazy = indexing.LazilyIndexedArray(array)
    variable = xr.Variable(dims, lazy, attrs=dict(meta.attrs), encoding=encoding)
    if str(meta.attrs.get("units", "")).startswith("nanoseconds"):  # times, as `write` keeps them
        variable = xr.conventions.decode_cf_variable(meta.name, variable, decode_timedelta=True)
    return variable


def _copied_on_write(variable: xr.Variable) -> xr.Variable:
    """As `xr.open_dataset` does: assigning to it changes a copy in memory, of all that the variable holds."""
    lazy = indexing.CopyOnWriteArray(variable._data)
    return xr.Variable(variable.dims, lazy, attrs=variable.attrs, encoding=variable.encoding)


def _chunk_samples(store: _Store) -> int:
    """Samples of a chunk, the same in all arrays, as data sets want."""
    metas = store.metas.values()
    largest = max((m.sample_nbytes for m in metas if not (m.is_constant or m.is_ragged)), default=0)
    return max(1, min(len(store), CHUNK_BYTES // max(1, largest)))


def _values(store: _Store, meta: ArrayMeta, key: Key) -> npt.NDArray[Any]:
    """Values of an array, or rows of a ragged one: a view of a mapped store where the key has no arrays."""
    if meta.is_constant or store.has_views:
        whole: Any = store[meta.name]
        return _outer(whole.rows if isinstance(whole, RaggedArray) else whole, key)
    wanted = _numbers(key[0], meta.shape[0])
    values = _rows(store, meta, wanted) if meta.is_ragged else store.gather(wanted, [meta.name])[meta.name]
    return _outer(values, (0 if _is_number(key[0]) else slice(None), *key[1:]))


def _rows(store: _Store, meta: ArrayMeta, wanted: Samples) -> npt.NDArray[Any]:
    """Rows of a ragged array by their numbers, out of the samples from the first to the last of them."""
    if not len(wanted):
        return np.empty((0, *meta.sample_shape), dtype_of(meta.dtype))
    offsets = _offsets(store, meta)
    first, last = np.searchsorted(offsets, [wanted.min(), wanted.max()], side="right") - 1
    views = store.gather(np.arange(first, last + 1), [meta.name])[meta.name]
    rows: npt.NDArray[Any] = np.concatenate(views)[wanted - offsets[first]]
    return rows


def _texts(store: _Store, meta: ArrayMeta, key: Key) -> npt.NDArray[Any]:
    found = store.gather(_numbers(key[0], len(store)), [meta.name])[meta.name]
    texts = np.empty(len(found), object)
    texts[:] = found
    return _outer(texts, (0 if _is_number(key[0]) else slice(None),))


def _offsets(store: _Store, meta: ArrayMeta) -> Samples:
    return np.concatenate([[0], np.cumsum(store.lengths(meta.name))])


def _offsets_at(store: _Store, meta: ArrayMeta, key: Key) -> npt.NDArray[Any]:
    return _outer(_offsets(store, meta), key)


def _outer(values: npt.NDArray[Any], key: Key) -> npt.NDArray[Any]:
    """Index every axis by itself; a view unless there are arrays of numbers."""
    view = values[tuple(_as_slice(part, size) for part, size in zip(key, values.shape, strict=True))]
    for axis, part in enumerate(key):
        if isinstance(part, np.ndarray):
            view = np.take(view, part, axis)
    return view.squeeze(tuple(axis for axis, part in enumerate(key) if _is_number(part)))


def _as_slice(part: Any, size: int) -> slice:
    if _is_number(part):
        number = range(size)[part]
        return slice(number, number + 1)
    return part if isinstance(part, slice) else slice(None)


def _numbers(part: Any, size: int) -> Samples:
    if isinstance(part, slice):
        return np.arange(*part.indices(size))
    return np.atleast_1d(np.asarray(part, np.int64))


def _is_number(part: Any) -> bool:
    return isinstance(part, int | np.integer)
