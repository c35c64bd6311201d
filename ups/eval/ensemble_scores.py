"""Numbers of an ensemble's row: scores with their intervals, by time step, ranks and reliability.

All are of values over the root mean square of each channel, so `crps` of a point forecast is its mean
absolute error on that scale, and `energy_score` its root mean square error. Letters: as in
`ups.eval.ensembles`; N means over trajectories.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ups.eval import ensemble_metrics
from ups.eval.ensembles import QUANTILES, EnsembleErrors
from ups.eval.intervals import Interval, Paired, Resampled, Resamples, Values, as_columns
from ups.eval.metrics import BANDS, means_of_defined
from ups.eval.scores import Scores

Numbers = Callable[[EnsembleErrors], torch.Tensor | Values]  # of trajectories, shape (B, ...)
Statistic = Callable[[Values], Values]  # of means over trajectories
Resample = Callable[..., Resampled]  # takes numbers, and a statistic of their means

_MEANS: dict[str, Numbers] = {  # (B, T)
    "mean_nrmse": lambda errors: means_of_defined(errors.nrmse, errors.undefined, 2),
    "crps": lambda errors: errors.crps.mean(2),
    "energy_score": lambda errors: errors.energy_score,
}
_ORDER = (
    *("mean_nrmse", "crps", "energy_score", "spread_skill", "spread", "skill"),
    *("rank_unevenness", "reliability_gap", *(f"band_{name}" for name in BANDS)),
)


@dataclass(frozen=True)
class Reliability:
    """How often a threshold was exceeded, by how probable that was said to be.

    Attributes:
        quantile: Of the truth, that the threshold is.
        probability: Mean forecast probability of each bin that isn't empty, shape (P',).
        frequency: How often it came true.
        share: Of all points, channels, time steps and trajectories in each bin.
    """

    quantile: float
    probability: Sequence[float]
    frequency: Sequence[Interval]
    share: Sequence[float]


@dataclass(frozen=True)
class EnsembleScores:
    """Scores of one row's members, or of its point forecast.

    Attributes:
        num_members: M; 1 of a point forecast.
        seed: Of the members; None of a point forecast.
        scores: `mean_nrmse`, `crps`, `energy_score`, `skill` (root mean square error of the ensemble mean),
            `band_low`, `band_mid`, `band_high` (energy over the truth's); of several members `spread_skill`,
            `spread`, `rank_unevenness` and `reliability_gap`, too.
        ranks: Share of each bin of ranks over the share expected; empty for a point forecast.
        reliability: Of each threshold; empty for a point forecast.
        seconds: Wall time of predicting all trajectories once.
        paired: By metric, beside the table's first row.
    """

    num_members: int
    seed: int | None
    scores: Scores
    ranks: Sequence[Interval] = ()
    reliability: Sequence[Reliability] = ()
    seconds: float | None = None
    paired: Mapping[str, Paired] = field(default_factory=dict)

    @property
    def is_point(self) -> bool:
        """Whether it is of a single forecast."""
        return self.num_members == 1

    def to_json(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "members": self.num_members,
            "seed": self.seed,
            "seconds": self.seconds,
            **{name: asdict(value) for name, value in self.scores.metrics.items()},
            "paired": {name: asdict(pair) for name, pair in self.paired.items()},
            "by_seed": {name: list(values) for name, values in self.scores.by_seed.items()},
            "by_step": {name: as_columns(steps) for name, steps in self.scores.by_step.items()},
            "ranks": as_columns(self.ranks),
            "reliability": [
                {**asdict(each), "frequency": as_columns(each.frequency)} for each in self.reliability
            ],
        }


def score_ensemble(
    errors: Sequence[EnsembleErrors],
    *,
    resamples: Resamples,
    row: str = "",
    seconds: float | None = None,
) -> EnsembleScores:
    """Turn numbers of trajectories into scores with 95 % intervals.

    Args:
        errors: Of all trajectories of the split, by training seed.
        resamples: Of the split; all rows of a table share them.
        row: Name of the row; not needed for one training seed.
        seconds: Wall time of predicting all trajectories once.
    """
    overall, by_step = _resampled(errors, resamples, row)
    found = {name: overall[name].interval(is_positive=True) for name in _ORDER if name in overall}
    first = errors[0]
    is_point = first.num_members == 1
    return EnsembleScores(
        first.num_members,
        first.seed,
        Scores(
            metrics=found,
            by_step={name: steps.intervals(is_positive=True) for name, steps in by_step.items()},
            by_seed=_by_seed(errors, found),
            resampled=overall,
        ),
        ranks=[] if is_point else _rank_shares(errors, resamples, row),
        reliability=[] if is_point else _reliability(errors, resamples, row),
        seconds=seconds,
    )


def ensemble_numbers(errors: EnsembleErrors) -> dict[str, float]:
    """The scores of one training seed, without intervals."""
    overall, _ = _resampled([errors], Resamples(len(errors), num_resamples=0), "")
    return {name: float(overall[name].value[0]) for name in _ORDER if name in overall}


def _resampled(
    errors: Sequence[EnsembleErrors], resamples: Resamples, row: str
) -> tuple[dict[str, Resampled], dict[str, Resampled]]:
    """Scores over all time steps, one number each, and by time step, (T,)."""

    def of(numbers: Numbers, statistic: Statistic = lambda means: means) -> Resampled:
        parts = (numbers(each) for each in errors)
        arrays = [part.flatten(1).numpy() if isinstance(part, torch.Tensor) else part for part in parts]
        return resamples.of(arrays, statistic, row=row)

    by_step = {name: of(numbers) for name, numbers in _MEANS.items()}
    overall = {name: steps.mean() for name, steps in by_step.items()}
    pooled = {**_moments(errors[0].num_members), **_calibration(errors[0])}
    for name, (numbers, statistic) in pooled.items():
        by_step[name] = of(numbers, statistic)
        overall[name] = of(partial(_pooled, numbers), statistic)
    for name, steps, whole in _bands(errors[0], of):
        by_step[name], overall[name] = steps, whole
    return overall, by_step


def _pooled(numbers: Numbers, errors: EnsembleErrors) -> torch.Tensor:
    """Means over time steps of what goes into a statistic, (B, 1, ...)."""
    return numbers(errors).mean(1, keepdim=True)


def _moments(num_members: int) -> dict[str, tuple[Numbers, Statistic]]:
    """Spread and skill: from variance and squared error, both means over channels, to (N, T)."""

    def numbers(errors: EnsembleErrors) -> torch.Tensor:
        return torch.stack([errors.variance.mean(2), errors.squared_error.mean(2)], dim=2)

    def pair(means_NF: Values) -> Values:
        return means_NF.reshape(len(means_NF), -1, 2)

    def ratio(means_NF: Values) -> Values:
        moments_NT2 = pair(means_NF)
        return ensemble_metrics.spread_skill(moments_NT2[..., 0], moments_NT2[..., 1], num_members)

    def root(means_NF: Values, *, of: int) -> Values:
        return np.sqrt(pair(means_NF)[..., of])

    skill = (numbers, partial(root, of=1))
    if num_members == 1:
        return {"skill": skill}
    return {"spread_skill": (numbers, ratio), "spread": (numbers, partial(root, of=0)), "skill": skill}


def _calibration(errors: EnsembleErrors) -> dict[str, tuple[Numbers, Statistic]]:
    """Unevenness of ranks, mean over channels, and gap of reliability, mean over thresholds, to (N, T)."""
    if errors.num_members == 1:
        return {}

    def unevenness(means_NF: Values) -> Values:
        shares_NTCR = means_NF.reshape(len(means_NF), -1, *errors.ranks.shape[2:])
        return ensemble_metrics.rank_unevenness(shares_NTCR, errors.num_members).mean(-1)

    def gap(means_NF: Values) -> Values:
        parts_NTQP3 = means_NF.reshape(len(means_NF), -1, *errors.exceedances.shape[2:])
        return ensemble_metrics.reliability_gap(parts_NTQP3).mean(-1)

    return {
        "rank_unevenness": (lambda each: each.ranks, unevenness),
        "reliability_gap": (lambda each: each.exceedances, gap),
    }


def _bands(errors: EnsembleErrors, of: Resample) -> Iterator[tuple[str, Resampled, Resampled]]:
    """Of every band that the truth has: its name, ratios by time step, and that of all steps together.

    The mean of the steps' ratios would say more of steps at which the truth has next to nothing of a band.
    """
    is_there_TKC = ensemble_metrics.has_band(errors.true_bands.mean(0).numpy())
    every = _band_ratios(is_there_TKC, of, lambda bands: bands)
    pooled_1KC = ensemble_metrics.has_band(errors.true_bands.mean((0, 1)).numpy()[None])
    pooled = _band_ratios(pooled_1KC, of, lambda bands: bands.mean(1, keepdim=True))
    for number, name in enumerate(BANDS):
        if pooled_1KC[0, number].any():
            steps = every.columns(slice(number, None, len(BANDS)))
            yield f"band_{name}", steps, pooled.columns(slice(number, number + 1))


def _band_ratios(
    is_there_TKC: npt.NDArray[np.bool_], of: Resample, taken: Callable[[torch.Tensor], torch.Tensor]
) -> Resampled:
    """Energies over the truth's, (T K,), of what `taken` makes of the bands of trajectories, (B, T, K, C)."""

    def ratios(means_NF: Values) -> Values:
        parts_N2TKC = means_NF.reshape(len(means_NF), 2, *is_there_TKC.shape)
        ratios_NTK = ensemble_metrics.band_ratios(parts_N2TKC[:, 0], parts_N2TKC[:, 1], is_there_TKC)
        return ratios_NTK.reshape(len(means_NF), -1)

    return of(lambda each: torch.stack([taken(each.bands), taken(each.true_bands)], dim=1), ratios)


def _rank_shares(errors: Sequence[EnsembleErrors], resamples: Resamples, row: str) -> list[Interval]:
    """Share of each bin over the one expected, all time steps and channels together."""
    expected = ensemble_metrics.expected_rank_shares(errors[0].num_members)
    shares = resamples.of([each.ranks.mean((1, 2)).numpy() for each in errors], row=row)
    return shares.map(lambda shares_NR: shares_NR / expected).intervals(is_positive=True)


def _reliability(errors: Sequence[EnsembleErrors], resamples: Resamples, row: str) -> list[Reliability]:
    found = []
    for number, quantile in enumerate(QUANTILES):
        parts = [each.exceedances[:, :, number].mean(1) for each in errors]  # (B, P, 3)
        share, probability, _ = torch.stack(parts).mean((0, 1)).unbind(-1)
        filled = share > 0
        values = [part[:, filled][..., [0, 2]].flatten(1).numpy() for part in parts]
        frequency = resamples.of(values, _frequencies, row=row).intervals()
        means = (probability / share)[filled]
        found.append(Reliability(quantile, means.tolist(), frequency, share[filled].tolist()))
    return found


def _frequencies(means_NF: Values) -> Values:
    """How often what had a probability came true, from shares and what came true of them."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return means_NF[:, 1::2] / means_NF[:, ::2]


def _by_seed(errors: Sequence[EnsembleErrors], found: Mapping[str, Interval]) -> dict[str, list[float]]:
    """Each score of each training seed alone."""
    if len(errors) == 1:
        return {name: [value.mean] for name, value in found.items()}
    alone = [ensemble_numbers(each) for each in errors]
    return {name: [numbers[name] for numbers in alone] for name in found}
