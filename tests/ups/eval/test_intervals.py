"""Intervals over seeds and trajectories against closed forms, and verdicts of paired differences."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
from scipy import stats

from ups.eval import intervals
from ups.eval.intervals import Interval, Resampled, Resamples, compare

Values = npt.NDArray[np.float64]


def resample(values_SB: npt.ArrayLike, *, row: str = "", seed: int = 0, num: int = 2000) -> Resampled:
    """Of the mean of one number a trajectory, by training seed."""
    values = np.atleast_2d(np.asarray(values_SB, np.float64))
    return Resamples(values.shape[1], seed=seed, num_resamples=num).of(list(values[..., None]), row=row)


def half_width(interval: Interval) -> float:
    return (interval.high - interval.low) / 2


def normal(num: int, *, spread: float = 1.0) -> Values:
    """Quantiles of a normal distribution in a random order: their variance is known."""
    quantiles = stats.norm.ppf((np.arange(num) + 0.5) / num)
    return np.asarray(np.random.default_rng(num).permutation(quantiles / quantiles.std(ddof=1) * spread))


# --- widths --------------------------------------------------------------------------------------------


def test_one_seed_has_the_interval_of_student_s_t() -> None:
    values = 3.0 + normal(40, spread=2.0)
    interval = resample(values).interval()
    assert interval.mean == pytest.approx(3.0)
    expected = stats.t.ppf(0.975, 39) * 2.0 / math.sqrt(40)
    assert half_width(interval) == pytest.approx(expected, rel=0.05)
    assert interval.mean - interval.low == pytest.approx(expected, rel=0.1)


def test_seeds_and_trajectories_add_their_variances() -> None:
    of_seed, of_trajectory = normal(12, spread=0.4), normal(50, spread=1.0)
    interval = resample(of_seed[:, None] + of_trajectory).interval()
    parts = {11: 0.4**2 / 12, 49: 1.0**2 / 50}
    variance = sum(parts.values())
    freedom = variance**2 / sum(part**2 / num for num, part in parts.items())  # Satterthwaite
    expected = stats.t.ppf(0.975, freedom) * math.sqrt(variance)
    assert half_width(interval) == pytest.approx(expected, rel=0.05)


def test_more_seeds_do_not_hide_that_trajectories_are_few() -> None:
    """Every seed meets the same trajectories: what they have in common doesn't average out."""
    trajectories = normal(30)
    one, eight = resample(trajectories), resample(np.tile(trajectories, (8, 1)))
    assert half_width(eight.interval()) == pytest.approx(half_width(one.interval()), rel=0.05)


@pytest.mark.parametrize("num_seeds", [1, 3])
def test_interval_covers_as_often_as_it_says(num_seeds: int) -> None:
    random = np.random.default_rng(num_seeds)
    covered = []
    for number in range(150):
        of_seed = random.normal(0, 0.1, (num_seeds, 1)) if num_seeds > 1 else 0.0
        values = np.exp(of_seed + random.normal(0, 0.5, 20) + random.normal(0, 0.2, (num_seeds, 20)))
        truth = math.exp((0.5**2 + 0.2**2 + (0.1**2 if num_seeds > 1 else 0.0)) / 2)
        interval = resample(values, seed=number, num=500).interval()
        covered.append(interval.low <= truth <= interval.high)
    assert 0.88 <= np.mean(covered) <= 0.99


@pytest.mark.parametrize(("spread", "least"), [(0.1, 0.88), (0.8, 0.8)])
def test_interval_of_an_error_is_above_zero_and_covers_as_often(spread: float, least: float) -> None:
    """Widened to Student's t, ends of three seeds that differ much would lie below zero."""
    random = np.random.default_rng(0)
    truth = math.exp((spread**2 + 0.5**2) / 2)
    found = []
    for number in range(150):
        values = np.exp(random.normal(0, spread, (3, 1)) + random.normal(0, 0.5, 20))
        found.append(resample(values, seed=number, num=300).interval(is_positive=True))
    assert min(interval.low for interval in found) > 0
    assert least <= np.mean([interval.low <= truth <= interval.high for interval in found]) <= 0.99


def test_interval_next_to_zero_is_that_of_any_number() -> None:
    values = np.concatenate([np.zeros(24), np.ones(1)])
    resampled = resample(values)  # some resamples hold none but zeros
    assert resampled.interval(is_positive=True) == resampled.interval()


def test_values_that_are_equal_have_a_point() -> None:
    assert resample([2.0] * 25).interval() == Interval(2.0, 2.0, 2.0)
    assert resample([[1.0] * 25, [3.0] * 25]).interval().mean == 2.0


def test_the_same_seed_of_resampling_gives_the_same_interval() -> None:
    values = normal(30)
    assert resample(values).interval() == resample(values).interval()
    assert resample(values).interval() != resample(values, seed=1).interval()


def test_fewer_than_twenty_trajectories_have_no_interval() -> None:
    few, enough = resample(normal(19)).interval(), resample(normal(20)).interval()
    assert not few.is_known
    assert math.isnan(few.low)
    assert few.mean == pytest.approx(0.0)
    assert enough.is_known


def test_no_interval_where_a_trajectory_blew_up() -> None:
    values = normal(30)
    values[3] = np.inf
    interval = resample(values).interval()
    assert interval.mean == math.inf
    assert not interval.is_known


