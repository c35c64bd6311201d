"""Stores as xarray data sets, whose variables read them when they are asked for values.

`AnyStore.to_xarray` gives one, and so does `xr.open_dataset("a.zarr.zip")`, through an entry point of xarray.
Not zarr-python's own data sets: those know neither partitions, views of a mapped store, nor `verify="touch"`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ups_store.errors import (
    ArrayNotFoundError,
    FormatError,
    NotCommittedError,
    SpecError,
    StoreNotFoundError,
    needs,
)
from ups_store.format.metadata import SAMPLE_DIM, ArrayMeta, dtype_of
from ups_store.format.ragged import companion_names
from ups_store.read.gather import Samples
from ups_store.read.ragged import RaggedArray
from ups_store.system.urls import is_remote

with needs("xarray"):
    import xarray as xr
    from xarray.backends import BackendArray, BackendEntrypoint
    from xarray.core import indexing

if TYPE_CHECKING:
    from ups_store.read.base import AnyStore

CHUNK_BYTES = 64 << 20  # of the largest array, in a chunk of Dask: its scheduler takes about 1 ms for each

_SUFFIX = ".zarr.zip"
_FOREIGN = ("foreign", "no_end_record", "not_a_file", "manifest")

Key = tuple[Any, ...]


class StoreBackend(BackendEntrypoint):
    """Opens stores of every kind, also at URLs; closing the data set closes the store.

    xarray takes it by itself for what is named `*.zarr.zip` and is a store of ours; for URLs say
    `engine="ups_store"`.
    """

    description = "Stores of ups_store, mapped, packed, in partitions or at URLs"
    url = ""
    open_dataset_parameters = (
        "filename_or_obj",
        "drop_variables",
        "access",
        "verify",
        "cache_dir",
        "cache_bytes",
        "deadline_s",
    )

    def open_dataset(
        self, filename_or_obj: Any, *, drop_variables: str | Iterable[str] | None = None, **options: Any
    ) -> xr.Dataset:
        """Open a store, nothing of which is read until values are asked for.

        Args:
            filename_or_obj: What `ups_store.open` takes.
            drop_variables: Variables to leave out.
            options: Of `ups_store.open`.
        Raises:
            StoreError: As `ups_store.open` and `AnyStore.to_xarray`.
        """
        if not isinstance(filename_or_obj, str | os.PathLike):
            hint = "an open store has `to_xarray()`"
            found = type(filename_or_obj).__name__
            raise SpecError("data set", kind="path", expected="a path or a URL", found=found, hint=hint)
        from ups_store.read.open import open_any

        dropped = {drop_variables} if isinstance(drop_variables, str) else set(drop_variables or ())
        store = open_any(filename_or_obj, **options)
        try:
            variables = _variables_of(store)
        except BaseException:
            store.close()
            raise
        kept = {name: value for name, value in variables.items() if name not in dropped}
        dataset = xr.Dataset(kept, attrs=dict(store.attrs))
        dataset.set_close(store.close)
        return dataset

    def guess_can_open(self, filename_or_obj: Any) -> bool:
        """Tell whether it is one of our stores, if a damaged or missing one: the error then says so."""
        is_path = isinstance(filename_or_obj, str | os.PathLike) and not is_remote(filename_or_obj)
        if not is_path or not os.fspath(filename_or_obj).endswith(_SUFFIX):
            return False
        from ups_store.read.open import open_any

        try:
            open_any(filename_or_obj).close()
        except StoreNotFoundError:
            return True
        except FormatError as error:
            return error.kind not in _FOREIGN
        return True


def dataset_of(store: AnyStore, names: Iterable[str] | None = None) -> xr.Dataset:
    """Make the data set of an open store; see `AnyStore.to_xarray`."""
    variables = {}
    for name, variable in _variables_of(store, names).items():
        # As `xr.open_dataset` does: assigning changes a copy in memory, of all that the variable holds.
        lazy = indexing.CopyOnWriteArray(variable._data)
        variables[name] = xr.Variable(variable.dims, lazy, attrs=variable.attrs, encoding=variable.encoding)
    return xr.Dataset(variables, attrs=dict(store.attrs))


def _variables_of(store: AnyStore, names: Iterable[str] | None = None) -> dict[str, xr.Variable]:
    store.check_open()
    if store.access == "device":
        hint = "make the data set of the store that was preloaded"
        raise SpecError("a device's memory in xarray", kind="unsupported", path=store.path, hint=hint)
    if not store.committed.all():
        raise NotCommittedError("the store is unfinished", path=store.path, hint="finish its build first")
    chosen = list(store.metas if names is None else names)
    if unknown := [name for name in chosen if name not in store.metas]:
        expected = f"one of {', '.join(store.metas)}"
        raise ArrayNotFoundError(f"no array {unknown[0]!r}", path=store.path, expected=expected)
    metas = store.metas.values()
    largest = max((m.sample_nbytes for m in metas if not (m.is_constant or m.is_ragged)), default=0)
    # Data sets want chunks of as many samples in all arrays.
    chunk = max(1, min(len(store), CHUNK_BYTES // max(1, largest)))
    return {name: var for array in chosen for name, var in _variables(store, store.metas[array], chunk)}


def _variables(store: AnyStore, meta: ArrayMeta, chunk: int) -> Iterator[tuple[str, xr.Variable]]:
    """An array as a variable; of a ragged one its rows and its offsets, text as an array of `str`."""
    if meta.encoding is not None:
        dims: tuple[str, ...] = (SAMPLE_DIM,)
        array = _LazyArray((len(store),), object, partial(_texts, store, meta.name))
    else:
        dims, array = meta.dims, _LazyArray(meta.shape, dtype_of(meta.dtype), partial(_values, store, meta))
    encoding = {"preferred_chunks": {SAMPLE_DIM: chunk}} if SAMPLE_DIM in dims else {}
    lazy = indexing.LazilyIndexedArray(array)
    variable = xr.Variable(dims, lazy, attrs=dict(meta.attrs), encoding=encoding)
    if str(meta.attrs.get("units", "")).startswith("nanoseconds"):  # times, as `write` keeps them
        variable = xr.conventions.decode_cf_variable(meta.name, variable, decode_timedelta=True)
    yield meta.name, variable
    if meta.is_ragged and meta.encoding is None:
        name = companion_names(meta.name)["offsets"]
        offsets = _LazyArray((len(store) + 1,), np.int64, partial(_offsets_at, store, meta.name))
        yield name, xr.Variable((f"{name}_dim_0",), indexing.LazilyIndexedArray(offsets))


class _LazyArray(BackendArray):
    """What a variable holds in place of values; picklable as the store is, which it refers to.

    Args:
        shape: Its shape.
        dtype: Its dtype.
        read: Gives the values at a key with a number, a slice, or an array of numbers for every axis, each
            axis by itself.
    """

    def __init__(
        self, shape: tuple[int, ...], dtype: npt.DTypeLike, read: Callable[[Key], npt.NDArray[Any]]
    ) -> None:
        self.shape, self.dtype, self._read = shape, np.dtype(dtype), read

    def __getitem__(self, key: Any) -> Any:
        return indexing.explicit_indexing_adapter(key, self.shape, indexing.IndexingSupport.OUTER, self._read)


def _values(store: AnyStore, meta: ArrayMeta, key: Key) -> npt.NDArray[Any]:
    """Values of an array, or rows of a ragged one: a view of a mapped store where the key has no arrays."""
    if meta.is_constant or store.has_views:
        whole: Any = store[meta.name]
        return _outer(whole.rows if isinstance(whole, RaggedArray) else whole, key)
    numbers = _numbers(key[0], meta.shape[0])
    rows = _rows(store, meta, numbers) if meta.is_ragged else store.gather(numbers, [meta.name])[meta.name]
    return _outer(rows, (0 if _is_number(key[0]) else slice(None), *key[1:]))


def _rows(store: AnyStore, meta: ArrayMeta, numbers: Samples) -> npt.NDArray[Any]:
    """Rows of a ragged array by their numbers, out of the samples from the first to the last of them."""
    if not len(numbers):
        return np.empty((0, *meta.sample_shape), dtype_of(meta.dtype))
    offsets = _offsets(store, meta.name)
    first, last = np.searchsorted(offsets, [numbers.min(), numbers.max()], side="right") - 1
    views = store.gather(np.arange(first, last + 1), [meta.name])[meta.name]
    rows: npt.NDArray[Any] = np.concatenate(views)[numbers - offsets[first]]
    return rows


def _texts(store: AnyStore, name: str, key: Key) -> npt.NDArray[Any]:
    samples = store.gather(_numbers(key[0], len(store)), [name])[name]
    texts = np.empty(len(samples), object)
    texts[:] = samples
    return _outer(texts, (0 if _is_number(key[0]) else slice(None),))


def _offsets(store: AnyStore, name: str) -> Samples:
    return np.concatenate([[0], np.cumsum(store.lengths(name))])


def _offsets_at(store: AnyStore, name: str, key: Key) -> npt.NDArray[Any]:
    return _outer(_offsets(store, name), key)


def _outer(values: npt.NDArray[Any], key: Key) -> npt.NDArray[Any]:
    """Index every axis by itself; a view unless there are arrays of numbers."""
    view, numbers = values, []
    for axis, index in enumerate(key):
        if _is_number(index):
            numbers.append(axis)
            index = slice(number := range(values.shape[axis])[index], number + 1)
        if isinstance(index, slice):
            view = view[(slice(None),) * axis + (index,)]
    for axis, index in enumerate(key):
        if isinstance(index, np.ndarray):
            view = np.take(view, index, axis)
    return view.squeeze(tuple(numbers))


def _numbers(index: Any, size: int) -> Samples:
    if isinstance(index, slice):
        return np.arange(*index.indices(size))
    return np.atleast_1d(np.asarray(index, np.int64))


def _is_number(index: Any) -> bool:
    return isinstance(index, int | np.integer)
