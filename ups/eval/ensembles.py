"""Ensembles: rolled out and measured a time step at a time, so that no member is kept beyond it, and scored.

Channels are divided by their root mean square over the split's truth first, so that none outweighs the others
by its unit and scores are relative: `crps` of a point forecast is its mean absolute error on that scale, and
`energy_score` its root mean square error. What is left of every trajectory and time step are numbers whose
means over trajectories make the scores, so they can be resampled. Fair estimators say what an ensemble of
infinitely many members like these would score (Ferro 2014, doi:10.1002/qj.2270), so that more members aren't
better by themselves.

Letters: B trajectories, M members, T time steps, X the axes of the grid, C channels, K bands, R bins of
    ranks,
Q thresholds, P bins of probabilities, N means over trajectories.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ups.data.windows import Trajectories, TrajectoryBatch
from ups.distributed.ranks import ALONE, Ranks
from ups.errors import ConfigError, ShapeError
from ups.eval.forecasters import AnyForecaster, has_members, predict, start_of
from ups.eval.intervals import Interval, Paired, Resamples, Values, as_columns
from ups.eval.metrics import BANDS, masked, nrmse_per_sample, shell_energy
from ups.eval.scores import Metric, Scores, score
from ups.grid import FIELDS
from ups.output import progress_bar

LEAST_MEMBERS = 2
QUANTILES = (0.5, 0.9, 0.99)  # of the truth: the thresholds of reliability diagrams
NUM_PROBABILITIES = 11  # bins of a reliability diagram, centred on 0, 0.1, ..., 1
_MOST_RANK_BINS = 20
_LEAST_SHARE = 1e-12  # of a band in the truth's energy, which rounding of float32 makes
_POINTS_OF_QUANTILES = 1 << 20  # values of each channel, evenly spread over all, that quantiles are taken of
_BATCH_NBYTES = 64 << 20  # of true frames in float32


@dataclass(frozen=True)
class Climate:
    """What the truth of a split is like; the same for all that predict it.

    Attributes:
        scale_C: Root mean square of each channel, float64; 1 where the truth is zero throughout.
        thresholds_QC: Its `QUANTILES`, over the scale.
    """

    scale_C: Tensor
    thresholds_QC: Tensor

    @classmethod
    def of(cls, trajectories: Trajectories) -> Climate:
        """Look at all frames that are predicted."""
        num_channels = dict(trajectories.info.grid.channels)[FIELDS]
        squares_C = torch.zeros(num_channels, dtype=torch.float64)
        num, parts = 0, []
        total = len(trajectories) * trajectories.horizon * trajectories.info.grid.num_values(FIELDS)
        every = -(-total // num_channels // _POINTS_OF_QUANTILES)
        for batch in trajectories.batches():
            values_NC = batch.truth.flatten(0, -2)
            squares_C += values_NC.double().square().sum(0)
            parts.append(values_NC[-num % every :: every].double())  # goes on where the last batch ended
            num += len(values_NC)
        scale_C = (squares_C / num).sqrt()
        scale_C = torch.where(scale_C > 0, scale_C, 1.0)
        quantiles_QC = np.quantile(torch.cat(parts).numpy(), QUANTILES, axis=0)
        return cls(scale_C, torch.from_numpy(quantiles_QC) / scale_C)


@dataclass(frozen=True)
class EnsembleErrors:
    """Numbers of trajectories and time steps, of values over `Climate.scale_C`; float64, on the CPU.

    Attributes:
        num_members: M; 1 of a point forecast.
        seed: Of the members; None of a point forecast.
        nrmse: Of the ensemble mean, shape (B, T, C).
        crps: Fair, mean over points, shape (B, T, C).
        energy_score: Fair, shape (B, T).
        variance: Mean over points, shape (B, T, C); NaN of a point forecast.
        squared_error: Of the ensemble mean, mean over points, shape (B, T, C).
        bands: Energy by band, mean over members, shape (B, T, K, C).
        true_bands: The same of the truth.
        ranks: Share of the points by bin of their rank, shape (B, T, C, R).
        exceedances: As `exceedances`, shape (B, T, Q, P, 3).
    """

    num_members: int
    seed: int | None
    nrmse: Tensor
    crps: Tensor
    energy_score: Tensor
    variance: Tensor
    squared_error: Tensor
    bands: Tensor
    true_bands: Tensor
    ranks: Tensor
    exceedances: Tensor

    @property
    def undefined(self) -> Tensor:
        """Where the truth is zero throughout, so that `nrmse` isn't defined, shape (B, T, C)."""
        return self.true_bands.sum(2) == 0

    def __len__(self) -> int:
        return len(self.energy_score)

    def tensors(self) -> dict[str, Tensor]:
        """All numbers by name."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    def pooled(self) -> EnsembleErrors:
        """The means over time steps, T = 1: of what goes into statistics of all steps together."""
        means = {name: value.mean(1, keepdim=True) for name, value in self.tensors().items()}
        return EnsembleErrors(self.num_members, self.seed, **means)


@dataclass(frozen=True)
class EnsembleRollout:
    """What came of a forecaster's members on a split.

    Attributes:
        errors: Of all trajectories.
        seconds: Wall time of predicting them, reading and measuring aside; of this rank.
    """

    errors: EnsembleErrors
    seconds: float


def measure_ensemble(
    steps: Iterator[Tensor], batch: TrajectoryBatch, climate: Climate, *, seed: int | None
) -> EnsembleErrors:
    """Measure the members of a batch, a time step at a time.

    Args:
        steps: Members of each time step, shape (B, M, X..., C), physical units; one of a point forecast.
        batch: The trajectories that they predict.
        climate: Of the split.
        seed: Of the members; ties of ranks are broken by it, too.
    """
    generators = [torch.Generator().manual_seed(seed_of(seed or 0, number)) for number in batch.samples]
    found: list[dict[str, Tensor]] = []
    num_members = 0
    for number, members in enumerate(steps):
        truth = batch.truth[:, min(number, batch.truth.shape[1] - 1)]
        num_members = members.shape[1] if members.ndim == truth.ndim + 1 else 0
        expected = (len(truth), num_members or "M", *truth.shape[1:])
        if number == batch.truth.shape[1] or tuple(members.shape) != expected:
            raise ShapeError(f"members of time step {number + 1}", expected=expected, found=(*members.shape,))
        found.append(_measured(members, truth, climate, generators))
    if len(found) != batch.truth.shape[1]:
        raise ShapeError("time steps of members", expected=batch.truth.shape[1], found=len(found))
    stacked = {name: torch.stack([step[name] for step in found], dim=1) for name in found[0]}
    return EnsembleErrors(num_members, seed if num_members > 1 else None, **stacked)


def seed_of(seed: int, sample: int) -> int:
    """A trajectory's own seed, so that its members don't depend on those that are predicted beside it."""
    return int(np.random.SeedSequence((seed, int(sample))).generate_state(1, np.uint64)[0] >> 1)


def _measured(
    members: Tensor, truth: Tensor, climate: Climate, generators: Sequence[torch.Generator]
) -> dict[str, Tensor]:
    """The numbers of one time step, on the CPU; they are computed where the members are."""
    device = torch.device("cpu") if members.device.type == "mps" else members.device  # has no float64
    scale_C, thresholds_QC = climate.scale_C.to(device), climate.thresholds_QC.to(device)
    members, truth = (field.to(device, torch.float64) / scale_C for field in (members, truth))
    mean, space = members.mean(1), tuple(range(1, truth.ndim - 1))
    ranks = [
        truth_ranks(members[b : b + 1], truth[b : b + 1], generator=generator)
        for b, generator in enumerate(generators)
    ]
    found = {
        "nrmse": nrmse_per_sample(mean.unsqueeze(1), truth.unsqueeze(1))[:, 0],
        "crps": fair_crps(members, truth).mean(space),
        "energy_score": fair_energy_score(members, truth),
        "variance": ensemble_variance(members),
        "squared_error": (mean - truth).square().mean(space),
        "bands": band_energies(members).mean(1),
        "true_bands": band_energies(truth.unsqueeze(1))[:, 0],
        "ranks": rank_shares(torch.cat(ranks), members.shape[1]),
        "exceedances": exceedances(members, truth, thresholds_QC),
    }
    return {name: value.cpu() for name, value in found.items()}


def roll_out_members(
    forecaster: AnyForecaster,
    trajectories: Trajectories,
    climate: Climate,
    *,
    members: int | None,
    seed: int = 0,
    ranks: Ranks = ALONE,
) -> EnsembleRollout:
    """Predict members of all trajectories of a split and measure them, a trajectory at a time.

    Args:
        forecaster: One that `has_members`, or any for its point forecasts.
        trajectories: Of a split.
        climate: Of the same.
        members: M, at least 2; None measures the forecast as if it were sure, several trajectories at a time.
        seed: With that of a sample it decides the sample's members: neither batches nor ranks matter.
        ranks: Which predict together, each its share; then it is a collective, and all get all numbers.
    """
    if members is not None:
        check_members(members)
    seconds = 0.0

    def predicted(batch: TrajectoryBatch) -> Iterator[Tensor]:
        """The members of each time step; only what predicts them is timed."""
        nonlocal seconds
        began = time.perf_counter()
        if members is None:
            steps: Iterator[Tensor] = (
                frame.unsqueeze(1) for frame in predict(forecaster, batch, trajectories).unbind(1)
            )
        else:
            (sample,) = batch.samples.tolist()
            start, own_seed = start_of(batch, trajectories), seed_of(seed, sample)
            assert has_members(forecaster)
            steps = forecaster.forecast_members(start, trajectories.horizon, members=members, seed=own_seed)
        while (step := next(steps, None)) is not None:
            seconds += time.perf_counter() - began
            yield step
            del step  # the members are the consumer's, who lets them go before the next are made
            began = time.perf_counter()

    size = 1
    if members is None:
        size = max(1, _BATCH_NBYTES // (4 * trajectories.horizon * trajectories.info.grid.num_values(FIELDS)))
    numbers = ranks.share(np.arange(len(trajectories)))
    parts: list[EnsembleErrors] = []
    with progress_bar(f"{trajectories.info.task}: {forecaster.label}", total=len(numbers)) as advance:
        for first in range(0, len(numbers), size):
            batch = trajectories.read(numbers[first : first + size])
            of_members = None if members is None else seed
            parts.append(measure_ensemble(predicted(batch), batch, climate, seed=of_members))
            advance(float(first + len(batch)))
    items, tables = torch.from_numpy(numbers), [part.tensors() for part in parts]
    joined = {name: ranks.joined(items, torch.cat([table[name] for table in tables])) for name in tables[0]}
    return EnsembleRollout(EnsembleErrors(parts[0].num_members, parts[0].seed, **joined), seconds)


def check_members(members: int, *, flag: str = "members") -> None:
    """Refuse what is no ensemble."""
    if members < LEAST_MEMBERS:
        raise ConfigError(flag, kind="members", expected=f"at least {LEAST_MEMBERS}", found=members)


# --- scores --------------------------------------------------------------------------------------------


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
        scores: `ENSEMBLE_METRICS`; those of spread, ranks and reliability of several members only.
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


def _moments(errors: EnsembleErrors) -> Tensor:
    """Variance and squared error, means over channels, (B, T, 2)."""
    return torch.stack([errors.variance.mean(2), errors.squared_error.mean(2)], dim=2)


def _inflated(num_members: int) -> Tensor:
    """Factors of `_moments` for spread over skill: 1 if the truth is like a member (Fortin et al. 2014)."""
    return torch.tensor([(num_members + 1) / num_members, 1.0], dtype=torch.float64)


def _of_members(numbers: Callable[[EnsembleErrors], Tensor]) -> Callable[[EnsembleErrors], Tensor | None]:
    """Of several members only: one has no spread, and nothing that it says is probable."""
    return lambda errors: None if errors.num_members == 1 else numbers(errors)


def _band(number: int) -> Callable[[EnsembleErrors], Tensor | None]:
    """Energies of a band, the truth's, and whether it is there at all, (B, T, 3, C); None if it never is."""

    def numbers(errors: EnsembleErrors) -> Tensor | None:
        means_TKC = errors.true_bands.mean(0)
        if not has_band(means_TKC.mean(0).numpy())[number].any():
            return None
        is_there_TC = torch.from_numpy(has_band(means_TKC.numpy()))[:, number].double()
        parts = (errors.bands[:, :, number], errors.true_bands[:, :, number])
        return torch.stack([*parts, is_there_TC.expand_as(parts[0])], dim=2)

    return numbers


