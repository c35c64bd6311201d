"""Files of priors of steady solutions: all that drawing a solution needs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ups.trained.autoencoder import autoencoder_within, document_with
from ups.trained.checkpoint import fill_weights, load_checkpoint, save_checkpoint
from ups.trained.prior import SteadyPrior
from ups.trained.prior_spec import PriorSpec
from ups.trained.specs import PRIOR, incomplete_spec, parse_simulator_spec


def save_prior(
    path: str | os.PathLike[str],
    model: SteadyPrior,
    *,
    config: Mapping[str, Any],
    report: Mapping[str, Any],
    data: Mapping[str, str] | None = None,
    weights: Mapping[str, Tensor] | None = None,
) -> None:
    """Write weights of prior and autoencoder, specifications, configuration and report.

    Args:
        path: Where the file goes; its model card goes beside it.
        model: To be written.
        config: Of the run.
        report: Validation errors by name.
        data: What it was trained on, by task.
        weights: Its `state_dict`, whole; by default the model's own.
    """
    spec = {**model.spec.to_json(), PRIOR: model.prior_spec.to_json()}
    autoencoder = model.autoencoder
    document = document_with(autoencoder, spec=spec, config=config, report=report, data=data)
    tensors = model.state_dict() if weights is None else weights
    save_checkpoint(path, tensors, kind=PRIOR, document=document)


def load_prior(path: str | os.PathLike[str], *, device: str = "cpu") -> SteadyPrior:
    """Read a prior, in evaluation mode; the one file is enough.

    Raises:
        CheckpointError: As `load_checkpoint`; kind "no_spec" or "other_weights" if it doesn't hold together.
    """
    tensors, document = load_checkpoint(path, kind=PRIOR, device=device)
    try:
        values = dict(document["spec"])
        prior = PriorSpec.from_json(values.pop(PRIOR))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise incomplete_spec(error, path, what="prior") from error
    spec = parse_simulator_spec({"spec": values}, path)
    model = SteadyPrior(spec, prior, autoencoder_within(document, path)).to(device)
    fill_weights(model, tensors, path=path)
    model.path = Path(path)
    return model.eval()
