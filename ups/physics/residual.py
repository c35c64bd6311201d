"""Residual of an equation in integral form: over one stored step, and over control volumes.

Between two stored frames a wave may pass many cells, so differences in time say nothing. On a periodic line

    u_t + c u_x = nu u_xx - f(u)_x + s(u)

is integrated over the step instead, with L = nu d_xx - c d_x and N the rest:

    r = u(t + dt) - e^(L dt) u(t) - integral_0^dt e^(L (dt - s)) N(u(t + s)) ds + O(dt^5)

The linear part is exact, in Fourier space. In the integral N is the cubic that has its values and time
derivatives, which the equation gives, at both frames (Hermite): a rule of fourth order. Without N (advection)
the residual of an exact solution is rounding error. It is then the mean over a control volume around each
point: what the change of that mean lacks to the balance of fluxes and sources. Burgers' equation is taken in
the frame of its mean flow, where less happens in a step.

Letters: B batch, X points, K Fourier modes.
Source: Hochbruck and Ostermann 2010, Exponential integrators, section 2 (phi functions, interpolation of N).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

_TAYLOR_BELOW = 1.0  # |z| below which phi functions are summed: the recursion cancels there
_TAYLOR_TERMS = 18
_NUM_PHI = 4

Values = Mapping[str, Tensor]
_Pointwise = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class LineEquation:
    """An equation on a periodic line.

    Attributes:
        diffusivity: nu, shape (B,), from the parameters.
        speed: c, shape (B,), from the parameters and the mean of u.
        flux: f(v) of v = u less `background`, if there is one.
        flux_derivative: f'(v).
        source: s(v), from v and the parameters' column (B, 1), if there is one.
        source_derivative: s'(v).
        follows_mean: Whether v is u less its mean.
    """

    diffusivity: Callable[[Values], Tensor | float]
    speed: Callable[[Values, Tensor], Tensor | float]
    flux: Callable[[Tensor], Tensor] | None = None
    flux_derivative: Callable[[Tensor], Tensor] | None = None
    source: _Pointwise | None = None
    source_derivative: _Pointwise | None = None
    source_parameter: str = ""
    follows_mean: bool = False


LINE_EQUATIONS: Mapping[str, LineEquation] = {
    "advection1d": LineEquation(lambda values: 0.0, lambda values, mean: values["beta"]),
    # PDEBench's nu is pi times the viscosity; u - mean is carried by the mean.
    "burgers1d": LineEquation(
        lambda values: values["nu"] / math.pi,
        lambda values, mean: mean,
        flux=lambda v: v.square() / 2,
        flux_derivative=lambda v: v,
        follows_mean=True,
    ),
    "reacdiff1d": LineEquation(
        lambda values: values["nu"],
        lambda values, mean: 0.0,
        source=lambda u, rho: rho * u * (1 - u),
        source_derivative=lambda u, rho: rho * (1 - 2 * u),
        source_parameter="rho",
    ),
}


def line_residual(
    before_BX: Tensor,
    after_BX: Tensor,
    equation: LineEquation,
    *,
    values: Values,
    dt_B: Tensor,
    length: float,
    cell: int = 1,
) -> Tensor:
    """What the change between two frames lacks to the equation, mean over control volumes.

    Args:
        before_BX: u at t, real, shape (B, X).
        after_BX: u at t + dt, shape (B, X).
        equation: Of `LINE_EQUATIONS`.
        values: The equation's parameters by name, each (B,).
        dt_B: Time between the frames, shape (B,).
        length: Of the periodic line.
        cell: Width of the control volume around each point, in points: 1 for a cell of the grid, 0 for the
            points themselves.

    Returns:
        In units of u, where `after_BX` is, shape (B, X).
    """
    num = before_BX.shape[1]
    mean_B = before_BX.mean(1)
    base_B1 = mean_B[:, None] if equation.follows_mean else torch.zeros_like(mean_B)[:, None]
    k_K = 2 * math.pi / length * torch.arange(num // 2 + 1, dtype=torch.float64, device=before_BX.device)
    nu_B = _column(equation.diffusivity(values), mean_B)
    speed_B = _column(equation.speed(values, mean_B), mean_B)
    # The frame of the mean flow: there the later state is carried back, and diffusion is all that L is.
    phase_BK = (speed_B * dt_B)[:, None] * k_K.to(speed_B.dtype)
    carried = torch.polar(torch.ones_like(phase_BK), phase_BK)
    first_BK = torch.fft.rfft(before_BX - base_B1)
    last_BK = torch.fft.rfft(after_BX - base_B1) * carried
    z_BK = -(nu_B * dt_B).double()[:, None] * k_K.square()
    residual_BK = last_BK - torch.exp(z_BK).to(first_BK.dtype) * first_BK
    if equation.flux is not None or equation.source is not None:
        diffusion_BK = (-nu_B[:, None] * k_K.square().to(nu_B.dtype)).to(first_BK.dtype)
        rates = [
            _rates(state, equation, values=values, k_K=k_K, linear_BK=diffusion_BK, num=num)
            for state in (first_BK, last_BK)
        ]
        (n0, dn0), (n1, dn1) = rates
        w00, w10, w01, w11 = (weight.to(n0.dtype) for weight in hermite_weights(z_BK))
        dt_B1 = dt_B[:, None]
        residual_BK = residual_BK - dt_B1 * (w00 * n0 + w01 * n1 + dt_B1 * (w10 * dn0 + w11 * dn1))
    width = k_K * (length / num * cell) / 2
    mean_over_cell = torch.sinc(width / math.pi).to(before_BX.dtype)
    return torch.fft.irfft(residual_BK * carried.conj() * mean_over_cell, n=num)


def hermite_weights(z: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Weights of N(0), dt N'(0), N(1), dt N'(1) in the integral of e^(z (1 - s)) N(s) over 0..1, N cubic.

    Args:
        z: Real, at most 0, float64.
    """
    phi1, phi2, phi3, phi4 = phi_functions(z)
    return (
        phi1 - 6 * phi3 + 12 * phi4,
        phi2 - 4 * phi3 + 6 * phi4,
        6 * phi3 - 12 * phi4,
        6 * phi4 - 2 * phi3,
    )


