"""Files of corrected simulators: all that a rollout needs, bound by a hash to the operator's file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ups.errors import CheckpointError
from ups.trained.autoencoder import autoencoder_within, document_with
from ups.trained.checkpoint import fill_weights, hash_tensors, load_checkpoint, save_checkpoint
from ups.trained.corrected import CorrectedSimulator
from ups.trained.corrector_spec import CorrectorSpec, parse_specs
from ups.trained.simulator import Simulator
from ups.trained.specs import CORRECTOR, STUDENT

_OPERATOR = "simulator."  # beginning of the names of the operator's tensors


def candidate_of(path: Path) -> Path:
    """What has not passed its gates yet, and so hasn't the name of a checkpoint."""
    return path.with_name(f"{path.stem}.candidate{path.suffix}")


def save_corrected(
    path: str | os.PathLike[str],
    model: CorrectedSimulator,
    *,
    config: Mapping[str, Any],
    report: Mapping[str, Any],
    data: Mapping[str, str] | None = None,
    weights: Mapping[str, Tensor] | None = None,
) -> None:
    """Write weights of corrector, operator and autoencoder, specifications, configuration and report.

    The file of a corrector that was taught by another is of the kind "student", else "corrector".

    Args:
        path: Where the file goes; its model card goes beside it.
        model: To be written.
        config: Of the run.
        report: Validation errors by name.
        data: What it was trained on, by task, such as the hash of a store.
        weights: Its `state_dict`, whole; by default the model's own.
    """
    spec = {**model.spec.to_json(), CORRECTOR: model.corrector_spec.to_json()}
    autoencoder = model.simulator.autoencoder
    document = document_with(autoencoder, spec=spec, config=config, report=report, data=data)
    tensors = model.state_dict() if weights is None else weights
    kind = CORRECTOR if model.corrector_spec.taught is None else STUDENT
    save_checkpoint(path, tensors, kind=kind, document=document)


def load_corrected(
    path: str | os.PathLike[str], *, device: str = "cpu", kind: str = CORRECTOR
) -> CorrectedSimulator:
    """Read a corrected simulator, in evaluation mode; the one file is enough.

    Args:
        path: The file.
        device: Where it computes.
        kind: "corrector" or "student".

    Raises:
        CheckpointError: As `load_checkpoint`; kind "no_spec" or "other_weights" if it doesn't hold together;
            kind "other_operator", if the operator in it isn't the one that it was trained for.
    """
    tensors, document = load_checkpoint(path, kind=kind, device=device)
    spec, corrector = parse_specs(document, path)
    _check_bound(path, found=hash_tensors(path, prefix=_OPERATOR), corrector=corrector)
    simulator = Simulator(spec, autoencoder_within(document, path))
    model = CorrectedSimulator(simulator, corrector).to(device)
    fill_weights(model, tensors, path=path)
    model.path = Path(path)
    return model.eval()


def _check_bound(path: str | os.PathLike[str], *, found: str, corrector: CorrectorSpec) -> None:
    if found != corrector.operator_sha256:
        raise CheckpointError(
            "a corrector of another operator, whose residuals are others",
            kind="other_operator",
            path=path,
            expected=f"the operator {corrector.operator_sha256[:12]}",
            found=found[:12],
            hint="train the corrector again: `ups train --stage diff_residual`",
        )
