"""Point 67: a coordinate that falls made lengths, and so errors of the report, fall below zero."""

from __future__ import annotations

import numpy as np

from ups.grid import directed_lengths, domain_lengths


def test_lengths_are_above_zero_and_derivatives_keep_the_direction() -> None:
    for stored in ({"x": 2.0, "y": 3.0}, {"x": 2.0, "y": -3.0}):  # the second by stores from before
        assert domain_lengths(stored, ndim=2) == [3.0, 2.0]
        coordinates = {"x": np.arange(4.0), "y": np.arange(4.0)[::-1]}
        assert directed_lengths(stored, coordinates) == {"x": 2.0, "y": -3.0}
