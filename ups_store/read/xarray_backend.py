"""`StoreBackend`: `xr.open_dataset("a.zarr.zip")`, by an entry point of xarray."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from ups_store.errors import FormatError, SpecError, StoreNotFoundError, needs
from ups_store.read.open import open_any
from ups_store.read.xarray_dataset import variables_of
from ups_store.system.paths import is_remote

with needs("xarray"):
    import xarray as xr
    from xarray.backends import BackendEntrypoint

_SUFFIXES = (".zarr.zip",)
_FOREIGN = ("foreign", "no_end_record", "not_a_file", "manifest")


class StoreBackend(BackendEntrypoint):
    """Opens stores of every kind, also at URLs; closing the data set closes the store.

    xarray takes it by itself for what is named `*.zarr.zip` or `*.zarr.json` and is a store of ours; for URLs
    say `engine="ups_store"`.
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
        dropped = {drop_variables} if isinstance(drop_variables, str) else set(drop_variables or ())
        store = open_any(filename_or_obj, **options)
        try:
            found_variables = variables_of(store)
        except BaseException:
            store.close()
            raise
        kept = {name: value for name, value in found_variables.items() if name not in dropped}
        dataset = xr.Dataset(kept, attrs=dict(store.attrs))
        dataset.set_close(store.close)
        return dataset

    def guess_can_open(self, filename_or_obj: Any) -> bool:
        """Whether it is one of our stores, if a damaged one, or a missing one: the error then says so."""
        is_path = isinstance(filename_or_obj, str | os.PathLike) and not is_remote(filename_or_obj)
        if not is_path or not os.fspath(filename_or_obj).endswith(_SUFFIXES):
            return False
        try:
            open_any(filename_or_obj).close()
        except StoreNotFoundError:
            return True
        except FormatError as error:
            return error.kind not in _FOREIGN
        return True
