"""How good the members of an ensemble are at one time step, by sample and channel; all in float64.

The first functions take members (B, M, X..., C) and truths (B, X..., C), on any device. Fair estimators say
what an ensemble of infinitely many members like these would score (Ferro 2014, doi:10.1002/qj.2270), so that
more members aren't better by themselves. They need two members; one alone is taken as a point forecast, whose
CRPS is the absolute error and whose energy score is the norm of the error.

The others make numbers of their means over samples. Letters: B samples, M members, T time steps, X the axes
of the grid, C channels, K bands, R bins of ranks, Q thresholds, P bins of probabilities, N means over B.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ups.eval.metrics import BANDS, shell_energy

NUM_PROBABILITIES = 11  # bins of a reliability diagram, centred on 0, 0.1, ..., 1
_MOST_RANK_BINS = 20
_LEAST_SHARE = 1e-12  # of a band in the truth's energy, which rounding of float32 makes

Values = npt.NDArray[np.float64]


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


def spread_skill(variance: Values, squared_error: Values, num_members: int) -> Values:
    """Spread over skill, sqrt((M + 1) / M * variance / squared error): 1 if the truth is like a member.

    Args:
        variance: Means of `ensemble_variance`.
        squared_error: Means of the squared error of the ensemble mean, which M members leave (M + 1) / M
            times as large as infinitely many would; the same shape.
        num_members: M.

    Source: Fortin et al. 2014 (doi:10.1175/JHM-D-14-0008.1).
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.sqrt((num_members + 1) / num_members * variance / squared_error)


def rank_unevenness(shares_NR: Values, num_members: int) -> Values:
    """sum_r (f_r - p_r)^2 / p_r of the shares f of bins with p expected, shape (N,): 0 if ranks are even.

    This is the chi-square statistic over the number of counts. R - 1 over the number of independent counts is
    expected from a perfect ensemble; points that are neighbours aren't independent.

    Source: Candille and Talagrand 2005 (doi:10.1256/qj.04.71).
    """
    expected = expected_rank_shares(num_members)
    return np.asarray(((shares_NR - expected) ** 2 / expected).sum(-1))


def reliability_gap(exceedances_NP3: Values) -> Values:
    """Mean squared difference of forecast probability and observed frequency: the Brier score's reliability.

    Args:
        exceedances_NP3: Means of `exceedances`, of one threshold.

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


def band_ratios(energies_NTKC: Values, true_NTKC: Values, is_there_TKC: npt.NDArray[np.bool_]) -> Values:
    """Energy of the members' bands over that of the truth's, mean over channels, shape (N, T, K).

    Args:
        energies_NTKC: Means of the members' `band_energies`.
        true_NTKC: The same of the truth.
        is_there_TKC: As `has_band`; other channels don't count, and where there is no channel it is NaN.
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        ratios = np.where(is_there_TKC, energies_NTKC / true_NTKC, 0.0)
        return np.asarray(ratios.sum(-1) / is_there_TKC.sum(-1))
