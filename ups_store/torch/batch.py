"""Batches of tensors, `Batch` and `Sample`, which PyTorch's default collate and its workers know.

Their tensors lie over the memory of NumPy's arrays, which is what copies samples.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any, Self, overload

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import get_worker_info
from torch.utils.data._utils.collate import collate, default_collate_fn_map

from ups_store.errors import ArrayNotFoundError, SpecError
from ups_store.format.metadata import dtype_of
from ups_store.format.ragged import LENGTHS
from ups_store.read import items
from ups_store.read.base import AnyStore
from ups_store.read.gather import Indices
from ups_store.system import files

# Smaller tensors go to another process by value: sharing one takes a file, two descriptors and a connection.
SENT_BYTES = 512 << 10

Allocate = Callable[[tuple[int, ...], torch.dtype], Tensor]


class _Tensors(dict[str, Any]):
    """Tensors and strings by name; "params" holds tensors by name once more.

    Attributes:
        padded: Ragged arrays that get zeros behind each sample where samples become a batch. Only what was
            just gathered knows them, not what is made of it.
    """

    padded: Collection[str] = ()

    def apply(self, function: Callable[[Tensor], Tensor]) -> Self:
        """Make a new object with `function` of every tensor; everything else is taken over."""
        changed: Self = map_tensors(self, function)
        return changed

    def tensors(self) -> list[Tensor]:
        """Give all tensors."""
        groups = (value.values() if isinstance(value, Mapping) else (value,) for value in self.values())
        return [value for group in groups for value in group if isinstance(value, Tensor)]

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Self:
        """Move to another device; tensors that are there already are not copied."""
        return self.apply(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum((tensor.values() if tensor.is_nested else tensor).nbytes for tensor in self.tensors())


class Sample(_Tensors):
    """One item of a `StoreDataset`: the keys of a `Batch` without the axis B."""


class Batch(_Tensors):
    """A batch: the names of the arrays, or for windows `z0`, `z1`, `params`, `dt` and `t`.

    | key | shape | content |
    |---|---|---|
    | `z0` | (B, L, D) or (B, X, C)... | state at the window's start |
    | `z1` | (B, H, L, D)... | the H states that follow, `stride` steps apart |
    | `params` | {name: (B,)} float32 | every number that belongs to a trajectory |
    | `t` | (B,) float32 | time of `z0`; the number of the step where the store has no times |
    | `dt` | (B, H) float32 | time from each state to the next |
    | an array's name | (B, ...) | without windows every array; with windows those that don't vary in time |
    | a name in `names` | (B, H + 1, ...) | with windows: an array that varies in time, at the steps of both |
    | a ragged array's name | (B, L, ...), or nested | see `StoreDataset`; `NAME.lengths`, (B,), beside it |
    | a text's name | list of B `str` | likewise `bytes` |
    | `index` | (B,) int64 | items of the dataset |
    | `source` | (B,) int64 | of a `MixedDataset`: which of its datasets a sample is of |
    | `task` | str | task of the store; a list of B where a batch mixes tasks |
    | `valid` | (B,) bool | loaders with `pad_last=True`: False where a row only fills up the last batch |
    """

    @property
    def num_samples(self) -> int:
        """B."""
        return len(self["index"])

    def row(self, index: int) -> Sample:
        """Give one sample, as views."""
        sample = Sample(self.apply(lambda tensor: tensor[index]))
        for key, value in self.items():
            if isinstance(value, list):  # text, and tasks of a mixed batch
                sample[key] = value[index]
        return sample

    def split(self, num: int) -> list[Batch]:
        """Cut into `num` consecutive batches, as views; of as many samples each, not ragged."""
        # By NumPy: each tensor is all of its storage, as of a batch that was made alone.
        return [Batch(part) for part in items.split_batch(map_tensors(dict(self), as_array), num, as_tensor)]

    def __missing__(self, key: object) -> Any:
        raise KeyError(f"no {key!r} in this batch; it has {', '.join(map(str, self))}")


def tensors_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Make tensors over the memory of arrays."""
    return {
        key: as_tensor(value)
        if isinstance(value, np.ndarray)
        else tensors_of(value)
        if isinstance(value, Mapping)
        else value
        for key, value in values.items()
    }


def batch_of(values: dict[str, Any], source: items.StoreSource, allocate: items.Allocate) -> Batch:
    """Make a batch of the arrays of a source's items, and nested tensors of lists of them."""
    lists = [] if source.padded else [name for name in source.ragged if not source.is_text(name)]
    views = {name: values.pop(name) for name in lists}
    batch = Batch(tensors_of(values))
    for name in lists:
        row = tuple(source.store.arrays[name].shape[2:])
        batch[name] = nested(views[name], source.dtype_of(name), row, allocate)
    batch.padded = source.padded
    return batch


