"""The samples that every peer stores, and how many of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from benchmarks.harness.inputs import Floats, values_of

Items = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Samples:
    """Samples of one size: float32, shape (N, frames, width).

    Attributes:
        label: Size of a sample, for tables.
        num: N.
        frames: Time steps of a sample.
        width: Values of a time step.
        batch: Samples of a batch.
    """

    label: str
    num: int
    frames: int
    width: int
    batch: int

    @property
    def sample_bytes(self) -> int:
        """Bytes of one sample."""
        return 4 * self.frames * self.width

    @property
    def nbytes(self) -> int:
        """Bytes of all."""
        return self.num * self.sample_bytes

    def values(self, samples: Items) -> Floats:
        """What the samples must hold, shape (B, frames, width)."""
        return values_of(samples, self.sample_bytes).reshape(-1, self.frames, self.width)


def sizes(*, full: bool) -> list[Samples]:
    """Samples of 4 KB, 100 KB and 13 MB; frames of 1, 1 and 32 KB."""
    factor = 8 if full else 1
    return [
        Samples("4 KB", 8192 * factor, 4, 256, 64),
        Samples("100 KB", 1024 * factor, 100, 256, 64),
        Samples("13 MB", 12 * factor, 400, 8192, 4),
    ]
