"""Windows over trajectories: which (trajectory, first time step) an item stands for; pure NumPy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ups_store.errors import SpecError
from ups_store.read.order import Items, below, mix, round_keys


@dataclass(frozen=True)
class Window:
    """Items are spans of trajectories: a state and the ones that follow.

    Attributes:
        horizon: H, number of states that follow the first.
        time_stride: Stored time steps from one state to the next.
        samples_per_trajectory: How many windows an epoch draws from each trajectory, one in each of as many
            equal parts of it; None takes every window there is.
        seed: Of those draws, 0 <= seed < 2**64.
    """

    horizon: int = 1
    time_stride: int = 1
    samples_per_trajectory: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("horizon", "time_stride", "samples_per_trajectory"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise SpecError(name, kind="window", expected="at least 1", found=value)
        if not 0 <= self.seed < 1 << 64:
            raise SpecError("seed", kind="window", expected="0 <= seed < 2**64", found=self.seed)

    @property
    def span(self) -> int:
        """Stored time steps from the first state to the last."""
        return self.horizon * self.time_stride


class WindowIndex:
    """The items of one store.

    Args:
        window: What an item spans.
        num_steps: Valid time steps of every trajectory, int64, shape (N,).
    """

    def __init__(self, window: Window, num_steps: Items) -> None:
        self.window = window
        num_windows = (num_steps - window.span).clip(min=0)
        self.samples = np.flatnonzero(num_windows)  # trajectories shorter than a window have none
        self.num_windows: Items = num_windows[self.samples]
        draws = window.samples_per_trajectory
        per_sample = self.num_windows if draws is None else np.full_like(self.samples, draws)
        self.ends: Items = np.cumsum(per_sample)

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def locate(self, items: Items, *, epoch: int) -> tuple[Items, Items]:
        """Sample and first time step of items, each int64, shape (B,)."""
        rows = np.searchsorted(self.ends, items, side="right")
        draws, num_windows = self.window.samples_per_trajectory, self.num_windows[rows]
        if draws is None:
            return self.samples[rows], items - self.ends[rows] + num_windows
        bits = mix(items.astype(np.uint64) ^ round_keys(1, self.window.seed, epoch))
        within = below(bits, num_windows.astype(np.uint64)).astype(np.int64)
        return self.samples[rows], (items % draws * num_windows + within) // draws
