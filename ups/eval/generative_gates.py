"""Gates of the generative stages: what a corrector or its student has to reach before it is exported.

No single score is one: a corrector that was stopped early looks fine by CRPS and has too little spread, a
student of one step fills the high band too much, which only its energy shows, and one that has collapsed to
its teacher's mean has a good nRMSE. All together are.
"""

from __future__ import annotations

import numpy as np

from ups.errors import ConfigError
from ups.eval.ensembles import EnsembleErrors, band_ratio, ensemble_numbers, has_band
from ups.eval.gate_verdicts import GateVerdict, judge_number
from ups.eval.intervals import Resamples, compare
from ups.eval.metrics import BANDS, masked
from ups.eval.scores import mean_from

LEAST_MEMBERS = 64  # fewer leave too much chance in a ratio of energy scores
MOST_ENERGY_SCORE = 1.03  # of the student over the teacher's
SPREAD_SKILL = (0.8, 1.2)
LEAST_SPREAD = 0.5  # of the student over the teacher's
BAND_RATIOS = (0.5, 2.0)
MOST_NRMSE = 1.01  # of the ensemble mean over the operator's without the corrector
_LEAST_SHARE = 1e-6  # of a band in the truth's energy; what is less can't be seen, and needn't be right
_LEAST_TRAJECTORIES = 3  # of an interval; two say nothing of each other once one is left out


def corrector_gates(
    corrected: EnsembleErrors, operator: EnsembleErrors, *, what: str = "the corrector"
) -> list[GateVerdict]:
    """Compare an operator with its corrector to the operator alone.

    Args:
        corrected: Of at least 64 members.
        operator: Of the operator's point forecasts of the same trajectories.
        what: Name of the model that is judged, for people.

    Returns:
        Gates "crps", "mean_nrmse", "spread_skill", and "band_low", "band_mid", "band_high" as far as the
        truth has these bands.
    """
    _check_members(corrected, what)
    numbers, alone = ensemble_numbers(corrected), ensemble_numbers(operator)
    loss = f"nRMSE of the ensemble mean of {what} over the operator's, lower end of 95 %"
    return [
        judge_number("crps", f"CRPS of {what}", numbers["crps"], "less than", alone["crps"]),
        judge_number("mean_nrmse", loss, least_ratio(corrected, operator), "at most", MOST_NRMSE),
        *_calibration(corrected, numbers, what),
    ]


def student_gates(
    student: EnsembleErrors, teacher: EnsembleErrors, *, what: str = "the student"
) -> list[GateVerdict]:
    """Compare a distilled student to its teacher.

    Args:
        student: Of at least 64 members.
        teacher: Of as many members of the same trajectories, with the same noise.
        what: Name of the model that is judged, for people.

    Returns:
        Gates "energy_score", "spread", "spread_skill", and "band_low", "band_mid", "band_high" as far as the
        truth has these bands.

    Raises:
        ConfigError: Kind "few_members", or "other_noise", if numbers of members or seeds differ.
    """
    _check_members(student, what)
    own, theirs = ((each.num_members, each.seed) for each in (student, teacher))
    if own != theirs:
        raise ConfigError(
            f"{what} and its teacher weren't given the same noise",
            kind="other_noise",
            expected="as many members of both, with one seed",
            found=f"{own[0]} members of seed {own[1]}, and {theirs[0]} of seed {theirs[1]}",
        )
    numbers, taught = ensemble_numbers(student), ensemble_numbers(teacher)
    with np.errstate(invalid="ignore", divide="ignore"):
        energy, spread = (
            float(np.divide(numbers[name], taught[name])) for name in ("energy_score", "spread")
        )
    of_teacher = f"of {what} over its teacher's"
    return [
        judge_number("energy_score", f"energy score {of_teacher}", energy, "at most", MOST_ENERGY_SCORE),
        judge_number("spread", f"spread {of_teacher}", spread, "more than", LEAST_SPREAD),
        *_calibration(student, numbers, what),
    ]


def _check_members(errors: EnsembleErrors, what: str) -> None:
    if errors.num_members < LEAST_MEMBERS:
        raise ConfigError(
            f"too few members to judge {what} by",
            kind="few_members",
            expected=f"at least {LEAST_MEMBERS}",
            found=errors.num_members,
        )


def _calibration(errors: EnsembleErrors, numbers: dict[str, float], what: str) -> list[GateVerdict]:
    """Gates of an ensemble by itself; of bands of which the truth has a share that matters."""
    skill = f"spread over skill of {what}"
    verdicts = [judge_number("spread_skill", skill, numbers["spread_skill"], "within", SPREAD_SKILL)]
    energies_KC, true_KC = (each.mean((0, 1)).numpy() for each in (errors.bands, errors.true_bands))
    is_there_KC = has_band(true_KC, least_share=_LEAST_SHARE)
    for name, *band in zip(BANDS, energies_KC, true_KC, is_there_KC, strict=True):
        if band[2].any():
            energy = f"energy of {what} in the {name} band over the truth's"
            verdicts.append(
                judge_number(f"band_{name}", energy, float(band_ratio(*band)), "within", BAND_RATIOS)
            )
    return verdicts


def least_ratio(corrected: EnsembleErrors, operator: EnsembleErrors) -> float:
    """Ratio of the ensemble mean's nRMSE to the operator's, less what chance may make of it.

    The mean of M members is off by their variance over M besides, nearly 1 % of the nRMSE for 64 members: as
    much as the gate lets pass, so it is taken off. Few trajectories can't tell 1 % either: members that are
    solved with the equation itself were 2 % above an operator on 24 (docs/results/generative.md). So it is
    the lower end of a paired interval of 95 %; of one or two trajectories nothing is known of that.
    """
    excess_BTC = corrected.variance / corrected.num_members / corrected.squared_error
    fair_BTC = corrected.nrmse * (1 - excess_BTC).clamp(min=0).sqrt()
    resamples = Resamples(len(operator), least=_LEAST_TRAJECTORIES)
    own, theirs = (
        resamples.of([mean_from(masked(nrmse_BTC, operator.undefined), 1)[:, None]])
        for nrmse_BTC in (fair_BTC, operator.nrmse)
    )
    ratio = compare(own, theirs).ratio
    return ratio.low if ratio.is_known else ratio.mean
