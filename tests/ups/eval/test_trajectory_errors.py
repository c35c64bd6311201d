"""Errors of trajectories in batches and as a whole, and intervals against their definition."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from ups.errors import ShapeError
from ups.eval.comparison import COMPAT_BATCH_SIZE, score
from ups.eval.metrics import summary
from ups.eval.trajectory_errors import Resamples, join, measure

GRIDS = {1: (32,), 2: (8, 16)}


def make_pair(ndim: int, num: int = 7, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (num, 3, *GRIDS[ndim], 2)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def test_batches_joined_are_the_whole() -> None:
    prediction, truth = make_pair(2)
    whole = measure(prediction, truth)
    parts = [measure(p, y) for p, y in zip(prediction.split(3), truth.split(3), strict=True)]
    torch.testing.assert_close(join(parts).shells, whole.shells)
    torch.testing.assert_close(join(parts).pdebench_compat(2), whole.pdebench_compat(2), equal_nan=True)
    assert len(join(parts)) == len(whole) == 7


def test_drift_counts_from_the_given_state() -> None:
    given = torch.full((2, 8, 1), 2.0)
    truth = given[:, None].expand(-1, 3, -1, -1)
    prediction = truth + torch.tensor([0.0, 0.5, -1.0])[None, :, None, None]
    drift = measure(prediction, truth, given=given).drift
    torch.testing.assert_close(drift[0, :, 0], torch.tensor([0.0, 0.25, 0.5]).double())


def test_measure_refuses_another_shape() -> None:
    prediction, truth = make_pair(1)
    with pytest.raises(ShapeError, match="prediction"):
        measure(prediction[:, :2], truth)


# --- intervals -----------------------------------------------------------------------------------------


def test_scores_are_the_exact_metrics_with_intervals_around_them() -> None:
    prediction, truth = make_pair(1, num=40)
    scores = score(measure(prediction, truth), t=torch.arange(1.0, 4.0))
    exact = summary(measure(prediction, truth).pdebench())
    for name, value in exact.items():
        interval = scores.metrics[name]
        assert interval.mean == pytest.approx(value), name
        assert interval.low < interval.high, name
        assert interval.low <= interval.mean <= interval.high + 1e-12, name
    for name in ("nrmse", "crmse", "frmse_mid"):
        assert np.mean([step.mean for step in scores.by_step[name]]) == pytest.approx(exact[name]), name
        assert len(scores.by_step[name]) == 3
    assert scores.pdebench_compat["nrmse"] == pytest.approx(exact["nrmse"])  # 40 fit in one batch
    assert COMPAT_BATCH_SIZE >= 40


def test_interval_of_a_root_is_resampled_inside_the_root() -> None:
    """Trajectories with opposite errors of the mean: their mean vanishes, the cRMSE doesn't."""
    truth = torch.zeros(2, 1, 4, 1)
    prediction = truth + torch.tensor([1.0, -1.0])[:, None, None, None]
    crmse = score(measure(prediction, truth + 1e-9), t=torch.ones(1)).metrics["crmse"]
    assert crmse.mean == pytest.approx(1.0)
    assert crmse.low == pytest.approx(1.0)
    assert crmse.high == pytest.approx(1.0)


def test_bands_without_wave_numbers_are_left_out() -> None:
    prediction, truth = torch.randn(3, 2, 8, 1), torch.randn(3, 2, 8, 1)
    scores = score(measure(prediction, truth), t=torch.arange(1.0, 3.0))
    assert "frmse_mid" in scores.metrics  # wave number 4 of eight points
    assert "frmse_high" not in scores.metrics
    assert "frmse_high" not in scores.pdebench_compat


def test_prediction_that_blew_up_has_no_number() -> None:
    prediction, truth = make_pair(1)
    prediction[0, 2] = torch.inf
    scores = score(measure(prediction, truth), t=torch.arange(1.0, 4.0))
    assert not math.isfinite(scores.metrics["nrmse"].mean)
    assert math.isfinite(scores.by_step["nrmse"][0].mean)


def test_resamples_draw_as_many_trajectories_as_there_are() -> None:
    resamples = Resamples(5, num_resamples=100)
    torch.testing.assert_close(
        torch.from_numpy(resamples.means(np.ones((5, 2)))), torch.ones(100, 2).double()
    )
    assert resamples.of_maximum(np.arange(5.0)).high == 4.0
    assert resamples.of_maximum(np.arange(5.0)).low < 4.0
