"""`Loader`: batches that threads have ready, in an order that any number of ranks agree on.

`make_loader` and `make_batch_sampler`: from plain arguments, every one of them checked.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from ups_store.errors import ConfigError
from ups_store.read.base import AnyStore
from ups_store.read.mixed_order import MixedOrder
from ups_store.read.order import DataOrder, Shuffle, Step, expect
from ups_store.torch.ahead import Ahead, Inline, OnWait
from ups_store.torch.assembler import (
    Assembler,
    BatchTransform,
    Collate,
    EpochReport,
    Groups,
    Made,
    Order,
    jobs_of,
)
from ups_store.torch.dataset import BatchSource, StoreDataset, StoreLike, as_table, in_words
from ups_store.torch.deadline import check_timeout
from ups_store.torch.device import DeviceFeed
from ups_store.torch.memory import BufferPool
from ups_store.torch.mixed import MixedDataset
from ups_store.torch.ranks import RankedOrder
from ups_store.torch.sampler import StoreBatchSampler, choose_shuffle

BLOCK_BYTES = 4 << 20  # read at once with shuffle="block": a disk's seek or a network's round trip disappears

MAX_BLOCK_SIZE = 4096

NUM_WORKERS = 2

PREFETCH_FACTOR = 2  # as of torch's DataLoader


Making = Ahead[list[Step], list[Made | BaseException]] | Inline[list[Step], list[Made | BaseException]]


@dataclass
class _Meter:
    """What an epoch has moved so far."""

    epoch: int
    num_steps: int = 0
    num_samples: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    waited_s: float = 0.0
    assembled_s: float = 0.0
    major_faults: int = 0


class Loader:
    """Batches of a dataset; `for batch in loader` is one epoch.

    Every iteration is the next epoch, also after one that was abandoned; after `load_state_dict` it is the
    rest of the epoch that was saved. There is one iterator at a time: a new one closes the one before.
    Where it works across epochs, the first batches of the next epoch are made while one ends, and lie ready
    until they are asked for, or it is closed or dropped. `make_loader` makes loaders; the arguments that
    both have mean the same.

    Args:
        dataset: Where batches come from.
        order: Which samples each step takes; a `RankedOrder` where its ranks aren't known yet.

    Attributes:
        dataset: Where the samples come from.
        on_wait: Called now and then by the thread that waits for a batch; what it raises ends the iteration.
        timeout: Seconds that a batch is waited for; None for no limit.
    """

    def __init__(
        self,
        dataset: BatchSource,
        order: Order | RankedOrder,
        *,
        num_workers: int = NUM_WORKERS,
        prefetch_factor: int | None = None,
        collate_fn: Collate | None = None,
        batch_transform: BatchTransform | None = None,
        device: torch.device | None = None,
        across_epochs: bool = False,
        timeout: float | None = None,
    ) -> None:
        self.dataset, self.timeout = dataset, timeout
        self._ranked = order if isinstance(order, RankedOrder) else None
        self._order: Order = order.order if isinstance(order, RankedOrder) else order
        self.on_wait: OnWait | None = None
        self._num_workers, self._depth = num_workers, num_workers * (prefetch_factor or PREFETCH_FACTOR)
        self._collate, self._batch_transform = collate_fn, batch_transform
        self._across_epochs = across_epochs and num_workers > 0
        self._feed = DeviceFeed(device) if device is not None and device.type == "cuda" else None
        pool = BufferPool(limit=(self._depth + 2) * dataset.num_tensors)  # ready, being made, in use
        self._allocate = self._feed.allocate if self._feed else pool.empty
        self._made: Making | None = None
        self._assembler: Assembler | None = None  # what its threads run
        self._ready: deque[Made | BaseException] = deque()  # of the group that was handed over last
        self._made_of: tuple[Any, ...] = ()  # what all its batches depend on
        self._made_next: tuple[int, int] | None = None  # epoch and position that it waits to go on from
        self._is_abandoned = False
        self._meter = _Meter(self._order.epoch)

    @property
    def order(self) -> Order:
        """Which samples each step takes, and how many have been consumed."""
        if self._ranked is not None:
            self._order = self._ranked.current()
        return self._order

    def __len__(self) -> int:
        """Steps of a whole epoch, the same on all ranks."""
        return self.order.num_steps

    def __repr__(self) -> str:
        return in_words("Loader", self._facts())

    def _repr_html_(self) -> str:
        return as_table("Loader", self._facts())

    def __iter__(self) -> Iterator[Any]:
        if self._ranked is not None:
            self._ranked.begin()
        if self._is_abandoned:
            self.set_epoch(self.order.epoch + 1)
        meter = self._meter = _Meter(self.order.epoch)
        began = time.perf_counter()
        made = self._take_up()
        try:
            total = self.order.num_steps * self.order.global_batch_size
            while self._made is not made or self.order.consumed < total:  # one that was replaced says so
                batch = self._next(made, meter)
                meter.seconds = time.perf_counter() - began
                yield batch
                del batch  # else its buffers wouldn't be free while the next batch is awaited
        except GeneratorExit:
            made.close()
            raise
        except BaseException:
            made.stop()  # not waiting: what ended a wait for data that never come mustn't wait for them
            raise
        meter.seconds = time.perf_counter() - began
        if self._across_epochs:
            self._made_next = (meter.epoch + 1, 0)
        self.set_epoch(self.order.epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        """Have the next iteration be all of epoch number `epoch`."""
        if self._made_next != (epoch, 0):
            self.close()
        self.order.epoch, self.order.consumed = epoch, 0
        self._is_abandoned = False

    def state_dict(self) -> dict[str, Any]:
        """What the training loop has been given so far, and of which order; equal on all ranks.

        Seed, shuffle (with "auto" what that chose) and global batch size; see `DataOrder.state_dict`.
        """
        return self.order.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Have the next iteration give the batches that followed when `state_dict` was called.

        With `shuffle="auto"` the order is shuffled as in the state.

        Raises:
            ConfigError: If the state can't come from a loader of this seed, shuffle, global batch size and
                dataset, or doesn't say so, as states that older versions saved.
        """
        self.close()
        self.order.load_state_dict(state)
        self._is_abandoned = False

    def report(self) -> EpochReport:
        """What the last epoch moved and waited for, or the current one so far; `str` of it is one line."""
        stores = self.dataset.stores
        resident = sum(store.residency() * store.nbytes for store in stores)
        resident /= sum(store.nbytes for store in stores)
        ways = {store.access for store in stores}
        access = ways.pop() if len(ways) == 1 else "mixed"
        return EpochReport(**vars(self._meter), resident=resident, access=access)

    def close(self) -> None:
        """End the background threads; the iterator that used them raises StoreClosedError."""
        if self._made is not None:
            self._made.close()
            self._made = self._made_next = None
            self._ready.clear()

    def _take_up(self) -> Making:
        """What gives the batches from here on: the one that there is, if it goes on from here."""
        wanted = (os.getpid(), self.dataset, self.order.key)
        goes_on = self._made_next == (self.order.epoch, self.order.consumed) and self._made_of == wanted
        if self._made is not None and goes_on:
            self._made_next = None
            return self._made
        self.close()
        jobs = Groups(jobs_of(self.order, goes_on=self._across_epochs))
        work = self._assembler = Assembler(
            self.dataset,
            jobs,
            allocate=self._allocate,
            feed=self._feed,
            collate=self._collate,
            batch_transform=self._batch_transform,
        )
        self._made_of = wanted
        if not self._num_workers:
            self._made = Inline(jobs, work)
            return self._made
        usual = torch.get_num_threads()  # ask now: afterwards the answer might be the one for our threads
        self._made = Ahead(
            jobs,
            work,
            depth=self._depth,
            num_threads=self._num_workers,
            setup=functools.partial(_use_one_thread, usual),
            name="ups_store loader",
        )
        return self._made

    def __getstate__(self) -> dict[str, Any]:
        return {
            **vars(self),
            "_made": None,
            "_assembler": None,
            "_ready": deque(),
            "_made_of": (),
            "_made_next": None,
        }  # threads stay here

    def _next(self, made: Making, meter: _Meter) -> Any:
        began = time.perf_counter()
        if not self._ready:
            on_wait = self.on_wait
            if self.timeout is not None and isinstance(made, Ahead):
                on_wait = self._in_time(made, self.timeout)
            self._ready.extend(made.get(on_wait))
        got = self._ready.popleft()
        if isinstance(got, BaseException):
            self._ready.append(got)  # again and again
            raise got
        meter.waited_s += time.perf_counter() - began
        if self._feed is not None and got.copied is not None:
            self._feed.receive(got.batch, got.copied)
        self._is_abandoned = True
        self.order.consumed = (got.step.number + 1) * self.order.global_batch_size
        meter.num_steps += 1
        meter.num_samples += len(got.step.items)
        meter.nbytes += got.nbytes
        meter.assembled_s += got.seconds
        meter.major_faults += got.major_faults
        return got.batch

    def _in_time(self, made: Ahead[Any, Any], timeout_s: float) -> OnWait:
        """What is called while the next batch is waited for, and ends that when it is late."""
        deadline_s, also, assembler = time.monotonic() + timeout_s, self.on_wait, self._assembler
        assert assembler is not None, "it is what `made` runs"

        def look() -> None:
            if also is not None:
                also()
            if time.monotonic() > deadline_s:
                error = assembler.late(timeout_s)
                made.leave()
                self._made = self._made_next = None
                raise error

        return look

    def _facts(self) -> dict[str, object]:
        order = self.order
        ready = f"{self._num_workers} workers, {self._depth} batches ahead" if self._num_workers else "none"
        return {
            "steps": f"{order.num_steps:,} of {order.global_batch_size:,} samples over all ranks",
            "position": f"epoch {order.epoch}, {order.consumed:,} samples consumed",
            "workers": ready,
            "dataset": repr(self.dataset),
        }


