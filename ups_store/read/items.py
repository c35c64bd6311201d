"""Items of stores, samples or windows over their time, as batches: dictionaries of NumPy arrays.

`StoreItems` numbers the items of several stores through; `StoreSource` copies those of one, into memory of a
`BufferPool` where that is given. Of which trajectory and time steps a window is, `Trajectories` knows.
"""

from __future__ import annotations

import bisect
import html
import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ups_store.errors import ArrayNotFoundError, NotCommittedError, SampleIndexError, SpecError
from ups_store.format.ragged import LENGTHS
from ups_store.printable import one_line
from ups_store.read.base import AnyStore
from ups_store.read.gather import TIME_DIM, Samples, check_indices, names_of
from ups_store.read.open import open_any
from ups_store.read.order import DataOrder, below, mix, round_keys
from ups_store.read.ragged import padded
from ups_store.read.several import parts_of

Array = npt.NDArray[Any]
StoreLike: TypeAlias = AnyStore | str | os.PathLike[str]
Where = tuple[str | None, Sequence[int]]  # path of a store, and numbers of its samples
Allocate = Callable[[tuple[int, ...], np.dtype[Any]], Array]

STATE_NAMES = ("latent", "fields")  # what windows are taken of unless it is named: the first that exists

NUM_STEPS, TIMES = "num_steps", "t"  # arrays that say how long a trajectory is, and when its steps are

TAKEN_KEYS = frozenset({"index", "task", "valid"})
TAKEN_WINDOW_KEYS = TAKEN_KEYS | {"z0", "z1", "params", "t", "dt"}
SCRATCH_BYTES = 1 << 20  # of rows before conversion: stays in the second-level cache
SMALL_BYTES = 64 << 10  # below, malloc reuses memory itself, and an `index` that is kept keeps nothing else


class ShowsFacts:
    """Shows what is known of it: in one line, and in notebooks as a table."""

    def _facts(self) -> dict[str, object]:
        raise NotImplementedError

    def __repr__(self) -> str:
        facts = "; ".join(f"{key}: {value}" for key, value in self._facts().items())
        return one_line(f"<{type(self).__name__}: {facts}>")

    def _repr_html_(self) -> str:
        facts = self._facts().items()
        rows = (
            f"<tr><th>{html.escape(key)}</th><td>{html.escape(str(value))}</td></tr>" for key, value in facts
        )
        name = html.escape(type(self).__name__)
        return one_line(f"<table><caption>{name}</caption>{''.join(rows)}</table>")


class NumberedSources(ShowsFacts):
    """Several stores whose items are numbered through.

    Attributes:
        sources: One `StoreSource` per store.
    """

    def _set_sources(self, sources: Iterable[StoreSource]) -> None:
        self.sources = tuple(sources)
        self._ends: Samples = np.cumsum([len(source) for source in self.sources])
        self._firsts = [0, *self._ends[:-1].tolist()]

    def _number_of(self, item: int) -> int:
        """Find the source that an item is of."""
        return bisect.bisect_right(self._firsts, item) - 1

    @property
    def stores(self) -> tuple[AnyStore, ...]:
        """The stores that the samples lie in."""
        return tuple(source.store for source in self.sources)

    @property
    def num_tensors(self) -> int:
        """Arrays of a batch that are gathered."""
        return max(len(source.fields) + len(source.ragged) for source in self.sources)

    def fetch_mixed(
        self, items: Samples, *, epoch: int, allocate: Allocate, scratch: Allocate = np.empty
    ) -> dict[str, Any]:
        """Copy a batch of items, numbered through over the stores, of any sources whose arrays are alike."""
        if len(self.sources) == 1:  # `unique` takes longer than all else that doesn't copy
            return self._fetch_source(0, items, epoch, allocate)
        numbers = np.searchsorted(self._ends, items, side="right")
        present = np.unique(numbers).tolist()
        if len(present) == 1:
            return self._fetch_source(present[0], items - self._firsts[present[0]], epoch, allocate)
        first = self.sources[present[0]]
        hint = "use make_loader, or make_batch_sampler with a DataLoader: they keep stores apart"
        for number in present:
            self.sources[number].check_fits(first, hint=hint)
        rows = [np.flatnonzero(numbers == number) for number in present]
        batches = [
            self._fetch_source(number, items[mine] - self._firsts[number], epoch, scratch)
            for number, mine in zip(present, rows, strict=True)
        ]
        return interleave(batches, rows, allocate, first.padded)

    def _fetch_source(self, number: int, items: Samples, epoch: int, allocate: Allocate) -> dict[str, Any]:
        """Copy items of one source, and say of which task they are."""
        values = self.sources[number].fetch(items, epoch=epoch, allocate=allocate)
        values["task"] = self.sources[number].task
        return values

    def where(self, number: int, items: Samples, *, epoch: int) -> Where:
        """Find the first store that items are of, counted from a source's first, and their samples there."""
        items = items + self._firsts[number]
        number = self._number_of(items[0])
        mine = items[np.searchsorted(self._ends, items, side="right") == number] - self._firsts[number]
        samples, _ = self.sources[number].locate(mine, epoch=epoch)
        return str(self.sources[number].store.path), list(dict.fromkeys(samples.tolist()))


