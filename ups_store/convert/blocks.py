"""Arrays a block of samples at a time, so that memory stays bounded whatever N is."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

BLOCK_BYTES = 16 << 20


def samples_per_block(view: npt.NDArray[Any], nbytes: int = BLOCK_BYTES) -> int:
    """How many samples make a block of `nbytes`; at least one.

    Args:
        view: An array of a store, shape (N, ...).
        nbytes: Bytes that a block should have at most.
    """
    sample_nbytes = math.prod(view.shape[1:]) * view.itemsize
    return max(1, min(len(view), nbytes // max(1, sample_nbytes)))


def blocks_of(view: npt.NDArray[Any], num: int | None = None) -> Iterator[npt.NDArray[Any]]:
    """Contiguous copies of consecutive samples, shape (M, ...); an array without axes or elements at once.

    Args:
        view: An array of a store, shape (N, ...); its first axis is cut, whatever it is.
        num: Samples of a block; as many as `BLOCK_BYTES` hold by default.
    """
    if not view.ndim or not view.size:
        yield np.array(view, order="C")
        return
    num = num or samples_per_block(view)
    for first in range(0, len(view), num):
        yield np.array(view[first : first + num], order="C")
