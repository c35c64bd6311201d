"""Sections of what comes after training: evaluation, its gates, and the records of `ups run`."""

from __future__ import annotations

from collections.abc import Collection

from ups.errors import did_you_mean, needs
from ups.section import Count, Positive, Section, key
from ups.stages import GENERATIVE, STAGES
from ups_store.sources import LocalPath

with needs("train"):
    from pydantic import ValidationInfo, model_validator


class EvaluationConfig(Section):
    """Evaluation after training."""

    enabled: bool = key(False, "evaluate after training")
    split: str = key(
        "dev",
        "dev, val or train; `ups evaluate --split test` alone takes the test split",
        used_by=("evaluation",),
    )
    horizon: Count | None = key(
        None, "steps to predict; by default to the end of the shortest trajectory", used_by=("evaluation",)
    )
    max_trajectories: Count | None = key(
        None, "so many trajectories of the split, spread evenly; by default all", used_by=("evaluation",)
    )
    members: int | None = key(
        None,
        "score ensembles of so many members, of models that have any, beside point forecasts; by "
        "default none",
        strict=True,
        ge=2,
        used_by=("evaluation",),
    )
    metrics: tuple[str, ...] = key(
        (),
        "metrics of your own beside those that every report has: registered names, or module:function",
        used_by=("evaluation",),
    )
    baseline_flops: Positive | None = key(
        None, "counted operations for which FNO and U-Net of each task are trained beside it"
    )
    baseline_samples: Count | None = key(
        None, "the same, with a budget of training windows; each gives rows of its own"
    )
    baseline_seconds: Positive | None = key(
        None, "the same, with a budget of processor time, which depends on the machine"
    )


# What reports measure, less being better.
METRICS = (
    *("nrmse", "vrmse", "relative_l2", "drift", "rmse", "crmse", "max_error"),
    *("brmse", "frmse_low", "frmse_mid", "frmse_high"),
)


# The same of ensembles (`evaluation.members`), in a row's part `ensemble`.
ENSEMBLE_METRICS = ("mean_nrmse", "crps", "energy_score", "skill", "rank_unevenness", "reliability_gap")
# Of ensembles, more and less being wrong alike.
CALIBRATION = ("spread_skill", "band_low", "band_mid", "band_high")
# Rows of reports that have members: the stage that trains each one's model, and its file beside the operator.
ENSEMBLE_ROWS = {str(STAGES[name].row): (name, STAGES[name].makes[0].file) for name in GENERATIVE}


def own_name(entry: str) -> str:
    """The name in reports of an entry of `evaluation.metrics`: module:function, or a registered name."""
    return entry.rpartition(":")[2].rpartition(".")[2]


def _known(name: str, known: Collection[str], what: str) -> str:
    if name not in known:
        hint = did_you_mean(name, known) or f"known: {', '.join(known)}"
        raise ValueError(f"{name} is no {what}; {hint}")
    return name


def _known_or_own(metric: str) -> None:
    if ":" not in metric:
        _known(metric, METRICS, "metric of which less is better")


def _known_of_ensemble(name: str, metrics: Collection[str], what: str) -> None:
    before, _, metric = name.rpartition("/")
    _known(metric, metrics, what)
    _known(before.rpartition("/")[2], ENSEMBLE_ROWS, "row with members")


class GatesConfig(Section):
    """What a run has to reach after an evaluation to go on."""

    ceilings: dict[str, Positive] = key(
        {},
        "largest allowed mean of a metric of the operator, such as nrmse, on every task; "
        "burgers1d/nrmse is about one task; a metric of your own as evaluation.metrics has it",
    )
    ensemble_ceilings: dict[str, Positive] = key(
        {},
        "the same of an ensemble, such as crps or energy_score, with its row (corrected, student "
        "or prior) before it: student/crps, or burgers1d/student/crps; the evaluation needs members",
    )
    ensemble_ranges: dict[str, tuple[Positive, Positive]] = key(
        {}, "least and largest allowed spread_skill, band_low, band_mid or band_high, named as above"
    )
    improvement: str | None = key(
        None,
        "metric by which the operator has to be better than the best so far, its paired interval "
        "included, on no task worse",
    )
    throughput: dict[str, Positive] = key(
        {}, "least samples a second in training, by stage, waiting for data included"
    )

    @model_validator(mode="after")
    def _are_known(self, info: ValidationInfo) -> GatesConfig:
        for name in self.ceilings:
            _known_or_own(name.rpartition("/")[2])
        for name in self.ensemble_ceilings:
            _known_of_ensemble(name, ENSEMBLE_METRICS, "metric of ensembles of which less is better")
        for name, (low, high) in self.ensemble_ranges.items():
            _known_of_ensemble(name, CALIBRATION, "ratio of ensembles")
            if low > high:
                raise ValueError(f"{name}: from {low:g} to {high:g} is no range")
        if self.improvement is not None:
            _known_or_own(self.improvement)
        if (info.context or {}).get("knows_stages", True):
            for name in self.throughput:
                _known(name, STAGES, "stage")
        return self


class CheckConfig(Section):
    """An evaluation of a run, and its gates."""

    overrides: tuple[str, ...] = key((), "key=value: how its configuration differs from the run's")
    gates: GatesConfig = GatesConfig()


class PipelineConfig(Section):
    """What `ups run` does after training, and where it keeps its records."""

    dir: LocalPath | None = key(
        None, "folder of records, reports and metadata.json; by default <checkpoint.dir>/run"
    )
    report_dir: LocalPath | None = key(
        None, "folder of the full evaluation's report; by default <dir>/full-eval"
    )
    best_dir: LocalPath | None = key(
        None, "folder of the best operator, which runs may share; by default <checkpoint.dir>/best"
    )
    num_processes: Count | None = key(
        None,
        "processes that build latents and train together, by torchrun on this machine; by "
        "default training.num_gpus, or 1",
    )
    small: CheckConfig = key(
        CheckConfig(overrides=("evaluation.max_trajectories=32",)),
        "the evaluation after training, which a failed training shall not get past",
    )
    full: CheckConfig = key(CheckConfig(), "the evaluation after it, which decides")
