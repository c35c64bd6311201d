"""What files of trained models have in common: weights, specification, and what is said of their training."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NotRequired, TypedDict, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ups.device import free_bytes
from ups.errors import CheckpointError, ConfigError
from ups.trained.checkpoint import fill_weights, save_checkpoint
from ups.trained.specs import incomplete_spec

_WEIGHTS = (torch.empty, torch.randn, torch.eye)
_OF_GRIDS = (
    *(torch.arange, torch.linspace, torch.meshgrid, torch.cartesian_prod),
    *(torch.zeros, torch.ones, torch.full, torch.Tensor.expand),
)
_BYTES_OF_A_POINT = 64  # of all functions of a grid


class TrainedModel(nn.Module):
    """What is saved and loaded as a whole.

    Attributes:
        path: The file that it was loaded from; None for one that wasn't.
    """

    path: Path | None = None


Model = TypeVar("Model", bound=TrainedModel)


class OfTraining(TypedDict):
    """What is said of a model's training, and which weights it left.

    Attributes:
        config: Of the run.
        report: Validation errors by name.
        data: What it was trained on, by task, such as the hash of a store.
        weights: The model's `state_dict`, whole; by default its own.
    """

    config: Mapping[str, Any]
    report: Mapping[str, Any]
    data: NotRequired[Mapping[str, str] | None]
    weights: NotRequired[Mapping[str, Tensor] | None]


def save_model(
    path: str | os.PathLike[str],
    model: nn.Module,
    *,
    kind: str,
    spec: Mapping[str, Any],
    training: OfTraining,
    **own: Any,
) -> None:
    """Write a model's file, and its card beside it; arguments and errors as of `save_checkpoint`.

    `own` are further values of the document, JSON values.
    """
    document = {
        "spec": dict(spec),
        **own,
        "config": dict(training["config"]),
        "report": dict(training["report"]),
        "data": dict(training.get("data") or {}),
    }
    weights = training.get("weights")
    save_checkpoint(path, model.state_dict() if weights is None else weights, kind=kind, document=document)


def filled(
    build: Callable[[], Model],
    tensors: Mapping[str, Tensor],
    *,
    path: str | os.PathLike[str],
    device: str,
    is_trusted: bool = False,
) -> Model:
    """Build a model on a device with the weights of its file, in evaluation mode.

    Args:
        build: Makes it as its specification says, with any weights.
        is_trusted: Whether a constructor of others is called, which may make as many tensors as it likes.
    """
    try:
        with nullcontext() if is_trusted else _NoLarger(tensors):
            model = build()
    except (CheckpointError, ImportError):
        raise
    except Exception as error:  # a constructor's, whose arguments are a file's
        if is_trusted and isinstance(error, ConfigError):
            error.path = str(path)
            raise
        raise incomplete_spec(error, path, what="model") from error
    fill_weights(model.to(device), tensors, path=path)
    model.path = Path(path)
    return model.eval()


class _NoLarger(TorchFunctionMode):
    """Inside, a model is built whose weights are about as many as a file's tensors, and none larger.

    Anything else is refused with a ValueError, before memory is filled; so is a function of the grid, such as
    coordinates, that memory doesn't hold.

    Args:
        tensors: Of the file.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._largest = max((tensor.numel() for tensor in tensors.values()), default=0)
        self._num_left = 2 * len(tensors)  # some are made twice
        self._room = free_bytes(torch.device("cpu")) // _BYTES_OF_A_POINT

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _WEIGHTS:
            self._num_left -= 1
            if self._num_left < 0:
                raise ValueError("more weights than the file has")
            if (num := _num_values(func, args)) > self._largest:
                raise ValueError(f"weights of {num:,} values, in a file whose largest have {self._largest:,}")
        elif func in _OF_GRIDS and (num := _num_values(func, args)) > self._room:
            raise ValueError(f"a grid of {num:,} points, in memory for {self._room:,}")
        return func(*args, **(kwargs or {}))


def _num_values(func: Any, args: tuple[Any, ...]) -> int:
    """How many the function will make of its arguments."""
    if func is torch.arange or func is torch.linspace:
        return int(args[-1])
    if func in (torch.meshgrid, torch.cartesian_prod):
        return math.prod(tensor.numel() for tensor in args)
    if func is torch.eye:
        return int(args[0] * args[-1])
    sizes = args[1:] if func is torch.Tensor.expand else args
    if not sizes:  # named, such as those of another package's layers
        return 0
    return math.prod(sizes[0] if isinstance(sizes[0], Sequence) else sizes)
