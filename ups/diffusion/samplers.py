"""Samplers: from noise to data along a velocity, dx/dt = v(x, t) from t = 0 to 1.

All of them ask for velocities before t = 1 only and take the last step along a straight line, so that a
velocity that is (r - x) / (1 - t) ends at r exactly. What they cost is counted in evaluations of the network,
each of the whole batch. A sample's steps don't depend on what else is in its batch.

Letters: B batch, x state, t flow time, h step, k slopes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ups.diffusion.paths import LAST_TIME, along, datum_of_velocity, time_grid

Velocity = Callable[[Tensor, Tensor], Tensor]
Sampler = Literal["euler", "heun", "adaptive"]

_SAFETY, _LEAST, _MOST = 0.9, 0.2, 5.0
_FIRST_STEP = 0.05
_SHORTEST = 1e-4


class Sampled(NamedTuple):
    """What a sampler gives.

    Attributes:
        x: At t = 1, shape of the noise.
        num_evaluations: Calls of the velocity, each of the whole batch.
    """

    x: Tensor
    num_evaluations: int


def sample(
    velocity: Velocity,
    noise: Tensor,
    *,
    sampler: Sampler = "euler",
    num_steps: int = 32,
    tolerance: float = 1e-2,
    max_evaluations: int = 200,
) -> Sampled:
    """From noise to data by a sampler of this name.

    Args:
        velocity: v(x, t) of x, shape (B, ...), and t, float32, shape (B,), in 0..`LAST_TIME`.
        noise: x at t = 0, shape (B, ...), float32.
        sampler: "euler", "heun" or "adaptive".
        num_steps: Of Euler's and Heun's method.
        tolerance: Of the adaptive one.
        max_evaluations: Of the adaptive one, at most.
    """
    if sampler == "adaptive":
        return adaptive(velocity, noise, tolerance=tolerance, max_evaluations=max_evaluations)
    fixed = euler if sampler == "euler" else heun
    return fixed(velocity, noise, time_grid(num_steps))


def euler(velocity: Velocity, noise: Tensor, times: Sequence[float]) -> Sampled:
    """x_{i+1} = x_i + h v(x_i, t_i); one evaluation a step, error of order h.

    Args:
        velocity: v(x, t).
        noise: x at the first time.
        times: Ascending; the last is 1.

    Source: Liu et al. 2023, section 2.1 (arXiv:2209.03003).
    """
    x = noise
    for t, after in pairwise(times[:-1]):
        x = x + (after - t) * velocity(x, _all(t, x))
    return Sampled(_to_end(velocity, x, _all(times[-2], x)), len(times) - 1)


def heun(velocity: Velocity, noise: Tensor, times: Sequence[float]) -> Sampled:
    """The mean of the slopes at both ends of a step; two evaluations a step but the last, error of order h^2.

    Args:
        velocity: v(x, t).
        noise: x at the first time.
        times: Ascending; the last is 1.

    Source: Karras et al. 2022, algorithm 1 (arXiv:2206.00364), whose last step is Euler's, too.
    """
    x = noise
    for t, after in pairwise(times[:-1]):
        slope = velocity(x, _all(t, x))
        ahead = velocity(x + (after - t) * slope, _all(after, x))
        x = x + (after - t) / 2 * (slope + ahead)
    return Sampled(_to_end(velocity, x, _all(times[-2], x)), 2 * len(times) - 3)


def adaptive(
    velocity: Velocity,
    noise: Tensor,
    *,
    tolerance: float,
    max_evaluations: int,
    last: float = LAST_TIME,
) -> Sampled:
    """Steps of order 3 whose length an embedded method of order 2 chooses, for each sample by itself.

    A step is repeated, shorter, where the two differ by more than `tolerance` (1 + |x|), as a root mean
    square over the sample. The slope at the end of a step is that of the next one's beginning, so a step
    costs three evaluations. When there are no more, what is left of the way is one straight line.

    Args:
        velocity: v(x, t).
        noise: x at t = 0, shape (B, ...).
        tolerance: Largest error of a step, absolute and relative.
        max_evaluations: Evaluations at most, >= 2.
        last: Latest time at which the velocity is asked; from there a straight line leads to 1.

    Source: Bogacki and Shampine 1989, "A 3(2) pair of Runge-Kutta formulas"; step control: Hairer, Norsett
        and Wanner 1993, "Solving Ordinary Differential Equations I", section II.4.
    """
    x, t = noise, _all(0.0, noise)
    h = torch.full_like(t, min(_FIRST_STEP, last))
    k1, num = velocity(x, t), 1
    while num + 3 <= max_evaluations and bool((t < last).any()):
        h = torch.minimum(h, last - t)
        step = along(h, x)
        k2 = velocity(x + step / 2 * k1, t + h / 2)
        k3 = velocity(x + step * 3 / 4 * k2, t + h * 3 / 4)
        there = x + step * (2 * k1 + 3 * k2 + 4 * k3) / 9
        k4 = velocity(there, t + h)
        num += 3
        difference = step * (-5 * k1 + 6 * k2 + 8 * k3 - 9 * k4) / 72
        error = (difference / (tolerance * (1 + torch.maximum(x.abs(), there.abs())))).square()
        error = error.flatten(1).mean(dim=1).sqrt()
        is_taken = (error <= 1) | (h <= _SHORTEST)
        taken = along(is_taken, x).bool()
        x, k1 = torch.where(taken, there, x), torch.where(taken, k4, k1)
        t = torch.where(is_taken, torch.where(h >= last - t, last, t + h), t)
        h = h * (_SAFETY * error.clamp_min(1e-8) ** (-1 / 3)).clamp(_LEAST, _MOST)
    return Sampled(datum_of_velocity(x, k1, t), num)


def _to_end(velocity: Velocity, x: Tensor, t: Tensor) -> Tensor:
    """The last step, to t = 1, along a straight line."""
    return datum_of_velocity(x, velocity(x, t), t)


def _all(t: float, x: Tensor) -> Tensor:
    return torch.full((len(x),), t, device=x.device)
