"""The velocity that training converges to where data are normal, in closed form."""

from __future__ import annotations

import torch
from torch import Tensor

from ups.diffusion.paths import along


def gaussian_velocity(x: Tensor, t: Tensor, *, mean: Tensor | float, std: Tensor | float) -> Tensor:
    """E[r - e | x_t = x] where r is normal: the velocity that training converges to.

    v = m + (t s^2 - (1 - t)) / ((1 - t)^2 + t^2 s^2) (x - t m), elementwise.

    Args:
        x: Points of the path.
        t: Flow time.
        mean: m, broadcast against x.
        std: s, broadcast against x.

    Source: the regression of r - e on x_t, which are jointly normal; Albergo and Vanden-Eijnden 2023,
        section 2 (arXiv:2209.15571).
    """
    t = along(t, x)
    variance = torch.as_tensor(std, dtype=x.dtype, device=x.device) ** 2
    slope = (t * variance - (1 - t)) / ((1 - t) ** 2 + t**2 * variance)
    return mean + slope * (x - t * mean)
