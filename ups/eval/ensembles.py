"""Ensembles rolled out and measured time step by time step: members are never kept beyond one.

What is left of every trajectory and time step are numbers whose means over trajectories make the scores
(`ups.eval.ensemble_scores`), so they can be resampled. Channels are divided by their root mean square over
the split's truth first, so that none outweighs the others by its unit and scores are relative.

Letters: B trajectories, M members, T time steps, X the axes of the grid, C channels, and K, R, Q, P as in
`ups.eval.ensemble_metrics`.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ups.data.windows import Trajectories, TrajectoryBatch
from ups.distributed.ranks import ALONE, Ranks
from ups.errors import ConfigError, ShapeError
from ups.eval import ensemble_metrics
from ups.eval.forecasters import AutoencoderFloor, EnsembleForecaster, Forecaster
from ups.eval.metrics import nrmse_per_sample
from ups.eval.rollout import predict, start_of
from ups.grid import FIELDS
from ups.output import progress_bar

LEAST_MEMBERS = 2
QUANTILES = (0.5, 0.9, 0.99)  # of the truth: the thresholds of reliability diagrams
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
        exceedances: As `ensemble_metrics.exceedances`, shape (B, T, Q, P, 3).
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
        found = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in found.items() if isinstance(value, Tensor)}


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

    Raises:
        ShapeError: If there are more or fewer steps than true ones, or of another shape.
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
        ensemble_metrics.truth_ranks(members[b : b + 1], truth[b : b + 1], generator=generator)
        for b, generator in enumerate(generators)
    ]
    found = {
        "nrmse": nrmse_per_sample(mean.unsqueeze(1), truth.unsqueeze(1))[:, 0],
        "crps": ensemble_metrics.fair_crps(members, truth).mean(space),
        "energy_score": ensemble_metrics.fair_energy_score(members, truth),
        "variance": ensemble_metrics.ensemble_variance(members),
        "squared_error": (mean - truth).square().mean(space),
        "bands": ensemble_metrics.band_energies(members).mean(1),
        "true_bands": ensemble_metrics.band_energies(truth.unsqueeze(1))[:, 0],
        "ranks": ensemble_metrics.rank_shares(torch.cat(ranks), members.shape[1]),
        "exceedances": ensemble_metrics.exceedances(members, truth, thresholds_QC),
    }
    return {name: value.cpu() for name, value in found.items()}


def roll_out_members(
    forecaster: EnsembleForecaster,
    trajectories: Trajectories,
    climate: Climate,
    *,
    members: int,
    seed: int,
    ranks: Ranks = ALONE,
) -> EnsembleRollout:
    """Predict members of all trajectories of a split and measure them, a trajectory at a time.

    Args:
        trajectories: Of a split.
        climate: Of the same.
        members: M, at least 2.
        seed: With that of a sample it decides the sample's members: neither batches nor ranks matter.
        ranks: Which predict together, each its share; then it is a collective, and all get all numbers.

    Raises:
        ConfigError: Kind "members", if there are fewer than 2.
        ShapeError: As `measure_ensemble`.
    """
    check_members(members)

    def steps_of(batch: TrajectoryBatch) -> Iterator[Tensor]:
        (sample,) = batch.samples.tolist()
        own = seed_of(seed, sample)
        return forecaster.forecast_members(
            start_of(batch, trajectories), trajectories.horizon, members=members, seed=own
        )

    return _roll_out(steps_of, forecaster.label, trajectories, climate, size=1, seed=seed, ranks=ranks)


def roll_out_point(
    forecaster: Forecaster | AutoencoderFloor,
    trajectories: Trajectories,
    climate: Climate,
    *,
    ranks: Ranks = ALONE,
) -> EnsembleRollout:
    """Measure a forecaster without members as ensembles are measured, as if its forecast were sure.

    Arguments and errors are those of `roll_out_members`.
    """

    def steps_of(batch: TrajectoryBatch) -> Iterator[Tensor]:
        # A generator, so that predicting counts as the time of its first step.
        yield from (frame.unsqueeze(1) for frame in predict(forecaster, batch, trajectories).unbind(1))

    nbytes = 4 * trajectories.horizon * trajectories.info.grid.num_values(FIELDS)
    size = max(1, _BATCH_NBYTES // nbytes)
    return _roll_out(steps_of, forecaster.label, trajectories, climate, size=size, seed=None, ranks=ranks)


def check_members(members: int, *, flag: str = "members") -> None:
    """Refuse what is no ensemble.

    Raises:
        ConfigError: Kind "members".
    """
    if members < LEAST_MEMBERS:
        raise ConfigError(flag, kind="members", expected=f"at least {LEAST_MEMBERS}", found=members)


def _roll_out(
    steps_of: Callable[[TrajectoryBatch], Iterator[Tensor]],
    label: str,
    trajectories: Trajectories,
    climate: Climate,
    *,
    size: int,
    seed: int | None,
    ranks: Ranks,
) -> EnsembleRollout:
    numbers = ranks.share(np.arange(len(trajectories)))
    parts: list[EnsembleErrors] = []
    clock = _Clock()
    with progress_bar(f"{trajectories.info.task}: {label}", total=len(numbers)) as advance:
        for first in range(0, len(numbers), size):
            batch = trajectories.read(numbers[first : first + size])
            parts.append(measure_ensemble(clock.timed(steps_of(batch)), batch, climate, seed=seed))
            advance(float(first + len(batch)))
    items, found = torch.from_numpy(numbers), [part.tensors() for part in parts]
    joined = {name: ranks.joined(items, torch.cat([part[name] for part in found])) for name in found[0]}
    return EnsembleRollout(EnsembleErrors(parts[0].num_members, parts[0].seed, **joined), clock.seconds)


class _Clock:
    """How long iterators take to give their items, all together."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def timed(self, items: Iterator[Tensor]) -> Iterator[Tensor]:
        while True:
            began = time.perf_counter()
            item = next(items, None)
            self.seconds += time.perf_counter() - began
            if item is None:
                return
            yield item
