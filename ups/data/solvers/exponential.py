"""Exponential time stepping for fields whose stiff linear part is diagonal in a spectral basis.

Solves du/dt = L u + N(u): the linear part exactly, the nonlinear part to fourth order. So the step is limited
by the nonlinear term alone, however stiff the diffusion is.

Source: Cox & Matthews 2002 (ETDRK4); weights by contour integrals as in Kassam & Trefethen 2005, eq. 2.5.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Spectral coefficients: complex in a Fourier basis, real in a cosine basis.
Spectrum = NDArray[Any]

# The closed forms of the weights cancel near z = L dt = 0: at this distance they still have 13 digits.
_CANCELLATION_RADIUS = 0.25
# Nearer to it their mean over a circle of radius 1 around z is taken, which is the same value. L is real, so
# half the circle and the real part will do; 32 points reach rounding error (Kassam & Trefethen 2005).
_CONTOUR_POINTS = 32


@dataclass(frozen=True)
class ExponentialStepper:
    """One ETDRK4 step of a fixed size; every array has the shape of the linear operator L.

    Attributes:
        decay: exp(L dt).
        half_decay: exp(L dt / 2).
        stage: Weight of N in the inner stages, in units of time like the three weights below.
        first: Weight of N at the start of the step.
        middle: Weight of each of the two N at half time.
        last: Weight of N at the end of the step.
    """

    decay: NDArray[np.float64]
    half_decay: NDArray[np.float64]
    stage: NDArray[np.float64]
    first: NDArray[np.float64]
    middle: NDArray[np.float64]
    last: NDArray[np.float64]

    def step(self, u: Spectrum, nonlinear: Callable[[Spectrum], Spectrum]) -> Spectrum:
        """Advance spectral coefficients by dt.

        Args:
            u: Coefficients, shape (..., *L.shape); not changed.
            nonlinear: N(u), same shape as `u`; must not change its argument.

        Returns:
            Coefficients one step later; a new array.
        """
        n_start = nonlinear(u)
        u_half = self.half_decay * u
        a = u_half + self.stage * n_start
        n_a = nonlinear(a)
        n_b = nonlinear(u_half + self.stage * n_a)
        n_end = nonlinear(self.half_decay * a + self.stage * (2.0 * n_b - n_start))
        advanced: Spectrum = (
            self.decay * u + self.first * n_start + self.middle * (n_a + n_b) + self.last * n_end
        )
        return advanced


def make_stepper(linear: NDArray[np.float64], *, dt: float) -> ExponentialStepper:
    """Compute the coefficients of one step size.

    Args:
        linear: Diagonal of L, any shape, real, 1/time; usually <= 0.
        dt: Step size, > 0.
    """
    z = linear * dt
    stage, first, middle, last = dt * _weights(z)
    return ExponentialStepper(
        decay=np.exp(z), half_decay=np.exp(z / 2), stage=stage, first=first, middle=middle, last=last
    )


def _weights(z: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the four weights of N in units of dt, shape (4, *z.shape)."""
    near_zero = np.abs(z) < _CANCELLATION_RADIUS
    weights = _closed_forms(np.where(near_zero, 1.0, z))
    half_circle = np.exp(1j * np.pi * (np.arange(_CONTOUR_POINTS) + 0.5) / _CONTOUR_POINTS)
    weights[:, near_zero] = _closed_forms(z[near_zero][:, None] + half_circle).real.mean(axis=-1)
    return weights


def _closed_forms(z: NDArray[Any]) -> NDArray[Any]:
    exp_z = np.exp(z)
    stage = (np.exp(z / 2) - 1) / z
    first = (-4 - z + exp_z * (4 - 3 * z + z**2)) / z**3
    middle = 2 * (2 + z + exp_z * (z - 2)) / z**3
    last = (-4 - 3 * z - z**2 + exp_z * (4 - z)) / z**3
    return np.stack([stage, first, middle, last])
