"""`StoreDataset`: stores as a map-style dataset of samples, or of windows over their trajectories."""

from __future__ import annotations

import functools
import html
import os
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import Dataset, default_collate

from ups_store.errors import SampleIndexError, SpecError
from ups_store.printable import one_line
from ups_store.read.base import AnyStore
from ups_store.read.gather import Samples, check_indices, names_of
from ups_store.read.numbered import NumberedStores
from ups_store.read.open import open_any
from ups_store.read.partitioned import parts_of
from ups_store.torch.batch import Batch, BatchRows, Sample, one_or_all
from ups_store.torch.deadline import Where, check_timeout, in_time
from ups_store.torch.memory import Allocate, BufferPool, as_array, new_tensor
from ups_store.torch.ragged import RaggedForm, join_ragged
from ups_store.torch.source import SourceSelection, StoreSource
from ups_store.torch.windows import Window

StoreLike = AnyStore | str | os.PathLike[str]


class BatchSource(Protocol):
    """What a `Loader` takes batches of: a `StoreDataset`, or something that makes batches otherwise."""

    @property
    def stores(self) -> Sequence[AnyStore]:
        """Where the samples lie, for reports."""

    @property
    def num_tensors(self) -> int:
        """Most tensors of a batch that have the same shape and dtype."""

    def fetch(self, number: int, items: Samples, *, epoch: int, allocate: Allocate) -> Any:
        """A batch of one source; called by several threads at a time. See `StoreDataset.fetch`.

        A method `where`, as that of `StoreDataset`, gives a `BatchTimeoutError` what it names.
        """