def _use_one_thread(usual: int) -> None:
    """Have torch use one thread in this thread, and the usual number in all that begin later.

    `set_num_threads` changes both; only from another thread can the second be undone without the first.
    """
    torch.set_num_threads(1)
    undo = threading.Thread(target=torch.set_num_threads, args=(usual,))
    undo.start()
    undo.join()


def make_loader(
    dataset: StoreDataset | MixedDataset | StoreLike | Iterable[StoreLike],
    *,
    batch_size: int | None = None,
    global_batch_size: int | None = None,
    shuffle: Shuffle | Literal["auto"] = False,
    seed: int = 0,
    drop_last: bool = False,
    pad_last: bool = False,
    weights: Sequence[float] | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    num_workers: int = NUM_WORKERS,
    prefetch_factor: int | None = None,
    collate_fn: Collate | None = None,
    batch_transform: BatchTransform | None = None,
    device: torch.device | str | None = None,
    across_epochs: bool | None = None,
    timeout: float | None = None,
) -> Loader:
    """A loader that has the next batches ready.

    Batches are new tensors as far as can be seen: their memory is used again only when nothing refers to
    it any more. Of a dataset with several stores every batch comes from one of them, on all ranks the same.

    Args:
        dataset: Where the samples come from; its `transform` is applied in the workers. A store, a path or
            several stand for a `StoreDataset` of them. Every batch of a `MixedDataset` has samples of all of
            its datasets; its batches are full, and `weights` and `epoch_size` are its own.
        batch_size: Samples of a batch, on each rank. Give this or `global_batch_size`.
        global_batch_size: Samples of a step over all ranks: the same number gives the same samples in every
            step, whatever the number of ranks, which have to divide it.
        shuffle: False for the order of the stores; True; "block" for stores that are larger than RAM or lie
            on slow disks: items are read in blocks of neighbours and mixed within a window of blocks; "auto"
            for "block" where the stores are larger than the memory or lie on a network file system, and True
            elsewhere. What it chose is logged, and kept in `state_dict`.
        seed: Of the order.
        drop_last: Whether to leave out the last batch of an epoch if it isn't full. Else it is shorter.
            Several ranks divide it as evenly as possible, so that all make equally many steps; if it
            has fewer samples than there are ranks, that is an error here: say True, or `pad_last=True`.
        pad_last: Whether to fill it up with samples from the epoch's beginning; `batch["valid"]` is False
            for those, and True for all others.
        weights: Shares of the steps, one per store; by default an epoch takes every sample once.
        rank: This process. By default as torch.distributed says, or without it the variables RANK and
            WORLD_SIZE, at the first batch: a loader may be made before the ranks are.
        world_size: Processes that share a step; likewise.
        num_workers: Threads that assemble batches, each another one; with 0 the loop's thread does it.
        prefetch_factor: Batches that each worker has ready or in the making, 2 by default; memory for as many
            batches is kept.
        collate_fn: Makes a batch of a sequence of samples, as torch's. By default the batch that was gathered
            is taken as it is, which is faster; or, of transformed samples, what torch's default makes.
        batch_transform: Called in the workers with every batch and its `Step`, whose `epoch` and `number` are
            what random numbers may depend on; what it returns is the batch.
        device: A CUDA device that batches are copied to while it computes; by default they stay in RAM.
        across_epochs: Whether to make the first batches of the next epoch while one ends, so that nothing
            waits between epochs; they lie ready until the next iteration, or until the loader is closed or
            dropped. By default where the order is shuffled, which is for training.
        timeout: Seconds that the loop waits for a batch before `BatchTimeoutError`, which names the store,
            its samples, and where in the code the thread is that reads them: for data on disks and servers
            that may hang. By default there is no limit. It needs workers.
    Raises:
        ConfigError: For an argument out of range, both batch sizes or none, a rank >= world_size, a batch
            that the ranks can't share. At a first batch, if the ranks aren't those of the first epoch, or if
            the ranks of torch.distributed have other orders, such as of a seed for each.
    """
    expect("num_workers", _is_number(num_workers, 0), "a whole number of at least 0", num_workers)
    if prefetch_factor is not None:
        fits = _is_number(prefetch_factor, 1) and num_workers > 0
        expected = (
            "a whole number of at least 1" if num_workers else "None, as num_workers=0 has nothing ready"
        )
        expect("prefetch_factor", fits, expected, prefetch_factor)
    check_timeout(timeout)
    fits = timeout is None or num_workers > 0
    expect("num_workers", fits, "at least 1 with `timeout`: the loop can't wait for itself", num_workers)
    found = _device(device)
    data = dataset if isinstance(dataset, MixedDataset) else _as_dataset(dataset)
    make = functools.partial(
        _make_order,
        data,
        (batch_size, global_batch_size),
        seed=seed,
        shuffle=shuffle,
        drop_last=drop_last,
        pad_last=pad_last,
        weights=weights,
    )
    return Loader(
        data,
        RankedOrder(make, rank, world_size),
        num_workers=num_workers,
        prefetch_factor=prefetch_factor,
        collate_fn=collate_fn,
        batch_transform=batch_transform,
        device=found,
        across_epochs=bool(shuffle) if across_epochs is None else across_epochs,
        timeout=timeout,
    )


