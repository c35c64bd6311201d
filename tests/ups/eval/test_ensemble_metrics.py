"""Scores of ensembles against closed forms, plain twins, and estimators without bias in few members."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import special, stats
from torch import Tensor

from ups.eval.ensembles import (
    band_energies,
    band_ratio,
    ensemble_variance,
    exceedances,
    expected_rank_shares,
    fair_crps,
    fair_energy_score,
    has_band,
    rank_bins,
    rank_deviations,
    rank_shares,
    reliability_gap,
    truth_ranks,
)

torch.set_num_threads(1)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# --- CRPS ----------------------------------------------------------------------------------------------


def plain_crps(members: Tensor, truth: Tensor) -> Tensor:
    num = members.shape[1]
    pairs = (members.unsqueeze(1) - members.unsqueeze(2)).abs().sum((1, 2))
    return (members - truth.unsqueeze(1)).abs().mean(1) - pairs / (2 * num * (num - 1))


def crps_of_gaussian(y: Tensor) -> Tensor:
    """Of N(0, 1); Gneiting and Raftery 2007."""
    z = y.numpy()
    return torch.from_numpy(z * (2 * stats.norm.cdf(z) - 1) + 2 * stats.norm.pdf(z) - 1 / math.sqrt(math.pi))


@pytest.mark.parametrize("num", [2, 3, 17])
def test_crps_in_sorted_form_is_that_of_pairs(num: int) -> None:
    members, truth = normal(3, num, 5, 4, 2), normal(3, 5, 4, 2, seed=1)
    torch.testing.assert_close(fair_crps(members, truth), plain_crps(members, truth))


def test_crps_keeps_its_digits_far_from_zero() -> None:
    members, truth = normal(1, 9, 6, 1), normal(1, 6, 1, seed=1)
    far = fair_crps(members + 1e8, truth + 1e8)
    torch.testing.assert_close(far, plain_crps(members, truth), rtol=0, atol=1e-7)


def test_crps_of_gaussian_is_the_closed_form() -> None:
    truth = torch.tensor([[[-1.5], [0.0], [0.7], [3.0]]], dtype=torch.float64)
    quantiles = special.ndtri((np.arange(4001) + 0.5) / 4001)  # a sample without chance
    members = torch.from_numpy(quantiles)[None, :, None, None].expand(1, -1, 4, 1)
    torch.testing.assert_close(fair_crps(members, truth), crps_of_gaussian(truth), rtol=0, atol=1e-3)


@pytest.mark.parametrize("num", [2, 5])
def test_fair_crps_has_no_bias_in_few_members(num: int) -> None:
    many, truth = 200_000, 0.7
    found = fair_crps(normal(1, num, many, 1), torch.full((1, many, 1), truth, dtype=torch.float64))
    expected = crps_of_gaussian(torch.tensor([truth])).item()
    assert found.mean().item() == pytest.approx(expected, abs=4 * found.std().item() / math.sqrt(many))
    biased = found.mean().item() + 1 / math.sqrt(math.pi) / num  # as with 1 / (2 M^2)
    assert abs(biased - expected) > 0.05


def test_crps_and_energy_score_of_a_point_forecast_are_its_errors() -> None:
    point, truth = normal(3, 1, 8, 2), normal(3, 8, 2, seed=1)
    error = point[:, 0] - truth
    torch.testing.assert_close(fair_crps(point, truth), error.abs())
    torch.testing.assert_close(fair_energy_score(point, truth), error.square().mean((1, 2)).sqrt())


# --- energy score --------------------------------------------------------------------------------------


def plain_energy_score(members: Tensor, truth: Tensor) -> Tensor:
    num, flat = members.shape[1], members.flatten(2) / math.sqrt(truth[0].numel())
    to_truth = (flat - truth.flatten(1).unsqueeze(1) / math.sqrt(truth[0].numel())).norm(dim=2).mean(1)
    pairs = (flat.unsqueeze(1) - flat.unsqueeze(2)).norm(dim=3).sum((1, 2))
    return to_truth - pairs / (2 * num * (num - 1))


@pytest.mark.parametrize("offset", [0.0, 1e6])
def test_energy_score_by_a_product_is_that_of_pairs(offset: float) -> None:
    members, truth = normal(3, 11, 5, 4, 2), normal(3, 5, 4, 2, seed=1)
    found = fair_energy_score(members + offset, truth + offset)
    torch.testing.assert_close(found, plain_energy_score(members, truth), rtol=1e-7, atol=0)


def test_energy_score_of_equal_members_has_no_spread_from_rounding() -> None:
    one, truth = 1e3 + normal(1, 1, 64, 1), normal(1, 64, 1, seed=1)
    collapsed = fair_energy_score(one.expand(-1, 16, -1, -1), truth)
    torch.testing.assert_close(collapsed, fair_energy_score(one, truth), rtol=1e-12, atol=0)


def test_energy_score_in_one_dimension_is_the_crps() -> None:
    members, truth = normal(50, 7, 1, 1), normal(50, 1, 1, seed=1)
    torch.testing.assert_close(fair_energy_score(members, truth), fair_crps(members, truth).flatten())


@pytest.mark.parametrize("num", [2, 6])
def test_energy_score_of_gaussian_in_d_dimensions_is_the_closed_form_for_few_members(num: int) -> None:
    """y = 0: E|X| - E|X - X'| / 2 = (1 - 1 / sqrt(2)) E|X| with E|X| = sqrt(2) G((d + 1) / 2) / G(d / 2)."""
    many, d = 60_000, 6
    found = fair_energy_score(normal(many, num, d, 1), torch.zeros(many, d, 1, dtype=torch.float64))
    mean_norm = math.sqrt(2) * math.exp(special.gammaln((d + 1) / 2) - special.gammaln(d / 2))
    expected = (1 - 1 / math.sqrt(2)) * mean_norm / math.sqrt(d)
    assert found.mean().item() == pytest.approx(expected, abs=4 * found.std().item() / math.sqrt(many))