def _band_ratio(means_NT3C: Values) -> Values:
    energy, truth, is_there = np.moveaxis(means_NT3C, 2, 0)
    return band_ratio(energy, truth, is_there > 0.5)


# Spread isn't good by itself, and the energy of a band is best where it is the truth's.
ENSEMBLE_METRICS = (
    Metric(
        "mean_nrmse",
        lambda errors: masked(errors.nrmse, errors.undefined),
        title="nRMSE of the ensemble mean",
    ),
    Metric("crps", lambda errors: errors.crps, title="CRPS"),
    Metric("energy_score", lambda errors: errors.energy_score, title="energy score"),
    Metric(
        "spread_skill",
        # The mean of M members leaves (M + 1) / M times the error that infinitely many would.
        _of_members(lambda errors: _moments(errors) * _inflated(errors.num_members)),
        lambda means_NT2: np.sqrt(means_NT2[..., 0] / means_NT2[..., 1]),
        over_steps="pooled",
        better=None,
        title="spread / skill",
    ),
    Metric(
        "spread",
        _of_members(_moments),
        lambda means_NT2: np.sqrt(means_NT2[..., 0]),
        over_steps="pooled",
        better=None,
    ),
    Metric("skill", _moments, lambda means_NT2: np.sqrt(means_NT2[..., 1]), over_steps="pooled"),
    Metric(
        "rank_unevenness",
        _of_members(lambda errors: rank_deviations(errors.ranks, errors.num_members)),
        lambda means_NTCR: np.square(means_NTCR).sum(-1).mean(-1),
        over_steps="pooled",
    ),
    Metric(
        "reliability_gap",
        _of_members(lambda errors: errors.exceedances),
        lambda means_NTQP3: reliability_gap(means_NTQP3).mean(-1),
        over_steps="pooled",
    ),
    # The mean of the steps' ratios would say more of steps at which the truth has next to nothing of a band.
    *(
        Metric(
            f"band_{name}",
            _band(number),
            _band_ratio,
            over_steps="pooled",
            better=None,
            title="energy of the high band / the truth's" if name == "high" else None,
        )
        for number, name in enumerate(BANDS)
    ),
)


