"""One store as a source of samples: which of its arrays make a batch, under which names, in which memory.

`Rows`: copies samples of one array, or windows of them, into tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ups_store.errors import ArrayNotFoundError, NotCommittedError, SpecError
from ups_store.read.base import AnyStore
from ups_store.read.gather import TIME_DIM, Samples
from ups_store.torch.deadline import Where
from ups_store.torch.memory import Allocate, as_array, as_tensor, new_tensor, torch_dtype, writable
from ups_store.torch.ragged import RaggedField, RaggedForm
from ups_store.torch.windows import NUM_STEPS, TIMES, Trajectories, Window, check_time_axis

SCRATCH_BYTES = 1 << 20  # of rows before conversion: stays in the second-level cache


class Rows:
    """Samples of one array, or windows of them.

    Args:
        store: The store.
        name: Its array.
        length: Time steps of a window; None for whole samples.
        stride: Time steps from one to the next.

    Attributes:
        dtype: Dtype of the array.
        shape: Shape of one copied sample, `(length, ...)` for windows.
    """

    def __init__(self, store: AnyStore, name: str, *, length: int | None = None, stride: int = 1) -> None:
        spec = store.arrays[name]
        self._store, self._name, self._length, self._stride = store, name, length, stride
        self.dtype = torch_dtype(np.dtype(spec.dtype))
        self.shape: tuple[int, ...] = tuple(spec.shape[1:]) if length is None else (length, *spec.shape[2:])

    def gather(self, samples: Samples, starts: Samples | None, out: Tensor) -> None:
        """Copy samples, or windows from time steps `starts` on.

        Args:
            samples: Sample numbers, all valid, int64, shape (B,).
            starts: First time step of each window, all valid, int64, shape (B,); None for whole samples.
            out: Contiguous output of B * prod(`shape`) elements; converted to if it has another dtype.
        """
        rows = out.view(len(samples), *self.shape)
        if out.dtype == self.dtype or not out.numel():
            self._copy(samples, starts, rows)
            return
        num = min(len(samples), max(1, SCRATCH_BYTES // (math.prod(self.shape) * self.dtype.itemsize)))
        scratch = torch.empty((num, *self.shape), dtype=self.dtype)
        for first in range(0, len(samples), num):
            part = slice(first, first + num)
            copied = scratch[: len(rows[part])]
            self._copy(samples[part], None if starts is None else starts[part], copied)
            rows[part].copy_(copied)  # several times faster than NumPy's conversion of float16

    def _copy(self, samples: Samples, starts: Samples | None, out: Tensor) -> None:
        options: dict[str, Any] = {}
        if self._length is not None:
            options = {"start": starts, "length": self._length, "stride": self._stride}
        if self._store.codec != "none":  # a worker of a loader, thread or process, is one; others are all
            options["num_threads"] = None if torch.get_num_threads() > 1 else 1
        self._store.gather(samples, [self._name], out={self._name: as_array(out)}, **options)


TAKEN_KEYS = frozenset({"index", "task", "valid"})

TAKEN_WINDOW_KEYS = TAKEN_KEYS | {"z0", "z1", "params", "t", "dt"}


@dataclass(frozen=True)
class SourceSelection:
    """What a dataset takes from each of its stores; see `StoreDataset`."""

    names: tuple[str, ...] | None
    state: str | None
    window: Window | None
    dtype: torch.dtype | None
    ragged: RaggedForm | None = None


@dataclass(frozen=True)
class Field:
    """One tensor of a batch.

    Attributes:
        key: Its name in the batch, or in the batch's `params`.
        name: Its array in the store.
        rows: What copies it.
        shape: Shape of one sample.
        dtype: Dtype in the batch.
        is_param: Whether it lies in `params`.
        steps: Its time steps counted from the window's start; None where it has no time.
    """

    key: str
    name: str
    rows: Rows
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_param: bool = False
    steps: range | None = None

    @property
    def picks(self) -> slice:
        """Its steps among the H + 1 of a window."""
        assert self.steps is not None
        first = self.steps.start // self.steps.step
        return slice(first, first + len(self.steps))


class StoreSource:
    """One store, its items, and how they are copied.

    Attributes:
        store: The store.
        task: Name of its task.
        fields: What makes a batch, ragged arrays left out.
        ragged: What has a number of rows of its own for every sample.
        padded: Keys of those that get zeros behind each sample in a batch.
    """

    def __init__(self, store: AnyStore, selection: SourceSelection) -> None:
        if not store.committed.all():
            raise NotCommittedError(
                "the store is incomplete",
                path=store.path,
                expected=f"{len(store)} samples",
                found=int(store.committed.sum()),
                hint="run its build again to finish it",
            )
        self.store = store
        self.task = task_of(store)
        self._selection = selection
        self._trajectories = None
        if selection.window is not None:
            self._trajectories = Trajectories(store, selection.window, state=selection.state)
        self.ragged = tuple(self._make_ragged())
        self.padded = [field.key for field in self.ragged if field.form == "padded" and not field.is_text]
        self.fields = tuple(self._make_fields())
        self._check_keys()

    def __len__(self) -> int:
        return len(self.store) if self._trajectories is None else len(self._trajectories.index)

    @property
    def signature(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """What must be equal for samples of two stores to share a batch."""
        fixed = {field.key: (field.shape, field.dtype) for field in self.fields}
        return fixed | {field.key: ((-1, *field.tail), field.dtype) for field in self.ragged}

    @property
    def decodes_windows(self) -> bool:
        """Whether a whole sample is decoded for each window of it that comes."""
        if self.store.codec == "none" or self._trajectories is None:
            return False
        try:
            self.store[self._trajectories.state]
        except SpecError:  # it isn't in memory
            return True
        return False

    @property
    def sample_nbytes(self) -> int:
        """Bytes of one sample in a batch, times not counted; of ragged arrays on average."""
        fixed = sum(math.prod(field.shape) * field.dtype.itemsize for field in self.fields)
        ragged = sum(self.store.metas[field.key].nbytes for field in self.ragged)
        return fixed + ragged // max(1, len(self.store))

    def locate(self, items: Samples, *, epoch: int) -> tuple[Samples, Samples]:
        """Sample and first time step of items, each int64, shape (B,)."""
        if self._trajectories is None:
            return items, np.zeros_like(items)
        return self._trajectories.index.locate(items, epoch=epoch)

    def where(self, items: Samples, *, epoch: int) -> Where:
        """For people: path of the store, and the samples that items are of."""
        return str(self.store.path), list(dict.fromkeys(self.locate(items, epoch=epoch)[0].tolist()))

    def fetch(self, items: Samples, *, epoch: int, allocate: Allocate) -> dict[str, Any]:
        """Copy items, all valid, into tensors (B, ...) that `allocate` provides; by key."""
        samples, starts = items, None
        values: dict[str, Any] = {}
        if self._trajectories is not None:
            samples, starts = self._trajectories.index.locate(items, epoch=epoch)
            values = self._conditions(samples, starts)
        whole = self._gather_decoded(samples, starts)
        for field in self.fields:
            out = allocate((len(items), *field.shape), field.dtype)
            if field.steps is not None and field.name in whole:
                out.view(len(items), *field.rows.shape).copy_(whole[field.name][:, field.picks])
            else:
                first = None if starts is None or field.steps is None else starts + field.steps.start
                field.rows.gather(samples, first, out)
            _put(values, field, out)
        for ragged in self.ragged:
            values |= ragged.fetch(samples, allocate)
        return values

    def _gather_decoded(self, samples: Samples, starts: Samples | None) -> dict[str, Tensor]:
        """Of a store that is decoded, the arrays of which windows have several parts, (B, H + 1, ...)."""
        window = self._selection.window
        if window is None or not self.decodes_windows:
            return {}
        names = [field.name for field in self.fields if field.steps is not None]
        gathered = {}
        for name in sorted({name for name in names if names.count(name) > 1}):
            rows = Rows(self.store, name, length=window.horizon + 1, stride=window.stride)
            gathered[name] = torch.empty((len(samples), *rows.shape), dtype=rows.dtype)
            rows.gather(samples, starts, gathered[name])
        return gathered

    def view(self, item: int, *, epoch: int) -> dict[str, Any]:
        """One item as views of the store's memory, by key; numbers (`params`, `t`, `dt`) are copies."""
        samples, starts = self.locate(np.array([item]), epoch=epoch)
        sample, start = int(samples[0]), int(starts[0])
        values = self._conditions(samples, starts)
        for key in values.keys() - {"params"}:
            values[key] = values[key][0]
        for field in self.fields:
            view = as_tensor(writable(self.store[field.name]))[sample]
            if field.steps is not None:
                view = view[start + field.steps.start : start + field.steps.stop : field.steps.step]
            _put(values, field, view.view(field.shape).to(field.dtype))
        for ragged in self.ragged:
            values |= {key: value[0] for key, value in ragged.fetch(samples, new_tensor).items()}
        return values

    def _conditions(self, samples: Samples, starts: Samples) -> dict[str, Any]:
        """What only windows have: times, and room for parameters."""
        if self._trajectories is None:
            return {}
        return {"params": {}, **self._trajectories.moments(samples, starts)}

    def _make_ragged(self) -> Iterator[RaggedField]:
        """The ragged arrays that are asked for; with windows there are none."""
        selection, arrays = self._selection, self.store.arrays
        names = selection.names if selection.names is not None else () if selection.window else arrays
        for name in names:
            if name in arrays and arrays[name].is_ragged:
                if selection.window is not None:
                    hint = "leave it out with `names`, or the window"
                    problem = "a ragged array beside windows"
                    raise SpecError(problem, kind="ragged", path=self.store.path, array=name, hint=hint)
                yield RaggedField(self.store, name, selection.ragged, selection.dtype)

    def _make_fields(self) -> Iterator[Field]:
        arrays = {name: spec for name, spec in self.store.arrays.items() if not spec.is_ragged}
        names, window = self._selection.names, self._selection.window
        ragged = {field.key for field in self.ragged}
        if names is not None:
            names = tuple(name for name in names if name not in ragged)
        for name in names or ():
            if name not in arrays:
                expected = list(self.store.arrays)
                raise ArrayNotFoundError("no such array", path=self.store.path, array=name, expected=expected)
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
        length, stride = (None, 1) if steps is None else (len(steps), steps.step)
        rows = Rows(self.store, name, length=length, stride=stride)
        shape = rows.shape[1:] if key == "z0" else rows.shape
        dtype = self._selection.dtype
        is_param = self._trajectories is not None and steps is None and not shape
        if is_param:
            dtype = torch.float32
        elif dtype is None or not rows.dtype.is_floating_point:
            dtype = rows.dtype
        return Field(key, name, rows, shape, dtype, is_param, steps)

    def _check_keys(self) -> None:
        taken = TAKEN_KEYS if self._trajectories is None else TAKEN_WINDOW_KEYS
        keys = [field.key for field in self.fields if field.key == field.name]
        clashes = [key for key in (*keys, *(field.key for field in self.ragged)) if key in taken]
        if clashes:
            raise SpecError(
                "the array's name is a key of batches",
                kind="names",
                path=self.store.path,
                array=clashes[0],
                hint="leave it out with `names`",
            )


def task_of(store: AnyStore) -> str:
    """The task that a store belongs to: by its attributes, its identity, else its file name."""
    for described in (store.attrs, store.identity):
        if isinstance(described.get("task"), str):
            return str(described["task"])
    return store.path.name.removesuffix(".zarr.zip")


def _put(values: dict[str, Any], field: Field, tensor: Tensor) -> None:
    (values["params"] if field.is_param else values)[field.key] = tensor
