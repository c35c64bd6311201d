"""The seams of an operator: what of its residuals is linear in its own prediction, measured in closed form.

Operators on patches leave seams, and small scales that have nothing to do with the truth's. They are little
beside what a corrector has to draw, so training hardly sees them; but rollouts feed them back, and then they
are most of the energy at high wave numbers. So A, a linear map of a token and its neighbours, is fitted by
ridge regression to predict d = y - op(z) from op(z) on held-out residuals: p = op(z) + A op(z) keeps what the
prediction has in common with the truth, and a flow draws the rest, r = (y - p) / sigma_c.

Letters: N residuals, L tokens, D channels of a token, F features: of a token and its neighbours.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import reduce
from operator import add

import numpy as np
import torch
from torch import Tensor

from ups.data.fields import evenly_spread
from ups.data.held_out import Items
from ups.data.residuals import OF_STATISTICS, PREDICTED, RESIDUAL
from ups.data.stores import Store
from ups.nn.patches import NeighbourMap, with_neighbours
from ups.trained.simulator import Simulator

_AT_ONCE = 128  # residuals
_RIDGES = (1e-6, 1e-4, 1e-2)  # over the mean square of the features
_TINY = 1e-12


@dataclass(frozen=True)
class Seams:
    """Of a task.

    Attributes:
        weight: Of A, float32, shape (F, D).
        sigma: sigma_c: root mean square of y - p, in normalised units, padding aside.
    """

    weight: Tensor
    sigma: float


def measure_seams(store: Store, simulator: Simulator, task: str) -> Seams:
    """Fit A to a store of residuals, and measure sigma_c.

    Residuals lie in the order of their trajectories. Of the ridges that one is taken with which a map of
    either half leaves least of the other half; if it leaves more than there was, A is 0.
    """
    known = simulator.spec.tasks[task]
    seams = NeighbourMap(simulator.spec.state_dim, grid=known.tokens, periodic=known.is_periodic)
    numbers = evenly_spread(len(store), OF_STATISTICS)
    halves = [_Moments.over(_read(store, half), seams) for half in np.array_split(numbers, 2) if len(half)]
    seams.weight.copy_(_fitted(halves))
    return Seams(seams.weight, _sigma(store, numbers, seams, own_dim=simulator.own_dim(task)))


@dataclass(frozen=True)
class _Moments:
    """Sums over tokens, float64.

    Attributes:
        features_FF: Products of features.
        both_FD: Products of features and targets.
        targets: Squares of targets, shape ().
        num: Tokens.
    """

    features_FF: Tensor
    both_FD: Tensor
    targets: Tensor
    num: int

    @classmethod
    def over(cls, parts: Iterable[tuple[Tensor, Tensor]], seams: NeighbourMap) -> _Moments:
        """Of op(z) and y - op(z), (N, L, D) each."""
        return reduce(add, (cls._of(predicted, residual, seams) for predicted, residual in parts))

    @classmethod
    def _of(cls, predicted_NLD: Tensor, residual_NLD: Tensor, seams: NeighbourMap) -> _Moments:
        features_NLF = with_neighbours(predicted_NLD, seams.grid, seams.periodic)
        x, y = features_NLF.flatten(0, 1).double(), residual_NLD.flatten(0, 1).double()
        return cls(x.mT @ x, x.mT @ y, y.square().sum(), len(x))

    def __add__(self, other: _Moments) -> _Moments:
        return _Moments(
            self.features_FF + other.features_FF,
            self.both_FD + other.both_FD,
            self.targets + other.targets,
            self.num + other.num,
        )

    @property
    def scale(self) -> float:
        """Mean square of the features; 1 if they are all zero."""
        return float(self.features_FF.diagonal().mean() / self.num) or 1.0

    def weight(self, ridge: float) -> Tensor:
        """The map which leaves least of the targets and has small weights itself, shape (F, D)."""
        eye = torch.eye(len(self.features_FF), dtype=torch.float64)
        return torch.linalg.solve(self.features_FF + ridge * self.num * eye, self.both_FD)

    def left_by(self, weight_FD: Tensor) -> float:
        """Squares of targets that a map leaves."""
        explained = 2 * self.both_FD - self.features_FF @ weight_FD
        return float(self.targets - (weight_FD * explained).sum())


def _fitted(halves: list[_Moments]) -> Tensor:
    total = reduce(add, halves)
    if len(halves) < 2:
        return torch.zeros_like(total.both_FD)
    first, second = halves

    def left(ridge: float) -> float:
        return first.left_by(second.weight(ridge)) + second.left_by(first.weight(ridge))

    best = min((share * total.scale for share in _RIDGES), key=left)
    return total.weight(best) if left(best) < total.targets else torch.zeros_like(total.both_FD)


@torch.no_grad()
def _sigma(store: Store, numbers: Items, seams: NeighbourMap, *, own_dim: int) -> float:
    squares = torch.cat(
        [(d - seams(p))[..., :own_dim].double().square().mean((1, 2)) for p, d in _read(store, numbers)]
    )
    return float((squares.mean() + _TINY).sqrt())


def _read(store: Store, numbers: Items) -> Iterator[tuple[Tensor, Tensor]]:
    """op(z) and y - op(z), float32, some residuals after the other."""
    for first in range(0, len(numbers), _AT_ONCE):
        found = store.gather(numbers[first : first + _AT_ONCE], [PREDICTED, RESIDUAL])
        yield torch.from_numpy(found[PREDICTED]).float(), torch.from_numpy(found[RESIDUAL]).float()
