"""Values as coloured cells, in one way for all pictures: of stores here, of reports in `ups.eval.figures`."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

SEQUENTIAL, DIVERGING = (
    "viridis",
    "coolwarm",
)  # both are perceptually uniform (the latter as in Moreland 2009)
_ROBUST_PERCENTILES = (0.1, 99.9)  # a few wild values must not decide the colours

Values = npt.NDArray[np.floating[Any]]


def colours_of(values: Values) -> tuple[float, float, str]:
    """Limits and colour map: symmetric about zero where both signs matter, else the range.

    Args:
        values: What one colour scale is for, any shape; NaN and Inf are left out.

    Returns:
        Lowest and highest value of the scale, and the map's name in matplotlib.
    """
    finite = values[np.isfinite(values)]
    if not finite.size:
        return 0.0, 1.0, SEQUENTIAL
    low, high = (float(limit) for limit in np.percentile(finite, _ROBUST_PERCENTILES))
    if min(-low, high) > 0.2 * max(-low, high):
        bound = max(-low, high)
        return -bound, bound, DIVERGING
    if high - low <= 1e-6 * max(abs(low), abs(high)):  # a constant: noise in its last digit is no picture
        margin = 0.05 * abs(low) or 1.0
        return low - margin, high + margin, SEQUENTIAL
    return low, high, SEQUENTIAL


def cell_edges(points: Values) -> npt.NDArray[np.float64]:
    """Edges of cells that have these points in their middle, (n,) to (n + 1,); a single one is 1 wide.

    Where points aren't evenly spaced, an edge lies halfway between two of them.
    """
    points = np.asarray(points, np.float64)
    if len(points) == 1:
        return np.array([points[0] - 0.5, points[0] + 0.5])
    between = (points[1:] + points[:-1]) / 2
    first, last = 1.5 * points[0] - 0.5 * points[1], 1.5 * points[-1] - 0.5 * points[-2]
    return np.array([first, *between, last])
