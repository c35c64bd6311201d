"""`ups_store.open`: one file, or the partitions of a split that several machines made."""

from __future__ import annotations

import contextlib
import os

from ups_store.partitioned_store import PartitionedStore
from ups_store.reader import open_store
from ups_store.store import Store, Verify
from ups_store.store_file import Access
from ups_store.system import files
from ups_store.system.paths import find_partitions, path_of


def open_any(
    path: str | os.PathLike[str],
    *,
    partial: bool = False,
    access: Access = "auto",
    verify: Verify | None = None,
) -> Store | PartitionedStore:
    """Open a store, or with a pattern such as `NAME-*-of-00016.zarr.zip` all its partitions as one.

    Arguments and errors are those of `ups_store.reader.open_store`; `partial` is for single files.

    Raises:
        StoreNotFoundError: Also if partitions are missing.
        FormatError: Also if the partitions were not made from the same.
    """
    pattern = path_of(path)
    if "*" not in pattern.name or files.exists(pattern):
        return open_store(path, partial=partial, access=access, verify=verify)
    with contextlib.ExitStack() as stack:
        partitions = [
            stack.enter_context(open_store(partition, access=access, verify=verify))
            for partition in find_partitions(pattern)
        ]
        store = PartitionedStore(pattern, partitions)
        stack.pop_all()
    return store
