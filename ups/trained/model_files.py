"""What files of trained models have in common: weights, specification, and what is said of their training."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NotRequired, TypedDict, TypeVar

from torch import Tensor, nn

from ups.trained.checkpoint import fill_weights, save_checkpoint


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
    model: Model, tensors: Mapping[str, Tensor], *, path: str | os.PathLike[str], device: str
) -> Model:
    """A model on a device with the weights of its file, in evaluation mode.

    Raises:
        OtherTensorsError: As `fill_weights`.
    """
    fill_weights(model.to(device), tensors, path=path)
    model.path = Path(path)
    return model.eval()
