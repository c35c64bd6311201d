"""Gates: what a run has to reach after an evaluation, read from its report and the logs of its training; and
what generative stages found of their own gates, as their logs and files say it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ups.config import RunConfig
from ups.config.after_training import ENSEMBLE_ROWS, GatesConfig, own_name
from ups.config.stages import BASELINES
from ups.errors import CheckpointError, ConfigError, GateMissedError, UpsError, did_you_mean
from ups.eval.gate_verdicts import GateVerdict, check_gates, judge_number, shown_number
from ups.eval.training_logs import log_path, read_stage_log, read_stage_logs
from ups.pipeline.records import json_lines
from ups.train.checks import first_stage, trained_stages
from ups.trained.checkpoint import read_any_document
from ups.trained.specs import GATES


def judge(
    gates: GatesConfig, report: Mapping[str, Any], config: RunConfig, *, what: str
) -> list[dict[str, Any]]:
    """Compare a report, and the logs of the training, with all gates.

    Args:
        gates: Of the evaluation.
        report: `report.json` of the evaluation.
        config: Of the training.
        what: Name of the evaluation, for the error.

    Returns:
        Every gate's verdict as JSON values.

    Raises:
        GateMissedError: With all gates that were missed, number and limit of each.
    """
    verdicts = [
        *_ceilings(gates, report),
        *_of_ensembles(gates, report),
        *_improvements(gates, report),
        *_rates(gates, config),
    ]
    return check_gates(verdicts, where=f"gate after {what}", hint="nothing is removed")


def check_judgeable(name: str, config: RunConfig, *, evaluated: RunConfig) -> None:
    """Refuse, before anything is trained, gates that the evaluation couldn't but miss.

    Args:
        name: "small" or "full".
        config: Of the training.
        evaluated: Of the evaluation.

    Raises:
        ConfigError: Kind "gates", with all of them: they name a task that isn't evaluated, an ensemble where
            none is drawn, or what a stage leaves that this run doesn't train, and that isn't there either.
    """
    gates: GatesConfig = getattr(config.pipeline, name).gates
    refused = [*_of_other_tasks(gates, evaluated), *_of_other_stages(gates, config)]
    for gate in (*gates.ceilings, *filter(None, [gates.improvement])):
        metric, measured = gate.rpartition("/")[2], evaluated.evaluation.metrics
        if ":" in metric and metric not in measured:
            refused.append(
                (gate, metric, ", ".join(measured) or "none", f"say evaluation.metrics=[{metric}]")
            )
    of_ensembles = (*gates.ensemble_ceilings, *gates.ensemble_ranges)
    if of_ensembles and evaluated.evaluation.members is None:
        refused.append((of_ensembles[0], "evaluation.members", "none", "say evaluation.members=64"))
    if refused:
        raise ConfigError.joined(
            [
                ConfigError(
                    f"pipeline.{name}.gates: {gate}", kind="gates", expected=expected, found=found, hint=hint
                )
                for gate, expected, found, hint in refused
            ]
        )


def gate_missed_by_stage(config: RunConfig, stage: str, *, since: float) -> GateMissedError | None:
    """The gates that a stage missed in a process of its own, as its log has them; None if it missed none.

    The exit code doesn't say it where `torchrun` is between: its own is 1 whatever its ranks end with.

    Args:
        config: Of the training.
        stage: Name of the stage.
        since: When its process began, seconds since 1970.
    """
    path = log_path(config, stage)
    lines = json_lines(path) if path.exists() else iter(())
    missed = [line for line in lines if line.get("event") == "gate_missed" and line.get("stage") == stage]
    if not missed or missed[-1].get("time", 0.0) < since:
        return None
    verdicts = tuple(missed[-1]["verdicts"])
    says = "; ".join(verdict["says"] for verdict in verdicts if not verdict["passed"])
    hint = "everything is kept: train longer, or export it marked with --export-anyway"
    error = GateMissedError(f"stage {stage}: {says}", hint=hint)
    error.verdicts = verdicts
    return error


def gates_of_file(path: Path) -> list[dict[str, Any]] | None:
    """The verdicts that a generative stage wrote into its checkpoint; None if it has none."""
    try:
        verdicts = read_any_document(path)[1].get(GATES)
    except CheckpointError:
        return None
    return None if verdicts is None else list(verdicts)


def read_report(path: Path) -> dict[str, Any]:
    """A `report.json`.

    Raises:
        UpsError: Kind "not_evaluated".
    """
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        hint = "evaluate it: leave out --skip-small-eval, --skip-full-eval and --only"
        raise UpsError("no report of an evaluation", kind="not_evaluated", path=path, hint=hint) from error


def metric_of(report: Mapping[str, Any], task: str, metric: str, *, row: str = "operator") -> float | None:
    """Mean of a metric; None if there is no such row or metric, or it is no finite number."""
    values = report["tasks"][task]["rows"].get(row, {}).get(metric)
    mean = values.get("mean") if isinstance(values, Mapping) else None
    return None if mean is None else float(mean)


# A gate, what it needs, what there is, and what to do.
_Unjudgeable = tuple[str, str, str, str | None]


def _of_other_tasks(gates: GatesConfig, config: RunConfig) -> Iterator[_Unjudgeable]:
    named = {gate: gate.rpartition("/")[0] for gate in gates.ceilings}
    named |= {gate: _task_and_row(gate)[0] for gate in (*gates.ensemble_ceilings, *gates.ensemble_ranges)}
    tasks = config.data.tasks
    for gate, task in named.items():
        if task and task not in tasks:
            yield gate, " or ".join(tasks), task, did_you_mean(task, tasks)


def _of_other_stages(gates: GatesConfig, config: RunConfig) -> Iterator[_Unjudgeable]:
    """Those about a stage that isn't trained, unless an earlier training left what they are judged by."""
    needed: list[tuple[str, str, Path, bool]] = []
    for gate in (*gates.ensemble_ceilings, *gates.ensemble_ranges):
        stage, file = ENSEMBLE_ROWS[_task_and_row(gate)[1]]
        path = config.checkpoint.dir / file
        needed.append((gate, stage, path, path.exists()))
    for stage in gates.throughput:
        path = log_path(config, stage)
        needed.append((f"throughput.{stage}", stage, path, read_stage_log(path, stage) is not None))
    trained = trained_stages(config, first_stage(config)) if needed else ()
    for gate, stage, path, is_there in needed:
        if stage not in trained and not is_there:
            found = f"stages {', '.join(trained)}" if trained else "no stage"
            yield gate, f"stage {stage}, or what it left in {path}", found, _how_to_train(stage)


