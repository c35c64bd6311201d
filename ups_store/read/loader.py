"""`make_loader`: batches of stores that threads have ready, as dictionaries of NumPy arrays; without torch.

The order is one that any number of ranks agree on, and goes on in the middle of an epoch. `ups_store.torch`
gives the same batches in the same order as tensors.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import resource
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from ups_store.errors import BatchTimeoutError, ConfigError, SpecError
from ups_store.format.ragged import LENGTHS
from ups_store.read.base import AnyStore
from ups_store.read.items import BufferPool, StoreItems, StoreLike, Where, as_table, in_words, split
from ups_store.read.order import DataOrder, MixedOrder, Shuffle, Step, expect
from ups_store.read.prefetch import OnWait, Prefetch, check_timeout, deadline, late
from ups_store.read.windows import Window
from ups_store.system.memory import available_bytes

BLOCK_BYTES = 4 << 20  # read at once with shuffle="block": a disk's seek or a network's round trip disappears

MAX_BLOCK_SIZE = 4096

RESIDENT_SHARE = 0.99  # from here on nothing worth mentioning is read from the disk

NUM_WORKERS, PREFETCH_FACTOR = 2, 2  # the latter as of torch's DataLoader

HAND_OVER_S = 1e-3  # of work at a time: handing it from thread to thread takes up to a tenth of that

GROUP_BYTES = 4 << 20  # that a batch keeps in memory at most, as batches of a group share it

CALLER_S = 2e-4  # a batch that takes less is made by the loop's thread: about what a hand-over costs both

CALLER_BYTES = 128 << 10  # of a group that it makes; above, the copy takes the time, which threads share

WAIT_SHARE = 0.05  # a loop that waits less than this is not held up by its data

FAULTS_PER_S = 100.0  # major page faults, each a read from the disk

_THREAD_USAGE = getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)

_AGREED = ("world_size", "sizes", "weights", "num_steps", "drop_last", "pad_last")

Collate = Callable[[Sequence[Any]], Any]

BatchTransform = Callable[[Any, Step], Any]

logger = logging.getLogger(__name__)


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


class Order(Protocol):
    """Which samples each step takes: a `DataOrder`, or one that depends on what there is.

    Attributes:
        epoch: Number of the current epoch.
        consumed: Samples of it that the training loop has been given: steps times `global_batch_size`.
        num_steps: Steps of an epoch, equal on all ranks.
        global_batch_size: Samples of a whole step over all ranks.
    """

    epoch: int
    consumed: int
    num_steps: int
    global_batch_size: int

    @property
    def key(self) -> object:
        """What the steps of all epochs depend on: batches that were made before it changed are stale."""

    def steps(self, epoch: int | None = None) -> Iterator[Step]:
        """The steps of the current epoch that haven't been consumed; all of `epoch`."""

    def state_dict(self) -> dict[str, Any]:
        """What continues from here."""

    def load_state_dict(self, state: Any) -> None:
        """Continue where `state_dict` was called."""


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


def jobs_of(order: Order, *, goes_on: bool) -> Iterator[Step]:
    """Give the steps that have not been consumed; if it goes on, those of later epochs, too."""
    epoch, steps = order.epoch, order.steps()
    while True:
        yield from steps
        if not goes_on:
            return
        epoch += 1
        steps = order.steps(epoch)


class Groups(Iterator[list[Step]]):
    """Steps in groups, each made by one thread at a time; at first a step each."""

    def __init__(self, steps: Iterator[Step]) -> None:
        self.size = 1
        self._steps = steps
        self._late: list[Step | BaseException] = []  # what was taken from `steps` and is for the next group

    def __next__(self) -> list[Step]:
        group = [self._take()]
        while len(group) < self.size:
            try:
                step = self._take()
            except BaseException as error:  # the end too: the next group's
                self._late.append(error)
                break
            first = group[0]
            if (step.source, step.epoch, len(step.items)) != (first.source, first.epoch, len(first.items)):
                self._late.append(step)
                break
            group.append(step)
        return group

    def end(self) -> None:
        """Have no more groups."""
        self._steps, self._late = iter(()), []

    def _take(self) -> Step:
        step = self._late.pop() if self._late else next(self._steps)
        if isinstance(step, BaseException):
            raise step
        return step


