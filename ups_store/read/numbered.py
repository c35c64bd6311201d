"""Stores that were appended one after the other, `days-00007.zarr.zip`, read as one by `days-*.zarr.zip`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ups_store.errors import FormatError
from ups_store.format.root import describe_differences, differences
from ups_store.read.base import AnyStore
from ups_store.read.partitioned import PartitionedStore


class NumberedStores(PartitionedStore):
    """Stores of one pattern as one; what is appended later belongs to it when it is opened again.

    Each may be made from its own; they have the same arrays and constants.

    Args:
        pattern: What names the files.
        partitions: The open stores, in order.
    """

    @staticmethod
    def _document(path: Path, partitions: Sequence[AnyStore]) -> dict[str, Any]:
        """The identity document of all: theirs if they are equal, else one that names them."""
        first = dict(partitions[0].identity_document)
        for store in partitions[1:]:
            differing = differences(_geometry(store), _geometry(partitions[0]))
            if differing:
                raise FormatError(
                    f"other arrays than in the first store:\n{describe_differences(differing)}",
                    path=store.path,
                    kind="partitions",
                    hint=f"move it away: {path.name} names stores of the same arrays and constants",
                )
        hashes = list(dict.fromkeys(store.config_hash for store in partitions))
        return first if len(hashes) == 1 else {**first, "content": {"kind": "stores", "parents": hashes}}


def _geometry(store: AnyStore) -> dict[str, Any]:
    return {key: store.identity_document.get(key) for key in ("arrays", "constants")}