def _how_to_train(stage: str) -> str:
    how = f"`ups train --stage {stage}` before" if stage in BASELINES else f"stages.{stage}.epochs"
    return f"train it, by {how}, or leave the gate out"


def _task_and_row(gate: str) -> tuple[str, str]:
    """Of `TASK/ROW/METRIC`; without a task it is about all, and the first is empty."""
    task, _, row = gate.rpartition("/")[0].rpartition("/")
    return task, row


def _ceilings(gates: GatesConfig, report: Mapping[str, Any]) -> Iterator[GateVerdict]:
    for name, limit in gates.ceilings.items():
        one, _, metric = name.rpartition("/")
        for task in [one] if one else list(report["tasks"]):
            number = metric_of(report, task, own_name(metric)) if task in report["tasks"] else None
            yield judge_number("ceiling", f"{metric} of {task}", number, "at most", limit)


def _of_ensembles(gates: GatesConfig, report: Mapping[str, Any]) -> Iterator[GateVerdict]:
    for name, limit in gates.ensemble_ceilings.items():
        for what, number in _ensemble_numbers(name, report):
            yield judge_number("ensemble_ceiling", what, number, "at most", limit)
    for name, limits in gates.ensemble_ranges.items():
        for what, number in _ensemble_numbers(name, report):
            yield judge_number("ensemble_range", what, number, "within", limits)


def _ensemble_numbers(name: str, report: Mapping[str, Any]) -> Iterator[tuple[str, float | None]]:
    """What `TASK/ROW/METRIC` names, of all tasks where none is named; None where there is no ensemble."""
    metric, (one, row) = name.rpartition("/")[2], _task_and_row(name)
    for task in [one] if one else list(report["tasks"]):
        rows = report["tasks"].get(task, {}).get("rows", {})
        values = rows.get(row, {}).get("ensemble", {}).get(metric)
        mean = values.get("mean") if isinstance(values, Mapping) else None
        yield f"{metric} of {row} on {task}", None if mean is None else float(mean)


def _improvements(gates: GatesConfig, report: Mapping[str, Any]) -> Iterator[GateVerdict]:
    """One verdict: on no task worse than the best so far, and on one better, intervals included."""
    if gates.improvement is None:
        return
    metric = own_name(gates.improvement)
    rows = {task: found["rows"].get("best") for task, found in report["tasks"].items()}
    if not any(rows.values()):
        says = "there is no best operator yet, or it is this one"
        yield GateVerdict("improvement", metric, None, 0.0, True, says)
        return
    pairs = {task: row["paired"].get(metric, {}) for task, row in rows.items() if row}
    of_best = {task: pair.get("verdict") for task, pair in pairs.items()}
    passed = "behind" in of_best.values() and "ahead" not in of_best.values()
    shown = ", ".join(f"{task} {_difference(pair)}" for task, pair in pairs.items())
    says = f"{metric} minus the best operator's: {shown}; expected less than 0, with its interval"
    numbers = [mean for pair in pairs.values() if (mean := _mean(pair)) is not None]
    yield GateVerdict("improvement", metric, max(numbers, default=None), 0.0, passed, says)


def _mean(pair: Mapping[str, Any]) -> float | None:
    """Of the difference operator minus best; reports have best minus operator."""
    mean = pair.get("difference", {}).get("mean")
    return None if mean is None else -float(mean)


def _difference(pair: Mapping[str, Any]) -> str:
    difference = pair.get("difference", {})
    low, high = difference.get("low"), difference.get("high")
    ends = "no interval" if low is None or high is None else f"95 % from {-high:.3g} to {-low:.3g}"
    return f"{shown_number(_mean(pair))} ({ends})"


def _rates(gates: GatesConfig, config: RunConfig) -> Iterator[GateVerdict]:
    if not gates.throughput:
        return
    logs = {log.stage: log for log in read_stage_logs(config)}
    for stage, limit in gates.throughput.items():
        log = logs.get(stage)
        number = log.samples / log.train_s if log is not None and log.train_s > 0 else None
        yield judge_number("throughput", f"samples a second of stage {stage}", number, "at least", limit)
