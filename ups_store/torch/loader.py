"""`make_loader`: the batches of `ups_store.make_loader` as tensors, in memory or on a device."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import json
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import default_collate

from ups_store.errors import ConfigError
from ups_store.read import assemble, loader, ranks
from ups_store.read.assemble import BatchTransform, Collate, Groups, Made, Order
from ups_store.read.base import AnyStore
from ups_store.read.items import StoreLike
from ups_store.read.loader import NUM_WORKERS, check_workers
from ups_store.read.order import Shuffle, Step, expect
from ups_store.read.ranks import RankedOrder, ranked_order
from ups_store.torch.batch import Batch, BatchRows
from ups_store.torch.dataset import BatchSource, MixedDataset, StoreDataset
from ups_store.torch.device import DeviceFeed
from ups_store.torch.memory import Allocate, TensorPool
from ups_store.torch.sampler import StoreBatchSampler

_shared_orders = itertools.count()  # ranks begin with their orders one after the other, all alike


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
        self._pool = TensorPool(limit=self._num_buffers)

    def _new_maker(self, groups: Groups) -> Maker:
        feed = self._feed
        allocate = self._pool if feed is None else feed.allocate
        return Maker(self.dataset, groups, allocate, self._collate, self._batch_transform, feed)  # type: ignore[arg-type]

    def _setup(self) -> Callable[[], None]:
        # Ask now: afterwards the answer might be the one for our threads.
        return functools.partial(_use_one_thread, torch.get_num_threads())

    def _receive(self, made: Made) -> None:
        if self._feed is not None and made.copied is not None:
            self._feed.receive(made.batch, made.copied)


class Maker(assemble.Maker):
    """Makes batches of tensors, and copies them to a device if they are wanted there."""

    kind = Batch

    def __init__(
        self,
        dataset: BatchSource,
        groups: Groups,
        allocate: Allocate,
        collate: Collate | None,
        batch_transform: BatchTransform | None,
        feed: DeviceFeed | None,
    ) -> None:
        super().__init__(dataset, groups, allocate, collate, batch_transform)
        self._feed = feed
        self.may_group = self.may_group and feed is None

    def count(self, batch: Any) -> int:
        """Count the bytes of a batch's tensors."""
        nbytes: int = batch.nbytes
        return nbytes

    def split(self, batch: Batch, num: int) -> list[Batch]:
        """Cut a batch into so many."""
        return batch.split(num)

    def mark(self, batch: dict[str, Any], mask: npt.NDArray[np.bool_]) -> None:
        """Say which rows only fill up the last batch."""
        batch["valid"] = torch.from_numpy(mask)

    def collated(self, batch: Batch, step: Step) -> Any:
        """Make a batch of a batch's samples, transformed where there is a transform."""
        rows: Any = BatchRows(batch)
        if self._transform is not None:
            rows = rows.transformed(self._transform)
        return (self._collate or default_collate)(rows)

    def sent(self, batch: Any) -> tuple[Any, Any]:
        """Start the copy to the device."""
        return (batch, None) if self._feed is None else self._feed.send(batch)


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
    check_workers(num_workers, prefetch_factor, timeout)
    where = _device(device)
    data = _as_dataset(dataset, reading)
    order = ranked_order(
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
        device=where,
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
    """Make a sampler for torch's own loader: `DataLoader(dataset, batch_sampler=...)`.

    It gives the batches of `make_loader`, and has its arguments. Stores of different shapes in one dataset
    need it.

    Raises:
        ConfigError: As `make_loader`.
    """
    data = _as_dataset(dataset, {})
    if isinstance(data, MixedDataset):
        raise _no_dataset(data, "make_loader takes it")
    order = ranked_order(
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