def test_energy_score_prefers_the_truth_s_distribution() -> None:
    truth = normal(4000, 4, 1)
    members = normal(4000, 8, 4, 1, seed=1)
    scores = [fair_energy_score(scale * members, truth).mean().item() for scale in (0.5, 1.0, 1.5)]
    assert scores[1] < min(scores[0], scores[2])


# --- spread and skill ----------------------------------------------------------------------------------


@pytest.mark.parametrize("num", [2, 5, 20])
def test_spread_over_skill_is_one_if_the_truth_is_like_a_member(num: int) -> None:
    members, truth = normal(500, num, 40, 2), normal(500, 40, 2, seed=1)
    error = members.mean(1) - truth
    spread = (num + 1) / num * ensemble_variance(members).mean(0)
    ratio = (spread / error.square().mean((0, 1))).sqrt()
    np.testing.assert_allclose(ratio, 1.0, atol=0.02)


def test_one_member_has_no_spread() -> None:
    assert ensemble_variance(normal(2, 1, 4, 3)).isnan().all()
    assert ensemble_variance(normal(2, 1, 4, 3).expand(-1, 5, -1, -1)).max() == 0


# --- ranks ---------------------------------------------------------------------------------------------


def rank_unevenness(shares: np.ndarray, num_members: int) -> np.ndarray:
    return rank_deviations(torch.from_numpy(shares), num_members).square().sum(-1).numpy()


@pytest.mark.parametrize("num", [4, 64])
def test_ranks_are_even_if_the_truth_is_like_a_member(num: int) -> None:
    many = 40_000
    ranks = truth_ranks(normal(1, num, many, 1), normal(1, many, 1, seed=1), generator=generator())
    shares = rank_shares(ranks, num)[0].numpy()
    uneven = rank_unevenness(shares, num)
    bins = shares.shape[1]
    assert uneven[0] * many < stats.chi2.ppf(0.9999, bins - 1)
    assert shares.sum() == pytest.approx(1.0)


def test_narrow_and_biased_ensembles_have_uneven_ranks() -> None:
    members, truth = normal(1, 9, 5000, 1), normal(1, 5000, 1, seed=1)
    narrow, biased, wide = (
        rank_shares(truth_ranks(each, truth, generator=generator()), 9)[0, 0].numpy()
        for each in (0.3 * members, members + 1.0, 3.0 * members)
    )
    assert narrow[0] + narrow[-1] > 0.5  # a U
    assert biased[0] > 0.3  # the truth lies below
    assert wide[0] + wide[-1] < 0.05  # a dome
    assert rank_unevenness(np.stack([narrow, biased, wide]), 9).min() > 0.3


