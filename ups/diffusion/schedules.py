"""When: distributions that training draws flow times from, and the times at which a sampler asks a network.

A network that predicts the datum divides by 1 - t to give a velocity, so it is asked up to `LAST_TIME` only:
from there a straight line leads to t = 1. Letters: tau a number in 0..1, t flow time, B batch, N steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

# A datum's deviations of less than 1/32 of its standard deviation are averaged then, 0.1 % of the variance;
# and the largest weight that a datum's error has in the velocity's is 32^2.
LAST_TIME = 1 - 1 / 32

Distribution = Literal["uniform", "beta", "logit_normal"]


@dataclass(frozen=True)
class FlowTimes:
    """A distribution of tau, from which training draws.

    Attributes:
        type: "uniform"; "beta"; or "logit_normal", whose log(tau / (1 - tau)) is normal.
        alpha: Of "beta", > 0; larger than `beta` means closer to the data.
        beta: Of "beta", > 0.
        mean: Of the logit's normal distribution.
        std: Of the logit's normal distribution, > 0.

    Source: Esser et al. 2024, eq. 19 (arXiv:2403.03206), of the logit-normal one; Black et al. 2024,
        appendix B (arXiv:2410.24164), of beta distributions.
    """

    type: Distribution = "uniform"
    alpha: float = 1.0
    beta: float = 1.0
    mean: float = 0.0
    std: float = 1.0

    def draw(self, num: int, generator: torch.Generator) -> Tensor:
        """Independent tau, shape (num,), float32, in 0..1; on the generator's device."""
        if self.type == "uniform":
            return torch.rand(num, generator=generator, device=generator.device)
        if self.type == "logit_normal":
            normal = torch.randn(num, generator=generator, device=generator.device)
            return torch.sigmoid(self.mean + self.std * normal)
        shapes = torch.tensor([[self.alpha], [self.beta]], device=generator.device).expand(2, num)
        first, second = torch._standard_gamma(shapes.contiguous(), generator=generator)
        return first / (first + second)


def flow_time(tau: Tensor) -> Tensor:
    """t = `LAST_TIME` tau: flow times at which a network is trained."""
    return LAST_TIME * tau


def time_grid(num_steps: int) -> list[float]:
    """Times from 0 to 1 of a sampler of fixed steps, N + 1 of them, equally spaced up to the last but one.

    The last step has a length of 1 / N or the next power of two below: (r - x) / (1 - t) (1 - t) is then r -
    x to the bit, so that a datum of 0 is reached exactly.

    Args:
        num_steps: N, >= 1.
    """
    if num_steps == 1:
        return [0.0, 1.0]
    before = min(LAST_TIME, 1 - 2.0 ** -math.ceil(math.log2(num_steps)))
    return [*(before * number / (num_steps - 1) for number in range(num_steps)), 1.0]