@dataclass(slots=True)
class Made:
    """A batch and what it took; `copied` is the event of its copy to a device."""

    step: Step
    batch: Any
    nbytes: int
    seconds: float
    major_faults: int
    copied: Any = None


class Maker:
    """Makes the batches of groups of steps; called by several threads at a time.

    Several small ones are gathered by one call: neither Python nor the hand-over takes longer than the copy.
    It doesn't refer to the loader, so that dropping that ends its threads.
    """

    kind: type[dict[str, Any]] = dict  # of batches that can be split and marked

    def __init__(
        self,
        dataset: Any,
        groups: Groups,
        allocate: Callable[..., Any],
        collate: Collate | None = None,
        batch_transform: BatchTransform | None = None,
    ) -> None:
        self._dataset, self._allocate, self._groups = dataset, allocate, groups
        self._transform = getattr(dataset, "transform", None)
        self._collate, self._batch_transform = collate, batch_transform
        self._nbytes: dict[tuple[int, int], int] = {}
        self._is_ragged = any(getattr(source, "ragged", ()) for source in getattr(dataset, "sources", ()))
        self._in_hand: dict[int, list[Step]] = {}  # by the thread that makes them
        changes = (self._transform, collate, batch_transform)
        self.may_group = not self._is_ragged and all(change is None for change in changes)
        self.is_quick = False

    def __call__(self, steps: list[Step]) -> list[Made | BaseException]:
        """Make the batches of steps, up to the first that can't be made, of which there is the error."""
        thread = threading.get_ident()
        self._in_hand[thread] = steps
        try:
            if len(steps) > 1:
                with contextlib.suppress(Exception):  # of one of them; which, is found one by one
                    return self._made_together(steps)
            return self._made_one_by_one(steps)
        finally:
            del self._in_hand[thread]

    def late(self, timeout_s: float) -> BatchTimeoutError:
        """Make the error of the batch that the loop waits for, of which it has waited so long."""
        in_hand = self._in_hand.copy()
        if not in_hand:  # the order doesn't say which samples are next
            return late((None, ()), timeout_s=timeout_s, thread=None)
        first = min(in_hand, key=lambda thread: (in_hand[thread][0].epoch, in_hand[thread][0].number))
        return late(self._where(in_hand[first]), timeout_s=timeout_s, thread=first)

    def _where(self, steps: list[Step]) -> Where:
        items = np.concatenate([step.items for step in steps])
        where: Callable[..., Where] | None = getattr(self._dataset, "where", None)
        if where is None:
            return None, items.tolist()
        return where(steps[0].source, items, epoch=steps[0].epoch)

    def _made_one_by_one(self, steps: list[Step]) -> list[Made | BaseException]:
        made = list[Made | BaseException]()
        for step in steps:
            try:
                made.append(self._made(step))
            except BaseException as error:
                if not made:
                    raise
                self._groups.end()
                return [*made, error]
        return made

    def _made_together(self, steps: list[Step]) -> list[Made | BaseException]:
        first, num = steps[0], len(steps)
        began, faults = time.perf_counter(), _major_faults()
        items = np.concatenate([step.items for step in steps])
        whole = self._dataset.fetch(first.source, items, epoch=first.epoch, allocate=self._allocate)
        nbytes = self._nbytes_of(whole, first.source, len(items)) // num
        batches = self.split(whole, num)
        faults = _major_faults() - faults
        seconds = (time.perf_counter() - began) / num
        self._adapt(seconds, nbytes)
        made = list[Made | BaseException]()
        for step, batch in zip(steps, batches, strict=True):
            if step.mask is not None:
                self.mark(batch, step.mask)
            made.append(Made(step, batch, nbytes, seconds, 0 if made else faults))
        return made

    def _made(self, step: Step) -> Made:
        began, faults = time.perf_counter(), _major_faults()
        batch = self._dataset.fetch(step.source, step.items, epoch=step.epoch, allocate=self._allocate)
        if step.mask is not None and isinstance(batch, self.kind):
            self.mark(batch, step.mask)
        nbytes = self._nbytes_of(batch, step.source, len(step.items))
        if self.may_group and isinstance(batch, self.kind):
            self._adapt(time.perf_counter() - began, nbytes)
        if self._transform is not None or self._collate is not None:
            batch = self.collated(batch, step)
        if self._batch_transform is not None:
            batch = self._batch_transform(batch, step)
        batch, copied = self.sent(batch)
        faults = _major_faults() - faults
        return Made(step, batch, nbytes, time.perf_counter() - began, faults, copied)

    def _adapt(self, seconds: float, nbytes: int) -> None:
        """Have the next groups be worth a hand-over, or be made without one, by what a batch took."""
        self.is_quick = seconds < CALLER_S and nbytes <= CALLER_BYTES
        limit = CALLER_BYTES if self.is_quick else GROUP_BYTES
        fit = min(HAND_OVER_S / max(seconds, 1e-9), limit / max(nbytes, 1))
        self._groups.size = max(1, min(int(fit), 2 * self._groups.size))

    def _nbytes_of(self, batch: Any, source: int, num_items: int) -> int:
        """Count a batch's bytes once, as batches of a source and a length are alike, unless ragged."""
        alike = source, num_items
        nbytes = None if self._is_ragged else self._nbytes.get(alike)
        if nbytes is None:
            nbytes = self._nbytes[alike] = self.count(batch)
        return nbytes

    def count(self, batch: Any) -> int:
        """Count the bytes of a batch's arrays."""
        return _nbytes(batch)

    def split(self, batch: Any, num: int) -> Sequence[Any]:
        """Cut a batch into so many."""
        return split(batch, num)

    def mark(self, batch: dict[str, Any], mask: npt.NDArray[np.bool_]) -> None:
        """Say which rows only fill up the last batch."""
        batch["valid"] = mask

    def collated(self, batch: Any, step: Step) -> Any:
        """Make a batch of a batch's samples, transformed where there is a transform."""
        padded = self._dataset.sources[step.source].padded
        samples: list[Any] = list(samples_of(batch, padded))
        if self._transform is not None:
            samples = [self._transform(sample) for sample in samples]
        return stacked(samples, padded) if self._collate is None else self._collate(samples)

    def sent(self, batch: Any) -> tuple[Any, Any]:
        """Give the batch, and the event of its copy to a device."""
        return batch, None


