"""The linear path from noise to data, the velocity along it, what else a velocity says; times, and noise.

Flow matching (Lipman et al. 2023, arXiv:2210.02747) and rectified flow (Liu et al. 2023, arXiv:2209.03003)
on the straight path from noise e, standard normal, at t = 0 to a datum r at t = 1. Whatever predicts one of
velocity, datum and noise from a point of the path predicts the other two. A network that predicts the datum
divides by 1 - t to give a velocity, so it is asked up to `LAST_TIME` only: from there a straight line leads
to t = 1. Each member of an ensemble has a stream of noise of its own, so it doesn't depend on their number.

Letters: e noise, r datum, t flow time, tau a number in 0..1, x the point of the path at t, v velocity, N
steps. Tensors have shape (B, ...), t has shape (B,) and is broadcast over the rest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor


def at_time(e: Tensor, r: Tensor, t: Tensor) -> Tensor:
    """x_t = (1 - t) e + t r.

    Source: Liu et al. 2023, section 2.1; Lipman et al. 2023, eq. 22 with sigma_min = 0.
    """
    t = along(t, r)
    return (1 - t) * e + t * r


def target_velocity(e: Tensor, r: Tensor) -> Tensor:
    """d x_t / dt = r - e, the same all along the path: what a velocity is trained on.

    Source: Liu et al. 2023, eq. 1; Lipman et al. 2023, eq. 23 with sigma_min = 0.
    """
    return r - e


def datum_of_velocity(x: Tensor, v: Tensor, t: Tensor) -> Tensor:
    """f(x, t) = x + (1 - t) v: where the straight line through x ends, an estimate of r.

    With any v it is x itself at t = 1, as a consistency function has to be.
    Source: Song et al. 2023, eq. 5 (arXiv:2303.01469), with c_skip = 1 and c_out = 1 - t.
    """
    return x + (1 - along(t, x)) * v


def velocity_of_datum(x: Tensor, r: Tensor, t: Tensor) -> Tensor:
    """v = (r - x) / (1 - t), the inverse of `datum_of_velocity`; for t < 1.

    Source: Li and He 2025, table 1 (arXiv:2511.13720), "x-prediction" as a velocity.
    """
    return (r - x) / (1 - along(t, x))


def flow_matching_error(v: Tensor, e: Tensor, r: Tensor) -> Tensor:
    """|v - (r - e)|^2, the mean over all but the batch; shape (B,).

    Source: Lipman et al. 2023, eq. 23; Liu et al. 2023, eq. 1.
    """
    return (v - target_velocity(e, r)).square().flatten(1).mean(dim=1)


def along(t: Tensor, x: Tensor) -> Tensor:
    """Flow times (B,) with the axes that broadcast them against x, (B, 1...)."""
    return t.reshape(-1, *(1,) * (x.ndim - 1)).to(x.dtype)


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


def member_generators(seed: int, members: int) -> list[torch.Generator]:
    """A generator for each member, on the CPU: the same numbers on every device."""
    seeds = (np.random.SeedSequence([seed, number]).generate_state(1, np.uint64) for number in range(members))
    return [torch.Generator().manual_seed(int(own[0])) for own in seeds]


def member_noise(generators: Sequence[torch.Generator], like: Tensor) -> Tensor:
    """Standard normal numbers of one step, a member after the other within each sample.

    Args:
        generators: Of the members; each goes on.
        like: A state of each sample, shape (B, ...), on the device that they are wanted on.
    Returns:
        float32, shape (B M, ...).
    """
    drawn = [torch.randn(like.shape, generator=generator) for generator in generators]
    return torch.stack(drawn, dim=1).flatten(0, 1).to(like.device)