def phi_functions(z: Tensor) -> list[Tensor]:
    """phi_j(z) = integral over 0..1 of e^(z (1 - s)) s^(j - 1) / (j - 1)!, for j = 1 to 4."""
    far = torch.where(z.abs() < _TAYLOR_BELOW, -torch.ones_like(z), z)
    near = torch.where(z.abs() < _TAYLOR_BELOW, z, torch.zeros_like(z))
    found, value = [], torch.exp(far)
    for j in range(1, _NUM_PHI + 1):
        value = (value - 1 / math.factorial(j - 1)) / far
        terms = [near**m * (1 / math.factorial(m + j)) for m in range(_TAYLOR_TERMS)]
        series = torch.stack(terms).sum(0)
        found.append(torch.where(z.abs() < _TAYLOR_BELOW, series, value))
    return found


def _rates(
    state_BK: Tensor, equation: LineEquation, *, values: Values, k_K: Tensor, linear_BK: Tensor, num: int
) -> tuple[Tensor, Tensor]:
    """N of a state and its time derivative, in modes; products are taken on 3/2 as many points."""
    fine = 3 * num // 2
    scale = fine / num
    derivative_K = (1j * k_K).to(state_BK.dtype)
    if num % 2 == 0:
        derivative_K = derivative_K.clone()
        derivative_K[-1] = 0  # the sawtooth has no slope that the points could say

    def points(modes: Tensor) -> Tensor:
        return torch.fft.irfft(modes, n=fine) * scale

    def modes(values_BX: Tensor) -> Tensor:
        return torch.fft.rfft(values_BX)[:, : len(k_K)] / scale

    def rate(flux: Tensor | None, source: Tensor | None) -> Tensor:
        parts = [] if flux is None else [-derivative_K * modes(flux)]
        parts += [] if source is None else [modes(source)]
        return torch.stack(parts).sum(0)

    v = points(state_BK)
    parameter = values[equation.source_parameter][:, None] if equation.source_parameter else v
    n_BK = rate(
        None if equation.flux is None else equation.flux(v),
        None if equation.source is None else equation.source(v, parameter),
    )
    velocity = points(linear_BK * state_BK + n_BK)
    slope_BK = rate(
        None if equation.flux_derivative is None else equation.flux_derivative(v) * velocity,
        None if equation.source_derivative is None else equation.source_derivative(v, parameter) * velocity,
    )
    return n_BK, slope_BK


def _column(value: Tensor | float, like_B: Tensor) -> Tensor:
    return torch.as_tensor(value, dtype=like_B.dtype, device=like_B.device).expand_as(like_B)


def darcy_residual(
    solution_BYX: Tensor,
    coefficient_BYX: Tensor,
    *,
    beta_B: Tensor,
    lengths: tuple[float, float],
    cell: int = 1,
) -> Tensor:
    """Outflow of control volumes less their source, -div(a grad u) - beta, u = 0 at the boundary.

    Fluxes between cells take the harmonic mean of both coefficients, second order; inside a block of cells
    they cancel, and what crosses its rim is left.

    Args:
        solution_BYX: u at cell centres, shape (B, Y, X).
        coefficient_BYX: a at cell centres, > 0, shape (B, Y, X).
        beta_B: Source, shape (B,).
        lengths: Of the domain along Y and X.
        cell: Width of the control volumes in cells; those that don't fit in are left out.

    Returns:
        In units of beta, shape (B, Y // cell, X // cell).
    """
    total = torch.zeros_like(solution_BYX)
    for axis, length in enumerate(lengths, start=1):
        num = solution_BYX.shape[axis]
        spacing = length / num
        u = solution_BYX.movedim(axis, -1)
        a = coefficient_BYX.movedim(axis, -1)
        inner = 2 * a[..., :-1] * a[..., 1:] / (a[..., :-1] + a[..., 1:]) * (u[..., 1:] - u[..., :-1])
        low, high = 2 * a[..., :1] * u[..., :1], -2 * a[..., -1:] * u[..., -1:]
        flux = torch.cat([low, inner, high], dim=-1) / spacing  # a du/dx at the faces
        total = total - ((flux[..., 1:] - flux[..., :-1]) / spacing).movedim(-1, axis)
    pooled = torch.nn.functional.avg_pool2d(total[:, None], cell)[:, 0]
    return pooled - beta_B[:, None, None]