def make_batch_sampler(
    dataset: StoreDataset | StoreLike | Iterable[StoreLike],
    *,
    batch_size: int | None = None,
    global_batch_size: int | None = None,
    shuffle: Shuffle | Literal["auto"] = False,
    seed: int = 0,
    drop_last: bool = False,
    pad_last: bool = False,
    weights: Sequence[float] | None = None,
    rank: int | None = None,
    world_size: int | None = None,
) -> StoreBatchSampler:
    """What gives torch's `DataLoader` the batches of `make_loader`: `DataLoader(dataset, batch_sampler=...)`.

    Needed where stores of different shapes are in one dataset; the arguments are those of `make_loader`.

    Raises:
        ConfigError: As `make_loader`.
    """
    data = _as_dataset(dataset)
    make = functools.partial(
        _make_order,
        data,
        (batch_size, global_batch_size),
        seed=seed,
        shuffle=shuffle,
        drop_last=drop_last,
        pad_last=pad_last,
        weights=weights,
    )
    return StoreBatchSampler(RankedOrder(make, rank, world_size), data.first_items)


def _as_dataset(dataset: StoreDataset | StoreLike | Iterable[StoreLike]) -> StoreDataset:
    if isinstance(dataset, StoreDataset):
        return dataset
    if isinstance(dataset, torch.utils.data.Dataset):
        raise ConfigError(
            "a dataset of torch's own",
            kind="dataset",
            expected="a StoreDataset, or a store, its path, or several",
            found=type(dataset).__name__,
            hint="torch's DataLoader takes a Subset or ConcatDataset of StoreDatasets",
        )
    is_known = isinstance(dataset, AnyStore | str | os.PathLike | Iterable)
    expect("dataset", is_known, "a StoreDataset, or a store, its path, or several", repr(dataset))
    return StoreDataset(dataset)


