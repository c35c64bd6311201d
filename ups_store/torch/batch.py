"""`Batch` and `Sample`: tensors by name, which PyTorch's default collate knows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data._utils.collate import collate, default_collate_fn_map

from ups_store.errors import SpecError

# Smaller tensors go to another process by value: sharing one takes a file, two descriptors and longer.
SENT_BYTES = 64 << 10


class _Tensors(dict[str, Any]):
    """Tensors and strings by name; "params" holds tensors by name once more."""

    def apply(self, function: Callable[[Tensor], Tensor]) -> Self:
        """A new object with `function` of every tensor; everything else is taken over."""
        return type(self)(_map(self, Tensor, function))

    def tensors(self) -> list[Tensor]:
        """All tensors."""
        groups = (value.values() if isinstance(value, Mapping) else (value,) for value in self.values())
        return [value for group in groups for value in group if isinstance(value, Tensor)]

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Self:
        """The same values on another device; tensors that are there already are not copied."""
        return self.apply(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors())


class Sample(_Tensors):
    """One item of a `StoreDataset`: the keys of a `Batch` without the axis B."""


class Batch(_Tensors):
    """A batch: the names of the arrays, or for windows `z0`, `z1`, `params`, `dt` and `t`.

    | key | shape | content |
    |---|---|---|
    | `z0` | (B, L, D) or (B, X, C)... | state at the window's start |
    | `z1` | (B, H, L, D)... | the H states that follow, `time_stride` steps apart |
    | `params` | {name: (B,)} float32 | every number that belongs to a trajectory |
    | `t` | (B,) float32 | time of `z0`; the number of the step where the store has no times |
    | `dt` | (B, H) float32 | time from each state to the next |
    | an array's name | (B, ...) | without windows every array; with windows those that don't vary in time |
    | a name in `names` | (B, H + 1, ...) | with windows: an array that varies in time, at the steps of both |
    | `index` | (B,) int64 | items of the dataset |
    | `task` | str | task of the store; a list of B where a batch mixes tasks |
    | `valid` | (B,) bool | loaders with `drop_last=False`: False where a row only fills up the last batch |
    """

    @property
    def num_samples(self) -> int:
        """B."""
        return len(self["index"])

    def row(self, index: int) -> Sample:
        """One sample, as views."""
        sample = Sample(self.apply(lambda tensor: tensor[index]))
        sample["task"] = self["task"] if isinstance(self["task"], str) else self["task"][index]
        return sample

    def __missing__(self, key: object) -> Sample:
        # default_collate looks at batch[0] to choose a function, which then gets the batch as it is.
        if isinstance(key, int):
            return self.row(key)
        raise KeyError(f"no {key!r} in this batch; it has {', '.join(map(str, self))}")


def _map(values: Mapping[str, Any], kind: type[Any], function: Callable[[Any], Any]) -> dict[str, Any]:
    """A new dict with `function` of every value of a kind, also of those in dicts within."""
    result: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            result[key] = _map(value, kind, function)
        else:
            result[key] = function(value) if isinstance(value, kind) else value
    return result


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
    return _unpacked, (type(values), _map(values, Tensor, _packed))


def _unpacked(cls: type[_Tensors], values: Mapping[str, Any]) -> _Tensors:
    return cls(_map(values, _Packed, lambda it: torch.from_numpy(it.raw).view(it.dtype).view(it.shape)))


def _collate(
    rows: Batch | Sequence[Sample], *, collate_fn_map: dict[Any, Callable[..., Any]] | None = None
) -> Batch:
    if isinstance(rows, Batch):  # a dataset's __getitems__ made it already
        return rows
    if any(row.keys() != rows[0].keys() for row in rows):
        raise SpecError(
            "samples with different arrays don't make a batch",
            kind="mixed",
            expected=sorted(rows[0]),
            found=next(sorted(row) for row in rows if row.keys() != rows[0].keys()),
            hint="keep stores apart: make_loader does",
        )
    values = {key: collate([row[key] for row in rows], collate_fn_map=collate_fn_map) for key in rows[0]}
    values["task"] = one_or_all(values["task"])
    return Batch(values)


def one_or_all(tasks: Sequence[str]) -> str | list[str]:
    """The task if all are the same, else the list of them."""
    return tasks[0] if len(set(tasks)) == 1 else list(tasks)


default_collate_fn_map[Sample] = _collate
ForkingPickler.register(Batch, _sent)  # what goes through multiprocessing's pipes and queues; not `pickle`
ForkingPickler.register(Sample, _sent)
