"""How well frames are reconstructed. Letters: B batch, X the axes of the grid, P points, C channels."""

from __future__ import annotations

from torch import Tensor

# Share of a channel's variance that is added to a frame's power, so that faint frames don't dominate.
_FAINT = 0.01


def relative_square_error(
    prediction_BPC: Tensor, truth_BPC: Tensor, *, power_BC: Tensor, std_C: Tensor
) -> Tensor:
    """Mean over frames and channels of mean_P (p - y)^2 / (power of the frame): the square of nRMSE.

    Args:
        prediction_BPC: Predicted values at points, physical units.
        truth_BPC: True ones.
        power_BC: mean_X y^2 of the whole frames.
        std_C: Standard deviation of each channel in the training data.

    Returns:
        Scalar.
    """
    square_BC = (prediction_BPC - truth_BPC).square().mean(1)
    return (square_BC / (power_BC + _FAINT * std_C.square())).mean()