def _major_faults() -> int:
    return resource.getrusage(_THREAD_USAGE).ru_majflt


def _nbytes(value: Any) -> int:
    if isinstance(value, np.ndarray):
        return value.nbytes
    if isinstance(value, dict | list):
        return sum(map(_nbytes, value.values() if isinstance(value, dict) else value))
    return 0


def samples_of(batch: Mapping[str, Any], padded: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Give the samples of a batch, as views; what a ragged array was padded with is left out."""
    for row in range(len(batch["index"])):
        sample = {key: _row(value, row) for key, value in batch.items()}
        for name in padded:
            sample[name] = sample[name][: int(sample[name + LENGTHS])]
        yield sample


def _row(value: Any, row: int) -> Any:
    if isinstance(value, dict):
        return {key: _row(item, row) for key, item in value.items()}
    return value[row, ...] if isinstance(value, np.ndarray) else value[row]


def stacked(samples: Sequence[Any], padded: Sequence[str] = ()) -> Any:
    """Make a batch of samples: arrays and numbers are stacked, other values are lists."""
    first = samples[0]
    if isinstance(first, Mapping):
        if any(not isinstance(sample, Mapping) or sample.keys() != first.keys() for sample in samples):
            problem = "samples with different arrays don't make a batch"
            raise SpecError(problem, kind="mixed", expected=sorted(first))
        batch = {}
        for key in first:
            column = [sample[key] for sample in samples]
            if key in padded and key + LENGTHS in first:
                longest = max(map(len, column))
                column = [_longer(array, longest) for array in column]
            batch[key] = stacked(column)
        return batch
    if not isinstance(first, np.ndarray | np.generic | bool | int | float | complex):
        return list(samples)
    try:
        return np.stack([np.asarray(sample) for sample in samples])
    except ValueError as error:
        shapes = sorted({np.shape(sample) for sample in samples})
        hint = "give a `collate_fn`, or have the transform give arrays of one shape"
        raise SpecError("arrays of other shapes", kind="mixed", found=shapes, hint=hint) from error


def _longer(array: Any, num_rows: int) -> Any:
    rows = np.asarray(array)
    return np.concatenate([rows, np.zeros((num_rows - len(rows), *rows.shape[1:]), rows.dtype)])


class Ranks:
    """Number of this process and of all that share a step, as given, or by RANK and WORLD_SIZE."""

    def __init__(self, rank: int | None = None, world_size: int | None = None) -> None:
        self._given = rank, world_size

    def current(self) -> tuple[int, int]:
        """Give both as they are now."""
        rank, world_size = self._given
        if rank is not None and world_size is not None:
            return rank, world_size
        ranks = self.found()
        return ranks[0] if rank is None else rank, ranks[1] if world_size is None else world_size

    def found(self) -> tuple[int, int]:
        """Find both where they aren't given."""
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            return _variable("RANK"), _variable("WORLD_SIZE")
        return 0, 1

    def compare(self, mine: dict[str, Any]) -> dict[str, Any] | None:
        """Give the settings of the order that another rank began with, if they can be compared."""
        return None

    def agree(self, choice: tuple[Shuffle, str]) -> list[tuple[Shuffle, str]]:
        """Give the choices of all ranks."""
        raise ConfigError(
            'shuffle="auto" with several ranks',
            kind="shuffle",
            expected="torch.distributed to be initialised, so that the ranks can agree",
            hint='initialise it and use ups_store.torch, or say True or "block"',
        )


def _variable(name: str) -> int:
    try:
        return int(os.environ[name])
    except ValueError as error:
        problem, found = f"environment variable {name}", repr(os.environ[name])
        raise ConfigError(problem, kind="rank", expected="a whole number", found=found) from error


class RankedOrder:
    """An order of this process, whose ranks are read anew until the first step is asked for."""

    def __init__(self, make: Callable[[int, int], DataOrder | MixedOrder], ranks: Ranks) -> None:
        self._make, self._ranks = make, ranks
        self.order = make(*ranks.current())
        self._has_begun = False

    def current(self) -> DataOrder | MixedOrder:
        """Give the order, by the ranks that there are; from the first step on as it is."""
        if self._has_begun:
            return self.order
        ranks = self._ranks.current()
        if ranks != (self.order.rank, self.order.world_size):
            if self.order.consumed:
                raise self._changed(ranks)
            epoch = self.order.epoch
            self.order = self._make(*ranks)
            self.order.epoch = epoch
        return self.order

    def begin(self) -> None:
        """Begin an iteration over the order's steps."""
        order, ranks = self.current(), self._ranks.current()
        if ranks != (order.rank, order.world_size):
            raise self._changed(ranks)
        if not self._has_begun:
            self._compare(order)
            self._has_begun = True

    def _changed(self, ranks: tuple[int, int]) -> ConfigError:
        order = self.order
        return ConfigError(
            "the ranks aren't those that the order began with",
            kind="world_size",
            expected=f"rank {order.rank} of {order.world_size}",
            found=f"rank {ranks[0]} of {ranks[1]}",
            hint="make a new one once torch.distributed is initialised, or give it `rank` and `world_size`",
        )

    def _compare(self, order: DataOrder | MixedOrder) -> None:
        """Refuse an order that isn't that of the other ranks, such as one of a seed of this rank's own."""
        if order.world_size == 1 or self._ranks.found() != (order.rank, order.world_size):
            return
        settings: dict[str, Any] = {name: getattr(order, name, None) for name in _AGREED}
        ours = settings | order.state_dict()
        theirs = self._ranks.compare(ours)
        if theirs is None:
            return
        differing = [name for name in {**theirs, **ours} if theirs.get(name) != ours.get(name)]
        raise ConfigError(
            f"rank {order.rank} has another order than another rank: samples would come twice, others never",
            kind="ranks_differ",
            expected=", ".join(f"{name} {theirs.get(name)!r}" for name in differing),
            found=", ".join(f"{name} {ours.get(name)!r}" for name in differing),
            hint="give all ranks the same arguments and state, in the same order; "
            "a loader that only one of them iterates over takes rank=0, world_size=1",
        )


def ranked_order(
    dataset: Any,
    ranks: Ranks,
    *,
    batch_size: int | None,
    global_batch_size: int | None,
    shuffle: Shuffle | Literal["auto"],
    **options: Any,
) -> RankedOrder:
    """Check the arguments about a dataset's order, and make it; options are those of `dataset.make_order`."""
    expect("shuffle", shuffle in (True, False, "block", "auto"), "True, False, 'block' or 'auto'", shuffle)
    fits = (batch_size is None) != (global_batch_size is None)
    found = "neither" if batch_size is None else "both"
    expect("batch_size", fits, "batch_size (per rank) or global_batch_size", found)
    if batch_size is not None:
        expect("batch_size", _is_number(batch_size, 1), "a whole number of at least 1", batch_size)
    item_nbytes = max(source.sample_nbytes for source in dataset.sources)
    options["block_size"] = min(MAX_BLOCK_SIZE, max(1, BLOCK_BYTES // max(1, item_nbytes)))
    sizes = batch_size, global_batch_size
    return RankedOrder(functools.partial(_order_of_rank, dataset, ranks, sizes, shuffle, options), ranks)


def _order_of_rank(
    dataset: Any,
    ranks: Ranks,
    sizes: tuple[int | None, int | None],
    shuffle: Shuffle | Literal["auto"],
    options: Mapping[str, Any],
    rank: int,
    world_size: int,
) -> DataOrder | MixedOrder:
    order: DataOrder | MixedOrder = dataset.make_order(
        global_batch_size=sizes[1] if sizes[0] is None else sizes[0] * world_size,
        shuffle=choose_shuffle(dataset, ranks, world_size=world_size) if shuffle == "auto" else shuffle,
        keeps_shuffle=shuffle == "auto",
        rank=rank,
        world_size=world_size,
        **options,
    )
    return order


def choose_shuffle(dataset: Any, ranks: Ranks, *, world_size: int) -> Shuffle:
    """Decide between a full shuffle and one in blocks, alike on all ranks, and log why.

    "block" if any rank needs it: a store is larger than the memory, or lies on a network file system, and
    isn't in RAM already; or windows are cut out of packed samples, which aren't in RAM decoded.
    """
    choice = _choose_here(dataset.sources)
    if world_size > 1:
        choices = ranks.agree(choice)
        choice = next((choice for choice in choices if choice[0] == "block"), choices[0])
    logger.info("shuffle: %s: %s", *choice)
    return choice[0]


def _choose_here(sources: Sequence[Any]) -> tuple[Shuffle, str]:
    stores: list[AnyStore] = [source.store for source in sources]
    nbytes, available = sum(store.nbytes for store in stores), available_bytes()
    resident = sum(store.residency() * store.nbytes for store in stores) / nbytes
    sizes = f"{nbytes:,} bytes of stores, {resident:.0%} resident, {available:,} bytes of RAM available"
    if any(source.decodes_windows for source in sources):
        return "block", f"windows of one sample are decoded together ({sizes})"
    if resident >= RESIDENT_SHARE:
        return True, f"all in RAM ({sizes})"
    networks = sorted({store.network for store in stores if store.network})
    if networks:
        return "block", f"on {', '.join(networks)} ({sizes})"
    if nbytes > available:
        return "block", f"larger than RAM ({sizes})"
    return True, f"fits into RAM ({sizes})"


def check_workers(num_workers: object, prefetch_factor: object, timeout: float | None) -> None:
    """Refuse numbers of threads, and of batches ahead, that make no sense."""
    expect("num_workers", _is_number(num_workers, 0), "a whole number of at least 0", num_workers)
    if prefetch_factor is not None:
        fits = _is_number(prefetch_factor, 1) and bool(num_workers)
        expected = "a whole number of at least 1"
        if not num_workers:
            expected = "None, as num_workers=0 has nothing ready"
        expect("prefetch_factor", fits, expected, prefetch_factor)
    check_timeout(timeout)
    fits = timeout is None or bool(num_workers)
    expect("num_workers", fits, "at least 1 with `timeout`: the loop can't wait for itself", num_workers)


def _is_number(value: object, least: int) -> bool:
    return isinstance(value, int | np.integer) and bool(value >= least)
