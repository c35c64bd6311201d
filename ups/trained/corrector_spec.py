"""What a corrector is, besides its weights, and how residuals are drawn with it. No torch here."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import numpy as np

from ups.errors import ConfigError
from ups.models.operator_size import OperatorSize
from ups.parsing import Count, NotNegative, Parsed, Positive
from ups.trained.specs import CORRECTOR, SimulatorSpec, incomplete_spec, parse_joined_specs

Sampler = Literal["euler", "heun", "adaptive"]  # as `ups.diffusion.samplers` has them


@dataclass(frozen=True)
class Sampling:
    """How residuals are drawn.

    Attributes:
        sampler: "euler", "heun" or "adaptive".
        num_steps: Of Euler's and Heun's method.
        tolerance: Of the adaptive one: largest error of a step.
        max_evaluations: Of the adaptive one, at most.
    """

    sampler: Sampler = "euler"
    num_steps: Count = 32
    tolerance: Positive = 1e-2
    max_evaluations: Count = 200


@dataclass(frozen=True)
class Taught:
    """Of a student, where it comes from.

    Attributes:
        teacher_sha256: Of the corrector's file, as `ups.trained.checkpoint.hash_tensors` gives it.
        method: "reflow" or "consistency".
    """

    teacher_sha256: str
    method: str


@dataclass(frozen=True)
class CorrectorSpec(Parsed):
    """What a corrector is, besides its weights.

    Attributes:
        operator_sha256: Of the operator's file, as `ups.trained.checkpoint.hash_tensors` gives it.
        size: Fields of `ups.models.operator_size.OperatorSize`.
        sigma: sigma_c by task: root mean square of the operator's residual, in normalised units.
        lead_times: Steps of the operator's own rollouts that residuals were taken from.
        sampling: How residuals are drawn where nothing else is asked for.
        taught: Of a student of another corrector; None of one that was trained on residuals.
        takes_seams: Whether a linear map takes the operator's seams off before residuals are drawn.
    """

    operator_sha256: str
    size: Mapping[str, Any]
    sigma: Mapping[str, NotNegative]
    lead_times: Count
    sampling: Sampling = Sampling()
    taught: Taught | None = None
    takes_seams: bool = False

    def to_json(self) -> dict[str, Any]:
        """JSON values, for `from_json`."""
        return asdict(self)


def parse_specs(
    document: Mapping[str, Any], path: str | os.PathLike[str]
) -> tuple[SimulatorSpec, CorrectorSpec]:
    """The specifications in a corrector's or a student's document: of the operator in it, and its own.

    Raises:
        CheckpointError: As `parse_joined_specs`.
    """
    spec, corrector = parse_joined_specs(document, path, name=CORRECTOR, parse=CorrectorSpec.from_json)
    try:
        OperatorSize.from_json(corrector.size)
        if missing := spec.tasks.keys() - corrector.sigma.keys():
            raise ValueError(f"sigma: none of {', '.join(sorted(missing))}")
    except (KeyError, TypeError, ValueError) as error:
        raise incomplete_spec(error, path, what=CORRECTOR) from error
    return spec, corrector


def checked_sampling(sampling: Sampling) -> Sampling:
    """The same, if it can be.

    Raises:
        ConfigError: Kind "sampler", for an unknown one or no steps.
    """
    if sampling.sampler not in get_args(Sampler):
        expected = ", ".join(get_args(Sampler))
        raise ConfigError("sampler", kind="sampler", expected=expected, found=repr(sampling.sampler))
    num = sampling.num_steps
    if not isinstance(num, (int, np.integer)) or isinstance(num, bool) or num < 1:
        expected = "a whole number, at least 1"
        raise ConfigError("num_sampler_steps", kind="sampler", expected=expected, found=repr(num))
    return sampling
