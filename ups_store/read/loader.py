"""`make_loader`: batches of stores that threads have ready, as dictionaries of NumPy arrays; without torch.

The order is one that any number of ranks agree on, and goes on in the middle of an epoch. `ups_store.torch`
gives the same batches in the same order as tensors. `Loader` is what the loop sees; a `Maker` is what its
threads run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import resource
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ups_store.errors import BatchTimeoutError, SpecError
from ups_store.format.ragged import LENGTHS
from ups_store.read.items import BufferPool, ShowsFacts, StoreItems, StoreLike, Where, Window, split_batch
from ups_store.read.order import Order, Shuffle, Step, expect
from ups_store.read.prefetch import OnWait, Prefetch, check_timeout, deadline, late
from ups_store.read.ranks import RankedOrder, Ranks, is_number

NUM_WORKERS, PREFETCH_FACTOR = 2, 2  # the latter as of torch's DataLoader
WAIT_SHARE = 0.05  # a loop that waits less than this is not held up by its data
FAULTS_PER_S = 100.0  # major page faults, each a read from the disk
HAND_OVER_S = 1e-3  # of work at a time: handing it from thread to thread takes up to a tenth of that
GROUP_BYTES = 4 << 20  # that a batch keeps in memory at most, as batches of a group share it
CALLER_S = 2e-4  # a batch that takes less is made by the loop's thread: about what a hand-over costs both
CALLER_BYTES = 128 << 10  # of a group that it makes; above, the copy takes the time, which threads share
_THREAD_USAGE = getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)

Collate = Callable[[Sequence[Any]], Any]
BatchTransform = Callable[[Any, Step], Any]


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
    items = StoreItems(stores, names=names, window=window, state=state, dtype=dtype, ragged=ragged)
    items.transform = transform
    order = RankedOrder(
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


def batches_ahead(num_workers: int, prefetch_factor: int | None) -> int:
    """Count the batches that are ready or in the making: `prefetch_factor` of each worker, 0 without workers.

    Memory of `batches_ahead` + 2 batches is kept: one more is with the loop, and one on its way there.
    """
    return num_workers * (prefetch_factor or PREFETCH_FACTOR)


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
        """Tell what a faster epoch needs: "model", "storage" or "cpu" (copying, or decoding)."""
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


class Loader(ShowsFacts):
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
        expect("num_workers", is_number(num_workers, 0), "a whole number of at least 0", num_workers)
        if prefetch_factor is not None:
            expected = "a whole number of at least 1"
            if not num_workers:
                expected = "None, as num_workers=0 has nothing ready"
            expect(
                "prefetch_factor",
                is_number(prefetch_factor, 1) and num_workers > 0,
                expected,
                prefetch_factor,
            )
        check_timeout(timeout)
        fits = timeout is None or num_workers > 0
        expect("num_workers", fits, "at least 1 with `timeout`: the loop can't wait for itself", num_workers)
        self.dataset, self.timeout = dataset, timeout
        self.on_wait: OnWait | None = None
        self._order = order
        self._num_workers, self._depth = num_workers, batches_ahead(num_workers, prefetch_factor)
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
        self._meter = EpochReport(self.order.epoch)

    def _new_maker(self) -> Maker:
        return Maker(self.dataset, self._pool.empty, self._collate, self._batch_transform)

    @property
    def order(self) -> Order:
        """Tell which samples each step takes, and how many have been consumed."""
        return self._order.current() if isinstance(self._order, RankedOrder) else self._order

    def __len__(self) -> int:
        """Steps of a whole epoch, the same on all ranks."""
        return self.order.num_steps

    def _facts(self) -> dict[str, object]:
        order = self.order
        ready = f"{self._num_workers} workers, {self._depth} batches ahead" if self._num_workers else "none"
        return {
            "steps": f"{order.num_steps:,} of {order.global_batch_size:,} samples over all ranks",
            "position": f"epoch {order.epoch}, {order.consumed:,} samples consumed",
            "workers": ready,
            "dataset": repr(self.dataset),
        }

    def __iter__(self) -> Iterator[Any]:
        if isinstance(self._order, RankedOrder):
            self._order.begin()
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

    def _take_up(self) -> Prefetch[list[Step], list[Made | BaseException]]:
        """Give what makes the batches from here on: the one that there is, if it goes on from here."""
        order = self.order
        depends_on = (os.getpid(), self.dataset, order.key)
        goes_on = self._made_next == (order.epoch, order.consumed) and self._made_of == depends_on
        if self._made is not None and goes_on:
            self._made_next = None
            return self._made
        self.close()
        maker = self._maker = self._new_maker()
        self._made_of = depends_on
        self._made = Prefetch(
            maker.groups(order, goes_on=self._across_epochs),
            maker,
            depth=self._depth,
            num_threads=self._num_workers,
            setup=maker.setup,
        )
        return self._made

    def _next(self, made: Prefetch[list[Step], list[Made | BaseException]], meter: EpochReport) -> Any:
        began = time.perf_counter()
        if not self._ready:
            maker, on_wait, timeout = self._maker, self.on_wait, self.timeout
            assert maker is not None, "it is what `made` runs"
            ahead = timeout is not None or on_wait is not None or not maker.is_quick
            if timeout is not None:

                def leave() -> BatchTimeoutError:
                    error = maker.late(timeout)
                    made.leave()
                    self._made = self._made_next = None
                    return error

                on_wait = deadline(timeout, leave, on_wait)
            self._ready.extend(made.get(on_wait, ahead=ahead))
        result = self._ready.popleft()
        if isinstance(result, BaseException):
            self._ready.append(result)  # again and again
            raise result
        meter.waited_s += time.perf_counter() - began
        self._receive(result)
        order = self.order
        self._is_abandoned = True
        order.consumed = (result.step.number + 1) * order.global_batch_size
        meter.num_steps += 1
        meter.num_samples += len(result.step.items)
        meter.nbytes += result.nbytes
        meter.assembled_s += result.seconds
        meter.major_faults += result.major_faults
        return result.batch

    def _receive(self, made: Made) -> None:
        """Do what remains to be done with a batch in the loop's thread."""

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

    def __getstate__(self) -> dict[str, Any]:
        stays_here: dict[str, Any] = dict.fromkeys(("_made", "_maker", "_made_next"))  # threads do
        return {**vars(self), **stays_here, "_ready": deque(), "_made_of": ()}


