"""Names in the order that people expect: numbers by their value."""

from __future__ import annotations

import re


def natural_key(name: str) -> list[str | float]:
    """Text and numbers by turns, so that Nu0.001 < Nu0.01 < Nu0.1, 1.e-8 is small and 2 < 10."""
    pieces = re.split(r"(\d+\.?\d*(?:e[+-]?\d+)?)", name)
    return [float(piece) if i % 2 else piece for i, piece in enumerate(pieces)]
