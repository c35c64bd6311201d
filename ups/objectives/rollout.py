"""How far predicted states are from the true ones, in normalised states: means over samples.

Letters: B batch, K steps, L tokens, D channels of a token, G the axes of the token grid.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Share of a sample's mean energy that is added to that of each wave number, and to each frame's power, so
# that what is nearly empty doesn't dominate.
_FAINT = 0.01


def rollout_losses(
    predicted_BKLD: Tensor,
    truth_BKLD: Tensor,
    *,
    tokens: tuple[int, ...],
    lambda_relative: float = 0.0,
    lambda_spectral: float = 0.0,
) -> dict[str, Tensor]:
    """Losses of a rollout, weighted; their sum is minimised.

    Args:
        predicted_BKLD: States after each of K steps, shape (B, K, L, D).
        truth_BKLD: True ones.
        tokens: Tokens along each axis, L in all.
        lambda_relative: Weight of `relative_error`.
        lambda_spectral: Weight of `spectral_error`.
    Returns:
        "one_step" and, of longer rollouts, "rollout" (mean square errors of the first and of the later
        steps); "relative" and "spectral" where they have a weight.
    """
    predicted_BKLD, truth_BKLD = predicted_BKLD.float(), truth_BKLD.float()
    square_K = (predicted_BKLD - truth_BKLD).square().mean(dim=(0, 2, 3))
    losses = {"one_step": square_K[0]}
    if len(square_K) > 1:
        losses["rollout"] = square_K[1:].mean()
    if lambda_relative:
        losses["relative"] = lambda_relative * relative_error(predicted_BKLD, truth_BKLD)
    if lambda_spectral:
        losses["spectral"] = lambda_spectral * spectral_error(predicted_BKLD, truth_BKLD, tokens=tokens)
    return losses


def relative_error(predicted_BKLD: Tensor, truth_BKLD: Tensor) -> Tensor:
    """Mean over samples and steps of |p - y|^2 / |y|^2: every frame counts the same however faint it is."""
    square_BK = (predicted_BKLD - truth_BKLD).square().mean(dim=(2, 3))
    power_BK = truth_BKLD.square().mean(dim=(2, 3))
    return (square_BK / (power_BK + _FAINT)).mean()


def spectral_error(predicted_BKLD: Tensor, truth_BKLD: Tensor, *, tokens: tuple[int, ...]) -> Tensor:
    """Mean over wave numbers along the token axes of |FFT(p - y)|^2 / |FFT(y)|^2.

    Every wave number counts the same however little energy it has, so small scales do that a mean square
    error hardly sees. It is taken of the states, not of the fields: nothing is decoded.
    """
    axes = tuple(range(2, 2 + len(tokens)))
    error, truth = (
        torch.fft.rfftn(states.unflatten(2, tokens), dim=axes, norm="ortho").abs().square().sum(-1)
        for states in (predicted_BKLD - truth_BKLD, truth_BKLD)
    )
    mean_energy = truth.mean(dim=axes, keepdim=True)
    return (error / (truth + _FAINT * mean_energy + torch.finfo(truth.dtype).tiny)).mean()