class StoreItems(NumberedSources):
    """The items of one or several stores, one after the other, in batches of NumPy arrays."""

    transform: Callable[[Any], Any] | None = None
    epoch = 0

    def __init__(
        self,
        stores: StoreLike | Iterable[StoreLike],
        *,
        names: Sequence[str] | None = None,
        window: Window | None = None,
        state: str | None = None,
        dtype: npt.DTypeLike | None = None,
        ragged: str | None = None,
    ) -> None:
        paths = [stores] if isinstance(stores, AnyStore | str | os.PathLike) else list(stores)
        if not paths:
            raise SpecError("no store given", kind="stores", expected="at least one", found=0)
        if state is not None and window is None:
            hint = "add a window, or choose arrays with `names`"
            raise SpecError("state without a window has no effect", kind="state", found=state, hint=hint)
        if ragged not in (None, "padded", "views"):
            raise SpecError("ragged", kind="ragged", expected="padded or views", found=repr(ragged))
        is_window = window is None or isinstance(window, Window)
        if not is_window:
            expected, hint = "ups_store.Window or None", "say window=ups_store.Window(horizon=3)"
            raise SpecError("window", kind="window", expected=expected, found=repr(window), hint=hint)
        try:
            converted = None if dtype is None else np.dtype(dtype)
        except TypeError as error:
            raise SpecError("dtype", kind="dtype", expected="a dtype of NumPy", found=repr(dtype)) from error
        chosen = None if names is None else names_of(names)
        self._options: dict[str, Any] = {"names": chosen, "window": window, "state": state}
        self._options |= {"dtype": converted, "ragged": ragged}
        opened: list[AnyStore] = []
        for path in paths:
            store = open_any(path) if isinstance(path, str | os.PathLike) else path
            parts = parts_of(store)  # partitions are a source each, other files of a pattern or list are one
            opened += parts if parts[0].partition else (store,)
        self._open(opened)

    def _open(self, stores: Iterable[AnyStore]) -> None:
        self._set_sources(StoreSource(store, **self._options) for store in stores)
        for source, first in zip(self.sources, self._firsts, strict=True):
            source.first = first

    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def first_items(self) -> list[int]:
        """Number of each store's first item."""
        return list(self._firsts)

    def locate(self, indices: Sequence[int] | Samples) -> tuple[Samples, Samples, Samples]:
        """Number of the store, sample in it, and first time step of items; int64, shape (B,) each."""
        items = self.check(indices)
        numbers = np.searchsorted(self._ends, items, side="right")
        samples, starts = np.empty_like(items), np.empty_like(items)
        for number in np.unique(numbers).tolist():
            mine = numbers == number
            local = items[mine] - self._firsts[number]
            samples[mine], starts[mine] = self.sources[number].locate(local, epoch=self.epoch)
        return numbers, samples, starts

    def make_order(self, **options: Any) -> DataOrder:
        """Make the order in which a loader takes the items; see `DataOrder`."""
        return DataOrder([len(source) for source in self.sources], **options)

    def _facts(self) -> dict[str, object]:
        window, first = self._options["window"], self.sources[0]
        tasks = ", ".join(sorted({source.task for source in self.sources}))
        is_decoded = any(source.store.codec != "none" for source in self.sources)
        arrays = [f"{field.key} {field.shape} {field.dtype.name}" for field in first.fields]
        arrays += [
            f"{name} {'text' if first.is_text(name) else first.row_shape(name)}" for name in first.ragged
        ]
        return {
            "items": f"{len(self):,} {'samples' if window is None else 'windows'}",
            "stores": f"{len(self.sources)} ({tasks})" + (", decoded" if is_decoded else ""),
            **({} if window is None else {"window": window}),
            "tensors": ", ".join(arrays),
        }

    def fetch(self, number: int, items: Samples, *, epoch: int, allocate: Allocate) -> dict[str, Any]:
        """Copy a batch of one source; called by several threads at a time."""
        return self.sources[number].fetch(items, epoch=epoch, allocate=allocate)

    def check(self, indices: Sequence[int] | Samples) -> Samples:
        """Validate numbers of items, at least one; negative ones count from the end."""
        path = self.sources[0].store.path
        items = check_indices(indices, len(self), path=path)
        if not items.size:
            raise SampleIndexError("no items", path=path, expected="at least one", found=0)
        return items

    def __getstate__(self) -> dict[str, Any]:
        left_out = ("sources", "_ends", "_firsts", "_pool")
        state = {key: value for key, value in vars(self).items() if key not in left_out}
        return {**state, "stores": self.stores}

    def __setstate__(self, state: dict[str, Any]) -> None:
        stores = state.pop("stores")
        vars(self).update(state)
        self._open(stores)


