"""`Loader`: batches that threads have ready, in an order that any number of ranks agree on.

`make_loader` and `make_batch_sampler`: from plain arguments, every one of them checked.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from ups_store.errors import ConfigError
from ups_store.read.order import DataOrder, Shuffle
from ups_store.torch.ahead import Ahead
from ups_store.torch.assembler import Assembler, EpochReport, EpochStep, Made, jobs_of
from ups_store.torch.batch import Batch
from ups_store.torch.dataset import StoreDataset
from ups_store.torch.device import DeviceFeed
from ups_store.torch.memory import BufferPool
from ups_store.torch.sampler import StoreBatchSampler, choose_shuffle


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
    until they are asked for, or it is closed or dropped. `make_loader` makes loaders.

    Attributes:
        dataset: Where the samples come from.
        order: Which ones each step takes, and how many have been consumed.
    """

    def __init__(
        self,
        dataset: StoreDataset,
        order: DataOrder,
        *,
        prefetch: int = 2,
        device: torch.device | None = None,
        num_threads: int = 2,
        across_epochs: bool = False,
        keeps_shuffle: bool = False,
    ) -> None:
        self.dataset, self.order = dataset, order
        self._prefetch, self._num_threads = prefetch, num_threads
        self._across_epochs, self._keeps_shuffle = across_epochs, keeps_shuffle
        self._feed = DeviceFeed(device) if device is not None and device.type == "cuda" else None
        num_tensors = max(len(source.fields) for source in dataset.sources)
        pool = BufferPool(limit=(prefetch + 2) * num_tensors)  # ready, being made, in use
        self._allocate = self._feed.allocate if self._feed else pool.empty
        self._made: Ahead[EpochStep, Made] | None = None
        self._made_of: tuple[Any, ...] = ()  # what all its batches depend on
        self._made_next: tuple[int, int] | None = None  # epoch and position that it waits to go on from
        self._is_abandoned = False
        self._meter = _Meter(order.epoch)
        self._batch_nbytes: dict[int, int] = {}

    def __len__(self) -> int:
        """Steps of a whole epoch, the same on all ranks."""
        return self.order.num_steps

    def __iter__(self) -> Iterator[Batch]:
        if self._is_abandoned:
            self.set_epoch(self.order.epoch + 1)
        meter = self._meter = _Meter(self.order.epoch)
        began = time.perf_counter()
        made = self._take_up()
        try:
            total = self.order.num_steps * self.order.batch_size
            while self._made is not made or self.order.consumed < total:  # one that was replaced says so
                batch = self._next(made, meter)
                meter.seconds = time.perf_counter() - began
                yield batch
                del batch  # else its buffers wouldn't be free while the next batch is awaited
        except BaseException:
            made.close()
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
        """What the training loop has been given so far: {seed, epoch, consumed}; equal on all ranks.

        With `shuffle="auto"` also what that chose, which might be something else when the run goes on.
        """
        chosen = {"shuffle": self.order.shuffle} if self._keeps_shuffle else {}
        return {**self.order.state_dict(), **chosen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Have the next iteration give the batches that followed when `state_dict` was called.

        Raises:
            ConfigError: If the state can't come from a loader of this batch size and dataset.
        """
        self.close()
        self.order.load_state_dict(state)
        self._is_abandoned = False

    def report(self) -> EpochReport:
        """What the last epoch moved and waited for, or the current one so far; `str` of it is one line."""
        stores = [source.store for source in self.dataset.sources]
        resident = sum(store.residency() * store.nbytes for store in stores)
        return EpochReport(**vars(self._meter), resident=resident / sum(store.nbytes for store in stores))

    def close(self) -> None:
        """End the background threads; the iterator that used them raises StoreClosedError."""
        if self._made is not None:
            self._made.close()
            self._made = self._made_next = None

    def _take_up(self) -> Ahead[EpochStep, Made]:
        """What gives the batches from here on: the one that there is, if it goes on from here."""
        wanted = (os.getpid(), self.dataset, self.order.seed, self.order.shuffle)
        goes_on = self._made_next == (self.order.epoch, self.order.consumed) and self._made_of == wanted
        if self._made is not None and goes_on:
            self._made_next = None
            return self._made
        self.close()
        usual = torch.get_num_threads()  # ask now: afterwards the answer might be the one for our threads
        self._made_of = wanted
        self._made = Ahead(
            jobs_of(self.order, goes_on=self._across_epochs),
            Assembler(self.dataset, allocate=self._allocate, feed=self._feed),
            depth=self._prefetch,
            num_threads=min(self._num_threads, self._prefetch),
            setup=functools.partial(_use_one_thread, usual),
            name="ups_store loader",
        )
        return self._made

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_made": None, "_made_of": (), "_made_next": None}  # threads stay here

    def _next(self, made: Iterator[Made], meter: _Meter) -> Batch:
        began = time.perf_counter()
        got = next(made)
        meter.waited_s += time.perf_counter() - began
        if self._feed is not None and got.copied is not None:
            self._feed.receive(got.batch, got.copied)
        self._is_abandoned = True
        self.order.consumed = (got.step.number + 1) * self.order.batch_size
        meter.num_steps += 1
        meter.num_samples += len(got.step.items)
        meter.nbytes += self._nbytes_of(got)
        meter.assembled_s += got.seconds
        meter.major_faults += got.major_faults
        return got.batch

    def _nbytes_of(self, made: Made) -> int:
        nbytes = self._batch_nbytes.get(made.step.source)
        if nbytes is None:  # counting takes as long as half the rest, and all batches of a source are alike
            nbytes = self._batch_nbytes[made.step.source] = made.batch.nbytes
        return nbytes


def _use_one_thread(usual: int) -> None:
    """Have torch use one thread in this thread, and the usual number in all that begin later.

    `set_num_threads` changes both; only from another thread can the second be undone without the first.
    """
    torch.set_num_threads(1)
    undo = threading.Thread(target=torch.set_num_threads, args=(usual,))
    undo.start()
    undo.join()


BLOCK_BYTES = 4 << 20  # read at once with shuffle="block": a disk's seek or a network's round trip disappears

MAX_BLOCK_SIZE = 4096


def make_loader(
    dataset: StoreDataset,
    *,
    batch_size: int,
    shuffle: Shuffle | Literal["auto"] = True,
    seed: int = 0,
    drop_last: bool = False,
    weights: Sequence[float] | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    prefetch: int = 2,
    device: torch.device | str | None = None,
    num_threads: int = 2,
    across_epochs: bool | None = None,
    block_size: int | None = None,
    blocks_per_window: int = 64,
) -> Loader:
    """A loader that has the next batches ready.

    Batches are new tensors as far as anybody can tell: their memory is used again only when nothing refers to
    it any more. Of a dataset with several stores every batch comes from one of them, on all ranks the same.

    Args:
        dataset: Where the samples come from.
        batch_size: Samples of one step, over all ranks: the same number gives the same samples in every
            step, whatever the number of ranks.
        shuffle: True; False for the order of the stores; "block" for stores that are larger than RAM or lie
            on slow disks: items are read in blocks of neighbours and mixed within a window of blocks; "auto"
            for "block" where the stores are larger than the memory or lie on a network file system, and True
            elsewhere. What it chose is logged, and kept in `state_dict`.
        seed: Of the order.
        drop_last: Whether to leave out the last batch of an epoch if it isn't full. Else it is filled up with
            samples from the epoch's beginning, and `batch["valid"]` is False for those.
        weights: Shares of the steps, one per store; by default an epoch takes every sample once.
        rank: This process; by default as torch.distributed says.
        world_size: Processes that share a batch; by default as torch.distributed says.
        prefetch: Batches that lie ready or are in the making.
        device: A CUDA device that batches are copied to while it computes; by default they stay in RAM.
        num_threads: Threads that assemble batches, each another one; more than `prefetch` have no use.
        across_epochs: Whether to make the first batches of the next epoch while one ends, so that nobody
            waits between epochs; they lie ready, `prefetch` of them, until the next iteration, or until the
            loader is closed or dropped. By default where the order is shuffled, which is for training.
        block_size: Items of a block with shuffle="block"; about 4 MiB of them by default.
        blocks_per_window: Blocks that are mixed with shuffle="block".
    Raises:
        ConfigError: For an argument out of range, a rank >= world_size, a batch that the ranks can't share.
    """
    for name, number in {"prefetch": prefetch, "num_threads": num_threads}.items():
        fits = isinstance(number, int | np.integer) and number >= 1
        _check(name, fits, "a whole number of at least 1", number)
    found, is_chosen = _device(device), shuffle == "auto"
    order = _make_order(
        dataset,
        rank,
        world_size,
        batch_size=batch_size,
        seed=seed,
        shuffle=shuffle,
        drop_last=drop_last,
        weights=weights,
        block_size=block_size,
        blocks_per_window=blocks_per_window,
    )
    return Loader(
        dataset,
        order,
        prefetch=prefetch,
        device=found,
        num_threads=num_threads,
        across_epochs=order.shuffle is not False if across_epochs is None else across_epochs,
        keeps_shuffle=is_chosen,
    )


def make_batch_sampler(
    dataset: StoreDataset,
    *,
    batch_size: int,
    shuffle: Shuffle | Literal["auto"] = True,
    seed: int = 0,
    drop_last: bool = False,
    weights: Sequence[float] | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    block_size: int | None = None,
    blocks_per_window: int = 64,
) -> StoreBatchSampler:
    """What gives torch's `DataLoader` the batches of `make_loader`: `DataLoader(dataset, batch_sampler=...)`.

    Needed where stores of different shapes are in one dataset; the arguments are those of `make_loader`.

    Raises:
        ConfigError: For an argument out of range, a rank >= world_size, a batch that the ranks can't share.
    """
    order = _make_order(
        dataset,
        rank,
        world_size,
        batch_size=batch_size,
        seed=seed,
        shuffle=shuffle,
        drop_last=drop_last,
        weights=weights,
        block_size=block_size,
        blocks_per_window=blocks_per_window,
    )
    return StoreBatchSampler(order, dataset.first_items)


def _make_order(
    dataset: StoreDataset,
    rank: int | None,
    world_size: int | None,
    *,
    shuffle: Shuffle | Literal["auto"],
    block_size: int | None,
    **options: Any,
) -> DataOrder:
    _check("dataset", isinstance(dataset, StoreDataset), "StoreDataset(path)", repr(dataset))
    rank, world_size = _ranks(rank, world_size)
    _check("shuffle", shuffle in (True, False, "block", "auto"), "True, False, 'block' or 'auto'", shuffle)
    if shuffle == "auto":
        shuffle = choose_shuffle(dataset, world_size=world_size).shuffle
    return DataOrder(
        [len(source) for source in dataset.sources],
        shuffle=shuffle,
        rank=rank,
        world_size=world_size,
        block_size=_block_size(dataset) if block_size is None else block_size,
        **options,
    )


def _ranks(rank: int | None, world_size: int | None) -> tuple[int, int]:
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if rank is None:
        rank = torch.distributed.get_rank() if distributed else 0
    if world_size is None:
        world_size = torch.distributed.get_world_size() if distributed else 1
    return rank, world_size


def _device(device: torch.device | str | None) -> torch.device | None:
    if device is None:
        return None
    found = None
    with contextlib.suppress(RuntimeError):  # no such name, or a bare number where there is no device
        found = torch.device(device)
    is_usable = found is not None and (
        found.type == "cpu" or (found.type == "cuda" and torch.cuda.is_available())
    )
    _check("device", is_usable, "cpu, or cuda where torch finds a device", str(device))
    return found


def _block_size(dataset: StoreDataset) -> int:
    nbytes = max(source.sample_nbytes for source in dataset.sources)
    return min(MAX_BLOCK_SIZE, max(1, BLOCK_BYTES // max(1, nbytes)))


def _check(name: str, fits: bool, expected: str, found: object) -> None:
    if not fits:
        raise ConfigError(name, kind=name, expected=expected, found=found)
