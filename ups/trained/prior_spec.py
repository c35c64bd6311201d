"""What a prior of steady solutions is, besides its weights. No torch here."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

from ups.parsing import Count, Parsed
from ups.trained.corrector_spec import Sampling
from ups.trained.specs import SimulatorSpec

Method = Literal["flow", "regression"]


@dataclass(frozen=True)
class PriorSpec(Parsed):
    """What a prior of steady solutions is, besides its weights and its states.

    Attributes:
        method: "flow", a generative model; or "regression" by the same network, the mean of solutions.
        observed_points: Points at which it was trained to be given the input; None for all of them.
        sampling: How solutions are drawn where nothing else is asked for.
    """

    method: Method
    observed_points: Count | None
    sampling: Sampling

    def to_json(self) -> dict[str, Any]:
        """JSON values, for `from_json`."""
        return asdict(self)

    def num_given(self, spec: SimulatorSpec) -> int:
        """States of D channels that the input of a task fills, with its mask where it has one, at most."""
        if self.is_encoded(spec):
            return 1
        has_mask = self.observed_points is not None
        most = 1
        for task in spec.tasks.values():
            num_points = math.prod(task.grid.points) // math.prod(task.tokens)
            num_values = num_points * (dict(task.grid.channels)[task.input_array] + has_mask)
            most = max(most, math.ceil(num_values / spec.state_dim))
        return most

    def is_encoded(self, spec: SimulatorSpec) -> bool:
        """Whether the input is given as latents; one that is known at some points is given as its values."""
        return spec.states == "latent" and self.observed_points is None
