"""`make_loader` and `make_batch_sampler`: from plain arguments, every one of them checked."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch

from ups_store.errors import ConfigError
from ups_store.read.order import DataOrder, Shuffle
from ups_store.torch.dataset import StoreDataset
from ups_store.torch.loader import Loader
from ups_store.torch.sampler import StoreBatchSampler
from ups_store.torch.shuffle import choose_shuffle

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