def _make_order(
    dataset: StoreDataset | MixedDataset,
    batch_sizes: tuple[int | None, int | None],
    rank: int,
    world_size: int,
    *,
    shuffle: Shuffle | Literal["auto"],
    pad_last: bool,
    weights: Sequence[float] | None,
    **options: Any,
) -> DataOrder | MixedOrder:
    expect("shuffle", shuffle in (True, False, "block", "auto"), "True, False, 'block' or 'auto'", shuffle)
    size, global_size = batch_sizes
    fits, found = (size is None) != (global_size is None), "neither" if size is None else "both"
    expect("batch_size", fits, "batch_size (per rank) or global_batch_size", found)
    if size is not None:
        expect("batch_size", _is_number(size, 1), "a whole number of at least 1", size)
        global_size = size * world_size
    keeps_shuffle = shuffle == "auto"
    if shuffle == "auto":
        shuffle = choose_shuffle(dataset, world_size=world_size).shuffle
    options |= {"global_batch_size": global_size, "shuffle": shuffle, "keeps_shuffle": keeps_shuffle}
    options |= {"rank": rank, "world_size": world_size, "block_size": _block_size(dataset)}
    if isinstance(dataset, MixedDataset):
        expect("weights", weights is None, "none: the MixedDataset has its own", weights)
        expect("pad_last", not pad_last, "False: batches of a MixedDataset are full", pad_last)
        options |= {"weights": dataset.weights, "epoch_size": dataset.epoch_size}
        return MixedOrder(dataset.sizes, **options)
    sizes = [len(source) for source in dataset.sources]
    return DataOrder(sizes, pad_last=pad_last, weights=weights, **options)


def _is_number(value: object, least: int) -> bool:
    return isinstance(value, int | np.integer) and bool(value >= least)


def _device(device: torch.device | str | None) -> torch.device | None:
    if device is None:
        return None
    found = None
    with contextlib.suppress(RuntimeError):  # no such name, or a bare number where there is no device
        found = torch.device(device)
    is_usable = found is not None and (
        found.type == "cpu" or (found.type == "cuda" and torch.cuda.is_available())
    )
    expect("device", is_usable, "cpu, or cuda where torch finds a device", str(device))
    return found


def _block_size(dataset: StoreDataset | MixedDataset) -> int:
    nbytes = max(source.sample_nbytes for source in dataset.sources)
    return min(MAX_BLOCK_SIZE, max(1, BLOCK_BYTES // max(1, nbytes)))