def score_ensemble(
    errors: Sequence[EnsembleErrors], *, resamples: Resamples, row: str = "", seconds: float | None = None
) -> EnsembleScores:
    """Turn numbers of trajectories into scores with 95 % intervals."""
    first = errors[0]
    ranks: list[Interval] = []
    reliability: list[Reliability] = []
    if first.num_members > 1:
        expected = expected_rank_shares(first.num_members)
        shares = resamples.of([each.ranks.mean((1, 2)).numpy() for each in errors], row=row)
        ranks = shares.map(lambda shares_NR: shares_NR / expected).intervals(is_positive=True)
        reliability = [_reliability(errors, number, resamples, row) for number in range(len(QUANTILES))]
    scores = score(errors, ENSEMBLE_METRICS, resamples=resamples, row=row)
    return EnsembleScores(first.num_members, first.seed, scores, ranks, reliability, seconds)


def _reliability(
    errors: Sequence[EnsembleErrors], number: int, resamples: Resamples, row: str
) -> Reliability:
    """Of one threshold: bins that hold any forecasts, and how often they came true."""
    parts = [each.exceedances[:, :, number].mean(1) for each in errors]  # (B, P, 3)
    share, probability, _ = torch.stack(parts).mean((0, 1)).unbind(-1)
    filled = share > 0
    values = [part[:, filled][..., [0, 2]].flatten(1).numpy() for part in parts]
    frequency = resamples.of(values, lambda means_NF: means_NF[:, 1::2] / means_NF[:, ::2], row=row)
    means = (probability / share)[filled]
    return Reliability(QUANTILES[number], means.tolist(), frequency.intervals(), share[filled].tolist())


