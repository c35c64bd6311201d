"""Errors of trajectories in batches and as a whole, and intervals against their definition."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from ups.errors import ShapeError
from ups.eval.intervals import Resamples
from ups.eval.metrics import FIELD_METRICS, Errors, join, measure, pdebench, pdebench_compat, summary
from ups.eval.scores import Scores, score

GRIDS = {1: (32,), 2: (8, 16)}


def make_pair(ndim: int, num: int = 7, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (num, 3, *GRIDS[ndim], 2)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def scores_of(*errors: Errors, row: str = "") -> Scores:
    return score(errors, FIELD_METRICS, resamples=Resamples(len(errors[0]["rmse"])), row=row)


def test_batches_joined_are_the_whole() -> None:
    prediction, truth = make_pair(2)
    whole = measure(prediction, truth)
    parts = [measure(p, y) for p, y in zip(prediction.split(3), truth.split(3), strict=True)]
    torch.testing.assert_close(join(parts), whole)
    assert pdebench_compat(join(parts), 2) == pytest.approx(pdebench_compat(whole, 2), nan_ok=True)


def test_drift_counts_from_the_given_state() -> None:
    given = torch.full((2, 8, 1), 2.0)
    truth = given[:, None].expand(-1, 3, -1, -1)
    prediction = truth + torch.tensor([0.0, 0.5, -1.0])[None, :, None, None]
    drift = measure(prediction, truth, given=given)["drift"]
    torch.testing.assert_close(drift[0, :, 0], torch.tensor([0.0, 0.25, 0.5]).double())


def test_measure_refuses_another_shape() -> None:
    prediction, truth = make_pair(1)
    with pytest.raises(ShapeError, match="prediction"):
        measure(prediction[:, :2], truth)


# --- intervals -----------------------------------------------------------------------------------------


def test_scores_are_the_exact_metrics_with_intervals_around_them() -> None:
    prediction, truth = make_pair(1, num=40)
    scores = scores_of(measure(prediction, truth))
    exact = summary(pdebench(measure(prediction, truth)))
    for name, value in exact.items():
        interval = scores.metrics[name]
        assert interval.mean == pytest.approx(value), name
        if name == "max_error":  # nothing says how far it is from the largest of others
            assert not interval.is_known
            continue
        assert interval.low < interval.high, name
        assert interval.low <= interval.mean <= interval.high + 1e-12, name
    for name in ("nrmse", "crmse", "frmse_mid"):
        assert np.mean([step.mean for step in scores.by_step[name]]) == pytest.approx(exact[name]), name
        assert len(scores.by_step[name]) == 3


def test_interval_of_a_root_is_resampled_inside_the_root() -> None:
    """Trajectories with opposite errors of the mean: their mean vanishes, the cRMSE doesn't."""
    truth = torch.zeros(20, 1, 4, 1)
    prediction = truth + torch.tensor([1.0, -1.0] * 10)[:, None, None, None]
    crmse = scores_of(measure(prediction, truth + 1e-9)).metrics["crmse"]
    assert crmse.mean == pytest.approx(1.0)
    assert crmse.low == pytest.approx(1.0)
    assert crmse.high == pytest.approx(1.0)


def test_bands_without_wave_numbers_are_left_out() -> None:
    prediction, truth = torch.randn(3, 2, 8, 1), torch.randn(3, 2, 8, 1)
    scores = scores_of(measure(prediction, truth))
    assert "frmse_mid" in scores.metrics  # wave number 4 of eight points
    assert "frmse_high" not in scores.metrics


def test_prediction_that_blew_up_has_no_number() -> None:
    prediction, truth = make_pair(1)
    prediction[0, 2] = torch.inf
    scores = scores_of(measure(prediction, truth))
    assert not math.isfinite(scores.metrics["nrmse"].mean)
    assert math.isfinite(scores.by_step["nrmse"][0].mean)


def test_row_of_several_seeds_is_their_mean_and_has_each_of_them() -> None:
    errors = [measure(*make_pair(1, num=24, seed=seed)) for seed in range(3)]
    together = scores_of(*errors, row="fno")
    alone = [scores_of(each) for each in errors]
    for name, interval in together.metrics.items():
        each = [scores.metrics[name].mean for scores in alone]
        assert interval.mean == pytest.approx(np.mean(each)), name
        assert together.by_seed[name] == pytest.approx(each), name
    steps = [scores.by_step["frmse_low"][1].mean for scores in alone]
    assert together.by_step["frmse_low"][1].mean == pytest.approx(np.mean(steps))


def test_rows_are_paired_in_every_metric_that_can_be_won() -> None:
    prediction, truth = make_pair(1, num=24)
    worse, better = (scores_of(measure(truth + step * prediction, truth)) for step in (0.2, 0.1))
    paired = worse.paired(better)
    assert set(paired) == set(better.metrics) - {"max_error", "drift"}
    for name in set(paired) - {"correlation_time"}:
        assert paired[name].verdict == "behind", name
        assert paired[name].ratio.mean == pytest.approx(2.0), name
        assert paired[name].ratio.high - paired[name].ratio.low < 1e-6, name
