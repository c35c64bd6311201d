"""Gates: what a run has to reach after an evaluation, read from its report and the logs of its training; and
what generative stages found of their own gates, as their logs and files say it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ups.config import RunConfig
from ups.config.after_training import ENSEMBLE_ROWS, GatesConfig, own_name
from ups.errors import CheckpointError, ConfigError, GateMissedError, UpsError, did_you_mean
from ups.eval.gate_verdicts import GateVerdict, How, Limit, check_gates, judge_number, shown_number
from ups.eval.training_logs import log_path, read_stage_log, read_stage_logs
from ups.pipeline.records import json_lines
from ups.stages import BASELINES
from ups.trained.checkpoint import read_any_document
from ups.trained.specs import GATES


@dataclass(frozen=True)
class _Gate:
    """A number that a run is judged by.

    Attributes:
        kind: Of its verdicts, such as "ceiling".
        key: As the configuration names it.
        metric: Of a report, or "" of a stage's samples a second.
        task: Of a report; "" for all.
        row: Of a report whose ensemble is meant; "" for the operator's forecast.
        stage: What it takes to be judged: the stage whose log it is, or that trains the row's model.
        how: It compares with the limit.
    """

    kind: str
    key: str
    how: How
    limit: Limit
    metric: str = ""
    task: str = ""
    row: str = ""
    stage: str = ""

    def left(self, config: RunConfig) -> tuple[Path, bool]:
        """Where its stage leaves what it is judged by, and whether that is there."""
        if self.row:
            path = config.checkpoint.dir / ENSEMBLE_ROWS[self.row][1]
            return path, path.exists()
        path = log_path(config, self.stage)
        return path, read_stage_log(path, self.stage) is not None

    def numbers(self, report: Mapping[str, Any], config: RunConfig) -> Iterator[tuple[str, float | None]]:
        """What is measured of each task, or of the stage, and how much; None where nothing was."""
        if not self.metric:
            log = next((log for log in read_stage_logs(config) if log.stage == self.stage), None)
            rate = log.samples / log.train_s if log is not None and log.train_s > 0 else None
            yield f"samples a second of stage {self.stage}", rate
            return
        for task in [self.task] if self.task else list(report["tasks"]):
            rows = report["tasks"].get(task, {}).get("rows", {})
            if self.row:
                values = rows.get(self.row, {}).get("ensemble", {}).get(self.metric)
                yield f"{self.metric} of {self.row} on {task}", _mean_of(values)
            else:
                values = rows.get("operator", {}).get(own_name(self.metric))
                yield f"{self.metric} of {task}", _mean_of(values)


def _gates(gates: GatesConfig) -> Iterator[_Gate]:
    """All gates that compare a number: each is judged as this table has it."""
    for key, most in gates.ceilings.items():
        task, _, metric = key.rpartition("/")
        yield _Gate("ceiling", key, "at most", most, metric, task)
    ranges: tuple[tuple[str, How, Mapping[str, Limit]], ...] = (
        ("ensemble_ceiling", "at most", gates.ensemble_ceilings),
        ("ensemble_range", "within", gates.ensemble_ranges),
    )
    for kind, how, limits in ranges:
        for key, limit in limits.items():
            where, _, metric = key.rpartition("/")
            task, _, row = where.rpartition("/")
            yield _Gate(kind, key, how, limit, metric, task, row, stage=ENSEMBLE_ROWS[row][0])
    for stage, least in gates.throughput.items():
        yield _Gate("throughput", f"throughput.{stage}", "at least", least, stage=stage)


def judge(
    gates: GatesConfig, report: Mapping[str, Any], config: RunConfig, *, what: str
) -> list[dict[str, Any]]:
    """Compare a report, and the logs of the training, with all gates.

    Returns:
        Every gate's verdict as JSON values.
    """
    verdicts = [
        judge_number(gate.kind, measured, number, gate.how, gate.limit)
        for gate in _gates(gates)
        for measured, number in gate.numbers(report, config)
    ]
    if gates.improvement is not None:
        verdicts.append(_improvement(own_name(gates.improvement), report))
    return check_gates(verdicts, where=f"gate after {what}", hint="nothing is removed")


def check_judgeable(name: str, config: RunConfig, *, evaluated: RunConfig) -> None:
    """Refuse, before anything is trained, gates that the evaluation couldn't but miss."""
    gates: GatesConfig = getattr(config.pipeline, name).gates
    refused: list[ConfigError] = []

    def refuse(gate: str, expected: str, found: str, hint: str | None) -> None:
        problem = f"pipeline.{name}.gates: {gate}"
        refused.append(ConfigError(problem, kind="gates", expected=expected, found=found, hint=hint))

    tasks, asked, trained = evaluated.data.tasks, list(_gates(gates)), config.trained_stages
    for gate in asked:
        if gate.task and gate.task not in tasks:
            refuse(gate.key, " or ".join(tasks), gate.task, did_you_mean(gate.task, tasks))
    for gate in asked:
        if gate.stage and gate.stage not in trained:
            path, is_there = gate.left(config)
            if is_there:  # an earlier training left it
                continue
            is_baseline = gate.stage in BASELINES
            how = f"`ups train --stage {gate.stage}` before" if is_baseline else f"stages.{gate.stage}.epochs"
            found = f"stages {', '.join(trained)}" if trained else "no stage"
            hint = f"train it, by {how}, or leave the gate out"
            refuse(gate.key, f"stage {gate.stage}, or what it left in {path}", found, hint)
    measured = evaluated.evaluation.metrics
    for key in (*gates.ceilings, *filter(None, [gates.improvement])):
        metric = key.rpartition("/")[2]
        if ":" in metric and metric not in measured:
            refuse(key, metric, ", ".join(measured) or "none", f"say evaluation.metrics=[{metric}]")
    of_ensembles = [gate for gate in asked if gate.row]
    if of_ensembles and evaluated.evaluation.members is None:
        refuse(of_ensembles[0].key, "evaluation.members", "none", "say evaluation.members=64")
    if refused:
        raise ConfigError.joined(refused)


