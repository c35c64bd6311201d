"""`make_loader`: batches of stores that threads have ready, as dictionaries of NumPy arrays; without torch.

The order is one that any number of ranks agree on, and goes on in the middle of an epoch. `ups_store.torch`
gives the same batches in the same order as tensors.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy.typing as npt

from ups_store.errors import BatchTimeoutError
from ups_store.read.assemble import BatchTransform, Collate, Groups, Made, Maker, Order, jobs_of
from ups_store.read.items import BufferPool, StoreItems, StoreLike, as_table, in_words
from ups_store.read.order import Shuffle, Step, expect
from ups_store.read.prefetch import OnWait, Prefetch, check_timeout, deadline
from ups_store.read.ranks import RankedOrder, Ranks, is_number, ranked_order
from ups_store.read.windows import Window

NUM_WORKERS, PREFETCH_FACTOR = 2, 2  # the latter as of torch's DataLoader

WAIT_SHARE = 0.05  # a loop that waits less than this is not held up by its data

FAULTS_PER_S = 100.0  # major page faults, each a read from the disk


def make_loader(
    stores: StoreLike | Iterable[StoreLike],
    *,
    names: Sequence[str] | None = None,
    window: Window | None = None,
    state: str | None = None,
    dtype: npt.DTypeLike | None = None,
    ragged: Literal["padded", "views"] | None = None,
    transform: Callable[[dict[str, Any]], Any] | None = None,
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
    across_epochs: bool | None = None,
    timeout: float | None = None,
) -> Loader:
    """Make a loader of dictionaries of NumPy arrays that has the next batches ready.

    Keys are the names of the arrays, or for windows `z0`, `z1`, `params`, `dt` and `t`, and `index`, the
    items; see `ups_store.torch.Batch`, which has `task` besides. Order and state are those of
    `ups_store.torch.make_loader`: either goes on where the other stopped. Batches are new arrays as far as
    can be seen: their memory is used again only when nothing refers to it any more.

    Args:
        stores: A store, its path, or several of them; every batch comes from one, on all ranks the same.
        names: Arrays to take; by default all, with windows those that don't vary in time.
        window: What an item spans; None for whole samples.
        state: Array that windows are taken of; by default "latent", or "fields" where there is none.
        dtype: What arrays of floating-point numbers are converted to.
        ragged: "padded" for arrays (B, L, ...), zeros behind each sample, with the numbers of rows as
            `NAME.lengths`; "views" for lists of B arrays. Text is a list of `str` in any case.
        transform: Called in the workers with every sample, a dictionary; what it returns is stacked.
        batch_size: Samples of a batch, on each rank. Give this or `global_batch_size`.
        global_batch_size: Samples of a step over all ranks: the same number gives the same samples in every
            step, whatever the number of ranks, which have to divide it.
        shuffle: False for the order of the stores; True; "block" for stores that are larger than RAM or lie
            on slow disks: items are read in blocks of neighbours and mixed within a window of blocks; "auto"
            for "block" where the stores are larger than the memory or lie on a network file system, and True
            elsewhere. What it chose is logged, and kept in `state_dict`.
        seed: Of the order.
        drop_last: Whether to leave out the last batch of an epoch if it isn't full. Else it is shorter, and
            ranks divide it; if it has fewer samples than there are ranks, that is an error here.
        pad_last: Whether to fill it up with samples from the epoch's beginning; `batch["valid"]` is False
            for those, and True for all others.
        weights: Shares of the steps, one per store; by default an epoch takes every sample once.
        rank: This process. By default as the variables RANK and WORLD_SIZE say at the first batch.
        world_size: Processes that share a step; likewise.
        num_workers: Threads that assemble batches, each another one; with 0 the loop's thread does it, as it
            does where a batch takes less than handing it over.
        prefetch_factor: Batches that each worker has ready or in the making, 2 by default; memory for as many
            batches is kept.
        collate_fn: Makes a batch of a sequence of samples. By default the batch is gathered as a whole.
        batch_transform: Called in the workers with every batch and its `Step`, whose `epoch` and `number` are
            what random numbers may depend on; what it returns is the batch.
        across_epochs: Whether to make the first batches of the next epoch while one ends; they lie ready
            until the next iteration, or until the loader is closed or dropped. By default where it shuffles.
        timeout: Seconds that the loop waits for a batch before `BatchTimeoutError`, which names the store,
            its samples, and where in the code the thread is that reads them. It needs workers.
    Raises:
        ConfigError: For an argument out of range, both batch sizes or none, a rank >= world_size, a batch
            that the ranks can't share. At a first batch, if the ranks aren't those of the first epoch.
        NotCommittedError: If a store is incomplete.
        SpecError: If no trajectory is as long as a window, or for a ragged array without `ragged`.
    """
    check_workers(num_workers, prefetch_factor, timeout)
    items = StoreItems(stores, names=names, window=window, state=state, dtype=dtype, ragged=ragged)
    items.transform = transform
    order = ranked_order(
        items,
        Ranks(rank, world_size),
        batch_size=batch_size,
        global_batch_size=global_batch_size,
        shuffle=shuffle,
        seed=seed,
        drop_last=drop_last,
        pad_last=pad_last,
        weights=weights,
    )
    return Loader(
        items,
        order,
        num_workers=num_workers,
        prefetch_factor=prefetch_factor,
        collate_fn=collate_fn,
        batch_transform=batch_transform,
        across_epochs=bool(shuffle) if across_epochs is None else across_epochs,
        timeout=timeout,
    )


@dataclass
class EpochReport:
    """One epoch of a loader, or what there has been of it so far.

    Attributes:
        epoch: Its number.
        num_steps: Batches that the loop was given.
        num_samples: Samples in them on this rank, those that only fill up the last batch included.
        nbytes: Bytes that were gathered for them.
        seconds: From the first `next` on.
        waited_s: Of those, what the loop waited for batches, or spent on making them itself.
        assembled_s: What was spent on making them, added up over the threads.
        major_faults: Page faults meanwhile that read from the disk.
        resident: Share of the stores that lay in RAM at the end, 0 to 1.
        access: How samples were got, as `Store.access`: "decode" of packed stores; "mixed".
    """

    epoch: int
    num_steps: int = 0
    num_samples: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    waited_s: float = 0.0
    assembled_s: float = 0.0
    major_faults: int = 0
    resident: float = 0.0
    access: str = "map"

    @property
    def wait_share(self) -> float:
        """Share of the time that the loop waited, 0 to 1."""
        return self.waited_s / self.seconds if self.seconds else 0.0

    @property
    def samples_per_s(self) -> float:
        """Samples a second on this rank."""
        return self.num_samples / self.seconds if self.seconds else 0.0

    @property
    def bound(self) -> str:
        """What a faster epoch needs: "model", "storage" or "cpu" (copying, or decoding)."""
        if self.wait_share < WAIT_SHARE:
            return "model"
        reads_disk = self.assembled_s > 0 and self.major_faults / self.assembled_s > FAULTS_PER_S
        return "storage" if reads_disk else "cpu"

    def __str__(self) -> str:
        return (
            f"epoch {self.epoch}: {self.num_steps} steps, {self.num_samples} samples, "
            f"{self.nbytes / 1e6:,.1f} MB in {self.seconds:.2f} s ({self.samples_per_s:,.0f} samples/s); "
            f"waited {self.wait_share:.1%} of it, {self.bound}-bound; "
            f"{self.major_faults} major page faults, {self.resident:.0%} resident"
            + (", decoded" if self.access == "decode" else "")
        )


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
        dataset: Any,
        order: Order | RankedOrder,
        *,
        num_workers: int = NUM_WORKERS,
        prefetch_factor: int | None = None,
        collate_fn: Collate | None = None,
        batch_transform: BatchTransform | None = None,
        across_epochs: bool = False,
        timeout: float | None = None,
    ) -> None:
        self.dataset, self.timeout = dataset, timeout
        self.on_wait: OnWait | None = None
        self._ranked = order if isinstance(order, RankedOrder) else None
        self._order: Order = order.order if isinstance(order, RankedOrder) else order
        self._num_workers, self._depth = num_workers, num_workers * (prefetch_factor or PREFETCH_FACTOR)
        self._collate, self._batch_transform = collate_fn, batch_transform
        self._across_epochs = across_epochs and num_workers > 0
        self._num_buffers = (self._depth + 2) * dataset.num_tensors  # ready, being made, in use
        self._pool = BufferPool(limit=self._num_buffers)
        self._made: Prefetch[list[Step], list[Made | BaseException]] | None = None
        self._maker: Maker | None = None  # what its threads run
        self._ready: deque[Made | BaseException] = deque()  # of the group that was handed over last
        self._made_of: tuple[Any, ...] = ()  # what all its batches depend on
        self._made_next: tuple[int, int] | None = None  # epoch and position that it waits to go on from
        self._is_abandoned = False
        self._meter = EpochReport(self._order.epoch)

    def _new_maker(self, groups: Groups) -> Maker:
        return Maker(self.dataset, groups, self._pool.empty, self._collate, self._batch_transform)

    def _setup(self) -> Callable[[], None]:
        """Give what each thread begins with."""
        return lambda: None

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
        meter = self._meter = EpochReport(self.order.epoch)
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
        """Give how far the training loop is, and in which order; equal on all ranks.

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
        """Report what the last epoch, or the current one so far, moved and waited for; `str` is one line."""
        stores = self.dataset.stores
        resident = sum(store.residency() * store.nbytes for store in stores)
        resident /= sum(store.nbytes for store in stores)
        ways = {store.access for store in stores}
        access = ways.pop() if len(ways) == 1 else "mixed"
        return dataclasses.replace(self._meter, resident=resident, access=access)

    def close(self) -> None:
        """End the background threads; the iterator that used them raises StoreClosedError."""
        if self._made is not None:
            self._made.close()
            self._made = self._made_next = None
            self._ready.clear()

    def _take_up(self) -> Prefetch[list[Step], list[Made | BaseException]]:
        """Give what makes the batches from here on: the one that there is, if it goes on from here."""
        wanted = (os.getpid(), self.dataset, self.order.key)
        goes_on = self._made_next == (self.order.epoch, self.order.consumed) and self._made_of == wanted
        if self._made is not None and goes_on:
            self._made_next = None
            return self._made
        self.close()
        groups = Groups(jobs_of(self.order, goes_on=self._across_epochs))
        self._maker, self._made_of = self._new_maker(groups), wanted
        self._made = Prefetch(
            groups, self._maker, depth=self._depth, num_threads=self._num_workers, setup=self._setup()
        )
        return self._made

    def __getstate__(self) -> dict[str, Any]:
        stays_here: dict[str, Any] = dict.fromkeys(("_made", "_maker", "_made_next"))  # threads do
        return {**vars(self), **stays_here, "_ready": deque(), "_made_of": ()}

    def _next(self, made: Prefetch[list[Step], list[Made | BaseException]], meter: EpochReport) -> Any:
        began = time.perf_counter()
        if not self._ready:
            assert self._maker is not None, "it is what `made` runs"
            on_wait = self.on_wait
            ahead = self.timeout is not None or on_wait is not None or not self._maker.is_quick
            if self.timeout is not None:
                on_wait = deadline(self.timeout, self._left_behind(made, self.timeout), on_wait)
            self._ready.extend(made.get(on_wait, ahead=ahead))
        got = self._ready.popleft()
        if isinstance(got, BaseException):
            self._ready.append(got)  # again and again
            raise got
        meter.waited_s += time.perf_counter() - began
        self._receive(got)
        order = self._order
        self._is_abandoned = True
        order.consumed = (got.step.number + 1) * order.global_batch_size
        meter.num_steps += 1
        meter.num_samples += len(got.step.items)
        meter.nbytes += got.nbytes
        meter.assembled_s += got.seconds
        meter.major_faults += got.major_faults
        return got.batch

    def _receive(self, made: Made) -> None:
        """Do what remains to be done with a batch in the loop's thread."""

    def _left_behind(self, made: Prefetch[Any, Any], timeout_s: float) -> Callable[[], BatchTimeoutError]:
        """Give what leaves the threads behind, and says what they are at."""
        maker = self._maker
        assert maker is not None, "it is what `made` runs"

        def leave() -> BatchTimeoutError:
            error = maker.late(timeout_s)
            made.leave()
            self._made = self._made_next = None
            return error

        return leave

    def _facts(self) -> dict[str, object]:
        order = self.order
        ready = f"{self._num_workers} workers, {self._depth} batches ahead" if self._num_workers else "none"
        return {
            "steps": f"{order.num_steps:,} of {order.global_batch_size:,} samples over all ranks",
            "position": f"epoch {order.epoch}, {order.consumed:,} samples consumed",
            "workers": ready,
            "dataset": repr(self.dataset),
        }


def check_workers(num_workers: object, prefetch_factor: object, timeout: float | None) -> None:
    """Refuse numbers of threads, and of batches ahead, that make no sense."""
    expect("num_workers", is_number(num_workers, 0), "a whole number of at least 0", num_workers)
    if prefetch_factor is not None:
        fits = is_number(prefetch_factor, 1) and bool(num_workers)
        expected = "a whole number of at least 1"
        if not num_workers:
            expected = "None, as num_workers=0 has nothing ready"
        expect("prefetch_factor", fits, expected, prefetch_factor)
    check_timeout(timeout)
    fits = timeout is None or bool(num_workers)
    expect("num_workers", fits, "at least 1 with `timeout`: the loop can't wait for itself", num_workers)
