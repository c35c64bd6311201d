"""Intervals over training seeds and trajectories, and paired differences between the rows of a table.

Every row predicts the same trajectories, and each of its training seeds predicts all of them. So a resample
draws trajectories, which all seeds and all rows of the table share, and seeds, for each row its own: the
pigeonhole bootstrap (Owen 2007, arXiv:0712.1111). Other trajectories for each seed, as for nested data, would
average away what the trajectories have in common. Quantiles from few seeds or trajectories are too narrow, so
their distance to the value is widened to that of Student's t, with the jackknife's variance and
Satterthwaite's degrees of freedom.

Letters: S training seeds, B trajectories, F numbers of a trajectory, M of a statistic, R resamples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from ups.errors import needs

with needs("train"):
    from scipy.special import ndtri, stdtrit

LEAST_TRAJECTORIES = 20  # fewer say too little about how much trajectories differ: no interval is given
NUM_RESAMPLES = 2000
_TAIL = (1 - 0.95) / 2  # at each end, beyond the interval
_AT_ONCE_NBYTES = 64 << 20
_DRAWN_AT_ONCE = 100  # resamples

Values = npt.NDArray[np.float64]
Verdict = Literal["ahead", "behind", "can't be told"]


@dataclass(frozen=True)
class Interval:
    """A statistic and where it lies with a confidence of 95 %.

    Attributes:
        mean: Mean over seeds and trajectories, or another statistic of them.
        low: Lower end; NaN where there is no interval.
        high: Upper end; NaN where there is none.
    """

    mean: float
    low: float = float("nan")
    high: float = float("nan")

    @property
    def is_known(self) -> bool:
        """Whether there is an interval."""
        return self.low == self.low

    @property
    def is_finite(self) -> bool:
        """Whether the statistic is a number."""
        return math.isfinite(self.mean)


def as_columns(values: Sequence[Interval]) -> dict[str, list[float]]:
    """Intervals as lists of their means and ends."""
    return {part: [getattr(value, part) for value in values] for part in ("mean", "low", "high")}


@dataclass(frozen=True)
class Paired:
    """A row beside the table's first one, on the same trajectories.

    Attributes:
        difference: The row's value minus the first row's.
        ratio: The row's value over the first row's; NaN where one of them isn't positive.
        verdict: Of the row: "ahead" of the first row, "behind" it, or "can't be told": the interval of the
            difference has zero in it, or there is none.
    """

    difference: Interval
    ratio: Interval
    verdict: Verdict


@dataclass(frozen=True)
class Resampled:
    """M numbers of a row, and what becomes of them where seeds and trajectories are drawn or left out.

    Attributes:
        value: Shape (M,).
        draws: In every resample, shape (R, M); R is 0 with fewer than 20 trajectories.
        without_trajectory: With one trajectory left out, shape (B, M); (0, M) where R is 0.
        without_seed: With one seed left out, (S, M), by the row whose seed that is; empty for one seed.
    """

    value: Values
    draws: Values
    without_trajectory: Values
    without_seed: Mapping[str, Values]

    def map(self, function: Callable[[Values], Values]) -> Resampled:
        """The same for a function of the numbers, which maps (N, M) to (N, K)."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return Resampled(
                function(self.value[None])[0],
                function(self.draws),
                function(self.without_trajectory),
                {row: function(values) for row, values in self.without_seed.items()},
            )

    def columns(self, chosen: slice | npt.NDArray[np.bool_]) -> Resampled:
        """Some of the M numbers."""
        return self.map(lambda values: values[:, chosen])

    def mean(self) -> Resampled:
        """The mean of the M numbers, as one."""
        return self.map(lambda values: values.mean(1, keepdims=True))

    def minus(self, other: Resampled) -> Resampled:
        """The difference to another row, resample by resample."""
        own, theirs = self.without_seed, other.without_seed
        with np.errstate(invalid="ignore"):
            return Resampled(
                self.value - other.value,
                self.draws - other.draws,
                self.without_trajectory - other.without_trajectory,
                {
                    row: own.get(row, self.value) - theirs.get(row, other.value)
                    for row in dict.fromkeys((*own, *theirs))
                },
            )

    def intervals(self, *, is_positive: bool = False) -> list[Interval]:
        """An interval of each number; without ends where R is 0 or a number isn't finite.

        Args:
            is_positive: Whether the numbers can't be negative, as errors are. Ends are found on a logarithmic
                scale then, so that none lies below zero; next to zero itself they are as for other numbers.
        """
        plain = self._intervals()
        if not is_positive or not len(self.draws):
            return plain
        is_above_zero_M = np.all([part.min(0) > 0 for part in self._parts()], axis=0)
        logarithms = self.map(np.log)._intervals()
        return [
            Interval(one.mean, *np.exp([log.low, log.high]).tolist()) if is_above_zero else one
            for one, log, is_above_zero in zip(plain, logarithms, is_above_zero_M, strict=True)
        ]

    def interval(self, *, is_positive: bool = False) -> Interval:
        """The interval of the only number."""
        (interval,) = self.intervals(is_positive=is_positive)
        return interval

    def _parts(self) -> list[Values]:
        """What is resampled, each shape (N, M)."""
        return [self.draws, self.without_trajectory, *self.without_seed.values()]

    def _intervals(self) -> list[Interval]:
        if not len(self.draws):
            return [Interval(float(value)) for value in self.value]
        with np.errstate(invalid="ignore", divide="ignore"):
            low_M, high_M = np.quantile(self.draws, (_TAIL, 1 - _TAIL), axis=0) - self.draws.mean(0)
            widening_M = self._widening()
        ends = zip(self.value, low_M * widening_M, high_M * widening_M, strict=True)
        return [Interval(float(value), float(value + low), float(value + high)) for value, low, high in ends]

    def _widening(self) -> Values:
        """By what the draws' quantiles are too close to their mean, shape (M,)."""
        parts = self._parts()[1:]
        variances = [(len(part) - 1) * part.var(0) for part in parts]  # of the jackknife
        total_M = np.sum(variances, axis=0)
        shares = [
            (variance / total_M) ** 2 / (len(part) - 1)
            for variance, part in zip(variances, parts, strict=True)
        ]
        quantile_M = stdtrit(1 / np.sum(shares, axis=0), 1 - _TAIL) / ndtri(1 - _TAIL)
        spread_M = self.draws.std(0)
        is_point_M = (spread_M == 0) | (total_M == 0)
        return np.where(is_point_M, 0.0, quantile_M * np.sqrt(total_M) / spread_M)


