"""Generative models that lie beside an operator, and which of them belong into its table."""

from __future__ import annotations

from pathlib import Path

from ups.config.after_training import ENSEMBLE_ROWS
from ups.eval.forecasters import CorrectedForecaster, PriorForecaster, shown_size
from ups.log import logger
from ups.trained.checkpoint import hash_tensors, read_any_document
from ups.trained.corrected import CorrectedSimulator
from ups.trained.corrected_files import candidate_of, load_corrected
from ups.trained.loading import missed_gates
from ups.trained.prior import SteadyPrior, load_prior
from ups.trained.specs import CORRECTOR, PRIOR_FILE, STUDENT

_NAMES = {CORRECTOR: "corrected", STUDENT: "student"}  # of rows


def find_corrected(
    operator: Path,
    *,
    device: str,
) -> list[CorrectedSimulator]:
    """What was trained to correct an operator, from the files in its folder; others are named.

    Args:
        operator: The operator's checkpoint.

    Raises:
        CheckpointError: If one can't be read.
    """
    found, digest = [], hash_tensors(operator)
    for kind, row in _NAMES.items():
        stage, file = ENSEMBLE_ROWS[row]
        path = operator.with_name(file)
        if not path.exists():
            if (candidate := candidate_of(path)).exists():
                logger.warning(f"{path} isn't there, so it isn't evaluated: {_why_not(stage, candidate)}")
            continue
        model = load_corrected(path, device=device, kind=kind)
        if model.corrector_spec.operator_sha256 == digest:
            found.append(model)
            if missed := _missed(model):
                logger.warning(f"{path} was {missed}")
        else:
            logger.info(f"{path} is left out: it corrects another operator; train it again")
    return found


def find_prior(operator: Path, *, device: str) -> SteadyPrior | None:
    """The prior of steady solutions in an operator's folder; it needs no operator, and is of none.

    Raises:
        CheckpointError: If it can't be read.
    """
    path = operator.with_name(PRIOR_FILE)
    return load_prior(path, device=device) if path.exists() else None


def prior_forecaster(model: SteadyPrior) -> PriorForecaster:
    """Its row, `prior`."""
    num = model.prior_spec.observed_points
    given = "whole inputs" if num is None else f"inputs at {num} random points, where the others see all"
    return PriorForecaster(model, note=f"{shown_size(model.network)}, given {given}")


def _why_not(stage: str, candidate: Path) -> str:
    return (
        f"{candidate} hasn't passed its gates; `ups train --stage {stage}` trains it to its end and says "
        "what it missed, and with --export-anyway exports it, marked"
    )


def _missed(model: CorrectedSimulator) -> str:
    """That its file was exported in spite of gates; empty if it wasn't."""
    missed = missed_gates(read_any_document(model.path)[1]) if model.path is not None else []
    return f"exported although it missed gates: {'; '.join(missed)}" if missed else ""


def kind_of(model: CorrectedSimulator) -> str:
    """Of its checkpoint, "corrector" or "student"."""
    return CORRECTOR if model.corrector_spec.taught is None else STUDENT


def corrected_forecaster(model: CorrectedSimulator) -> CorrectedForecaster:
    """Its row, `corrected` or `student`."""
    kind, sampling = kind_of(model), model.corrector_spec.sampling
    drawn = "adaptive" if sampling.sampler == "adaptive" else f"{sampling.sampler}, {sampling.num_steps}"
    note = f"{kind} {shown_size(model.corrector)}, sampler {drawn}; one forecast is the mean of an ensemble"
    note = "; ".join(filter(None, (note, _missed(model))))
    return CorrectedForecaster(model, name=_NAMES[kind], label=f"operator with {kind}", note=note)
