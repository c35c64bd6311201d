"""How far fields are from their boundary values: at faces half a cell beyond the first and the last point.

Letters: B batch, X the axes of the grid, C channels, F the points of a face.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ups.conditions import BOUNDARY_VALUE
from ups.grid import axis_names

# Ends of each axis, the lower one first; conditions `bc_left`, `bc_right`, ... are about them.
ENDS: Mapping[str, tuple[str, str]] = {
    "x": ("left", "right"),
    "y": ("bottom", "top"),
    "z": ("front", "back"),
}
# Values at the face, and slopes towards the inside times the spacing, out of the three nearest points.
_VALUE, _SLOPE = (1.875, -1.25, 0.375), (-2.0, 3.0, -1.0)  # third and second order


def boundary_errors(
    fields_BXC: Tensor,
    boundary: Sequence[str],
    *,
    values: Mapping[str, Tensor],
    channels: Sequence[int] | None = None,
) -> Tensor | None:
    """Value at every `dirichlet` face less the boundary value, and the slope at every `neumann` face.

    The boundary value of a face is the condition `bc_left`, `bc_right`, `bc_bottom`, ... of the sample, or
    `bc_left_0`, `bc_left_1`, ... by channel; 0 where it has none. Slopes are per cell, in units of the field.

    Args:
        fields_BXC: Physical units, at least 3 points along each axis, shape (B, X..., C).
        boundary: Boundary type of each axis; other types than these two say nothing here.
        values: Conditions of the samples by name, each (B,).
        channels: Numbers of the channels that this is about; by default all.

    Returns:
        Shape (B, F, C'), all faces one after another; None where no axis has such a boundary.
    """
    chosen = list(range(fields_BXC.shape[-1])) if channels is None else list(channels)
    errors = []
    for axis, (name, kind) in enumerate(zip(axis_names(len(boundary)), boundary, strict=True), start=1):
        if kind not in ("dirichlet", "neumann"):
            continue
        for end, points in zip(ENDS[name], ((0, 1, 2), (-1, -2, -3)), strict=True):
            weights = _VALUE if kind == "dirichlet" else _SLOPE
            nearest = (fields_BXC[..., chosen].select(axis, point) for point in points)
            face_BFC = sum(w * u for w, u in zip(weights, nearest, strict=True))
            assert isinstance(face_BFC, Tensor)
            face_BFC = face_BFC.reshape(len(face_BFC), -1, len(chosen))
            if kind == "dirichlet":
                face_BFC = face_BFC - _boundary_value(end, values, chosen, like=face_BFC)
            errors.append(face_BFC)
    return torch.cat(errors, dim=1) if errors else None


def _boundary_value(
    end: str, values: Mapping[str, Tensor], channels: Sequence[int], *, like: Tensor
) -> Tensor:
    """Of one face, shape (B, 1, C')."""
    name, zero = f"{BOUNDARY_VALUE}{end}", like.new_zeros(len(like))
    columns = [values.get(f"{name}_{channel}", values.get(name, zero)) for channel in channels]
    return torch.stack([column.to(like) for column in columns], dim=-1)[:, None]
