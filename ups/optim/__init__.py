"""Optimisers and learning rates by name, and averages of a model's weights that can take their place."""

from ups.errors import check_installed

check_installed("torch", extra="train")

from ups.optim.averages import AveragedWeights, WeightsCopy  # noqa: E402
from ups.optim.learning_rate import LearningRate  # noqa: E402
from ups.optim.muon import MuonHybrid, muon_matrices  # noqa: E402
from ups.optim.optimizers import (  # noqa: E402
    ParameterGroup,
    make_optimizer,
    parameter_groups,
    set_learning_rate,
)

__all__ = [
    "AveragedWeights",
    "LearningRate",
    "MuonHybrid",
    "ParameterGroup",
    "WeightsCopy",
    "make_optimizer",
    "muon_matrices",
    "parameter_groups",
    "set_learning_rate",
]
