"""What a state is conditioned on: the task, which array it is, parameters of the equation, boundary types.

Letters: B batch, P parameters, E condition, A axes, K boundary types.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ups.grid import PERIODIC, UNKNOWN_BOUNDARY

# PDEBench's smallest parameters are viscosities of 1e-8.
_SMALLEST = 1e-8
_LOG_RANGE = 8.0
_FEATURES = 3
# Boundary types as stores name them: PDEBench's, then The Well's, whose two ends of an axis may differ. A
# checkpoint's weights are in this order. Names that aren't here share the last place.
BOUNDARY_TYPES = (
    *(PERIODIC, "neumann", "dirichlet", "dirichlet_cauchy", "outflow"),
    *("wall", "open", "wall_open", "open_wall"),
    UNKNOWN_BOUNDARY,
)


def boundary_flags(boundary: Sequence[str]) -> list[float]:
    """One-hot code of the boundary type of each axis, one axis after another, A K numbers."""
    known = [kind if kind in BOUNDARY_TYPES else UNKNOWN_BOUNDARY for kind in boundary]
    return [float(kind == one) for kind in known for one in BOUNDARY_TYPES]


@dataclass(frozen=True)
class Condition:
    """Conditions of a batch.

    Attributes:
        task: Number of the task among those of the model, int64, shape (B,).
        parameters: Parameters in the model's order, float32, NaN where a task has none of that name,
            shape (B, P).
    """

    task: Tensor
    parameters: Tensor

    def to(self, device: torch.device) -> Condition:
        """The same on a device."""
        return Condition(self.task.to(device), self.parameters.to(device))


class ConditionEmbedding(nn.Module):
    """Condition to a vector of E channels.

    Args:
        num_tasks: Tasks of the model.
        arrays: Names of the arrays; each has an embedding (field type).
        num_parameters: P.
        width: E.
    """

    def __init__(self, *, num_tasks: int, arrays: tuple[str, ...], num_parameters: int, width: int) -> None:
        super().__init__()
        self.task = nn.Embedding(num_tasks, width)
        self.array = nn.ParameterDict({name: nn.Parameter(0.02 * torch.randn(width)) for name in arrays})
        self.parameters_in = nn.Linear(max(1, _FEATURES * num_parameters), width)
        self.mlp = nn.Sequential(nn.GELU(), nn.Linear(width, width), nn.GELU())

    def forward(self, condition: Condition, *, array: str) -> Tensor:
        """Embed the condition of frames of one array; float32, shape (B, E)."""
        features = _parameter_features(condition.parameters).to(self.parameters_in.weight.dtype)
        if features.shape[1] == 0:
            features = features.new_zeros(len(features), 1)
        embedded = self.parameters_in(features) + self.task(condition.task) + self.array[array]
        return self.mlp(embedded)


def _parameter_features(parameters_BP: Tensor) -> Tensor:
    """Whether it is there, its signed logarithm, and its value squashed; shape (B, 3 P)."""
    there = torch.isfinite(parameters_BP)
    value = torch.where(there, parameters_BP, 0.0)
    logarithm = value.sign() * torch.log10(1 + value.abs() / _SMALLEST) / _LOG_RANGE
    squashed = value / (1 + value.abs())
    return torch.cat([there.to(value.dtype), logarithm, squashed], dim=1)