@dataclass(frozen=True)
class Field:
    """One array of a batch."""

    key: str  # its name in the batch, or in the batch's `params`
    name: str  # its array in the store
    stored: np.dtype[Any]  # of that
    rows: tuple[int, ...]  # shape of one copied sample, time steps of a window included
    shape: tuple[int, ...]  # of one sample in the batch
    dtype: np.dtype[Any]  # in the batch
    is_param: bool = False  # whether it lies in `params`
    steps: range | None = None  # its time steps counted from the window's start; None where it has no time

    def put(self, values: dict[str, Any], array: Array) -> None:
        """Add its array to a batch."""
        (values["params"] if self.is_param else values)[self.key] = array


class StoreSource:
    """One store, its items, and how they are copied; the arguments are those of `StoreItems`."""

    convert: Callable[[Array, Array], None] = staticmethod(
        lambda source, target: np.copyto(target, source, casting="unsafe")
    )
    num_threads: Callable[[], int | None] = staticmethod(lambda: 1)
    first = 0  # number of its first item in the dataset

    def __init__(
        self,
        store: AnyStore,
        *,
        names: tuple[str, ...] | None,
        window: Window | None,
        state: str | None,
        dtype: np.dtype[Any] | None,
        ragged: str | None,
    ) -> None:
        if not store.committed.all():
            raise NotCommittedError(
                "the store is incomplete",
                path=store.path,
                expected=f"{len(store)} samples",
                found=int(store.committed.sum()),
                hint="run its build again to finish it",
            )
        self.store, self.task = store, task_of(store)
        self._window, self._dtype, self._ragged_form = window, dtype, ragged
        self._trajectories = None if window is None else Trajectories(store, window, state=state)
        self.ragged = tuple(self._ragged_names(names))
        self.padded = [name for name in self.ragged if ragged == "padded" and not self.is_text(name)]
        self.fields = tuple(self._make_fields(names))
        taken = TAKEN_KEYS if window is None else TAKEN_WINDOW_KEYS
        keys = [*(field.key for field in self.fields if field.key == field.name), *self.ragged]
        if clashes := [key for key in keys if key in taken]:
            problem, hint = "the array's name is a key of batches", "leave it out with `names`"
            raise SpecError(problem, kind="names", path=store.path, array=clashes[0], hint=hint)
        # Equal where samples of two stores share a batch.
        self.signature: dict[str, tuple[tuple[int | None, ...], str]] = {
            **{field.key: (field.shape, field.dtype.name) for field in self.fields},
            **{name: (self.row_shape(name), self.dtype_of(name).name) for name in self.ragged},
        }

    def check_fits(self, other: StoreSource, *, hint: str) -> None:
        """Refuse samples that don't share a batch with those of another store."""
        if self.signature != other.signature:
            raise SpecError(
                f"samples of {other.task!r} and {self.task!r} don't fit into one batch",
                kind="mixed",
                path=self.store.path,
                expected=other.signature,
                found=self.signature,
                hint=hint,
            )

    def _ragged_names(self, names: tuple[str, ...] | None) -> Iterator[str]:
        """Find the ragged arrays that are asked for; with windows there are none."""
        arrays = self.store.arrays
        for name in names if names is not None else () if self._window else arrays:
            if name not in arrays or not arrays[name].is_ragged:
                continue
            if self._window is not None:
                hint = "leave it out with `names`, or the window"
                problem = "a ragged array beside windows"
                raise SpecError(problem, kind="ragged", path=self.store.path, array=name, hint=hint)
            if self._ragged_form is None and not self.is_text(name):
                hint = 'say ragged="padded", or leave it out with `names`; with torch also ragged="nested"'
                raise SpecError("a ragged array", kind="ragged", path=self.store.path, array=name, hint=hint)
            yield name

    def _make_fields(self, names: tuple[str, ...] | None) -> Iterator[Field]:
        arrays = {name: spec for name, spec in self.store.arrays.items() if not spec.is_ragged}
        if names is not None:
            names = tuple(name for name in names if name not in self.ragged)
        for name in names or ():
            if name not in arrays:
                expected = list(self.store.arrays)
                raise ArrayNotFoundError("no such array", path=self.store.path, array=name, expected=expected)
        window = self._window
        if window is None or self._trajectories is None:
            yield from (self._field(name, name) for name in (arrays if names is None else names))
            return
        stride, state = window.stride, self._trajectories.state
        yield self._field("z0", state, steps=range(1))
        yield self._field("z1", state, steps=range(stride, window.span + 1, stride))
        static = [name for name in arrays if TIME_DIM not in self.store.dims[name]]
        for name in static if names is None else names:
            if name in static and name != NUM_STEPS:
                yield self._field(name, name)
            elif name not in (state, NUM_STEPS, TIMES):
                check_time_axis(self.store, name)
                yield self._field(name, name, steps=range(0, window.span + 1, stride))

    def _field(self, key: str, name: str, *, steps: range | None = None) -> Field:
        shape: tuple[int, ...] = tuple(self.store.arrays[name].shape[1:])
        rows = shape if steps is None else (len(steps), *shape[1:])
        stored: np.dtype[Any] = np.dtype(self.store.arrays[name].dtype)
        is_param = self._trajectories is not None and steps is None and not shape
        dtype = np.dtype(np.float32) if is_param else self.dtype_of(name)
        return Field(key, name, stored, rows, rows[1:] if key == "z0" else rows, dtype, is_param, steps)

    def __len__(self) -> int:
        return len(self.store) if self._trajectories is None else len(self._trajectories.index)

    @property
    def decodes_windows(self) -> bool:
        """Tell whether a whole sample is decoded for each window of it that comes."""
        if self.store.codec == "none" or self._trajectories is None:
            return False
        try:
            self.store[self._trajectories.state]
        except SpecError:  # it isn't in memory
            return True
        return False

    @property
    def sample_nbytes(self) -> int:
        """Bytes of one item in a batch, times not counted; of ragged arrays on average."""
        fixed = sum(math.prod(field.shape) * field.dtype.itemsize for field in self.fields)
        return fixed + sum(self.store.metas[name].nbytes for name in self.ragged) // max(1, len(self.store))

    def is_text(self, name: str) -> bool:
        """Tell whether samples of a ragged array are `str` or `bytes`."""
        return self.store.arrays[name].encoding is not None

    def row_shape(self, name: str) -> tuple[int | None, ...]:
        """Compute the shape of a sample of a ragged array, None for its rows."""
        return (None, *self.store.arrays[name].shape[2:])

    def dtype_of(self, name: str) -> np.dtype[Any]:
        """Dtype of an array in a batch."""
        stored: np.dtype[Any] = np.dtype(self.store.arrays[name].dtype)
        is_floating = stored.kind == "f" or stored.name == "bfloat16"
        return self._dtype if self._dtype is not None and is_floating else stored

    def locate(self, items: Samples, *, epoch: int) -> tuple[Samples, Samples]:
        """Give sample and first time step of items, each int64, shape (B,)."""
        if self._trajectories is None:
            return items, np.zeros_like(items)
        return self._trajectories.index.locate(items, epoch=epoch)

    def fetch(self, items: Samples, *, epoch: int, allocate: Allocate) -> dict[str, Any]:
        """Copy items, all valid, into arrays (B, ...) that `allocate` provides; by key."""
        samples, starts = items, None
        values: dict[str, Any] = {}
        if self._trajectories is not None:
            samples, starts = self._trajectories.index.locate(items, epoch=epoch)
            values = {"params": {}, **self._trajectories.moments(samples, starts)}
        whole = self._decoded_windows(samples, starts)
        for field in self.fields:
            array = allocate((len(items), *field.shape), field.dtype)
            if field.steps is not None and field.name in whole:
                first = field.steps.start // field.steps.step
                steps = whole[field.name][:, first : first + len(field.steps)]
                self.convert(steps, array.reshape(steps.shape))
            else:
                self._copy(field, samples, starts, array.reshape(len(items), *field.rows))
            field.put(values, array)
        for name in self.ragged:
            values |= self._fetch_ragged(name, samples, allocate)
        values["index"] = items + self.first
        return values

    def _copy(self, field: Field, samples: Samples, starts: Samples | None, out: Array) -> None:
        """Copy samples, or windows from time steps `starts` on, into (B, ...); converted where it differs."""
        if out.dtype == field.stored or not out.size:
            self._gather(field, samples, starts, out)
            return
        num = min(len(samples), max(1, SCRATCH_BYTES // (math.prod(field.rows) * field.stored.itemsize)))
        scratch = np.empty((num, *field.rows), field.stored)
        for first in range(0, len(samples), num):
            rows = slice(first, first + num)
            copied = scratch[: len(out[rows])]
            self._gather(field, samples[rows], None if starts is None else starts[rows], copied)
            self.convert(copied, out[rows])

    def _gather(self, field: Field, samples: Samples, starts: Samples | None, out: Array) -> None:
        options: dict[str, Any] = {}
        if starts is not None and field.steps is not None:
            first, steps = field.steps.start, field.steps
            options = {
                "start": starts + first if first else starts,
                "length": len(steps),
                "stride": steps.step,
            }
        if self.store.codec != "none":
            options["num_threads"] = self.num_threads()
        self.store.gather(samples, [field.name], out={field.name: out}, **options)

    def _decoded_windows(self, samples: Samples, starts: Samples | None) -> dict[str, Array]:
        """Decode once what several fields are cut out of, the arrays' windows (B, H + 1, ...)."""
        if self._window is None or not self.decodes_windows:
            return {}
        gathered: dict[str, Array] = {}
        names = [field.name for field in self.fields if field.steps is not None]
        for name in sorted({name for name in names if names.count(name) > 1}):
            field = self._field(name, name, steps=range(0, self._window.span + 1, self._window.stride))
            gathered[name] = np.empty((len(samples), *field.rows), field.stored)
            self._gather(field, samples, starts, gathered[name])
        return gathered

    def _fetch_ragged(self, name: str, samples: Samples, allocate: Allocate) -> dict[str, Any]:
        views = self.store.gather(samples, [name])[name]
        if self.is_text(name):
            return {name: views}
        dtype = self.dtype_of(name)
        if self._ragged_form == "views":
            return {name: [view.astype(dtype, copy=False) for view in views]}
        shape = (len(views), max(map(len, views), default=0), *self.store.arrays[name].shape[2:])
        array, lengths = allocate_any(shape, dtype, allocate), np.empty(len(views), np.int64)
        padded(self.store.metas[name], views, array, lengths)
        return {name: array, name + LENGTHS: lengths}

    def view(self, item: int, *, epoch: int) -> dict[str, Any]:
        """Give one item as views of the store's memory, by key; numbers (`params`, `t`, `dt`) are copies."""
        samples, starts = self.locate(np.array([item]), epoch=epoch)
        sample, start = int(samples[0]), int(starts[0])
        values: dict[str, Any] = {}
        if self._trajectories is not None:
            moments = self._trajectories.moments(samples, starts)
            values = {"params": {}, **{key: array[0, ...] for key, array in moments.items()}}
        for field in self.fields:
            view = writable(self.store[field.name])[sample, ...]
            if field.steps is not None:
                view = view[start + field.steps.start : start + field.steps.stop : field.steps.step]
            field.put(values, view.reshape(field.shape).astype(field.dtype, copy=False))
        for name in self.ragged:
            fetched = self._fetch_ragged(name, samples, np.empty)
            firsts = {key: value[0] for key, value in fetched.items()}
            values |= {key: v if isinstance(v, str | bytes) else np.array(v) for key, v in firsts.items()}
        return values


@dataclass(frozen=True)
class Window:
    """Samples are spans of trajectories: a state and the ones that follow.

    Attributes:
        horizon: H, number of states that follow the first.
        stride: Stored time steps from one state to the next.
        samples_per_trajectory: How many windows an epoch draws from each trajectory, one in each of as many
            equal parts of it; None takes every window there is.
        seed: Of those draws, 0 <= seed < 2**64.
    """

    horizon: int = 1
    stride: int = 1
    samples_per_trajectory: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("horizon", "stride", "samples_per_trajectory"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise SpecError(name, kind="window", expected="at least 1", found=value)
        if not 0 <= self.seed < 1 << 64:
            raise SpecError("seed", kind="window", expected="0 <= seed < 2**64", found=self.seed)

    @property
    def span(self) -> int:
        """Stored time steps from the first state to the last."""
        return self.horizon * self.stride


class WindowIndex:
    """The items of one store.

    Args:
        window: What an item spans.
        num_steps: Valid time steps of every trajectory, int64, shape (N,).
    """

    def __init__(self, window: Window, num_steps: Samples) -> None:
        self.window = window
        num_windows = (num_steps - window.span).clip(min=0)
        self.samples = np.flatnonzero(num_windows)  # trajectories shorter than a window have none
        self.num_windows: Samples = num_windows[self.samples]
        draws = window.samples_per_trajectory
        per_sample = self.num_windows if draws is None else np.full_like(self.samples, draws)
        self.ends: Samples = np.cumsum(per_sample)

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def locate(self, items: Samples, *, epoch: int) -> tuple[Samples, Samples]:
        """Give sample and first time step of items, each int64, shape (B,)."""
        rows = np.searchsorted(self.ends, items, side="right")
        draws, num_windows = self.window.samples_per_trajectory, self.num_windows[rows]
        if draws is None:
            return self.samples[rows], items - self.ends[rows] + num_windows
        bits = mix(items.astype(np.uint64) ^ round_keys(1, self.window.seed, epoch))
        within = below(bits, num_windows.astype(np.uint64)).astype(np.int64)
        return self.samples[rows], (items % draws * num_windows + within) // draws


class Trajectories:
    """The trajectories of one store, cut into windows of the array `state`."""

    def __init__(self, store: AnyStore, window: Window, *, state: str | None) -> None:
        arrays, path = store.arrays, store.path
        name = state or next((name for name in STATE_NAMES if name in arrays), None)
        if name is None or name not in arrays:
            raise ArrayNotFoundError(
                "no array to take windows of",
                path=path,
                array=name,
                expected="`state`, one of " + ", ".join(arrays) if name else " or ".join(STATE_NAMES),
            )
        check_time_axis(store, name)
        self.state, self._window, num_times = name, window, int(arrays[name].shape[1])

        def read(name: str) -> npt.NDArray[Any]:
            """Give a whole array, checked or read as the store was opened for."""
            return store.gather(slice(None), [name])[name] if name in arrays else store[name]

        num_steps = np.full(len(store), num_times)
        if NUM_STEPS in arrays:
            num_steps = read(NUM_STEPS).astype(np.int64).clip(0, num_times)
        self.index = WindowIndex(window, num_steps)
        if not len(self.index):
            raise SpecError(
                f"horizon {window.horizon} with stride {window.stride}",
                kind="window",
                path=path,
                array=name,
                expected=f"trajectories of at least {window.span + 1} time steps",
                found=f"at most {int(num_steps.max(initial=0))}",
                hint="take a shorter horizon or a smaller stride",
            )
        # Time of every step, (T,) or (N, T); numbers of the steps where the store has no times.
        times = read(TIMES) if TIMES in store else np.arange(num_times)
        self._times = times.astype(np.float64)
        if times.shape not in ((num_times,), (len(store), num_times)):
            raise SpecError(
                "times of the steps",
                kind="times",
                path=path,
                array=TIMES,
                expected=f"{num_times} of them, as {name!r} has",
                found=times.shape,
            )

    def moments(self, samples: Samples, starts: Samples) -> dict[str, npt.NDArray[Any]]:
        """Time `t` of the first states, (B,), and `dt` from each state to the next, (B, H); float32."""
        steps = starts[:, None] + np.arange(self._window.horizon + 1) * self._window.stride
        times = self._times[samples[:, None], steps] if self._times.ndim == 2 else self._times[steps]
        return {"t": times[:, 0].astype(np.float32), "dt": np.diff(times).astype(np.float32)}


def check_time_axis(store: AnyStore, name: str) -> None:
    """Fail unless an array's second axis is the time: its windows lie together then."""
    dims = store.dims[name]
    if store.arrays[name].is_ragged:
        hint = "windows need samples of equal length, with `num_steps` beside them"
        raise SpecError("a ragged array", kind="ragged", path=store.path, array=name, hint=hint)
    if dims[1:2] != (TIME_DIM,):
        raise SpecError(
            "windows need the time behind the sample",
            kind="time_axis",
            path=store.path,
            array=name,
            expected=f"dims ('sample', '{TIME_DIM}', ...)",
            found=repr(dims),
        )


def task_of(store: AnyStore) -> str:
    """Name the task that a store belongs to: by its attributes, its identity, else its file name."""
    for described in (store.attrs, store.identity):
        if isinstance(described.get("task"), str):
            return str(described["task"])
    return store.path.name.removesuffix(".zarr.zip")


def split_batch(
    batch: Mapping[str, Any], num: int, wrap: Callable[[Array], Any] = lambda array: array
) -> list[Any]:
    """Cut a batch into `num` consecutive ones, as views; of as many samples each, not ragged."""

    def cut(value: Any) -> Sequence[Any]:
        if isinstance(value, np.ndarray):
            return [wrap(part) for part in value.reshape(num, -1, *value.shape[1:])]
        if isinstance(value, Mapping):
            return split_batch(value, num, wrap)
        if isinstance(value, list):  # tasks, where stores are mixed
            size = len(value) // num
            return [one_or_all(value[i : i + size]) for i in range(0, len(value), size)]
        return [value] * num

    columns = [cut(value) for value in batch.values()]
    return [dict(zip(batch, row, strict=True)) for row in zip(*columns, strict=True)] or [{}] * num


def interleave(
    batches: Sequence[dict[str, Any]], rows: Sequence[Samples], allocate: Allocate, grown: Sequence[str]
) -> dict[str, Any]:
    """Make one batch of several, whose rows go where `rows` says; `grown` are padded to the longest."""
    num, order = sum(map(len, rows)), np.concatenate(rows).argsort().tolist()

    def join(values: Sequence[Any], *, is_padded: bool = False) -> Any:
        if isinstance(values[0], dict):
            return {key: join([value[key] for value in values]) for key in values[0]}
        if isinstance(values[0], list):
            together = [sample for value in values for sample in value]
            return [together[row] for row in order]
        if is_padded:
            longest = max(value.shape[1] for value in values)
            joined = np.zeros((num, longest, *values[0].shape[2:]), values[0].dtype)
            for mine, value in zip(rows, values, strict=True):
                joined[mine, : value.shape[1]] = value
            return joined
        joined = allocate((num, *values[0].shape[1:]), values[0].dtype)
        for mine, value in zip(rows, values, strict=True):
            joined[mine] = value
        return joined

    tasks = [batch["task"] for batch in batches for _ in range(len(batch["index"]))]
    batch = {
        key: join([batch[key] for batch in batches], is_padded=key in grown)
        for key in batches[0]
        if key != "task"
    }
    return {**batch, "task": one_or_all([tasks[row] for row in order])}


def one_or_all(tasks: Sequence[str]) -> str | list[str]:
    """Give the task if all are the same, else the list of them."""
    return tasks[0] if len(set(tasks)) == 1 else list(tasks)


def allocate_any(shape: tuple[int, ...], dtype: np.dtype[Any], allocate: Allocate) -> Array:
    """Make memory of a shape that differs from batch to batch: sizes are rounded up, and so come again."""
    nbytes = math.prod(shape) * dtype.itemsize
    if not nbytes:
        return np.empty(shape, dtype)
    room = allocate((1 << (nbytes - 1).bit_length(),), np.dtype(np.uint8))
    return room[:nbytes].view(dtype).reshape(shape)


def writable(view: Array) -> Array:
    """Give an array of a store without the read-only flag, over the same memory.

    What is changed there is seen by this process only: the mapping is private and the file stays as it is.
    """
    if view.size == 0:
        return np.empty(view.shape, view.dtype)
    assert view.base is not None
    first = int(view.ctypes.data - np.frombuffer(view.base, np.uint8).ctypes.data)
    return np.ndarray(view.shape, view.dtype, view.base, first, view.strides)


class _Lent:
    """Memory that is given back when the last array, or tensor, over it is gone."""

    # Not `weakref.finalize`: between two copies the caches hold nothing of ours, and then it takes 30 µs.
    __slots__ = ("__array_interface__", "home", "memory")

    def __init__(self, memory: Array, home: deque[Array]) -> None:
        self.memory, self.home = memory, home
        self.__array_interface__ = memory.__array_interface__

    def __del__(self) -> None:
        self.home.append(self.memory)  # the newest is handed out first: some of it is still in a cache


class BufferPool:
    """Hands out uninitialised arrays; their memory comes back when the last array over it is gone.

    New memory costs more than the copy into it: the kernel clears every page first. Slices, views, tensors
    over it and what autograd saved for backward all keep it. When nothing has come back there is new memory,
    so holding on to every batch is allowed. Usable from several threads.
    """

    def __init__(self, *, limit: int) -> None:
        self._limit = limit
        self._free: dict[int, deque[Array]] = {}

    def __getstate__(self) -> dict[str, Any]:
        # Without the buffers: threads may be giving some back meanwhile.
        return {"_limit": self._limit, "_free": {}}

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Make an uninitialised array in this process' memory."""
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes < SMALL_BYTES:
            return np.empty(shape, dtype)
        free = self._free.get(nbytes)
        if free is None:  # `setdefault`: two threads may come here at the same time
            free = self._free.setdefault(nbytes, deque(maxlen=self._limit))
        try:
            memory = free.pop()
        except IndexError:
            memory = np.empty(nbytes, np.uint8)
        # Every array over the memory refers to the lent one, which nothing else does.
        return np.ndarray(shape, dtype, np.asarray(_Lent(memory, free)))
