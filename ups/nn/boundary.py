"""Features that say how far a place is from the ends of its non-periodic axes; periodic axes have none."""

from __future__ import annotations

import torch
from torch import Tensor

_DECAY_LENGTHS = (1.0, 4.0)  # in tokens or patches: the layer at the boundary, and its surroundings


def num_boundary_features(periodic: tuple[bool, ...]) -> int:
    """F, the number of features of one place."""
    return 2 * len(_DECAY_LENGTHS) * sum(not wraps for wraps in periodic)


def boundary_features(position_PN: Tensor, *, cells: tuple[int, ...], periodic: tuple[bool, ...]) -> Tensor:
    """Exponentials of the distance to the lower and the upper end of every axis that has ends.

    Args:
        position_PN: Positions in cells, from 0 to `cells` along each axis, shape (..., N).
        cells: Length of each axis in cells.
        periodic: Whether each axis is.

    Returns:
        Shape (..., F), in 0..1, dtype of `position_PN`.
    """
    features = [position_PN.new_zeros(*position_PN.shape[:-1], 0)]
    for axis, wraps in enumerate(periodic):
        if not wraps:
            below = position_PN[..., axis]
            for distance in (below, cells[axis] - below):
                features += [torch.exp(-distance / length).unsqueeze(-1) for length in _DECAY_LENGTHS]
    return torch.cat(features, dim=-1)
