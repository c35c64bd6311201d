"""Tensors over the memory of arrays, and arrays over that of tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ups_store.errors import ArrayNotFoundError, SpecError
from ups_store.format.metadata import dtype_of
from ups_store.read import items
from ups_store.read.base import AnyStore
from ups_store.read.gather import Indices
from ups_store.system import files

Allocate = Callable[[tuple[int, ...], torch.dtype], Tensor]


@functools.cache  # NumPy works the name of a dtype out each time, for 3 µs
def torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    """Give the torch dtype of the same name; every dtype of the format has one."""
    same: torch.dtype = getattr(torch, dtype.name)
    return same


@functools.cache
def numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    """Give NumPy's dtype of the same name."""
    return np.dtype(dtype_of(str(dtype).removeprefix("torch.")))


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


def shared_copy(tensor: Tensor) -> Tensor:
    """Copy to memory that other processes can map, by a write call.

    Filling new shared memory through a mapping faults once per page, which takes twice as long as this.
    """
    fd = files.create_anonymous("ups_store_batch")
    try:
        files.write_at(fd, 0, tensor.reshape(-1).view(torch.uint8).numpy().data)
        storage = torch.UntypedStorage._new_shared_fd_cpu(fd, tensor.nbytes)  # type: ignore[attr-defined]
    finally:
        files.close(fd)  # the storage has a descriptor of its own
    return torch.empty(0, dtype=tensor.dtype).set_(storage).view(tensor.shape)


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
    stored = torch_dtype(np.dtype(spec.dtype))
    wanted = dtype if dtype is not None and stored.is_floating_point else stored
    return nested(store.gather(indices, [name])[name], numpy_dtype(wanted), tuple(spec.shape[2:]), np.empty)


def nested(
    views: Sequence[npt.NDArray[Any]], dtype: np.dtype[Any], row: tuple[int, ...], allocate: items.Allocate
) -> Tensor:
    """Copy samples, arrays of any number of rows of shape `row`, into a nested tensor."""
    ends = np.cumsum([0, *map(len, views)])
    values = items.allocate_any((int(ends[-1]), *row), dtype, allocate)
    for first, end, view in zip(ends[:-1].tolist(), ends[1:].tolist(), views, strict=True):
        values[first:end] = view
    return torch.nested.nested_tensor_from_jagged(as_tensor(values), torch.from_numpy(ends))