class BatchRows(Sequence[Sample]):
    """The samples of a batch that was gathered as a whole, as views: what a `collate_fn` is given.

    Each is as the dataset gives it alone: what a ragged array was padded with is left out.
    """

    def __init__(self, batch: Batch) -> None:
        self.batch = batch

    def __len__(self) -> int:
        return self.batch.num_samples

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> list[Sample]: ...
    def __getitem__(self, index: int | slice) -> Sample | list[Sample]:
        if isinstance(index, slice):
            return [self[row] for row in range(*index.indices(len(self)))]
        sample = self.batch.row(range(len(self))[index])  # raises IndexError, which ends an iteration
        sample.padded = self.batch.padded
        for name in sample.padded:
            sample[name] = sample[name][: int(sample[name + LENGTHS])]
        return sample

    def transformed(self, transform: Callable[[Sample], Any]) -> list[Any]:
        """Transform every sample; where a dictionary comes back, default collate will know what to pad."""
        samples = [transform(sample) for sample in self]
        if self.batch.padded:
            samples = [Sample(sample) if type(sample) is dict else sample for sample in samples]
            for sample in samples:
                if isinstance(sample, Sample):
                    sample.padded = self.batch.padded
        return samples


def map_tensors(value: Any, function: Callable[[Tensor], Any]) -> Any:
    """Apply `function` to every tensor in mappings, lists, tuples and dataclasses; all else stays."""
    return _map(value, Tensor, function)


def _map(value: Any, kind: type[Any], function: Callable[[Any], Any]) -> Any:
    if isinstance(value, kind):
        return function(value)
    if isinstance(value, Mapping):
        changed = {key: _map(item, kind, function) for key, item in value.items()}
        return type(value)(changed) if isinstance(value, _Tensors) else changed
    if isinstance(value, list | tuple):
        mapped = [_map(item, kind, function) for item in value]
        return type(value)(*mapped) if hasattr(value, "_fields") else type(value)(mapped)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return dataclasses.replace(
            value, **{name: _map(getattr(value, name), kind, function) for name in names}
        )
    return value


@dataclass(frozen=True)
class _Packed:
    """The bytes of a tensor, uint8, and what they are."""

    raw: npt.NDArray[np.uint8]
    shape: torch.Size
    dtype: torch.dtype


def _packed(tensor: Tensor) -> Tensor | _Packed:
    is_plain = type(tensor) is Tensor and tensor.layout == torch.strided and tensor.device.type == "cpu"
    if not is_plain or tensor.is_conj() or tensor.is_neg() or tensor.requires_grad:
        return tensor
    if tensor.is_nested or not tensor.is_contiguous() or tensor.nbytes >= SENT_BYTES:
        return tensor
    return _Packed(tensor.view(-1).view(torch.uint8).numpy(), tensor.shape, tensor.dtype)


def _sent(values: _Tensors) -> tuple[Any, ...]:
    return _unpacked, (type(values), _map(dict(values), Tensor, _packed))


def _unpacked(cls: type[_Tensors], values: Mapping[str, Any]) -> _Tensors:
    return cls(_map(values, _Packed, lambda it: torch.from_numpy(it.raw).view(it.dtype).view(it.shape)))


def _collate(rows: Sequence[Sample], *, collate_fn_map: dict[Any, Callable[..., Any]] | None = None) -> Batch:
    if isinstance(rows, BatchRows):  # a dataset's __getitems__ made the batch already
        # A worker writes a large tensor to shared memory once.
        return rows.batch if get_worker_info() is None else rows.batch.apply(_as_shared)
    if any(row.keys() != rows[0].keys() for row in rows):
        raise SpecError(
            "samples with different arrays don't make a batch",
            kind="mixed",
            expected=sorted(rows[0]),
            found=next(sorted(row) for row in rows if row.keys() != rows[0].keys()),
            hint="keep stores apart: make_loader does",
        )
    values: dict[str, Any] = {}
    for key in rows[0]:
        column = [row[key] for row in rows]
        if key not in rows[0].padded or key + LENGTHS not in rows[0]:
            values[key] = collate(column, collate_fn_map=collate_fn_map)
            continue
        for array, length in zip(column, (row[key + LENGTHS] for row in rows), strict=True):
            if not isinstance(array, Tensor) or not array.ndim or len(array) != length:
                raise SpecError(  # a transform changed one and not the other
                    f"{key!r} and '{key}{LENGTHS}' disagree",
                    kind="ragged",
                    expected=f"a tensor of {int(length)} rows",
                    found=tuple(array.shape) if isinstance(array, Tensor) else type(array).__name__,
                    hint=f"a transform that changes the rows sets '{key}{LENGTHS}' too, or removes it",
                )
        values[key] = pad_sequence(column, batch_first=True)
    if "task" in values:
        values["task"] = items.one_or_all(values["task"])
    return Batch(values)


