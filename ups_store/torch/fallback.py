"""`open_dataset`: preloaded, mapped or encoded on demand: the best that store and memory allow."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch.utils.data import Dataset

from ups_store.errors import NotCommittedError, StoreNotFoundError
from ups_store.printable import printable
from ups_store.read.base import AnyStore
from ups_store.read.open import open_any
from ups_store.torch.dataset import StoreDataset, StoreLike

Rung = Literal["preloaded", "mapped", "decoded", "on-demand"]
Encode = Callable[[Path], Dataset[Any]]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class OpenedDataset:
    """A dataset, and how its samples will come.

    Attributes:
        dataset: A `StoreDataset`, or what the encoder gave for a store that isn't complete.
        rung: "preloaded": the store is in memory; "mapped": it is read when it is used; "decoded": it is
            packed, and samples are decoded when they are used; "on-demand": samples are encoded when they
            are asked for.
        reason: Why, with the numbers.
    """

    dataset: Dataset[Any]
    rung: Rung
    reason: str


def open_dataset(store: StoreLike, *, encode: Encode | None = None, **options: Any) -> OpenedDataset:
    """Open a store as a dataset: preloaded if it fits into memory, else mapped; the choice is logged.

    Args:
        store: A store, or its path.
        encode: Gives the dataset for a store that isn't there or isn't complete, from its path.
        options: Of `StoreDataset`.
    Raises:
        NotCommittedError: If the store is incomplete and there is no `encode`.
        StoreNotFoundError: If there is nothing at the path and there is no `encode`.
    """
    try:
        opened = open_any(store, partial=True) if isinstance(store, str | os.PathLike) else store
        if opened.is_partial:
            raise _incomplete(opened)
    except (StoreNotFoundError, NotCommittedError) as error:
        if encode is None:
            raise
        path = Path(store) if isinstance(store, str | os.PathLike) else store.path
        return _logged(path, OpenedDataset(encode(path), "on-demand", str(error)))
    report = opened.preload("auto")
    rung: Rung = "mapped" if report.mode == "mapped" else "preloaded"
    if opened.codec != "none" and report.mode != "copy":
        rung = "decoded"
    reason = f"{opened.nbytes:,} bytes; {report.why}"
    return _logged(opened.path, OpenedDataset(StoreDataset(opened, **options), rung, reason))


def _incomplete(store: AnyStore) -> NotCommittedError:
    return NotCommittedError(
        "the store is incomplete",
        path=store.path,
        expected=f"a finished store of {len(store)} samples",
        found=f"{int(store.committed.sum())} committed",
        hint="run `ups-store build` again to finish it, or pass `encode` to make samples on demand",
    )


def _logged(path: Path, opened: OpenedDataset) -> OpenedDataset:
    logger.info(printable(f"{path}: {opened.rung}: {opened.reason}"))
    return opened
