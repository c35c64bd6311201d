"""True frames that are zero in a channel are left out of the report's relative errors, and counted."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ups.eval.intervals import Resamples
from ups.eval.metrics import FIELD_METRICS, measure
from ups.eval.scores import Scores, score


def scores_of(factor: float, truth: torch.Tensor) -> Scores:
    prediction = truth * factor + 0.01
    errors = measure(prediction, truth, given=truth[:, 0])
    return score([errors], FIELD_METRICS, resamples=Resamples(len(truth)))


@pytest.fixture
def truth() -> torch.Tensor:
    """Shape (24, 3, 16, 2); a channel of one trajectory is zero, and all of another one."""
    truth = torch.randn(24, 3, 16, 2, generator=torch.Generator().manual_seed(0))
    truth[3, ..., 1] = 0
    truth[5] = 0
    return truth


def test_still_trajectory_takes_no_number_and_no_verdict_of_the_others(truth: torch.Tensor) -> None:
    good, bad = scores_of(1.01, truth), scores_of(1.2, truth)
    errors = measure(truth * 1.2 + 0.01, truth)
    left = errors["nrmse"][~errors["undefined"]]
    assert left.isfinite().all()
    assert int(errors["undefined"].sum()) == 3 + 6
    moving = torch.ones(24, dtype=torch.bool)
    moving[[3, 5]] = False
    rest = [errors["nrmse"][moving].mean((1, 2)), errors["nrmse"][3, :, 0].mean()[None]]
    assert bad.metrics["nrmse"].mean == pytest.approx(torch.cat(rest).mean().item())
    for name in ("nrmse", "relative_l2", "drift"):
        assert np.isfinite([bad.metrics[name].mean, bad.metrics[name].low, bad.metrics[name].high]).all()
    assert np.isfinite([step.mean for step in bad.by_step["nrmse"]]).all()
    assert bad.paired(good)["nrmse"].verdict == "behind"


def test_prediction_that_is_not_finite_is_no_reason_to_leave_it_out(truth: torch.Tensor) -> None:
    assert np.isinf(scores_of(float("inf"), truth.abs() + 1).metrics["nrmse"].mean)
    assert not np.isfinite(scores_of(float("inf"), truth).metrics["nrmse"].mean)
