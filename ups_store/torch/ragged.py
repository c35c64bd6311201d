"""Ragged arrays in batches: padded to the longest sample, or as nested tensors; text as lists of `str`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ups_store.errors import ArrayNotFoundError, SpecError
from ups_store.format.ragged import LENGTHS
from ups_store.read.base import AnyStore
from ups_store.read.gather import Indices, Samples
from ups_store.read.ragged import padded
from ups_store.torch.memory import Allocate, as_array, new_tensor, torch_dtype

RaggedForm: TypeAlias = Literal["padded", "nested"]


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
    field = RaggedField(store, name, "nested", dtype)
    views = store.gather(indices, [name])[name]
    return field.nested(views, new_tensor)


class RaggedField:
    """One ragged array of a store, as batches have it.

    Args:
        store: The store.
        name: Its array.
        form: "padded" or "nested"; None if only text is allowed.
        dtype: What floating-point numbers are converted to; None for the array's.

    Attributes:
        key: Its name in the batch.
        is_text: Whether samples are `str` or `bytes`: a batch has a list of them.
        dtype: Dtype in the batch.
        tail: Shape of a row.
    """

    def __init__(
        self, store: AnyStore, name: str, form: RaggedForm | None, dtype: torch.dtype | None
    ) -> None:
        arrays = store.arrays
        if not isinstance(name, str) or name not in arrays:
            expected = f"one of {', '.join(arrays)}"
            raise ArrayNotFoundError(f"no array {name!r} of samples", path=store.path, expected=expected)
        spec = arrays[name]
        if not spec.is_ragged or (form == "nested" and spec.encoding is not None and dtype is not None):
            raise SpecError("it isn't ragged", kind="ragged", path=store.path, array=name)
        self.key, self.form, self._store = name, form, store
        self.is_text = spec.encoding is not None
        if form is None and not self.is_text:
            hint = 'say ragged="padded" or ragged="nested", or leave it out with `names`'
            raise SpecError("a ragged array", kind="ragged", path=store.path, array=name, hint=hint)
        stored = torch_dtype(np.dtype(spec.dtype))
        self.dtype = dtype if dtype is not None and stored.is_floating_point else stored
        self.tail: tuple[int, ...] = tuple(spec.shape[2:])

    def fetch(self, samples: Samples, allocate: Allocate) -> dict[str, Any]:
        """What a batch has of these samples, by key."""
        views = self._store.gather(samples, [self.key])[self.key]
        if self.is_text:
            return {self.key: views}
        if self.form == "nested":
            return {self.key: self.nested(views, allocate)}
        longest = max(map(len, views), default=0)
        out = allocate_any((len(views), longest, *self.tail), self.dtype, allocate)
        lengths = torch.empty(len(views), dtype=torch.int64)
        padded(self._store.metas[self.key], views, as_array(out), lengths.numpy())
        return {self.key: out, self.key + LENGTHS: lengths}

    def nested(self, views: Sequence[npt.NDArray[Any]], allocate: Allocate) -> Tensor:
        """Samples as a nested tensor."""
        if self.is_text:
            hint = "text comes as a list of str; its bytes from gather(..., ragged='padded')"
            raise SpecError("text", kind="ragged", path=self._store.path, array=self.key, hint=hint)
        ends = np.cumsum([0, *map(len, views)])
        values = allocate_any((int(ends[-1]), *self.tail), self.dtype, allocate)
        target = as_array(values)
        for first, end, view in zip(ends[:-1].tolist(), ends[1:].tolist(), views, strict=True):
            target[first:end] = view
        return torch.nested.nested_tensor_from_jagged(values, torch.from_numpy(ends))


def allocate_any(shape: tuple[int, ...], dtype: torch.dtype, allocate: Allocate) -> Tensor:
    """Memory of a shape that differs from batch to batch: sizes are rounded up, so that they come again."""
    nbytes = math.prod(shape) * dtype.itemsize
    if not nbytes:
        return torch.empty(shape, dtype=dtype)
    room = allocate((1 << (nbytes - 1).bit_length(),), torch.uint8)
    return room[:nbytes].view(dtype).view(shape)


def join_ragged(parts: Sequence[Any], order: Sequence[int]) -> Any:
    """Parts of a batch that one ragged array has, as one, its rows in the order that is asked for."""
    if isinstance(parts[0], list):
        together = [value for part in parts for value in part]
        return [together[row] for row in order]
    if parts[0].is_nested:
        samples = [sample for part in parts for sample in part.unbind()]
        return torch.nested.as_nested_tensor([samples[row] for row in order], layout=torch.jagged)
    longest = max(part.shape[1] for part in parts)
    joined = parts[0].new_zeros((len(order), longest, *parts[0].shape[2:]))
    sources = [sample for part in parts for sample in part]
    for row, source in enumerate(order):
        joined[row, : len(sources[source])] = sources[source]
    return joined
