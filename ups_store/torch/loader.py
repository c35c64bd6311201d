"""`make_loader`: the batches of `ups_store.make_loader` as tensors, in memory or on a device.

And their order for torch's own `DataLoader`: `make_batch_sampler`.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import json
import os
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch.utils.data import Sampler, default_collate

from ups_store.errors import ConfigError
from ups_store.read import loader, ranks
from ups_store.read.base import AnyStore
from ups_store.read.items import ShowsFacts, StoreLike
from ups_store.read.loader import NUM_WORKERS, BatchTransform, Collate, Made
from ups_store.read.order import DataOrder, Order, Shuffle, Step, expect
from ups_store.read.ranks import RankedOrder
from ups_store.torch.batch import Batch, BatchRows, TensorPool
from ups_store.torch.dataset import BatchSource, MixedDataset, StoreDataset
from ups_store.torch.device import DeviceFeed

_CALLERS = 8  # from a sampler through Accelerate's to what makes a loop's iterator

_shared_orders = itertools.count()  # ranks begin with their orders one after the other, all alike


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
    **reading: Any,
) -> Loader:
    """Make a loader that has the next batches ready; see `ups_store.make_loader`, whose arguments it has.

    Batches are new tensors as far as can be seen: their memory is used again only when nothing refers to
    it any more. Of a dataset with several stores every batch comes from one of them, on all ranks the same.

    Args:
        dataset: Where the samples come from; its `transform` is applied in the workers. A store, a path or
            several stand for a `StoreDataset` of them. Every batch of a `MixedDataset` has samples of all of
            its datasets; its batches are full, and `weights` and `epoch_size` are its own.
        batch_size: As all arguments that aren't named here, what it is for `ups_store.make_loader`.
        rank: This process. By default as torch.distributed says, or without it the variables RANK and
            WORLD_SIZE, at the first batch: a loader may be made before the ranks are.
        world_size: Processes that share a step; likewise.
        collate_fn: Makes a batch of a sequence of samples, as torch's. By default the batch that was gathered
            is taken as it is, which is faster; or, of transformed samples, what torch's default makes.
        device: A CUDA device that batches are copied to while it computes; by default they stay in RAM.
        reading: Of `StoreDataset`, where `dataset` is none: names, window, state, dtype, ragged, transform.
    Raises:
        ConfigError: For an argument out of range, both batch sizes or none, a rank >= world_size, a batch
            that the ranks can't share. At a first batch, if the ranks aren't those of the first epoch, or if
            the ranks of torch.distributed have other orders, such as of a seed for each.
    """
    target = None
    with contextlib.suppress(RuntimeError):  # no such name, or a bare number where there is no device
        target = None if device is None else torch.device(device)
    is_cuda = target is not None and target.type == "cuda" and torch.cuda.is_available()
    is_usable = device is None or is_cuda or (target is not None and target.type == "cpu")
    expect("device", is_usable, "cpu, or cuda where torch finds a device", str(device))
    data = _as_dataset(dataset, reading)
    order = RankedOrder(
        data,
        TorchRanks(rank, world_size),
        batch_size=batch_size,
        global_batch_size=global_batch_size,
        shuffle=shuffle,
        seed=seed,
        drop_last=drop_last,
        pad_last=pad_last,
        weights=weights,
    )
    return Loader(
        data,
        order,
        num_workers=num_workers,
        prefetch_factor=prefetch_factor,
        collate_fn=collate_fn,
        batch_transform=batch_transform,
        device=target,
        across_epochs=bool(shuffle) if across_epochs is None else across_epochs,
        timeout=timeout,
    )


class Loader(loader.Loader):
    """Batches of a dataset as tensors; all else is said at `ups_store.read.loader.Loader`.

    Args:
        dataset: Where batches come from.
        order: Which samples each step takes; a `RankedOrder` where its ranks aren't known yet.
        device: A CUDA device that batches are copied to while it computes.
        options: As those of `make_loader`: num_workers, prefetch_factor, collate_fn, batch_transform,
            across_epochs, timeout.
    """

    def __init__(
        self,
        dataset: BatchSource,
        order: Order | RankedOrder,
        *,
        device: torch.device | None = None,
        **options: Any,
    ) -> None:
        super().__init__(dataset, order, **options)
        self._feed = DeviceFeed(device) if device is not None and device.type == "cuda" else None
        self._tensors = TensorPool(limit=self._num_buffers)

    def _new_maker(self) -> Maker:
        return Maker(self.dataset, self._tensors, self._collate, self._batch_transform, self._feed)

    def _receive(self, made: Made) -> None:
        if self._feed is not None and made.copied is not None:
            self._feed.receive(made.batch, made.copied)


class Maker(loader.Maker):
    """Makes batches of tensors, and copies them to a device if they are wanted there."""

    def __init__(
        self,
        dataset: BatchSource,
        pool: TensorPool,
        collate: Collate | None,
        batch_transform: BatchTransform | None,
        feed: DeviceFeed | None,
    ) -> None:
        super().__init__(dataset, pool if feed is None else feed.allocate, collate, batch_transform)
        self._feed = feed
        self.may_group = self.may_group and feed is None
        self._num_threads = torch.get_num_threads()  # asked now: later the answer may be that for our threads

    def setup(self) -> None:
        """Have torch use one thread in this thread, and the usual number in all that begin later.

        `set_num_threads` changes both; only from another thread can the second be undone without the first.
        """
        torch.set_num_threads(1)
        undo = threading.Thread(target=torch.set_num_threads, args=(self._num_threads,))
        undo.start()
        undo.join()

    def finish(self, batch: Any, step: Step) -> tuple[Any, Any]:
        """Make of what was gathered what the loop is given, and start its copy to the device."""
        if step.mask is not None and isinstance(batch, Batch):
            batch["valid"] = torch.from_numpy(step.mask)
        if self._transform is not None or self._collate is not None:
            rows: Any = BatchRows(batch)
            if self._transform is not None:
                rows = rows.transformed(self._transform)
            batch = (self._collate or default_collate)(rows)
        if self._batch_transform is not None:
            batch = self._batch_transform(batch, step)
        return (batch, None) if self._feed is None else self._feed.send(batch)


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
    """Make a sampler for torch's own loader: `DataLoader(dataset, batch_sampler=...)`.

    It gives the batches of `make_loader`, and has its arguments. Stores of different shapes in one dataset
    need it.

    Raises:
        ConfigError: As `make_loader`.
    """
    data = _as_dataset(dataset, {})
    if isinstance(data, MixedDataset):
        raise _no_dataset(data, "make_loader takes it")
    order = RankedOrder(
        data,
        TorchRanks(rank, world_size),
        batch_size=batch_size,
        global_batch_size=global_batch_size,
        shuffle=shuffle,
        seed=seed,
        drop_last=drop_last,
        pad_last=pad_last,
        weights=weights,
    )
    return StoreBatchSampler(order, data.first_items)


def _as_dataset(dataset: Any, reading: dict[str, Any]) -> StoreDataset | MixedDataset:
    inspect.signature(StoreDataset).bind(dataset, **reading)  # a misspelt argument of ours is a TypeError
    if isinstance(dataset, StoreDataset | MixedDataset):
        expect("dataset", not reading, f"{', '.join(reading)} to be said where the dataset is made", dataset)
        return dataset
    if isinstance(dataset, torch.utils.data.Dataset):
        raise _no_dataset(dataset, "torch's DataLoader takes a Subset or ConcatDataset of StoreDatasets")
    is_known = isinstance(dataset, AnyStore | str | os.PathLike | Iterable)
    expect("dataset", is_known, "a StoreDataset, or a store, its path, or several", repr(dataset))
    return StoreDataset(dataset, **reading)


def _no_dataset(dataset: object, hint: str) -> ConfigError:
    return ConfigError(
        "a dataset of another kind",
        kind="dataset",
        expected="a StoreDataset, or a store, its path, or several",
        found=type(dataset).__name__,
        hint=hint,
    )


class StoreBatchSampler(ShowsFacts, Sampler[list[int]]):
    """Batches of items of a `StoreDataset`, each from one store: `DataLoader(dataset, batch_sampler=...)`.

    Without it a `DataLoader` mixes stores in a batch, which only works where their arrays have equal shapes.
    Every iteration is the next epoch, also after one that was abandoned, unless the loop had no batch of that
    yet; after `load_state_dict` it is the rest of the epoch that was saved. The order is that of
    `make_loader`; with `pad_last` nothing marks the rows that fill up a batch.

    It shares samples among the ranks itself. Accelerate does so once more with a sampler that it prepares,
    which is an error unless that was made with `rank=0, world_size=1`.

    `state_dict` counts the batches that were taken from here. A `DataLoader` takes some before the loop needs
    them; torchdata's `StatefulDataLoader` knows that, and its own state has this one as it was.

    Args:
        order: Which items each step takes, as numbers within a store; a `RankedOrder` where its ranks aren't
            known yet.
        first: Number of each store's first item in the dataset.
        sampler_options: None; Lightning passes some where it would put a sampler in place of this one.

    Raises:
        ConfigError: If Lightning makes it anew; kind "sampler".
    """

    def __init__(
        self, order: DataOrder | RankedOrder, first: list[int] | None = None, **sampler_options: Any
    ) -> None:
        if sampler_options or first is None:
            raise ConfigError(
                "another sampler can't be put in place of this one, which shares samples among the ranks",
                kind="sampler",
                found=f"{type(order).__name__}, {', '.join(sampler_options)}",
                hint="with Lightning give `fit` the loader of make_loader, or say "
                "Trainer(use_distributed_sampler=False)",
            )
        self._order, self._first = order, first
        self._is_abandoned = False
        self._taken_ahead_of: int | None = None  # items consumed before the workers of a loop were given some

    @property
    def order(self) -> DataOrder:
        """Tell which items each step takes, and how many have been taken."""
        order = self._order.current() if isinstance(self._order, RankedOrder) else self._order
        assert isinstance(order, DataOrder)
        return order

    @property
    def batch_size(self) -> int:
        """Items of a batch on this rank."""
        return self.order.global_batch_size // self.order.world_size

    @property
    def drop_last(self) -> bool:
        """Tell whether batches that aren't full are left out."""
        return self.order.drop_last

    def __len__(self) -> int:
        """Steps of a whole epoch, the same on all ranks."""
        return self.order.num_steps

    def _facts(self) -> dict[str, object]:
        order = self.order
        return {
            "steps": f"{order.num_steps:,} of {order.global_batch_size:,} items over all ranks",
            "shuffle": order.shuffle,
            "seed": order.seed,
            "position": f"epoch {order.epoch}, {order.consumed:,} items consumed",
        }

    def __iter__(self) -> Iterator[list[int]]:
        if isinstance(self._order, RankedOrder):
            self._order.begin()
        order = self.order
        if self._is_abandoned:
            self.set_epoch(order.epoch + 1)
        elif self._taken_ahead_of is not None:
            order.consumed = self._taken_ahead_of
        self._taken_ahead_of = order.consumed
        for step in order.steps():
            if not self._is_abandoned:  # by whom it is asked for, until a loop is given a batch
                self._is_abandoned = not _is_asked_ahead(order.world_size)
            order.consumed = (step.number + 1) * order.global_batch_size
            yield (step.items + self._first[step.source]).tolist()
        self.set_epoch(order.epoch + 1)

    def state_dict(self) -> dict[str, Any]:
        """Give what has been taken from here so far, as `Loader.state_dict`; equal on all ranks."""
        return self.order.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Have the next iteration give the batches that followed when `state_dict` was called.

        Raises:
            ConfigError: As `Loader.load_state_dict`.
        """
        self.order.load_state_dict(state)
        self._is_abandoned, self._taken_ahead_of = False, None

    def set_epoch(self, epoch: int, *, consumed: int = 0) -> None:
        """Have the next iteration be epoch number `epoch`.

        Args:
            epoch: Its number.
            consumed: Items of it that the training loop has had, over all ranks: steps times the global batch
                size.
        Raises:
            ConfigError: If the order can't stand there.
        """
        self.load_state_dict({**self.order.state_dict(), "epoch": epoch, "consumed": consumed})


def _is_asked_ahead(world_size: int) -> bool:
    """Look at who asks for a batch: the loop, or a `DataLoader` for its workers before the loop asks for one.

    Wrappers that want such a loader's state have it begin, and drop what began.

    Raises:
        ConfigError: If Accelerate shares batches among processes that share their samples already.
    """
    frame = sys._getframe(1).f_back
    for _ in range(_CALLERS):
        if frame is None:
            return False
        caller: Any = frame.f_locals.get("self")
        if type(caller).__name__ == "BatchSamplerShard" and caller.num_processes > 1 < world_size:
            raise ConfigError(
                "Accelerate would share once more what the ranks share already, so most samples never come",
                kind="world_size",
                expected="`rank=0, world_size=1` in make_batch_sampler",
                found=f"world_size {world_size}, and {caller.num_processes} processes",
                hint="or prepare the loader of make_loader, which Accelerate takes as it is",
            )
        if frame.f_code.co_name == "_reset" and "dataloader" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


class TorchRanks(ranks.Ranks):
    """Number of this process and of all, as torch.distributed says, once it is initialised."""

    def found(self) -> tuple[int, int]:
        """Find both where they aren't given."""
        if _has_group():
            return torch.distributed.get_rank(), torch.distributed.get_world_size()
        return super().found()

    def compare(self, mine: dict[str, Any]) -> dict[str, Any] | None:
        """Give the settings that another rank began with, if they differ from these.

        The first rank to come leaves its own, the others compare: no rank waits for another.
        """
        if not _has_group():
            return None
        store: Any = torch.distributed.distributed_c10d._get_default_store()
        if store is None:  # backends that need none
            return None
        text = json.dumps(mine)
        first = store.compare_set(f"ups_store/order/{next(_shared_orders)}", "", text).decode()
        return None if first == text else json.loads(first)

    def agree(self, choice: tuple[Shuffle, str]) -> list[tuple[Shuffle, str]]:
        """Give the choices of all ranks."""
        if not _has_group():
            return super().agree(choice)
        choices = [choice] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(choices, choice)
        return choices


def _has_group() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def ranks_of_torch(rank: int | None = None, world_size: int | None = None) -> tuple[int, int]:
    """Give the numbers of this process and of all: those not given as torch.distributed says, if initialised.

    Before, or without it, as the variables RANK and WORLD_SIZE say, which `torchrun` sets; else 0 and 1.
    """
    return TorchRanks(rank, world_size).current()
