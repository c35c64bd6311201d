"""Windows over trajectories: which trajectory and first time step an item stands for, and its times."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ups_store.errors import ArrayNotFoundError, SpecError
from ups_store.read.base import AnyStore
from ups_store.read.gather import TIME_DIM, Samples
from ups_store.read.order import below, mix, round_keys

STATE_NAMES = ("latent", "fields")  # what windows are taken of unless it is named: the first that exists

NUM_STEPS, TIMES = "num_steps", "t"  # arrays that say how long a trajectory is, and when its steps are


@dataclass(frozen=True)
class Window:
    """Samples are spans of trajectories: a state and the ones that follow.

    Attributes:
        horizon: H, number of states that follow the first.
        stride: Stored time steps from one state to the next.
        samples_per_trajectory: How many windows an epoch draws from each trajectory, one in each of as many
            equal parts of it; None takes every window there is.
        seed: Of those draws, 0 <= seed < 2**64.
    """

    horizon: int = 1
    stride: int = 1
    samples_per_trajectory: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("horizon", "stride", "samples_per_trajectory"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise SpecError(name, kind="window", expected="at least 1", found=value)
        if not 0 <= self.seed < 1 << 64:
            raise SpecError("seed", kind="window", expected="0 <= seed < 2**64", found=self.seed)

    @property
    def span(self) -> int:
        """Stored time steps from the first state to the last."""
        return self.horizon * self.stride


class WindowIndex:
    """The items of one store.

    Args:
        window: What an item spans.
        num_steps: Valid time steps of every trajectory, int64, shape (N,).
    """

    def __init__(self, window: Window, num_steps: Samples) -> None:
        self.window = window
        num_windows = (num_steps - window.span).clip(min=0)
        self.samples = np.flatnonzero(num_windows)  # trajectories shorter than a window have none
        self.num_windows: Samples = num_windows[self.samples]
        draws = window.samples_per_trajectory
        per_sample = self.num_windows if draws is None else np.full_like(self.samples, draws)
        self.ends: Samples = np.cumsum(per_sample)

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def locate(self, items: Samples, *, epoch: int) -> tuple[Samples, Samples]:
        """Sample and first time step of items, each int64, shape (B,)."""
        rows = np.searchsorted(self.ends, items, side="right")
        draws, num_windows = self.window.samples_per_trajectory, self.num_windows[rows]
        if draws is None:
            return self.samples[rows], items - self.ends[rows] + num_windows
        bits = mix(items.astype(np.uint64) ^ round_keys(1, self.window.seed, epoch))
        within = below(bits, num_windows.astype(np.uint64)).astype(np.int64)
        return self.samples[rows], (items % draws * num_windows + within) // draws


class Trajectories:
    """The trajectories of one store, cut into windows of the array `state`."""

    def __init__(self, store: AnyStore, window: Window, *, state: str | None) -> None:
        arrays, path = store.arrays, store.path
        name = state or next((name for name in STATE_NAMES if name in arrays), None)
        if name is None or name not in arrays:
            raise ArrayNotFoundError(
                "no array to take windows of",
                path=path,
                array=name,
                expected="`state`, one of " + ", ".join(arrays) if name else " or ".join(STATE_NAMES),
            )
        check_time_axis(store, name)
        self.state, self._window, num_times = name, window, int(arrays[name].shape[1])

        def read(name: str) -> npt.NDArray[Any]:
            """Give a whole array, checked or read as the store was opened for."""
            return store.gather(slice(None), [name])[name] if name in arrays else store[name]

        num_steps = np.full(len(store), num_times)
        if NUM_STEPS in arrays:
            num_steps = read(NUM_STEPS).astype(np.int64).clip(0, num_times)
        self.index = WindowIndex(window, num_steps)
        if not len(self.index):
            raise SpecError(
                f"horizon {window.horizon} with stride {window.stride}",
                kind="window",
                path=path,
                array=name,
                expected=f"trajectories of at least {window.span + 1} time steps",
                found=f"at most {int(num_steps.max(initial=0))}",
                hint="take a shorter horizon or a smaller stride",
            )
        # Time of every step, (T,) or (N, T); numbers of the steps where the store has no times.
        times = read(TIMES) if TIMES in store else np.arange(num_times)
        self._times = times.astype(np.float64)
        if times.shape not in ((num_times,), (len(store), num_times)):
            raise SpecError(
                "times of the steps",
                kind="times",
                path=path,
                array=TIMES,
                expected=f"{num_times} of them, as {name!r} has",
                found=times.shape,
            )

    def moments(self, samples: Samples, starts: Samples) -> dict[str, npt.NDArray[Any]]:
        """Time `t` of the first states, (B,), and `dt` from each state to the next, (B, H); float32."""
        steps = starts[:, None] + np.arange(self._window.horizon + 1) * self._window.stride
        times = self._times[samples[:, None], steps] if self._times.ndim == 2 else self._times[steps]
        return {"t": times[:, 0].astype(np.float32), "dt": np.diff(times).astype(np.float32)}


def check_time_axis(store: AnyStore, name: str) -> None:
    """Fail unless an array's second axis is the time: its windows lie together then."""
    dims = store.dims[name]
    if store.arrays[name].is_ragged:
        hint = "windows need samples of equal length, with `num_steps` beside them"
        raise SpecError("a ragged array", kind="ragged", path=store.path, array=name, hint=hint)
    if dims[1:2] != (TIME_DIM,):
        raise SpecError(
            "windows need the time behind the sample",
            kind="time_axis",
            path=store.path,
            array=name,
            expected=f"dims ('sample', '{TIME_DIM}', ...)",
            found=repr(dims),
        )
