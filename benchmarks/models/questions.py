"""What models are asked: tasks with their data, what is shifted in other test sets, and how they are trained.

Sizes of `SMALL` are for two processor cores, those of `FULL` for a GPU: the same questions with more samples,
points and steps, and two more.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

Settings = Mapping[str, Any]

TRAIN, VAL, TEST = "train", "val", "test"
# Test sets of what training never saw are called so; others are of the training's distribution.
LONGER, TWICE, HALF = "twice as long", "twice the points", "half the points"


@dataclass(frozen=True)
class Question:
    """One task, its training data and its test sets."""

    name: str  # short, for folders and tables
    title: str  # for people
    task: str  # of `ups make-data`
    settings: Settings  # of all its data sets
    # Settings that other test sets change, by name; those with other `points` only are of another resolution,
    # those with other `frames` are longer.
    shifts: Mapping[str, Settings]
    num_samples: int  # of each training file
    num_held_out: int  # of each file of validation, and of test
    patch: int  # points of a patch of the operator, along each axis
    flops: float  # budget of each training, counted operations
    overrides: Sequence[str] = ()  # further `key=value` of the run

    @property
    def sets(self) -> dict[str, Settings]:
        """Every data set's settings: train, val, test, and the shifted ones."""
        return dict.fromkeys((TRAIN, VAL, TEST), self.settings) | {
            name: {**self.settings, **changed} for name, changed in self.shifts.items()
        }

    def samples_of(self, name: str) -> int:
        """Samples of each file of a set; a shifted set has as many as test in all its files together."""
        if name == TRAIN:
            return self.num_samples
        num_files = max((len(each) for each in self.settings.values() if isinstance(each, tuple)), default=1)
        return self.num_held_out * (1 if name in (VAL, TEST) else num_files)

    def seed_of(self, name: str) -> int:
        """Of a set's initial states; all resolutions and lengths of test start from its states."""
        return {TRAIN: 0, VAL: 1}.get(name, 2)

    def key(self, name: str) -> str:
        """Hash of what makes a set, so that data are made again when that changes."""
        return hash_of([self.task, self.sets[name], self.samples_of(name), self.seed_of(name)])


