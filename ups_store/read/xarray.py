"""Stores as xarray data sets, whose variables read them when they are asked for values.

`AnyStore.to_xarray` gives one, and so does `xr.open_dataset("a.zarr.zip")`, through an entry point of xarray.
Not zarr-python's own data sets: those know neither partitions, views of a mapped store, nor `verify="touch"`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
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
from ups_store.read.gather import check_indices
from ups_store.read.ragged import RaggedArray
from ups_store.system.paths import is_remote

with needs("xarray"):
    import xarray as xr
    from xarray.backends import BackendArray, BackendEntrypoint
    from xarray.core import indexing

if TYPE_CHECKING:
    from ups_store.read.base import AnyStore

CHUNK_BYTES = 64 << 20  # of the largest array, in a chunk of Dask: its scheduler takes about 1 ms for each

_SUFFIX = ".zarr.zip"
_FOREIGN = ("foreign", "no_end_record", "not_a_file", "manifest")


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
            actual = type(filename_or_obj).__name__
            raise SpecError("data set", kind="path", expected="a path or a URL", found=actual, hint=hint)
        from ups_store.read.open import open_any

        dropped = {drop_variables} if isinstance(drop_variables, str) else set(drop_variables or ())
        store = open_any(filename_or_obj, **options)
        try:
            variables = {name: value for name, value in _variables_of(store) if name not in dropped}
        except BaseException:
            store.close()
            raise
        dataset = xr.Dataset(variables, attrs=dict(store.attrs))
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
    for name, variable in _variables_of(store, names):
        # As `xr.open_dataset` does: assigning changes a copy in memory, of all that the variable holds.
        lazy = indexing.CopyOnWriteArray(variable._data)
        variables[name] = xr.Variable(variable.dims, lazy, attrs=variable.attrs, encoding=variable.encoding)
    return xr.Dataset(variables, attrs=dict(store.attrs))


def _variables_of(store: AnyStore, names: Iterable[str] | None = None) -> Iterator[tuple[str, xr.Variable]]:
    """Arrays as variables; of a ragged one its rows and its offsets, text as an array of `str`."""
    store.check_open()
    if store.access == "device":
        hint = "make the data set of the store that was preloaded"
        raise SpecError("a device's memory in xarray", kind="unsupported", path=store.path, hint=hint)
    if not store.committed.all():
        raise NotCommittedError("the store is unfinished", path=store.path, hint="finish its build first")
    chosen, metas = list(store.metas if names is None else names), store.metas.values()
    if unknown := [name for name in chosen if name not in store.metas]:
        expected = f"one of {', '.join(store.metas)}"
        raise ArrayNotFoundError(f"no array {unknown[0]!r}", path=store.path, expected=expected)
    largest = max((m.sample_nbytes for m in metas if not (m.is_constant or m.is_ragged)), default=0)
    # Data sets want chunks of as many samples in all arrays.
    chunk = max(1, min(len(store), CHUNK_BYTES // max(1, largest)))
    for name in chosen:
        meta, num = store.metas[name], len(store)
        is_text = meta.encoding is not None
        dims: tuple[str, ...] = (SAMPLE_DIM,) if is_text else meta.dims
        array = _LazyArray(store, meta, (num,), object) if is_text else _LazyArray(store, meta)
        encoding = {"preferred_chunks": {SAMPLE_DIM: chunk}} if SAMPLE_DIM in dims else {}
        lazy = indexing.LazilyIndexedArray(array)
        variable = xr.Variable(dims, lazy, attrs=dict(meta.attrs), encoding=encoding)
        if str(meta.attrs.get("units", "")).startswith("nanoseconds"):  # times, as `write` keeps them
            variable = xr.conventions.decode_cf_variable(name, variable, decode_timedelta=True)
        yield name, variable
        if meta.is_ragged and not is_text:
            companion = companion_names(name)["offsets"]
            offsets = indexing.LazilyIndexedArray(_LazyArray(store, meta, (num + 1,), np.int64))
            yield companion, xr.Variable((f"{companion}_dim_0",), offsets)


class _LazyArray(BackendArray):
    """What a variable holds in place of values; picklable as the store is, which it refers to.

    Args:
        store: The store.
        meta: The array that is read.
        shape: None for the values of the array, else that of its samples as text, or of its offsets.
        dtype: Then what these are.
    """

    def __init__(
        self, store: AnyStore, meta: ArrayMeta, shape: tuple[int, ...] | None = None, dtype: Any = None
    ) -> None:
        self._store, self._meta, self._is_other = store, meta, shape is not None
        self.shape = meta.shape if shape is None else shape
        self.dtype = dtype_of(meta.dtype) if shape is None else np.dtype(dtype)

    def __getitem__(self, key: Any) -> Any:
        return indexing.explicit_indexing_adapter(key, self.shape, indexing.IndexingSupport.OUTER, self._read)

    def _read(self, key: tuple[Any, ...]) -> npt.NDArray[Any]:
        """Read the values at a number, a slice, or an array of numbers for every axis, each by itself."""
        store, meta, name = self._store, self._meta, self._meta.name
        is_text = self.dtype == object
        if self._is_other and not is_text:
            return _outer(self._offsets(), key)
        if not is_text and (meta.is_constant or store.has_views):
            whole: Any = store[name]
            return _outer(whole.rows if isinstance(whole, RaggedArray) else whole, key)
        first, is_slice = key[0], isinstance(key[0], slice)
        numbers = np.arange(*first.indices(self.shape[0])) if is_slice else np.atleast_1d(first)
        if is_text:
            samples = store.gather(numbers, [name])[name]
            values = np.empty(len(samples), object)
            values[:] = samples
        elif not meta.is_ragged:
            values = store.gather(numbers, [name])[name]
        elif not len(numbers):
            values = np.empty((0, *meta.sample_shape), self.dtype)
        else:  # rows: out of the samples from that of the first to that of the last of them
            numbers, offsets = check_indices(numbers, self.shape[0], path=store.path), self._offsets()
            begin, last = np.searchsorted(offsets, [numbers.min(), numbers.max()], side="right") - 1
            rows = np.concatenate(store.gather(np.arange(begin, last + 1), [name])[name])
            values = rows[numbers - offsets[begin]]
        is_number = not isinstance(first, slice | np.ndarray)
        return _outer(values, (0 if is_number else slice(None), *key[1:]))

    def _offsets(self) -> npt.NDArray[np.int64]:
        return np.concatenate([[0], np.cumsum(self._store.lengths(self._meta.name))])


def _outer(values: npt.NDArray[Any], key: tuple[Any, ...]) -> npt.NDArray[Any]:
    """Index every axis by itself; a view unless there are arrays of numbers."""
    basic = [slice(None) if isinstance(index, np.ndarray) else index for index in key]
    view, axis = values[(*basic, ...)], 0
    for index in key:
        if isinstance(index, np.ndarray):
            view = np.take(view, index, axis)
        axis += isinstance(index, slice | np.ndarray)
    return view
