"""Files of corrected simulators: all that a rollout needs, bound by a hash to the operator's file."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Unpack

from ups.errors import CheckpointError
from ups.trained.autoencoder import Autoencoder, spec_of_autoencoder, spec_within
from ups.trained.checkpoint import hash_tensors, load_checkpoint
from ups.trained.corrected import CorrectedSimulator
from ups.trained.corrector_spec import CorrectorSpec, parse_specs
from ups.trained.model_files import OfTraining, filled, save_model
from ups.trained.simulator import Simulator
from ups.trained.specs import CORRECTOR, STUDENT

_OPERATOR = "simulator."  # beginning of the names of the operator's tensors


def candidate_of(path: Path) -> Path:
    """What has not passed its gates yet, and so hasn't the name of a checkpoint."""
    return path.with_name(f"{path.stem}.candidate{path.suffix}")


def save_corrected(
    path: str | os.PathLike[str], model: CorrectedSimulator, **training: Unpack[OfTraining]
) -> None:
    """Write weights of corrector, operator and autoencoder, and their specifications.

    The file of a corrector that was taught by another is of the kind "student", else "corrector". Arguments
    and errors are those of `save_model`.
    """
    inner = spec_within(model.simulator.autoencoder)
    spec = {**model.spec.to_json(), CORRECTOR: model.corrector_spec.to_json()}
    kind = CORRECTOR if model.corrector_spec.taught is None else STUDENT
    save_model(path, model, kind=kind, spec=spec, training=training, autoencoder=inner)


def load_corrected(
    path: str | os.PathLike[str],
    *,
    device: str = "cpu",
    kind: str = CORRECTOR,
    allow_code: str | Iterable[str] = (),
) -> CorrectedSimulator:
    """Read a corrected simulator, in evaluation mode; the one file is enough.

    Args:
        kind: "corrector" or "student".
        allow_code: As of `ups.load`.

    Raises:
        CheckpointError: As `load_checkpoint`; kind "no_spec" or "other_weights" if it doesn't hold together;
            kind "other_operator", if the operator in it isn't the one that it was trained for.
    """
    tensors, document = load_checkpoint(path, kind=kind, device=device)
    spec, corrector = parse_specs(document, path)
    _check_bound(path, found=hash_tensors(path, prefix=_OPERATOR), corrector=corrector)
    inner = spec_of_autoencoder(document, path)

    def build() -> CorrectedSimulator:
        autoencoder = Autoencoder(inner) if inner else None
        return CorrectedSimulator(Simulator(spec, autoencoder, allow_code=allow_code), corrector)

    return filled(build, tensors, path=path, device=device, is_trusted="name" in spec.operator)


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
