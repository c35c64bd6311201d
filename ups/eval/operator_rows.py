"""Rows of trained operators: the run's own, and others, such as the ablation that advances the fields."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ups.config import RunConfig
from ups.errors import ConfigError
from ups.eval.forecasters import OperatorForecaster, shown_size
from ups.eval.training_logs import StageLog
from ups.trained.simulator import Simulator
from ups.trained.specs import SimulatorSpec

_LABELS = {"latent": "latent operator", "fields": "operator on fields"}


@dataclass(frozen=True)
class OtherOperator:
    """An operator beside the one that a run has trained.

    Attributes:
        simulator: In evaluation mode, on the device of the run's own.
        path: Its checkpoint.
        logs: Of its training, as far as they are known.
    """

    simulator: Simulator
    path: Path
    logs: Sequence[StageLog] = ()


def forecasters_of(others: Sequence[OtherOperator], own: Simulator) -> list[OperatorForecaster]:
    """Their rows, `operator_latent` or `operator_fields` by their states, numbered from the second on."""
    count: Counter[str] = Counter()
    rows = []
    for other in others:
        states = other.simulator.spec.states
        count[states] += 1
        number = "" if count[states] == 1 else str(count[states])
        what = f"other {_LABELS[states]}" if states == own.spec.states else _LABELS[states]
        rows.append(
            OperatorForecaster(
                other.simulator,
                note=f"{other.path}; {operator_note(other.simulator, other.logs)}",
                name="_".join(filter(None, ("operator", states, number))),
                label=" ".join(filter(None, (what, number))),
            )
        )
    return rows


def operator_note(simulator: Simulator, logs: Sequence[StageLog]) -> str:
    """Sizes, and what the training took, as far as logs tell."""
    parts = [f"operator {shown_size(simulator.operator)}, {_architecture(simulator.spec)}"]
    if simulator.autoencoder is not None:
        parts.append(f"autoencoder {shown_size(simulator.autoencoder)}")
    parts += [
        f"{log.stage} trained for {log.seconds - log.startup_s:.0f} s after {log.startup_s:.0f} s of "
        f"startup, {log.steps:,} steps, {log.samples:,} samples"
        for log in logs
    ]
    return "; ".join(parts)


def _architecture(spec: SimulatorSpec) -> str:
    """Levels, and how far attention reaches in the finest."""
    num, window = len(spec.operator["depths"]), int(spec.operator["window"])
    longest = max(length for task in spec.tasks.values() for length in task.tokens)
    levels = "one level" if num == 1 else f"{num} levels"
    reach = "one window over all tokens" if window >= longest else f"windows of {window} tokens"
    return f"{levels} with {reach}"


def expect_comparable(other: OtherOperator, config: RunConfig, own: Simulator) -> None:
    """Refuse an operator that doesn't predict what a run's own does.

    Args:
        other: The operator.
        config: Configuration of the run, with the tasks that are evaluated.
        own: Of the run.

    Raises:
        ConfigError: Kinds "unknown_encoder", "other_task", "other_grid", "other_stride".
    """
    theirs, path = other.simulator.spec, other.path
    if not (own.spec.is_encoder_known and theirs.is_encoder_known):
        problem = "operators are compared as fields, and nothing decodes latents of an unknown encoder"
        raise ConfigError(problem, kind="unknown_encoder", path=path)
    for task in config.data.task:
        if task not in theirs.tasks:
            problem, known = "the operator wasn't trained for this task", " or ".join(sorted(theirs.tasks))
            raise ConfigError(problem, kind="other_task", path=path, expected=known, found=task)
        if task in own.spec.tasks:  # else the run itself is refused
            _expect_same_frames(task, theirs, own.spec, path)


def _expect_same_frames(task: str, theirs: SimulatorSpec, own: SimulatorSpec, path: Path) -> None:
    expected, found = own.tasks[task].grid, theirs.tasks[task].grid
    if found != expected:
        problem = f"the operator is for another grid of {task}"
        raise ConfigError(problem, kind="other_grid", path=path, expected=expected.name, found=found.name)
    if theirs.time_stride != own.time_stride and not own.tasks[task].steady:
        raise ConfigError(
            "the operator takes another time stride",
            kind="other_stride",
            path=path,
            expected=own.time_stride,
            found=theirs.time_stride,
        )
