"""The size of a generative model of states: the operator's, with what `diffusion` changes; no torch."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any

from ups.config.operator_size import check_size, operator_size
from ups.config.run import RunConfig
from ups.errors import ConfigWarning
from ups.models.operator_size import OperatorSize


def corrector_size(config: RunConfig) -> OperatorSize:
    """Architecture of the corrector.

    Raises:
        ConfigError: As `operator_size`, about the keys of `diffusion`.
    """
    with warnings.catch_warnings():  # said when the operator is made
        warnings.simplefilter("ignore", ConfigWarning)
        size = operator_size(config.operator)
    changed = {"width": config.diffusion.hidden_dim, "depths": config.diffusion.depths}
    return _with(size, changed, keys=("diffusion.hidden_dim", "diffusion.depths"))


def student_size(config: RunConfig, teacher: OperatorSize) -> OperatorSize:
    """Architecture of a student.

    Raises:
        ConfigError: As `corrector_size`, about the keys of `training`.
    """
    changed = {"width": config.training.distill_hidden_dim, "depths": config.training.distill_depths}
    return _with(teacher, changed, keys=("training.distill_hidden_dim", "training.distill_depths"))


def _with(size: OperatorSize, changed: Mapping[str, Any], *, keys: tuple[str, str]) -> OperatorSize:
    said = {name: value for name, value in changed.items() if value is not None}
    size = dataclasses.replace(size, **said)
    check_size(size, keys=keys)
    return size
