"""The linear path from noise to data, the velocity along it, and what else a velocity says.

Flow matching (Lipman et al. 2023, arXiv:2210.02747) and rectified flow (Liu et al. 2023, arXiv:2209.03003) on
the straight path from noise e, standard normal, at t = 0 to a datum r at t = 1. Whatever predicts one of
velocity, datum and noise from a point of the path predicts the other two.

Letters: e noise, r datum, t flow time, x the point of the path at t, v velocity. Tensors have shape (B, ...),
t has shape (B,) and is broadcast over the rest.
"""

from __future__ import annotations

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