def ensemble_numbers(errors: EnsembleErrors) -> dict[str, float]:
    """The scores of one training seed, without intervals."""
    scores = score([errors], ENSEMBLE_METRICS, resamples=Resamples(len(errors), num_resamples=0))
    return {name: value.mean for name, value in scores.metrics.items()}


# --- formulas ------------------------------------------------------------------------------------------


def fair_crps(members: Tensor, truth: Tensor) -> Tensor:
    """Continuous ranked probability score of every point, in O(M log M), shape (B, X..., C).

    mean_i |x_i - y| - sum_i (2 i - M - 1) x_(i) / (M (M - 1)), with x_(1) <= ... <= x_(M).

    Source: Zamo and Naveau 2018, CRPS_PWM (doi:10.1007/s11004-017-9709-7).
    """
    num = members.shape[1]
    errors = members - truth.unsqueeze(1)  # whose differences are the members', with fewer digits to lose
    to_truth = errors.abs().mean(1)
    if num == 1:
        return to_truth
    ranks = torch.arange(1, num + 1, dtype=errors.dtype, device=errors.device)
    ordered = errors.movedim(1, -1).contiguous().sort().values  # along another axis it takes thrice as long
    return to_truth - ordered @ (2 * ranks - num - 1) / (num * (num - 1))