@dataclass(slots=True)
class Made:
    """A batch and what it took; `copied` is the event of its copy to a device."""

    step: Step
    batch: Any
    copied: Any
    nbytes: int
    seconds: float
    major_faults: int


class Maker:
    """Makes the batches of groups of steps; called by several threads at a time.

    Several small ones are gathered by one call: neither Python nor the hand-over takes longer than the copy.
    It doesn't refer to the loader, so that dropping that ends its threads.
    """

    def __init__(
        self,
        dataset: Any,
        allocate: Callable[..., Any],
        collate: Collate | None = None,
        batch_transform: BatchTransform | None = None,
    ) -> None:
        self._dataset, self._allocate = dataset, allocate
        self._transform = getattr(dataset, "transform", None)
        self._collate, self._batch_transform = collate, batch_transform
        self._nbytes: dict[tuple[int, int], int] = {}
        self._is_ragged = any(getattr(source, "ragged", ()) for source in getattr(dataset, "sources", ()))
        self._in_hand: dict[int, list[Step]] = {}  # by the thread that makes them
        changes = (self._transform, collate, batch_transform)
        self.may_group = not self._is_ragged and all(change is None for change in changes)
        self.is_quick = False
        self._group_size, self._has_failed = 1, False

    def groups(self, order: Order, *, goes_on: bool) -> Iterator[list[Step]]:
        """Give the steps that haven't been consumed in groups for one thread each; at first a step each.

        If it goes on, those of later epochs, too. No step is asked for before its group needs it: an order
        may wait for what its steps are made of.
        """
        epoch, steps, group = order.epoch, order.steps(), list[Step]()
        while not self._has_failed:
            try:
                step = next(steps, None)
            except BaseException:
                if group:
                    yield group
                raise
            key = None if step is None else (step.source, len(step.items))
            if group and key != (group[0].source, len(group[0].items)):
                yield group
                group = []
            if step is None:
                if not goes_on:
                    return
                epoch += 1
                steps = order.steps(epoch)
                continue
            group.append(step)
            if len(group) >= self._group_size:
                yield group
                group = []

    def __call__(self, steps: list[Step]) -> list[Made | BaseException]:
        """Make the batches of steps, up to the first that can't be made, of which there is the error."""
        thread = threading.get_ident()
        self._in_hand[thread] = steps
        try:
            if len(steps) > 1:
                with contextlib.suppress(Exception):  # of one of them; which, is found one by one
                    return [*self._make(steps)]
            made = list[Made | BaseException]()
            for step in steps:
                try:
                    made += self._make([step])
                except BaseException as error:
                    if not made:
                        raise
                    self._has_failed = True
                    return [*made, error]
            return made
        finally:
            del self._in_hand[thread]

    def _make(self, steps: list[Step]) -> list[Made]:
        """Make the batches of steps of one source and length by one call of the dataset."""
        began, faults = time.perf_counter(), _major_faults()
        first, num = steps[0], len(steps)
        items = first.items if num == 1 else np.concatenate([step.items for step in steps])
        whole = self._dataset.fetch(first.source, items, epoch=first.epoch, allocate=self._allocate)
        # Batches of a source and a length have as many bytes, unless ragged: they are counted once.
        nbytes = None if self._is_ragged else self._nbytes.get((first.source, len(items)))
        if nbytes is None:
            nbytes = self._nbytes[first.source, len(items)] = nbytes_of(whole)
        nbytes //= num
        cut: Callable[[int], Sequence[Any]] = getattr(whole, "split", functools.partial(split_batch, whole))
        batches = [whole] if num == 1 else cut(num)
        if self.may_group and isinstance(whole, dict):  # what others make isn't split
            self._adapt((time.perf_counter() - began) / num, nbytes)
        finished = [self.finish(batch, step) for batch, step in zip(batches, steps, strict=True)]
        seconds, faults = (time.perf_counter() - began) / num, _major_faults() - faults
        return [
            Made(step, *finished[i], nbytes, seconds, faults if i == 0 else 0) for i, step in enumerate(steps)
        ]

    def _adapt(self, seconds: float, nbytes: int) -> None:
        """Have the next groups be worth a hand-over, or be made without one, by what a batch took."""
        self.is_quick = seconds < CALLER_S and nbytes <= CALLER_BYTES
        limit = CALLER_BYTES if self.is_quick else GROUP_BYTES
        fit = min(HAND_OVER_S / max(seconds, 1e-9), limit / max(nbytes, 1))
        self._group_size = max(1, min(int(fit), 2 * self._group_size))

    def late(self, timeout_s: float) -> BatchTimeoutError:
        """Make the error of the batch that the loop waits for, of which it has waited so long."""
        in_hand = self._in_hand.copy()
        if not in_hand:  # the order doesn't say which samples are next
            return late((None, ()), timeout_s=timeout_s, thread=None)
        thread = min(in_hand, key=lambda thread: (in_hand[thread][0].epoch, in_hand[thread][0].number))
        steps = in_hand[thread]
        items = np.concatenate([step.items for step in steps])
        where: Callable[..., Where] | None = getattr(self._dataset, "where", None)
        named = (
            (None, items.tolist()) if where is None else where(steps[0].source, items, epoch=steps[0].epoch)
        )
        return late(named, timeout_s=timeout_s, thread=thread)

    def setup(self) -> None:
        """Prepare a thread."""

    def finish(self, batch: Any, step: Step) -> tuple[Any, Any]:
        """Make of what was gathered what the loop is given, and the event of its copy to a device."""
        if step.mask is not None and isinstance(batch, dict):
            batch["valid"] = step.mask
        if self._transform is not None or self._collate is not None:
            padded = self._dataset.sources[step.source].padded
            samples: list[Any] = list(samples_of(batch, padded))
            if self._transform is not None:
                samples = [self._transform(sample) for sample in samples]
            batch = stacked(samples, padded) if self._collate is None else self._collate(samples)
        return batch if self._batch_transform is None else self._batch_transform(batch, step), None


def nbytes_of(batch: Any) -> int:
    """Count the bytes of a batch's arrays."""
    if type(batch) in (dict, list):
        return sum(map(nbytes_of, batch.values() if isinstance(batch, dict) else batch))
    return getattr(batch, "nbytes", 0)


def _major_faults() -> int:
    return resource.getrusage(_THREAD_USAGE).ru_majflt


def samples_of(batch: Mapping[str, Any], padded: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Give the samples of a batch, as views; what a ragged array was padded with is left out."""

    def cut(value: Any, row: int) -> Any:
        if isinstance(value, dict):
            return {key: cut(item, row) for key, item in value.items()}
        return value[row, ...] if isinstance(value, np.ndarray) else value[row]

    for row in range(len(batch["index"])):
        sample = {key: cut(value, row) for key, value in batch.items()}
        for name in padded:
            sample[name] = sample[name][: int(sample[name + LENGTHS])]
        yield sample


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
                rows = [np.asarray(array) for array in column]
                longest = max(map(len, rows))
                column = [np.pad(a, [(0, longest - len(a))] + [(0, 0)] * (a.ndim - 1)) for a in rows]
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
