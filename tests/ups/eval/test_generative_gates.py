"""Gates of generative stages: every known way to collapse misses the gate that it should, and no other."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from ups.data.windows import TrajectoryBatch
from ups.errors import ConfigError, GateMissedError
from ups.eval.ensembles import Climate, EnsembleErrors, measure_ensemble
from ups.eval.gate_verdicts import GateVerdict, check_gates, judge_number
from ups.eval.generative_gates import corrector_gates, least_ratio, student_gates

torch.set_num_threads(1)
NUM, STEPS, POINTS, MEMBERS = 60, 2, 32, 64
SCALE = Climate(torch.ones(1, dtype=torch.float64), torch.zeros(3, 1, dtype=torch.float64))
BANDS = ("band_low", "band_mid", "band_high")


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def high_band(fields: Tensor, factor: float) -> Tensor:
    """With the amplitudes from wave number 12 on multiplied."""
    spectrum = torch.fft.rfft(fields, dim=-2)
    spectrum[..., 12:, :] *= factor
    return torch.fft.irfft(spectrum, n=POINTS, dim=-2)


OPERATOR = high_band(draw(NUM, STEPS, POINTS, 1, seed=0), 0.0)  # what the operator predicts is smooth
TRUTH = OPERATOR + draw(NUM, STEPS, POINTS, 1, seed=1)  # and what it misses is noise
NOISE = draw(NUM, STEPS, MEMBERS, POINTS, 1, seed=2)


def measured(correction: Tensor, *, seed: int = 0) -> EnsembleErrors:
    """Of the operator's prediction and a correction, (B, T, M, X, C)."""
    members = OPERATOR.unsqueeze(2) + correction
    batch = TrajectoryBatch(np.arange(NUM), OPERATOR[:, 0], TRUTH, {})
    return measure_ensemble(iter(members.unbind(1)), batch, SCALE, seed=seed)


def missed(verdicts: list[GateVerdict]) -> list[str]:
    return [verdict.gate for verdict in verdicts if not verdict.passed]


@pytest.fixture(scope="module")
def teacher() -> EnsembleErrors:
    return measured(NOISE)


@pytest.fixture(scope="module")
def operator() -> EnsembleErrors:
    return measured(torch.zeros(NUM, STEPS, 1, POINTS, 1))


# --- students ------------------------------------------------------------------------------------------


def test_student_as_good_as_its_teacher_passes_all_gates(teacher: EnsembleErrors) -> None:
    verdicts = student_gates(measured(draw(*NOISE.shape, seed=3)), teacher)
    assert [verdict.gate for verdict in verdicts] == ["energy_score", "spread", "spread_skill", *BANDS]
    assert missed(verdicts) == []
    assert missed(student_gates(teacher, teacher)) == []


def test_student_that_returns_zero_is_stopped(teacher: EnsembleErrors) -> None:
    verdicts = student_gates(measured(0 * NOISE), teacher)
    assert missed(verdicts)[:3] == ["energy_score", "spread", "spread_skill"]
    by_gate = {verdict.gate: verdict for verdict in verdicts}
    assert by_gate["spread"].number == by_gate["spread_skill"].number == 0
    assert by_gate["spread"].limit == 0.5
    assert by_gate["energy_score"].number == pytest.approx(2**0.5, rel=0.05)  # |X - y| over |X - X'| / 2


def test_student_that_copies_its_teacher_s_mean_is_stopped(teacher: EnsembleErrors) -> None:
    mean = NOISE.mean(2, keepdim=True).expand_as(NOISE)
    assert missed(student_gates(measured(mean), teacher))[:3] == ["energy_score", "spread", "spread_skill"]


def test_student_that_over_fills_the_high_band_misses_that_band_only(teacher: EnsembleErrors) -> None:
    verdicts = student_gates(measured(high_band(NOISE, 1.5)), teacher)
    assert missed(verdicts) == ["band_high"]
    (found,) = (verdict for verdict in verdicts if not verdict.passed)
    assert found.limit == (0.5, 2.0)
    assert found.number == pytest.approx(2.25, rel=0.1)
    assert "the high band over the truth's = 2.2" in found.says


def test_student_that_was_stopped_early_has_too_little_spread_over_skill_only(
    teacher: EnsembleErrors,
) -> None:
    """Its energy score passes: with three quarters of the spread it is hardly worse."""
    verdicts = student_gates(measured(0.75 * NOISE), teacher)
    assert missed(verdicts) == ["spread_skill"]
    assert verdicts[0].number == pytest.approx(1.02, abs=0.01)


def test_student_with_too_much_spread_is_stopped_too(teacher: EnsembleErrors) -> None:
    assert "spread_skill" in missed(student_gates(measured(1.4 * NOISE), teacher))