class Resamples:
    """Which trajectories each resample draws, the same for all rows of a table, and which seeds of a row.

    Args:
        num_trajectories: B > 0.
        num_resamples: R; none are drawn for fewer than `least` trajectories.
        seed: Of the drawing; the same gives the same intervals.
        least: Trajectories that say enough about how much trajectories differ.
    """

    def __init__(
        self,
        num_trajectories: int,
        *,
        num_resamples: int = NUM_RESAMPLES,
        seed: int = 0,
        least: int = LEAST_TRAJECTORIES,
    ) -> None:
        self._num, self._seed = num_trajectories, seed
        num_drawn = num_resamples if num_trajectories >= least else 0
        self._counts_RB = np.zeros((num_drawn, num_trajectories), np.uint16)
        random, shares = np.random.default_rng(seed), np.full(num_trajectories, 1 / num_trajectories)
        for first in range(0, len(self._counts_RB), _DRAWN_AT_ONCE):
            some = self._counts_RB[first : first + _DRAWN_AT_ONCE]
            some[:] = random.multinomial(num_trajectories, shares, size=len(some))

    def of(
        self,
        values: Sequence[npt.ArrayLike],
        statistic: Callable[[Values], Values] = lambda means: means,
        *,
        row: str = "",
    ) -> Resampled:
        """Resample a statistic of each seed's means over trajectories; a row's number is its mean over seeds.

        Args:
            values: Numbers of every trajectory, shape (B, F), by training seed; what is masked is left out of
                the means.
            statistic: Of means (N, F), to be mapped to (N, M); by default the means themselves.
            row: Name of the row, whose seeds are drawn independently of other rows'; not needed for one seed.
        """
        missing: npt.NDArray[np.bool_] = np.ma.getmaskarray(np.ma.asarray(values[0]))
        if missing.any():  # of all seeds alike, as the truth decides it
            plain, num_numbers = statistic, int(missing.shape[-1])
            values = [np.hstack([np.ma.filled(values_BF, 0.0), ~missing]) for values_BF in values]

            def statistic(means: Values) -> Values:
                return plain(means[:, :num_numbers] / means[:, num_numbers:])

        with np.errstate(invalid="ignore", divide="ignore"):
            parts = [self._of_seed(np.asarray(values_BF, np.float64), statistic) for values_BF in values]
            value_SM, draws, without = (list(part) for part in zip(*parts, strict=True))
            num, total_M = len(values), np.sum(value_SM, axis=0)
            weights_SR = self._seed_weights(row, num)
            return Resampled(
                total_M / num,
                sum(weight_R[:, None] * drawn for weight_R, drawn in zip(weights_SR, draws, strict=True)),
                sum(without) / num,
                {} if num == 1 else {row: (total_M - np.stack(value_SM)) / (num - 1)},
            )

    def _of_seed(
        self, values_BF: Values, statistic: Callable[[Values], Values]
    ) -> tuple[Values, Values, Values]:
        """The statistic of one seed: of all trajectories (M,), drawn (R, M), and leaving one out (B, M)."""
        mean_F, num = values_BF.mean(0), self._num
        value_M = statistic(mean_F[None])[0]
        rows = max(1, _AT_ONCE_NBYTES // (8 * max(1, len(mean_F), num)))
        nothing = np.zeros((0, len(value_M)))
        draws = [
            statistic(self._counts_RB[first : first + rows] / num @ values_BF)
            for first in range(0, len(self._counts_RB), rows)
        ]
        if not draws:
            return value_M, nothing, nothing
        without = [
            statistic((num * mean_F - values_BF[first : first + rows]) / (num - 1))
            for first in range(0, num, rows)
        ]
        return value_M, np.concatenate(draws), np.concatenate(without)

    def _seed_weights(self, row: str, num: int) -> Values:
        """Share of each seed in each resample, shape (S, R)."""
        if num == 1:
            return np.ones((1, len(self._counts_RB)))
        random = np.random.default_rng((self._seed, *row.encode()))
        drawn = random.multinomial(num, np.full(num, 1 / num), size=len(self._counts_RB))
        return np.asarray(drawn.T / num)


def compare(row: Resampled, first: Resampled, *, is_more_better: bool = False) -> Paired:
    """A row's number beside the first row's, both of one number and of the same `Resamples`.

    A row whose number isn't finite, where the other's is, has blown up and is behind.
    """
    difference = row.minus(first).interval()
    ratio = Interval(float("nan"))
    if row.value[0] > 0 and first.value[0] > 0:
        logarithm = row.map(np.log).minus(first.map(np.log)).interval()
        ratio = Interval(*np.exp([logarithm.mean, logarithm.low, logarithm.high]).tolist())
    return Paired(difference, ratio, _verdict(row, first, difference, is_more_better=is_more_better))


def _verdict(row: Resampled, first: Resampled, difference: Interval, *, is_more_better: bool) -> Verdict:
    if not len(row.draws):
        return "can't be told"
    is_finite = np.isfinite(row.value[0])
    if is_finite != np.isfinite(first.value[0]):
        return "ahead" if is_finite else "behind"
    if not (difference.low > 0 or difference.high < 0):
        return "can't be told"
    return "ahead" if (difference.low > 0) == is_more_better else "behind"