class StoreDataset(Dataset[Any]):
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
        single = isinstance(stores, AnyStore | str | os.PathLike)
        given: list[StoreLike] = [stores] if single else list(stores)  # type: ignore[list-item, arg-type]
        if not given:
            raise SpecError("no store given", kind="stores", expected="at least one", found=0)
        if state is not None and window is None:
            hint = "give `window=Window(...)` too; `names` says which arrays whole samples have"
            raise SpecError("`state` without `window`", kind="state", found=repr(state), hint=hint)
        _check_dtype(dtype, views=views)
        if ragged not in (None, "padded", "nested"):
            raise SpecError("ragged", kind="ragged", expected="padded or nested", found=repr(ragged))
        chosen = None if names is None else names_of(names)
        self._selection = SourceSelection(chosen, state, window, dtype, ragged)
        check_timeout(timeout)
        self._views, self.transform, self._timeout = views, transform, timeout
        self.epoch = 0
        self._open([store for each in given for store in _opened(each)])

    def _open(self, stores: Iterable[AnyStore]) -> None:
        self.sources = tuple(StoreSource(store, self._selection) for store in stores)
        self._ends: Samples = np.cumsum([len(source) for source in self.sources])
        self._first = [0, *self._ends[:-1].tolist()]
        self._pool = BufferPool(limit=2 * self.num_tensors)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __repr__(self) -> str:
        return in_words("StoreDataset", self.facts())

    def _repr_html_(self) -> str:
        return as_table("StoreDataset", self.facts())

    def facts(self) -> dict[str, object]:
        """What `repr` shows."""
        window, first = self._selection.window, self.sources[0]
        tasks = ", ".join(sorted({source.task for source in self.sources}))
        is_decoded = any(source.store.codec != "none" for source in self.sources)
        tensors = [f"{field.key} {field.shape} {str(field.dtype)[6:]}" for field in first.fields]
        tensors += [f"{f.key} {'text' if f.is_text else (None, *f.tail)}" for f in first.ragged]
        return {
            "items": f"{len(self):,} {'samples' if window is None else 'windows'}",
            "stores": f"{len(self.sources)} ({tasks})" + (", decoded" if is_decoded else ""),
            **({} if window is None else {"window": window}),
            "tensors": ", ".join(tensors),
        }

    @property
    def stores(self) -> tuple[AnyStore, ...]:
        """The stores that the samples lie in."""
        return tuple(source.store for source in self.sources)

    @property
    def num_tensors(self) -> int:
        """Tensors of a batch that are gathered."""
        return max(len(source.fields) + len(source.ragged) for source in self.sources)

    @property
    def first_items(self) -> list[int]:
        """Number of each store's first item."""
        return list(self._first)

    def set_epoch(self, epoch: int) -> None:
        """Draw the windows of another epoch; call it before workers start. Our loaders need no call."""
        self.epoch = epoch

    def locate(self, indices: Sequence[int] | Samples) -> tuple[Samples, Samples, Samples]:
        """Number of the store, sample in it, and first time step of items; int64, shape (B,) each."""
        items = self._check(indices)
        numbers = np.searchsorted(self._ends, items, side="right")
        samples, starts = np.empty_like(items), np.empty_like(items)
        for number in np.unique(numbers).tolist():
            mine = numbers == number
            local = items[mine] - self._first[number]
            samples[mine], starts[mine] = self.sources[number].locate(local, epoch=self.epoch)
        return numbers, samples, starts

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
        items = self._check([index])  # type: ignore[list-item]
        return self._in_time(items, functools.partial(self._item, items))

    def _item(self, items: Samples) -> Any:
        sample = self._view(int(items[0])) if self._views else BatchRows(self._fetch(items, new_tensor))[0]
        return sample if self.transform is None else self.transform(sample)

    def __getitems__(self, indices: Sequence[int] | Samples) -> Any:
        """Items that a `DataLoader` asks for, gathered as one batch; its default collate takes that as it is.

        Raises:
            SampleIndexError: For an index outside the dataset.
            SpecError: If samples come from stores whose arrays differ.
        """
        items = self._check(indices)
        return self._in_time(items, functools.partial(self._items, items))

    def _items(self, items: Samples) -> Any:
        rows = BatchRows(self._fetch(items, self._pool.empty))
        return rows if self.transform is None else rows.transformed(self.transform)

    def batch(self, indices: Sequence[int] | Samples) -> Batch:
        """A whole batch in memory that nothing else refers to; `transform` isn't applied.

        Raises:
            SampleIndexError: For an index outside the dataset.
            SpecError: If samples come from stores whose arrays differ.
        """
        return self._fetch(self._check(indices), self._pool.empty)

    def _in_time(self, items: Samples, work: Callable[[], Any]) -> Any:
        if self._timeout is None:
            return work()
        return in_time(work, self._timeout, functools.partial(self._where, items))

    def _where(self, items: Samples) -> Where:
        """The first store that items are of, and the samples of theirs that lie there."""
        number = int(np.searchsorted(self._ends, items[0], side="right"))
        mine = items[np.searchsorted(self._ends, items, side="right") == number] - self._first[number]
        return self.where(number, mine, epoch=self.epoch)

    def fetch(self, number: int, items: Samples, *, epoch: int, allocate: Allocate) -> Batch:
        """A batch of one source.

        Args:
            number: Which source.
            items: Its items, counted from 0, all valid, int64, shape (B,).
            epoch: What windows are drawn for.
            allocate: Makes each tensor of the batch.
        """
        source = self.sources[number]
        values = source.fetch(items, epoch=epoch, allocate=allocate)
        values["index"] = torch.from_numpy(items + self._first[number])
        values["task"] = source.task
        batch = Batch(values)
        batch.padded = source.padded
        return batch

    def where(self, number: int, items: Samples, *, epoch: int) -> Where:
        """For people: path of a source's store, and the samples there that its items are of."""
        return self.sources[number].where(items, epoch=epoch)

    def _view(self, item: int) -> Sample:
        number = int(np.searchsorted(self._ends, item, side="right"))
        source = self.sources[number]
        values = source.view(item - self._first[number], epoch=self.epoch)
        sample = Sample({**values, "index": torch.tensor(item), "task": source.task})
        sample.padded = source.padded
        return sample

    def _fetch(self, items: Samples, allocate: Allocate) -> Batch:
        numbers = np.searchsorted(self._ends, items, side="right")
        present = np.unique(numbers).tolist()
        if len(present) == 1:
            local = items - self._first[present[0]]
            return self.fetch(present[0], local, epoch=self.epoch, allocate=allocate)
        self._check_alike(present)
        rows = [np.flatnonzero(numbers == number) for number in present]
        parts = [
            self.fetch(number, items[mine] - self._first[number], epoch=self.epoch, allocate=new_tensor)
            for number, mine in zip(present, rows, strict=True)
        ]
        ragged = {field.key for field in self.sources[present[0]].ragged}
        return interleave(parts, rows, allocate, ragged)

    def _check(self, indices: Sequence[int] | Samples) -> Samples:
        path = self.sources[0].store.path
        items = check_indices(indices, len(self), path=path)
        if not items.size:
            raise SampleIndexError("no items", path=path, expected="at least one", found=0)
        return items

    def _check_alike(self, numbers: Sequence[int]) -> None:
        first = self.sources[numbers[0]]
        for other in (self.sources[number] for number in numbers[1:]):
            if other.signature != first.signature:
                raise SpecError(
                    f"samples of {first.task!r} and {other.task!r} don't fit into one batch",
                    kind="mixed",
                    path=other.store.path,
                    expected=first.signature,
                    found=other.signature,
                    hint="use make_loader, or make_batch_sampler with a DataLoader: they keep stores apart",
                )

    def __getstate__(self) -> dict[str, Any]:
        state = {
            key: value
            for key, value in vars(self).items()
            if key not in ("sources", "_ends", "_first", "_pool")
        }
        return {**state, "stores": [source.store for source in self.sources]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        stores = state.pop("stores")
        vars(self).update(state)
        self._open(stores)


def _opened(store: StoreLike) -> tuple[AnyStore, ...]:
    """The store, or its partitions: each is a source of the dataset; appended stores are one together."""
    found = open_any(store) if isinstance(store, str | os.PathLike) else store
    return (found,) if isinstance(found, NumberedStores) else parts_of(found)


def interleave(
    parts: Sequence[Batch], rows: Sequence[Samples], allocate: Allocate, ragged: Set[str]
) -> Batch:
    """One batch of several.

    Args:
        parts: Batches with the same keys, shapes and dtypes.
        rows: Where the rows of each part go, int64; all rows of the batch together.
        allocate: Makes each tensor of the batch, ragged ones left out.
        ragged: Keys of ragged arrays.
    """
    num, order = sum(map(len, rows)), np.concatenate(rows).argsort().tolist()

    def join(values: Sequence[Any]) -> Any:
        if isinstance(values[0], dict):
            return {key: join([value[key] for value in values]) for key in values[0]}
        joined = allocate((num, *values[0].shape[1:]), values[0].dtype)
        target = as_array(joined)
        for mine, value in zip(rows, values, strict=True):
            target[mine] = as_array(value)
        return joined

    tasks = [part["task"] for part in parts for _ in range(part.num_samples)]
    values = {key: join([part[key] for part in parts]) for key in parts[0].keys() - ragged - {"task"}}
    values |= {key: join_ragged([part[key] for part in parts], order) for key in ragged}
    batch = Batch(values | {"task": one_or_all([tasks[row] for row in order])})
    batch.padded = parts[0].padded
    return batch


def _check_dtype(dtype: object, *, views: bool) -> None:
    if dtype is None:
        return
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        expected = "a floating-point torch.dtype"
        raise SpecError("dtype", kind="dtype", expected=expected, found=repr(dtype))
    if views:
        raise SpecError("views keep their dtype", kind="dtype", hint="leave out `views` or `dtype`")


def in_words(name: str, facts: Mapping[str, object]) -> str:
    """What `repr` gives for an object of which these facts are known."""
    return one_line(f"<{name}: {'; '.join(f'{key}: {value}' for key, value in facts.items())}>")


def as_table(name: str, facts: Mapping[str, object]) -> str:
    """The same as HTML, for notebooks."""
    rows = (f"<tr><th>{html.escape(k)}</th><td>{html.escape(str(v))}</td></tr>" for k, v in facts.items())
    return one_line(f"<table><caption>{html.escape(name)}</caption>{''.join(rows)}</table>")