def test_ties_are_ranked_at_random_and_alike_again() -> None:
    zeros = torch.zeros(1, 4, 10_000, 1, dtype=torch.float64)
    ranks = [truth_ranks(zeros, zeros[:, 0], generator=generator(seed)) for seed in (0, 0, 1)]
    assert torch.equal(ranks[0], ranks[1])
    assert not torch.equal(ranks[0], ranks[2])
    np.testing.assert_allclose(rank_shares(ranks[0], 4)[0, 0], 0.2, atol=0.02)


def test_ranks_of_many_members_share_bins_that_expect_as_much_as_they_hold() -> None:
    bins, expected = rank_bins(64), expected_rank_shares(64)
    assert len(expected) == 20
    assert bins.tolist() == sorted(bins.tolist())
    assert (expected * 65).round().astype(int).tolist() == [*np.bincount(bins)]
    assert rank_bins(3).tolist() == [0, 1, 2, 3]


# --- reliability ---------------------------------------------------------------------------------------


def test_probabilities_come_true_as_often_as_they_say() -> None:
    centre = normal(1, 20_000, 1)
    truth = centre + normal(1, 20_000, 1, seed=1)
    members = centre[:, None] + normal(1, 100, 20_000, 1, seed=2)
    found = exceedances(members, truth, torch.tensor([[0.0], [1.0]], dtype=torch.float64))
    assert found.shape == (1, 2, 11, 3)
    share, probability, happened = found[0].movedim(-1, 0)
    torch.testing.assert_close(share.sum(1), torch.ones(2, dtype=torch.float64))
    torch.testing.assert_close(happened / share, probability / share, rtol=0, atol=0.06)
    assert reliability_gap(found[0].numpy()).max() < 2e-3


def test_overconfident_probabilities_have_a_gap() -> None:
    truth, members = normal(1, 5000, 1), 0.2 * normal(1, 10, 5000, 1, seed=1) + normal(1, 1, 5000, 1, seed=2)
    found = exceedances(members, truth, torch.zeros(1, 1, dtype=torch.float64))
    assert reliability_gap(found[0].numpy())[0] > 0.1


def test_thresholds_belong_to_channels() -> None:
    truth = torch.tensor([[[1.0, 10.0], [3.0, 30.0]]], dtype=torch.float64)
    found = exceedances(truth[:, None], truth, torch.tensor([[2.0, 20.0]], dtype=torch.float64))
    assert found[0, 0, 0].tolist() == [0.5, 0.0, 0.0]
    assert found[0, 0, -1].tolist() == [0.5, 0.5, 0.5]


# --- bands ---------------------------------------------------------------------------------------------


def wave(number: int, *, points: int = 64) -> Tensor:
    return torch.cos(2 * torch.pi * number * torch.arange(points, dtype=torch.float64) / points)


def test_bands_hold_the_energy_of_their_wave_numbers() -> None:
    truth = (wave(1) + wave(6) + wave(20))[None, None, :, None]
    members = torch.stack([wave(1) + 2 * wave(6), wave(1)])[None, :, :, None]
    found, true = band_energies(members).mean(1, keepdim=True).numpy(), band_energies(truth).numpy()
    ratios = band_ratio(found, true, has_band(true[0]))
    np.testing.assert_allclose(ratios, [[[1.0, 2.0, 0.0]]], atol=1e-12)


def test_band_that_the_truth_does_not_have_has_no_ratio() -> None:
    both = torch.stack([wave(2), wave(2) + wave(6)], dim=-1)[None, None]
    true = band_energies(both).numpy()
    is_there = has_band(true[0])
    assert is_there[0].tolist() == [[True, True], [False, True], [False, False]]
    np.testing.assert_array_equal(band_ratio(true, true, is_there), [[[1.0, 1.0, np.nan]]])


def test_bands_of_a_plane_are_radial() -> None:
    plane = (wave(3)[:, None] * wave(4)[None])[None, None, ..., None]  # |(3, 4)| = 5
    energy = band_energies(plane)[0, 0, :, 0]
    assert energy[1] / energy.sum() == pytest.approx(1.0)