def hash_of(values: Any) -> str:
    """Of JSON values, short."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]


_LINE = {"points": 128, "frames": 21, "end_time": 2.0}
_SQUARE = {"points": 48, "frames": 21, "end_time": 2.0}
_STATES_1D = {
    "amplitude 1.5x": {"amplitude": 0.9},
    "means to 0.6": {"mean": 0.6},
    "wave numbers to 6": {"max_wave_number": 6, "waves": 6},
}


def _rollouts(grid: Settings, states: Mapping[str, Settings], **held: float) -> dict[str, Settings]:
    """Test sets of other initial states, and of longer rollouts and other resolutions, all with `held`."""
    sizes: dict[str, Settings] = {
        LONGER: {"frames": 2 * grid["frames"] - 1, "end_time": 2 * grid["end_time"]},
        TWICE: {"points": 2 * grid["points"]},
        HALF: {"points": grid["points"] // 2},
    }
    return {name: {**held, **changed} for name, changed in {**states, **sizes}.items()}


_line = functools.partial(Question, num_samples=100, num_held_out=12, patch=4, flops=5e11)
_square = functools.partial(Question, num_samples=100, num_held_out=24, patch=4, flops=1e12)

BURGERS = _line(
    name="burgers",
    title="Burgers, three viscosities",
    task="burgers1d",
    settings={"nu": (0.01, 0.03, 0.1), **_LINE},
    shifts={
        "nu = 0.017, between": {"nu": 0.017},
        "nu = 0.004, beyond": {"nu": 0.004},
        **_rollouts(_LINE, _STATES_1D, nu=0.03),
    },
)

SHOCKS = _line(
    name="shocks",
    title="Burgers, shocks thinner than a cell",
    task="burgers1d",
    settings={"nu": 0.001, **_LINE},
    shifts=_rollouts(_LINE, _STATES_1D),
    num_samples=300,
    num_held_out=36,
)

ADVECTION = _line(
    name="advection",
    title="advection, three speeds",
    task="advection1d",
    settings={"beta": (0.2, 0.4, 0.8), **_LINE},
    shifts={
        "beta = 0.6, between": {"beta": 0.6},
        "beta = 1, beyond": {"beta": 1.0},
        **_rollouts(
            _LINE,
            {
                "amplitude 1.5x": {"amplitude": 1.5},
                "means to 0.6": {"mean": 0.6},
                "wave numbers to 12": {"max_wave_number": 12, "waves": 4},
            },
            beta=0.4,
        ),
    },
)

WALLS = _line(
    name="walls",
    title="Burgers between walls, three viscosities",
    task="burgers1d",
    settings={"walls": True, "nu": (0.01, 0.03, 0.1), **_LINE},
    shifts={
        "nu = 0.017, between": {"nu": 0.017},
        "nu = 0.004, beyond": {"nu": 0.004},
        **_rollouts(
            _LINE, {name: shift for name, shift in _STATES_1D.items() if "mean" not in shift}, nu=0.03
        ),
    },
)

VORTICITY = _square(
    name="vorticity",
    title="2D vorticity, two viscosities",
    task="incompressible2d",
    settings={"nu": (1e-3, 4e-3), **_SQUARE},
    shifts={
        "nu = 0.002, between": {"nu": 2e-3},
        "nu = 0.0005, beyond": {"nu": 5e-4},
        **_rollouts(
            _SQUARE,
            {"amplitude 1.5x": {"amplitude": 7.5}, "wave numbers to 6": {"max_wave_number": 6}},
            nu=2e-3,
        ),
    },
    num_samples=60,
    num_held_out=12,
)

_PATTERNS = {**_SQUARE, "end_time": 4.0}
REACTION = _square(
    name="reaction",
    title="2D reaction-diffusion after its noise",
    task="diffreact2d",
    settings={"modes": 24, "du": 2e-3, "dv": 1e-2, "burn_in": 1.0, **_PATTERNS},
    shifts=_rollouts(_PATTERNS, {"amplitude 1.5x": {"amplitude": 1.5}}),
)

DARCY = _square(
    name="darcy",
    title="2D Darcy flow",
    task="darcy2d",
    settings={"beta": 1.0, "points": 64, "modes": 32},
    shifts={TWICE: {"points": 128}, HALF: {"points": 32}},
    num_samples=400,
    num_held_out=40,
)

SMALL = (BURGERS, SHOCKS, WALLS, ADVECTION, VORTICITY, REACTION, DARCY)


def _larger(question: Question, *, points: int, samples: int, patch: int, **settings: Any) -> Question:
    """A question at full size: its shifted resolutions follow its points."""
    resolutions = {TWICE: 2 * points, HALF: points // 2}
    shifts = {
        name: {**changed, "points": resolutions[name]} if name in resolutions else changed
        for name, changed in question.shifts.items()
    }
    return replace(
        question,
        settings={**question.settings, "points": points, **settings},
        shifts=shifts,
        num_samples=samples,
        num_held_out=max(question.num_held_out, samples // 10),
        patch=patch,
        flops=100 * question.flops,
    )


FORCED = _square(
    name="forced",
    title="2D vorticity, forced",
    task="incompressible2d",
    settings={"nu": (3e-4, 1e-3), "forcing": 0.1, "points": 64, "frames": 41, "end_time": 20.0},
    shifts={"nu = 0.0006, between": {"nu": 6e-4}, "forcing 1.5x": {"nu": 1e-3, "forcing": 0.15}},
    num_samples=500,
    num_held_out=50,
    flops=1e15,
)

DAM_BREAK = _square(
    name="dam_break",
    title="2D shallow water: dams anywhere, from rest",
    task="shallow_water2d",
    settings={"points": 64, "frames": 21, "end_time": 1.0, "shift": 1.0},
    shifts={"height 1.25x": {"height": 2.5}, "radii to 1": {"min_radius": 0.7, "max_radius": 1.0}},
    num_samples=1000,
    num_held_out=100,
    flops=1e15,
)

FULL = (
    _larger(BURGERS, points=256, samples=1000, patch=4),
    _larger(SHOCKS, points=256, samples=3000, patch=4),
    _larger(WALLS, points=256, samples=1000, patch=4),
    _larger(ADVECTION, points=256, samples=1000, patch=4),
    _larger(VORTICITY, points=128, samples=500, patch=4),
    _larger(REACTION, points=128, samples=1000, patch=4, modes=64),
    _larger(DARCY, points=128, samples=5000, patch=4, modes=64),
    FORCED,
    DAM_BREAK,
)