def test_student_that_blew_up_passes_no_gate_by_comparing_with_nan(teacher: EnsembleErrors) -> None:
    verdicts = student_gates(measured(NOISE * float("nan")), teacher)
    assert len(missed(verdicts)) == len(verdicts)
    assert verdicts[0].number is None
    assert "no number" in verdicts[0].says


def test_few_members_and_other_noise_are_refused(teacher: EnsembleErrors) -> None:
    few = measured(NOISE[:, :, :63])
    with pytest.raises(ConfigError, match="at least 64, found 63") as caught:
        student_gates(few, teacher)
    assert caught.value.kind == "few_members"
    with pytest.raises(ConfigError, match="seed 1, and 64 of seed 0") as caught:
        student_gates(measured(NOISE, seed=1), teacher)
    assert caught.value.kind == "other_noise"


# --- correctors ----------------------------------------------------------------------------------------


def test_corrector_that_knows_what_is_missing_passes_all_gates(
    teacher: EnsembleErrors, operator: EnsembleErrors
) -> None:
    verdicts = corrector_gates(teacher, operator)
    assert [verdict.gate for verdict in verdicts] == ["crps", "mean_nrmse", "spread_skill", *BANDS]
    assert missed(verdicts) == []
    crps, nrmse, *_ = verdicts
    assert crps.number == pytest.approx(crps.limit / 2**0.5, rel=0.05)  # 1 / sqrt(pi) and sqrt(2 / pi)
    assert nrmse.number == least_ratio(teacher, operator) == pytest.approx(1.0, abs=0.02)


def test_corrector_that_does_nothing_has_no_spread_and_no_better_crps(operator: EnsembleErrors) -> None:
    assert missed(corrector_gates(measured(0 * NOISE), operator))[:2] == ["crps", "spread_skill"]


def test_corrector_with_a_bias_loses_nrmse(operator: EnsembleErrors) -> None:
    assert missed(corrector_gates(measured(NOISE + 0.35), operator)) == ["mean_nrmse"]


def test_loss_of_nrmse_counts_as_far_as_trajectories_can_tell_it(
    teacher: EnsembleErrors, operator: EnsembleErrors
) -> None:
    noise, means = draw(NUM, seed=5).double(), operator.nrmse.mean((1, 2))

    def least(factors: Tensor, num: int = NUM) -> float:
        """Of an ensemble whose mean, few members aside, is so many times as far off as the operator."""
        own = replace(teacher, variance=0 * teacher.variance, nrmse=operator.nrmse * factors[:, None, None])
        rows = [
            EnsembleErrors(64, 0, **{k: v[:num] for k, v in one.tensors().items()}) for one in (own, operator)
        ]
        return least_ratio(*rows)

    sharp = 1.03 + 0.01 * noise
    assert 1.02 < least(sharp) < (means * sharp).mean() / means.mean()
    assert least(sharp, num=3) < least(sharp)
    assert least(1.03 + 0.3 * (noise - noise.mean())) < 1.01
    assert least(sharp, num=1) == pytest.approx(sharp[0].item())


def test_band_that_the_truth_hardly_has_is_no_gate() -> None:
    waves = torch.cos(2 * torch.pi * torch.arange(POINTS) / POINTS)[:, None].expand(NUM, STEPS, -1, 1)
    batch = TrajectoryBatch(np.arange(NUM), waves[:, 0], waves, {})
    members = waves.unsqueeze(2) + 1e-2 * NOISE
    errors = measure_ensemble(iter(members.unbind(1)), batch, SCALE, seed=0)
    gates = [verdict.gate for verdict in corrector_gates(errors, errors)]
    assert gates == ["crps", "mean_nrmse", "spread_skill", "band_low"]


# --- what a missed gate does ---------------------------------------------------------------------------


def test_missed_gates_are_raised_with_number_and_limit_of_each(teacher: EnsembleErrors) -> None:
    verdicts = student_gates(measured(0.75 * NOISE), teacher)
    with pytest.raises(GateMissedError, match=r"spread over skill of the student = 0\.7") as caught:
        check_gates(verdicts, where="distillation", hint="nothing is exported")
    assert caught.value.exit_code == 10
    assert [each["passed"] for each in caught.value.verdicts] == [True, True, False, True, True, True]
    assert caught.value.verdicts[2]["limit"] == (0.8, 1.2)
    passed = check_gates(student_gates(teacher, teacher), where="distillation", hint="")
    assert all(each["passed"] for each in passed)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), None])
def test_what_is_no_number_passes_nothing(number: float | None) -> None:
    for how in ("at most", "at least", "less than", "more than"):
        assert not judge_number("gate", "it", number, how, float("-inf")).passed
        assert not judge_number("gate", "it", number, how, float("inf")).passed
    assert not judge_number("gate", "it", number, "within", (0.0, float("inf"))).passed
