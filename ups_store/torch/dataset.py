"""`StoreDataset`: stores as a dataset of samples, or of windows; `MixedDataset`: several in a batch."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
import torch
from torch.utils.data import Dataset, default_collate

from ups_store.errors import NotCommittedError, SpecError, StoreNotFoundError
from ups_store.printable import printable
from ups_store.read import items as numpy_items
from ups_store.read.base import AnyStore
from ups_store.read.gather import Samples
from ups_store.read.items import BufferPool, NumberedSources, StoreItems, StoreLike, Window
from ups_store.read.open import open_any
from ups_store.read.order import MixedOrder, expect
from ups_store.read.prefetch import check_timeout, in_time
from ups_store.torch.batch import (
    Allocate,
    Batch,
    BatchRows,
    Sample,
    arrays_by,
    batch_of,
    convert,
    new_tensor,
    numpy_dtype,
    tensors_of,
)

RaggedForm: TypeAlias = Literal["padded", "nested"]

SOURCE = "source"  # key of a mixed batch

logger = logging.getLogger(__name__)


class BatchSource(Protocol):
    """What a `Loader` takes batches of: a `StoreDataset`, or something that makes batches otherwise."""

    @property
    def stores(self) -> Sequence[AnyStore]:
        """Give the stores that the samples lie in, for reports."""

    @property
    def num_tensors(self) -> int:
        """Most tensors of a batch that have the same shape and dtype."""

    def fetch(self, number: int, items: Samples, *, epoch: int, allocate: Allocate) -> Any:
        """Make a batch of one source; called by several threads at a time. See `StoreDataset.fetch`.

        A method `where`, as that of `StoreDataset`, gives a `BatchTimeoutError` what it names.
        """


class StoreDataset(StoreItems, Dataset[Any]):
    """Samples of one or several stores, one after the other.

    `dataset[i]` is a `Sample`, `dataset[2:5]` and `dataset[[4, 2]]` a `Batch`; negative numbers count from
    the end. What a `DataLoader` asks for is copied as a whole `Batch`, which its workers then write to memory
    that is shared with the main process. Picklable; workers may be forked or spawned.

    Args:
        stores: A store, its path, or several of them; of a store in partitions the pattern of their names.
        names: Arrays to take; by default all, with windows those that don't vary in time. Windows have the
            state as `z0` and `z1` in any case, and of a named array that varies in time the same steps.
        window: What an item spans; None for whole samples. Windows stay inside `num_steps` where a store has
            that array; trajectories that are too short have no item.
        state: Array that windows are taken of; by default "latent", or "fields" where there is none. It goes
            with `window`.
        dtype: Dtype that arrays of floating-point numbers are converted to while they are copied. Numbers of
            `params`, `t` and `dt` are float32 always.
        views: Whether `dataset[i]` gives views of the store's memory instead of copies. They may be changed:
            this process then reads what it wrote, the file and other processes don't. They are views of the
            map, whatever the store's `access`, and `verify="touch"` doesn't check samples of 4096 bytes or
            more there. Ragged arrays are copied.
        ragged: How batches have ragged arrays: "padded" as a tensor (B, L, ...), zeros behind each sample, L
            the rows of the longest, and the numbers of rows as `NAME.lengths`, int64, shape (B,); "nested" as
            a nested tensor of jagged layout. Text is a list of `str` in any case.
        transform: Called with every `Sample`, as `dataset[i]` gives it; what it returns is the item instead.
            In a loader samples are views of a batch that was gathered as a whole. Of dictionaries that it
            returns, `ragged="padded"` pads what still has `NAME.lengths` beside it, as it is then; anything
            else with rows of another number in every sample needs a `collate_fn`.
        timeout: Seconds that what is asked for may take, `transform` included, before `BatchTimeoutError`:
            for loops of your own and for workers of a `DataLoader`, which hand it on. By default there is no
            limit. Loaders of `make_loader` have a `timeout` of their own.

    Attributes:
        sources: One per store.
        transform: As given.
        epoch: What windows are drawn for, with `samples_per_trajectory`; `set_epoch` changes it.

    Raises:
        NotCommittedError: If a store is incomplete.
        ArrayNotFoundError: If a store lacks an array; also a KeyError.
        SpecError: If no trajectory is as long as a window, `state` is given without `window`, or `dtype`
            isn't a floating-point dtype of torch, or given with `views`. For a ragged array without `ragged`,
            kind "ragged".
    """

    def __init__(
        self,
        stores: StoreLike | Iterable[StoreLike],
        *,
        names: Sequence[str] | None = None,
        window: Window | None = None,
        state: str | None = None,
        dtype: torch.dtype | None = None,
        views: bool = False,
        ragged: RaggedForm | None = None,
        transform: Callable[[Sample], Any] | None = None,
        timeout: float | None = None,
    ) -> None:
        check_timeout(timeout)
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            expected = "a floating-point torch.dtype"
            raise SpecError("dtype", kind="dtype", expected=expected, found=repr(dtype))
        if dtype is not None and views:
            raise SpecError("views keep their dtype", kind="dtype", hint="leave out `views` or `dtype`")
        if ragged not in (None, "padded", "nested"):
            raise SpecError("ragged", kind="ragged", expected="padded or nested", found=repr(ragged))
        self._views, self.transform, self._timeout = views, transform, timeout
        super().__init__(
            stores,
            names=names,
            window=window,
            state=state,
            dtype=None if dtype is None else numpy_dtype(dtype),
            ragged="views" if ragged == "nested" else ragged,
        )

    def _open(self, stores: Iterable[AnyStore]) -> None:
        super()._open(stores)
        for source in self.sources:
            source.convert, source.num_threads = convert, _num_threads
        self._pool = BufferPool(limit=2 * self.num_tensors)

    def set_epoch(self, epoch: int) -> None:
        """Draw the windows of another epoch; call it before workers start. Our loaders need no call."""
        self.epoch = epoch

    def __getitem__(self, index: int | slice | Sequence[int] | Samples) -> Any:
        """One item, whose tensors are new, or views; of a slice or several numbers a `Batch`, or what default
        collate makes.

        Raises:
            SampleIndexError: Unless -len(dataset) <= index < len(dataset), or for none; also an IndexError.
        """
        if isinstance(index, slice):
            index = range(*index.indices(len(self)))
        if not isinstance(index, int) and np.ndim(index):
            return default_collate(self.__getitems__(index))
        return self._in_time(self.check([index]), self._item)  # type: ignore[list-item]

    def _item(self, items: Samples) -> Any:
        if not self._views:
            sample = BatchRows(self._batch(items, arrays_by(new_tensor)))[0]
        else:
            item = int(items[0])
            number = self._number_of(item)
            source = self.sources[number]
            values = source.view(item - self._firsts[number], epoch=self.epoch)
            sample = Sample({**tensors_of(values), "index": torch.tensor(item), "task": source.task})
            sample.padded = source.padded
        return sample if self.transform is None else self.transform(sample)

    def __getitems__(self, indices: Sequence[int] | Samples) -> Any:
        """Items that a `DataLoader` asks for, gathered as one batch; its default collate takes that as it is.

        Raises:
            SampleIndexError: For an index outside the dataset.
            SpecError: If samples come from stores whose arrays differ.
        """
        return self._in_time(self.check(indices), self._items)

    def _items(self, items: Samples) -> Any:
        rows = BatchRows(self._batch(items, self._pool.empty))
        return rows if self.transform is None else rows.transformed(self.transform)

    def _in_time(self, items: Samples, work: Callable[[Samples], Any]) -> Any:
        if self._timeout is None:
            return work(items)
        where = functools.partial(self.where, 0, items, epoch=self.epoch)
        return in_time(lambda: work(items), self._timeout, where)

    def batch(self, indices: Sequence[int] | Samples) -> Batch:
        """Copy a whole batch to memory that nothing else refers to; `transform` isn't applied.

        Raises:
            SampleIndexError: For an index outside the dataset.
            SpecError: If samples come from stores whose arrays differ.
        """
        return self._batch(self.check(indices), self._pool.empty)

    def _batch(self, items: Samples, allocate: numpy_items.Allocate) -> Batch:
        values = self.fetch_mixed(items, epoch=self.epoch, allocate=allocate)
        return batch_of(values, self.sources[self._number_of(items[0])], allocate)

    def fetch(self, number: int, items: Samples, *, epoch: int, allocate: Allocate) -> Batch:  # type: ignore[override]
        """Make a batch of one source.

        Args:
            number: Which source.
            items: Its items, counted from 0, all valid, int64, shape (B,).
            epoch: What windows are drawn for.
            allocate: Makes each tensor of the batch.
        """
        arrays = arrays_by(allocate)
        return batch_of(self._fetch_source(number, items, epoch, arrays), self.sources[number], arrays)


def _num_threads() -> int | None:
    """Give the threads that decode: a worker of a loader, thread or process, is one; others are all."""
    return None if torch.get_num_threads() > 1 else 1


Mixable: TypeAlias = StoreDataset | StoreLike


class MixedDataset(NumberedSources):
    """Several datasets for one loader, every batch of which has samples of all in the shares of `weights`.

    `make_loader(MixedDataset([a, b], weights=[3, 1]), batch_size=64)` gives batches with 48 samples of `a`
    and 16 of `b`. `batch["source"]`, int64, shape (B,), says of which dataset a sample is, and
    `batch["index"]` which item of that. Picklable.

    Which samples a step takes depends on the seed, the epoch and the step alone, not on the number of ranks.
    Each dataset is read through, over the ends of epochs, before a sample of it comes again; then it begins
    again, in a new order where the loader shuffles. An epoch ends after `epoch_size` samples.

    Args:
        datasets: What is mixed, perhaps by name: datasets, or stores, paths, or several of them, which stand
            for a `StoreDataset`. Their arrays have the same names, shapes and dtypes.
        weights: Shares of the samples, one per dataset; by default in proportion to their lengths.
        epoch_size: Samples of an epoch over all ranks, filled up to whole batches, or with `drop_last` cut
            down to them; by default as many as the datasets have together.
        transform: Called with every `Sample`, which has `source`, too.

    Attributes:
        datasets: The datasets, in order.
        names: Their names; "0", "1", ... where they have none.
        sources: Their stores, one after the other.

    Raises:
        SpecError: If the datasets' samples don't fit into one batch, kind "mixed"; if one of them has a
            transform of its own, kind "transform", or an array named "source", kind "names".
    """

    def __init__(
        self,
        datasets: Mapping[str, Mixable | Iterable[StoreLike]] | Sequence[Mixable | Iterable[StoreLike]],
        *,
        weights: Sequence[float] | None = None,
        epoch_size: int | None = None,
        transform: Callable[[Sample], Any] | None = None,
    ) -> None:
        named = dict(datasets) if isinstance(datasets, Mapping) else dict(enumerate(datasets))
        if not named:
            raise SpecError("no dataset given", kind="stores", expected="at least one", found=0)
        self.names = tuple(map(str, named))
        self.datasets = tuple(
            entry if isinstance(entry, StoreDataset) else StoreDataset(entry) for entry in named.values()
        )
        self.weights, self.epoch_size, self.transform = weights, epoch_size, transform
        self._set_sources(source for dataset in self.datasets for source in dataset.sources)
        first = self.sources[0]
        for name, dataset in zip(self.names, self.datasets, strict=True):
            if dataset.transform is not None:
                hint = 'give one to MixedDataset: sample["source"] says of which dataset a sample is'
                raise SpecError(f"dataset {name} has a transform", kind="transform", hint=hint)
            for source in dataset.sources:
                hint = "choose arrays with `names`, or give the stores to make_loader unmixed"
                source.check_fits(first, hint=hint)
        if SOURCE in first.signature:
            problem, hint = "the array's name is a key of mixed batches", "leave it out with `names`"
            raise SpecError(problem, kind="names", path=first.store.path, array=SOURCE, hint=hint)
        counts = [len(dataset.sources) for dataset in self.datasets]
        self._dataset_of = np.repeat(np.arange(len(counts)), counts).tolist()  # by source
        self._pool = BufferPool(limit=4 * self.num_tensors * len(self.sources))

    def _facts(self) -> dict[str, object]:
        sizes = [f"{name} ({size:,} items)" for name, size in zip(self.names, self.sizes, strict=True)]
        weights = "by their lengths" if self.weights is None else list(self.weights)
        return {"datasets": ", ".join(sizes), "weights": weights}

    @property
    def sizes(self) -> list[int]:
        """Number of items of each dataset."""
        return [len(dataset) for dataset in self.datasets]

    def make_order(
        self, *, pad_last: bool = False, weights: Sequence[float] | None = None, **options: Any
    ) -> MixedOrder:
        """Make the order in which a loader takes the items; see `MixedOrder`."""
        expect("weights", weights is None, "none: the MixedDataset has its own", weights)
        expect("pad_last", not pad_last, "False: batches of a MixedDataset are full", pad_last)
        return MixedOrder(self.sizes, weights=self.weights, epoch_size=self.epoch_size, **options)

    def fetch(self, number: int, items: Samples, *, epoch: int, allocate: Allocate) -> Batch:
        """Make a batch of all datasets together."""
        arrays = arrays_by(allocate)
        values = self.fetch_mixed(items, epoch=epoch, allocate=arrays, scratch=self._pool.empty)
        return batch_of(values, self.sources[0], arrays)  # all are alike

    def _fetch_source(self, number: int, items: Samples, epoch: int, allocate: Any) -> dict[str, Any]:
        values = super()._fetch_source(number, items, epoch, allocate)
        values[SOURCE] = np.full(len(items), self._dataset_of[number])
        return values

    def __reduce__(self) -> tuple[Any, ...]:
        options: dict[str, Any] = {"weights": self.weights, "epoch_size": self.epoch_size}
        options["transform"] = self.transform
        named = dict(zip(self.names, self.datasets, strict=True))
        return functools.partial(MixedDataset, **options), (named,)


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
    rung: Literal["preloaded", "mapped", "decoded", "on-demand"]
    reason: str


def open_dataset(
    store: StoreLike, *, encode: Callable[[Path], Dataset[Any]] | None = None, **options: Any
) -> OpenedDataset:
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
            raise NotCommittedError(
                "the store is incomplete",
                path=opened.path,
                expected=f"a finished store of {len(opened)} samples",
                found=f"{int(opened.committed.sum())} committed",
                hint="run `ups-store build` again to finish it, or pass `encode` to make samples on demand",
            )
    except (StoreNotFoundError, NotCommittedError) as error:
        if encode is None:
            raise
        path = Path(store) if isinstance(store, str | os.PathLike) else store.path
        result = OpenedDataset(encode(path), "on-demand", str(error))
    else:
        path, report = opened.path, opened.preload("auto")
        is_decoded = opened.codec != "none" and report.mode != "copy"
        way = "decoded" if is_decoded else "mapped" if report.mode == "mapped" else "preloaded"
        reason = f"{opened.nbytes:,} bytes; {report.why}"
        result = OpenedDataset(StoreDataset(opened, **options), way, reason)  # type: ignore[arg-type]
    logger.info(printable(f"{path}: {result.rung}: {result.reason}"))
    return result