def test_jackknife_and_draws_are_those_of_the_statistic() -> None:
    values = np.random.default_rng(0).random((2, 20, 3)) + 1

    def root(means_NF: Values) -> Values:
        return np.sqrt(means_NF).mean(1, keepdims=True)

    found = Resamples(20, num_resamples=50).of(list(values), root, row="fno")
    assert found.value[0] == pytest.approx(np.sqrt(values.mean(1)).mean())
    left_out = np.sqrt(np.delete(values, 5, axis=1).mean(1)).mean()
    assert found.without_trajectory[5, 0] == pytest.approx(left_out)
    assert found.without_seed["fno"][0, 0] == pytest.approx(np.sqrt(values[1].mean(0)).mean())
    assert found.draws.shape == (50, 1)
    assert found.draws.min() >= np.sqrt(values.min())
    assert found.draws.max() <= np.sqrt(values.max())


def test_memory_is_bounded_without_changing_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(0).random((2, 25, 4))
    whole = Resamples(25, num_resamples=30).of(list(values))
    monkeypatch.setattr(intervals, "_AT_ONCE_NBYTES", 2000)  # several resamples at once, and not all
    parts = Resamples(25, num_resamples=30).of(list(values))
    np.testing.assert_allclose(parts.draws, whole.draws)
    np.testing.assert_allclose(parts.without_trajectory, whole.without_trajectory)


# --- pairs ---------------------------------------------------------------------------------------------


def test_pairing_narrows_the_difference_of_errors_that_go_together() -> None:
    shared = normal(40)
    first, row = resample(3 + shared), resample(3.2 + shared + 0.1 * normal(41)[:40])
    difference = row.minus(first).interval()
    apart = math.hypot(half_width(row.interval()), half_width(first.interval()))
    assert half_width(difference) < 0.15 * apart
    assert row.interval().low < first.interval().high  # the intervals overlap
    assert compare(row, first).verdict == "behind"  # and yet one is behind


def test_errors_that_go_against_each_other_widen_the_difference() -> None:
    shared = normal(40)
    first, row = resample(3 + shared), resample(3.5 - shared)
    assert half_width(row.minus(first).interval()) > 1.8 * half_width(first.interval())
    assert compare(row, first).verdict == "can't be told"


def test_trainings_of_two_rows_vary_independently() -> None:
    """What is left of a difference, where trajectories cancel, has the variances of both rows' seeds."""
    of_seed, of_trajectory = normal(12, spread=0.5), normal(30)
    row, first = (resample(5 + of_seed[:, None] + of_trajectory, row=name) for name in ("fno", "operator"))
    expected = stats.t.ppf(0.975, 22) * 0.5 * math.sqrt(2 / 12)
    assert half_width(row.minus(first).interval()) == pytest.approx(expected, rel=0.05)


def test_a_row_without_seeds_stands_beside_one_with_several() -> None:
    model = resample(1 + normal(3, spread=0.1)[:, None] + 0.1 * normal(30))
    pair = compare(resample(5 + 0.1 * normal(30)), model)
    assert pair.verdict == "behind"
    assert pair.ratio.mean == pytest.approx(5.0, rel=1e-6)
    assert pair.ratio.low < 5.0 < pair.ratio.high


@pytest.mark.parametrize(
    ("difference", "verdict"),
    [(0.5, "behind"), (-0.5, "ahead"), (0.0, "can't be told"), (0.01, "can't be told")],
)
def test_verdict_is_told_only_where_the_interval_leaves_out_zero(difference: float, verdict: str) -> None:
    shared, own = normal(40), 0.2 * np.random.default_rng(1).permutation(normal(40))
    first, row = resample(3 + shared), resample(3 + difference + shared + own)
    pair = compare(row, first)
    assert pair.verdict == verdict
    assert (pair.difference.low <= 0 <= pair.difference.high) == (verdict == "can't be told")


def test_verdict_turns_where_more_is_better() -> None:
    shared = normal(40)
    first, row = resample(3 + shared), resample(4 + shared)
    assert compare(row, first).verdict == "behind"
    assert compare(row, first, is_more_better=True).verdict == "ahead"
    assert compare(first, row, is_more_better=True).verdict == "behind"


def test_rows_that_are_the_same_can_not_be_told_apart() -> None:
    row = resample(3 + normal(40))
    pair = compare(row, row)
    assert (pair.difference, pair.verdict) == (Interval(0.0, 0.0, 0.0), "can't be told")
    assert pair.ratio == Interval(1.0, 1.0, 1.0)


def test_nothing_can_be_told_from_nineteen_trajectories() -> None:
    pair = compare(resample(np.full(19, 9.0)), resample(np.ones(19)))
    assert pair.verdict == "can't be told"
    assert pair.difference.mean == 8.0
    assert not pair.difference.is_known
    assert pair.ratio.mean == pytest.approx(9.0)


def test_a_row_that_blew_up_is_behind_one_that_did_not() -> None:
    whole, broken = resample(3 + normal(30)), resample(np.full(30, np.nan))
    assert compare(broken, whole).verdict == "behind"
    assert compare(whole, broken).verdict == "ahead"
    assert compare(broken, broken).verdict == "can't be told"


def test_ratio_of_what_may_be_negative_has_no_number() -> None:
    pair = compare(resample(normal(30) - 1), resample(normal(30) + 3))
    assert math.isnan(pair.ratio.mean)
    assert pair.difference.mean == pytest.approx(-4.0)
