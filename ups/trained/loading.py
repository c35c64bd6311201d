"""`ups.load`: what predicts, from its file, of whatever kind that is."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from ups.errors import CheckpointError, MissedGatesWarning
from ups.trained.checkpoint import read_any_document
from ups.trained.corrected import CorrectedSimulator, load_corrected
from ups.trained.prior import SteadyPrior, load_prior
from ups.trained.simulator import Simulator, load_simulator
from ups.trained.specs import CORRECTOR, GATES, OPERATOR, PRIOR, STUDENT

Loaded = Simulator | CorrectedSimulator | SteadyPrior
# Kinds of checkpoint that can be rolled out; later ones are added here.
LOADERS: Mapping[str, Callable[..., Loaded]] = {
    OPERATOR: load_simulator,
    CORRECTOR: load_corrected,
    STUDENT: partial(load_corrected, kind=STUDENT),
    PRIOR: load_prior,
}


def load(
    path: str | os.PathLike[str], *, device: str = "cpu", allow_code: str | Iterable[str] = ()
) -> Loaded:
    """Read what predicts, in evaluation mode; the one file is enough.

    Warns (`MissedGatesWarning`) of a file that was exported although its model had missed gates.

    Args:
        path: `operator.safetensors`; for ensembles `corrector.safetensors` or `student.safetensors`, of
            steady tasks `prior.safetensors`.
        device: Where it computes.
        allow_code: Modules that may be imported because the file names an operator of them, such as
            "mylab.model"; an operator whose module is imported already needs no mention.
    Raises:
        CheckpointError: As `load_checkpoint`; kind "no_spec" or "other_weights" if it doesn't hold together;
            kind "foreign_code" if its operator is in a module that nobody allowed.
    """
    kind, document = read_any_document(path)
    if kind not in LOADERS:
        raise CheckpointError(
            "another kind of checkpoint",
            kind="other_kind",
            path=path,
            expected=" or ".join(LOADERS),
            found=kind,
        )
    if missed := missed_gates(document):
        said = f"{path}: exported although it missed gates: {'; '.join(missed)}"
        warnings.warn(said, MissedGatesWarning, stacklevel=2)
    options = {} if kind == PRIOR else {"allow_code": allow_code}  # a prior's network is always ours
    return LOADERS[kind](path, device=device, **options)


def missed_gates(document: Mapping[str, Any]) -> list[str]:
    """What a checkpoint's document says of gates that its model missed, for people."""
    return [gate["says"] for gate in document.get(GATES, ()) if not gate["passed"]]