def fair_energy_score(members: Tensor, truth: Tensor) -> Tensor:
    """Energy score over all points and channels together, shape (B,).

    mean_i |x_i - y| - sum_ij |x_i - x_j| / (2 M (M - 1)), where |.| is the root of the mean square over
    points and channels, so that the score of a point forecast is its root mean square error on any grid.

    Source: Gneiting and Raftery 2007, eq. 22 (doi:10.1198/016214506000001437).
    """
    num = members.shape[1]
    errors_BMD = (members - truth.unsqueeze(1)).flatten(2)
    errors_BMD = errors_BMD / errors_BMD.shape[2] ** 0.5
    to_truth = errors_BMD.norm(dim=2).mean(1)
    if num == 1:
        return to_truth
    return to_truth - _pairwise_distances(errors_BMD).sum((1, 2)) / (2 * num * (num - 1))


def _pairwise_distances(vectors_BMD: Tensor) -> Tensor:
    """|v_i - v_j|, shape (B, M, M), by one product of matrices.

    Vectors are centred first: a distance then is right to 1e-8 of their spread, however far they lie from 0.
    """
    centred = vectors_BMD - vectors_BMD.mean(1, keepdim=True)
    products = centred @ centred.mT
    squares = products.diagonal(dim1=1, dim2=2)
    distances = (squares.unsqueeze(1) + squares.unsqueeze(2) - 2 * products).clamp(min=0).sqrt()
    return distances - torch.diag_embed(distances.diagonal(dim1=1, dim2=2))  # rounding, of each to itself


def ensemble_variance(members: Tensor) -> Tensor:
    """Unbiased variance of the members, mean over points, shape (B, C); NaN for one member."""
    if members.shape[1] == 1:
        return members.new_full((len(members), members.shape[-1]), float("nan"))
    return members.var(1, correction=1).flatten(1, -2).mean(1)


def truth_ranks(members: Tensor, truth: Tensor, *, generator: torch.Generator) -> Tensor:
    """Number of members below the truth, those that equal it counted at random, int64, shape (B, X..., C).

    The generator is of the random counts, on the CPU.

    Source: Hamill 2001 (doi:10.1175/1520-0493(2001)129<0550:IORHFV>2.0.CO;2).
    """
    others = truth.unsqueeze(1)
    below, equal = (members < others).sum(1), (members == others).sum(1)
    draws = torch.rand(equal.shape, generator=generator, dtype=torch.float64)
    return below + (draws.to(equal.device) * (equal + 1)).long()


def rank_bins(num_members: int) -> npt.NDArray[np.int64]:
    """Bin of every rank 0..M, shape (M + 1,): one each, or 20 of neighbours where there are more ranks."""
    num = num_members + 1
    return np.arange(num) * min(num, _MOST_RANK_BINS) // num