def _improvement(metric: str, report: Mapping[str, Any]) -> GateVerdict:
    """Judge whether it is on no task worse than the best so far, and on one better, intervals included."""
    rows = {task: found["rows"].get("best") for task, found in report["tasks"].items()}
    if not any(rows.values()):
        says = "there is no best operator yet, or it is this one"
        return GateVerdict("improvement", metric, None, 0.0, True, says)
    pairs = {task: row["paired"].get(metric, {}) for task, row in rows.items() if row}
    verdicts = [pair.get("verdict") for pair in pairs.values()]  # of the best, beside this one
    numbers, shown = [], []
    for task, pair in pairs.items():
        difference = pair.get("difference", {})  # best minus operator; said is operator minus best
        mean, low, high = (difference.get(part) for part in ("mean", "low", "high"))
        number = None if mean is None else -float(mean)
        ends = "no interval" if low is None or high is None else f"95 % from {-high:.3g} to {-low:.3g}"
        shown.append(f"{task} {shown_number(number)} ({ends})")
        numbers += [] if number is None else [number]
    passed = "behind" in verdicts and "ahead" not in verdicts
    says = f"{metric} minus the best operator's: {', '.join(shown)}; expected less than 0, with its interval"
    return GateVerdict("improvement", metric, max(numbers, default=None), 0.0, passed, says)


def gate_missed_by_stage(config: RunConfig, stage: str, *, since: float) -> GateMissedError | None:
    """The gates that a stage missed in a process of its own, as its log has them; None if it missed none.

    The exit code doesn't say it where `torchrun` is between: its own is 1 whatever its ranks end with.
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
    """A `report.json`."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        hint = "evaluate it: leave out --skip-small-eval, --skip-full-eval and --only"
        raise UpsError("no report of an evaluation", kind="not_evaluated", path=path, hint=hint) from error


def metric_of(report: Mapping[str, Any], task: str, metric: str, *, row: str = "operator") -> float | None:
    """Mean of a metric; None if there is no such row or metric, or it is no finite number."""
    return _mean_of(report["tasks"][task]["rows"].get(row, {}).get(metric))


def _mean_of(values: Any) -> float | None:
    mean = values.get("mean") if isinstance(values, Mapping) else None
    return None if mean is None else float(mean)
