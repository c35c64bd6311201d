"""The order of a first pass: which trajectories come when, and which windows are drawn from those that came.

Everything here is a function of numbers and a seed. So it doesn't matter how fast trajectories really come: a
batch waits for those that it is drawn from, and is the same in every run, resumed or not, on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ups.data.batches import seed_of
from ups.data.windows import Items, evenly_spread
from ups_store.torch import DataOrder, Step, ranks_of_torch

FIRST_AHEAD = 8  # trajectories beyond those that are used up, from the first batch on
LEAST_AHEAD = 64  # at most so many beyond, or a share of all where that is more
SHARE_AHEAD = 8  # the share is 1 / SHARE_AHEAD
_TASKS, _DRAWS = range(2)  # purposes of random numbers


def arrival_stretches(
    num_trajectories: int, *, group: int, num_spread: int, length: int, seed: int
) -> list[Items]:
    """Stretches of trajectories in the order in which they are made.

    The first one is spread over the whole split, so that the first batches and what is measured on it stand
    for all. The others are consecutive trajectories, read in one go; which comes when is random, so that
    every part of the sources, such as the files of other parameters, has its share in each part of the pass.

    Args:
        num_trajectories: N.
        group: Trajectories that are encoded together, counted from the first; stretches don't part them.
        num_spread: Groups of the first stretch.
        length: Trajectories of the others, rounded up to whole groups.
        seed: Of the order.
    Returns:
        Numbers of trajectories, sorted inside a stretch; every one of 0..N-1 once.
    """
    num_groups = -(-num_trajectories // group)
    trajectories = np.arange(num_trajectories)
    is_first = np.isin(trajectories // group, evenly_spread(num_groups, num_spread))
    length = -(-length // group) * group
    firsts = np.arange(0, num_trajectories, length)
    chosen = np.random.default_rng(seed).permutation(len(firsts))
    rest = [trajectories[first : first + length] for first in firsts[chosen]]
    kept = [stretch[~is_first[stretch]] for stretch in rest]
    return [trajectories[is_first], *(stretch for stretch in kept if len(stretch))]


def in_turns(stretches: Mapping[str, Sequence[Items]]) -> list[tuple[str, int]]:
    """Task and number of every stretch, tasks of many and of few stretches getting on evenly."""
    places = [
        ((number + 0.5) / len(some), task, number)
        for task, some in stretches.items()
        for number in range(len(some))
    ]
    return [(task, number) for _, task, number in sorted(places)]


def count_batches(num_items: int, batch_size: int) -> int:
    """The fewest batches of at most `batch_size` that hold all items; at least 1."""
    return max(1, -(-num_items // batch_size))


def batch_ends(num_items: int, num_batches: int) -> Items:
    """Where batches end that hold all items, shape (num_batches,); the last ones may be one longer."""
    size, num_longer = divmod(num_items, num_batches)
    return np.cumsum([size] * (num_batches - num_longer) + [size + 1] * num_longer, dtype=np.int64)


def most_ahead(num_trajectories: int) -> int:
    """How many trajectories may come before they are needed; more mix better, and have to be waited for."""
    return max(LEAST_AHEAD, num_trajectories // SHARE_AHEAD)


class WindowBuffer:
    """Windows of the trajectories that have come, drawn at random in batches, every window once.

    Before a batch is drawn, trajectories come in until there are `ahead` more than the windows drawn so far
    make up. `ahead` begins small, so that the first batch waits for a few trajectories only, and grows with
    what was drawn.

    Args:
        arrival: Trajectories in the order in which they come, shape (N,).
        num_windows: Windows of each trajectory; those of trajectory i are numbered from i * num_windows.
        num_batches: Batches of the pass; the last ones may have one window more than the first.
        ahead: The largest `ahead`.
        seed: Of the draws.

    Attributes:
        num_drawn: Batches drawn so far.
        num_arrived: Trajectories, the first ones of `arrival`, that the batch drawn last could be drawn from.
    """

    def __init__(self, arrival: Items, *, num_windows: int, num_batches: int, ahead: int, seed: int) -> None:
        self._arrival, self._num_windows, self._ahead = arrival, num_windows, ahead
        self._ends: Items = batch_ends(len(arrival) * num_windows, num_batches)
        self._random = np.random.default_rng(seed)
        self._windows: Items = np.empty(0, np.int64)  # the first `_held` are in the buffer
        self._held = self._num_taken = 0
        self.num_drawn = self.num_arrived = 0

    def draw(self) -> Items:
        """Numbers of the windows of the next batch, shape (B,)."""
        end = int(self._ends[self.num_drawn])
        self._take_in(self._wanted(end))
        size = end - self._num_taken
        places = self._random.choice(self._held, size, replace=False)
        drawn = self._windows[places]
        self._close_gaps(places)
        self._num_taken, self.num_drawn = end, self.num_drawn + 1
        return drawn

    def is_used_up(self, trajectories: Items) -> npt.NDArray[np.bool_]:
        """Which trajectories have come and have no window left to be drawn, shape (M,)."""
        has_come = np.isin(trajectories, self._arrival[: self.num_arrived])
        return has_come & ~np.isin(trajectories, self._windows[: self._held] // self._num_windows)

    def _wanted(self, num_taken: int) -> int:
        """Trajectories that have to be there before windows up to `num_taken` are drawn."""
        used_up = -(-num_taken // self._num_windows)
        ahead = min(self._ahead, max(FIRST_AHEAD, used_up))
        return min(len(self._arrival), used_up + ahead)

    def _take_in(self, wanted: int) -> None:
        new = self._arrival[self.num_arrived : wanted]
        windows = (new[:, None] * self._num_windows + np.arange(self._num_windows)).reshape(-1)
        held = self._held + len(windows)
        if held > len(self._windows):  # twice the room, so that taking in costs the same per window
            self._windows = np.concatenate([self._windows[: self._held], np.empty(2 * held, np.int64)])
        self._windows[self._held : held] = windows
        self._held, self.num_arrived = held, max(self.num_arrived, wanted)

    def _close_gaps(self, places: Items) -> None:
        """Take windows out of the buffer: those at its end go where others were drawn."""
        held = self._held - len(places)
        tail = np.setdiff1d(np.arange(held, self._held), places, assume_unique=True)
        self._windows[np.sort(places[places < held])] = self._windows[tail]
        self._held = held


@dataclass(frozen=True, eq=False)
class Arrivals:
    """How the trajectories of a task come in a pass, and what is drawn from them.

    Attributes:
        stretches: Trajectories in the order in which they come.
        num_windows: Windows of each trajectory.
        num_batches: Batches of the pass.
        ahead: How many trajectories may come before they are needed.
    """

    stretches: Sequence[Items]
    num_windows: int
    num_batches: int
    ahead: int


@dataclass(frozen=True, eq=False)
class Draw:
    """One batch of a pass.

    Attributes:
        task: Name of the task.
        items: Numbers of its windows, shape (B,).
    """

    task: str
    items: Items


class PassDraws:
    """The batches of one pass over several tasks, one after the other; a function of the seed and the pass.

    Attributes:
        position: Number of the batch that is drawn next.
    """

    def __init__(self, arrivals: Mapping[str, Arrivals], *, seed: int, which: int) -> None:
        self._arrivals = arrivals
        self._buffers = {
            task: WindowBuffer(
                np.concatenate(some.stretches),
                num_windows=some.num_windows,
                num_batches=some.num_batches,
                ahead=some.ahead,
                seed=seed_of(seed, _DRAWS, which, number),
            )
            for number, (task, some) in enumerate(arrivals.items())
        }
        names = [task for task, some in arrivals.items() for _ in range(some.num_batches)]
        order = np.random.default_rng(seed_of(seed, _TASKS, which)).permutation(len(names))
        self._tasks = [names[place] for place in order.tolist()]
        self.position = 0

    def draw(self) -> Draw:
        """The next batch."""
        task = self._tasks[self.position]
        self.position += 1
        return Draw(task, self._buffers[task].draw())

    def skip_to(self, position: int) -> None:
        """Draw batches and drop them, up to the one of a position."""
        while self.position < position:
            self.draw()

    def is_used_up(self, task: str, trajectories: Items) -> npt.NDArray[np.bool_]:
        """Which trajectories have come and have no window left to be drawn, shape (M,)."""
        return self._buffers[task].is_used_up(trajectories)


class Passes(Protocol):
    """Where trajectories come from, pass after pass.

    Attributes:
        num_batches: Batches in which every window comes once.
    """

    num_batches: int

    def begin(self, which: int, position: int) -> PassDraws:
        """The batches of a pass, from a position on, whose trajectories will come."""


class ArrivalOrder:
    """An order for `ups_store.torch.Loader` that takes the trajectories that have come so far.

    Batch i is a function of the seed and i: how fast trajectories come, and which were there before, changes
    nothing. Ranks divide a batch as evenly as possible; one that would have no row is given a masked one.

    Args:
        passes: Where trajectories come from.
        names: Tasks, in the order of the sources.
        later: The order of all passes but the first; None where they are like the first.
        global_batch_size: Most windows of a batch, over all ranks.

    Attributes:
        epoch: Number of the pass.
        consumed: Batches of it that were trained on, times `global_batch_size`.
        num_steps: Batches of a pass.
        global_batch_size: As given.
    """

    def __init__(
        self, passes: Passes, names: Sequence[str], *, later: DataOrder | None, global_batch_size: int
    ) -> None:
        self._passes, self._names, self._later = passes, tuple(names), later
        self.num_steps, self.global_batch_size = passes.num_batches, global_batch_size
        self.epoch = self.consumed = 0
        self._rank, self._world_size = ranks_of_torch()

    @property
    def key(self) -> object:
        """Nothing can be changed."""
        return None

    def steps(self, epoch: int | None = None) -> Iterator[Step]:
        """The batches of the pass that haven't been consumed; all of pass number `epoch`."""
        which, position = (
            (self.epoch, self.consumed // self.global_batch_size) if epoch is None else (epoch, 0)
        )
        if which > 0 and self._later is not None:
            self._later.epoch, self._later.consumed = which, position * self.global_batch_size
            yield from self._later.steps()
            return
        draws = self._passes.begin(which, position)
        for number in range(position, self.num_steps):
            yield self._step(which, number, draws.draw())

    def state_dict(self) -> dict[str, int]:
        """Pass and position."""
        return {"epoch": self.epoch, "consumed": self.consumed}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on there."""
        self.epoch, self.consumed = state["epoch"], state["consumed"]

    def _step(self, which: int, number: int, draw: Draw) -> Step:
        num = len(draw.items)
        first, end = (num * rank // self._world_size for rank in (self._rank, self._rank + 1))
        mask = None
        if first == end:
            first, end, mask = 0, 1, np.zeros(1, bool)
        return Step(which, number, self._names.index(draw.task), draw.items[first:end], first, num, mask)