def _as_shared(tensor: Tensor) -> Tensor:
    """Copy a large tensor to memory that other processes can map, by a write call.

    Filling new shared memory through a mapping faults once per page, which takes twice as long as this.
    """
    if tensor.is_nested or tensor.nbytes < SENT_BYTES:
        return tensor
    fd = files.create_anonymous("ups_store_batch")
    try:
        files.write_at(fd, 0, tensor.reshape(-1).view(torch.uint8).numpy().data)
        storage = torch.UntypedStorage._new_shared_fd_cpu(fd, tensor.nbytes)  # type: ignore[attr-defined]
    finally:
        files.close(fd)  # the storage has a descriptor of its own
    return torch.empty(0, dtype=tensor.dtype).set_(storage).view(tensor.shape)


default_collate_fn_map[Sample] = _collate
ForkingPickler.register(Batch, _sent)  # what goes through multiprocessing's pipes and queues; not `pickle`
ForkingPickler.register(Sample, _sent)


@functools.cache  # NumPy works the name of a dtype out each time, for 3 µs
def torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    """Give the torch dtype of the same name; every dtype of the format has one."""
    same: torch.dtype = getattr(torch, dtype.name)
    return same


@functools.cache
def numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    """Give NumPy's dtype of the same name."""
    return np.dtype(dtype_of(str(dtype).removeprefix("torch.")))


def as_tensor(array: npt.NDArray[Any]) -> Tensor:
    """Give a writable array as a tensor over the same memory."""
    if torch_dtype(array.dtype) == torch.bfloat16:  # which torch doesn't take from NumPy
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def as_array(tensor: Tensor) -> npt.NDArray[Any]:
    """Give a contiguous tensor as an array over the same memory."""
    if tensor.dtype == torch.bfloat16:  # which torch doesn't give to NumPy
        return tensor.view(torch.int16).numpy().view(dtype_of("bfloat16"))
    return tensor.numpy()


def convert(source: npt.NDArray[Any], target: npt.NDArray[Any]) -> None:
    """Copy an array into one of another dtype: several times faster than NumPy's conversion of float16."""
    as_tensor(target).copy_(as_tensor(source))


def new_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Make an uninitialised tensor in this process' memory."""
    return torch.empty(shape, dtype=dtype)


class TensorPool(items.BufferPool):
    """A `BufferPool` that makes tensors when it is called, as `Allocate`."""

    def __call__(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Make an uninitialised tensor in this process' memory."""
        return as_tensor(self.empty(shape, numpy_dtype(dtype)))


def arrays_by(allocate: Allocate) -> items.Allocate:
    """Make arrays over the memory that tensors are made of."""
    if isinstance(allocate, TensorPool):
        return allocate.empty
    return lambda shape, dtype: as_array(allocate(shape, torch_dtype(dtype)))


def gather_nested(
    store: AnyStore, indices: Indices | slice, name: str, *, dtype: torch.dtype | None = None
) -> Tensor:
    """Copy samples of a ragged array into a nested tensor of jagged layout, shape (B, rows, ...).

    Args:
        store: An open store.
        indices: Sample numbers, as for `gather`.
        name: A ragged array of numbers.
        dtype: What floating-point numbers are converted to; the array's by default.
    Raises:
        ArrayNotFoundError: If there is no such array; also a KeyError.
        SpecError: If the array isn't ragged, or is text, kind "ragged".
    """
    arrays = store.arrays
    if not isinstance(name, str) or name not in arrays:
        expected = f"one of {', '.join(arrays)}"
        raise ArrayNotFoundError(f"no array {name!r} of samples", path=store.path, expected=expected)
    spec = arrays[name]
    if not spec.is_ragged:
        raise SpecError("it isn't ragged", kind="ragged", path=store.path, array=name)
    if spec.encoding is not None:
        hint = "text comes as a list of str; its bytes from gather(..., ragged='padded')"
        raise SpecError("text", kind="ragged", path=store.path, array=name, hint=hint)
    stored = np.dtype(spec.dtype)
    is_converted = dtype is not None and torch_dtype(stored).is_floating_point
    target = numpy_dtype(dtype) if is_converted and dtype is not None else stored
    return nested(store.gather(indices, [name])[name], target, tuple(spec.shape[2:]), np.empty)


def nested(
    views: Sequence[npt.NDArray[Any]], dtype: np.dtype[Any], row: tuple[int, ...], allocate: items.Allocate
) -> Tensor:
    """Copy samples, arrays of any number of rows of shape `row`, into a nested tensor."""
    ends = np.cumsum([0, *map(len, views)])
    values = items.allocate_any((int(ends[-1]), *row), dtype, allocate)
    for first, end, view in zip(ends[:-1].tolist(), ends[1:].tolist(), views, strict=True):
        values[first:end] = view
    return torch.nested.nested_tensor_from_jagged(as_tensor(values), torch.from_numpy(ends))