def expected_rank_shares(num_members: int) -> Values:
    """Share of the ranks that each bin has, shape (R,): that of the truths, were they one of the members."""
    return np.bincount(rank_bins(num_members)) / (num_members + 1)


def rank_shares(ranks: Tensor, num_members: int) -> Tensor:
    """Share of the points whose rank is in each bin, float64, shape (B, C, R)."""
    bins = torch.from_numpy(rank_bins(num_members)).to(ranks.device)
    bins_BCP = bins[ranks].flatten(1, -2).mT
    return _shares(bins_BCP, torch.ones_like(bins_BCP, dtype=torch.float64), int(bins[-1]) + 1)


def exceedances(members: Tensor, truth: Tensor, thresholds_QC: Tensor) -> Tensor:
    """What a reliability diagram is made of: how probable it was that thresholds are exceeded, and were they.

    A forecast probability, the share of the members above a threshold, belongs to the nearest of 11 bins.

    Returns:
        Float64, shape (B, Q, P, 3): for each bin the share of points and channels in it, and the sums of
        their probabilities and of what came true (0 or 1), over the number of all points and channels.
    """
    return torch.stack([_exceedances(members, truth, each_C) for each_C in thresholds_QC], dim=1)


def _exceedances(members: Tensor, truth: Tensor, threshold_C: Tensor) -> Tensor:
    probability = (members > threshold_C).double().mean(1).flatten(1)
    happened = (truth > threshold_C).double().flatten(1)
    bins = (probability * (NUM_PROBABILITIES - 1)).round().long()
    parts = (torch.ones_like(happened), probability, happened)
    return torch.stack([_shares(bins, part, NUM_PROBABILITIES) for part in parts], dim=-1)


def _shares(bins: Tensor, weights: Tensor, num_bins: int) -> Tensor:
    """Sums of weights by bin over the last axis, divided by its length; that axis becomes the bins."""
    sums = weights.new_zeros(*bins.shape[:-1], num_bins)
    return sums.scatter_add_(-1, bins, weights) / bins.shape[-1]


def band_energies(fields: Tensor) -> Tensor:
    """|FFT|^2 summed over the wave numbers of each of `metrics.BANDS`; (B, M, X..., C) to (B, M, K, C)."""
    shells = shell_energy(fields)
    return torch.stack([shells[:, :, slice(*ends)].sum(2) for ends in BANDS.values()], dim=2)


def rank_deviations(ranks: Tensor, num_members: int) -> Tensor:
    """(f - p) / sqrt(p) of the shares f of bins with p expected, the shape of `ranks`.

    The sum of the squares of its means is the chi-square statistic over the number of counts: 0 if ranks are
    even. Of a perfect ensemble R - 1 over the number of independent counts is expected; points that are
    neighbours aren't independent.

    Source: Candille and Talagrand 2005 (doi:10.1256/qj.04.71).
    """
    expected = torch.from_numpy(expected_rank_shares(num_members))
    return (ranks - expected) / expected.sqrt()


def reliability_gap(exceedances_NP3: Values) -> Values:
    """Mean squared difference of forecast probability and observed frequency: the Brier score's reliability.

    Returns:
        Shape (N,).

    Source: Murphy 1973 (doi:10.1175/1520-0450(1973)012<0595:ANVPOT>2.0.CO;2).
    """
    share, probability, happened = np.moveaxis(exceedances_NP3, -1, 0)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(share > 0, (probability - happened) ** 2 / share, 0.0).sum(-1)


def has_band(true_TKC: Values, *, least_share: float = _LEAST_SHARE) -> npt.NDArray[np.bool_]:
    """Whether the truth has a band at all, shape (T, K, C); what is less than rounding has no ratio."""
    return true_TKC > least_share * true_TKC.sum(-2, keepdims=True)


def band_ratio(energy: Values, truth: Values, is_there: npt.NDArray[np.bool_]) -> Values:
    """Energy of the members' band over the truth's, mean over channels that have it, (..., C) to (...)."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(np.where(is_there, energy / truth, 0.0).sum(-1) / is_there.sum(-1))
