"""The rows of a task's table: operators, and what they are compared with, on the same trajectories.

Rows are the run's operator, others such as the ablation that advances the fields, and baselines, with what
each took to train, so that budgets can be equal. What was trained alike with other seeds is one row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from ups.config import RunConfig
from ups.data.splits import open_fields, open_latent_fields, open_latent_trajectories, open_trajectories
from ups.data.windows import Fields, Trajectories
from ups.errors import ConfigError
from ups.eval.baseline_model import Baseline
from ups.eval.ensemble_files import corrected_forecaster, prior_forecaster
from ups.eval.equal_budgets import used_stages
from ups.eval.forecasters import (
    AutoencoderFloor,
    Forecaster,
    LatentForecaster,
    OperatorForecaster,
    Persistence,
    TrainingMean,
    shown_size,
)
from ups.eval.reconstruction import spectrum_of_fields
from ups.eval.training_logs import StageLog
from ups.eval.ttc import conditioned
from ups.grid import directed_lengths
from ups.models.operator_size import OperatorSize
from ups.trained.corrected import CorrectedSimulator
from ups.trained.prior import SteadyPrior
from ups.trained.simulator import Simulator
from ups.trained.specs import SimulatorSpec

BEST = "best"  # name of a row
_LABELS = {"latent": "latent operator", "fields": "operator on fields"}


@dataclass(frozen=True)
class ComparedModel:
    """A row to be: a model with every seed that it was trained with, or what isn't trained.

    Attributes:
        members: The model of each seed; one where nothing is trained.
        seeds: Of the members; empty where nothing is trained.
    """

    members: Sequence[Forecaster | AutoencoderFloor]
    seeds: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """Of the row."""
        return self.members[0].name

    @property
    def label(self) -> str:
        """For people; without budgets that aren't the same for all seeds."""
        labels = {member.label for member in self.members}
        first = self.members[0].label
        return first if len(labels) == 1 else f"{first.partition(' (')[0]} (a budget for each seed)"

    @property
    def note(self) -> str:
        """What the reader has to know, of each seed where that differs."""
        notes = [member.note for member in self.members]
        if len({*notes}) == 1:
            return notes[0]
        return "; ".join(f"seed {seed}: {note}" for seed, note in zip(self.seeds, notes, strict=True))


@dataclass(frozen=True)
class TrainedRun:
    """What a run has left that was trained with one seed.

    Attributes:
        simulator: The operator, in evaluation mode.
        seed: Of the training.
        baselines: Trained with the same seed, of any of the tasks.
        logs: Of its training.
        corrected: The operator with its corrector, and with a student, where ensembles are asked for.
        prior: Of steady solutions, where ensembles are asked for.
    """

    simulator: Simulator
    seed: int
    baselines: Sequence[Baseline] = ()
    logs: Sequence[StageLog] = ()
    corrected: Sequence[CorrectedSimulator] = ()
    prior: SteadyPrior | None = None


@dataclass(frozen=True)
class Comparison:
    """What predicts which trajectories.

    Attributes:
        trajectories: Of the split.
        entries: The rows in order, the run's operator first.
        space: Whether states are fields, or latents that nothing can decode.
        train: The training split as it is now.
    """

    trajectories: Trajectories
    entries: Sequence[ComparedModel]
    space: Literal["fields", "latent"]
    train: Fields


def make_comparison(
    config: RunConfig,
    runs: Sequence[TrainedRun],
    task: str,
    *,
    split: str,
    horizon: int | None,
    others: Sequence[ComparedModel] = (),
) -> Comparison:
    """Everything that an operator has to be compared with.

    Args:
        config: Configuration of the run; its evaluation says how many trajectories are taken.
        runs: What it trained, by seed; alike but for that.
        split: As in `ups.data.splits.open_fields`.
        horizon: Steps to predict; None to the end. A steady task has one.
        others: Other operators, on fields that are known; left out where errors are of latents.

    Raises:
        ConfigError: Kinds "other_task", "other_grid", and those of the trajectories.
        ups_store.StoreError: If the data can't be read.
    """
    spec = runs[0].simulator.spec
    if task not in spec.tasks:
        raise ConfigError(
            "the operator wasn't trained for this task",
            kind="other_task",
            expected=" or ".join(sorted(spec.tasks)),
            found=task,
        )
    wanted = min(horizon, 1) if spec.tasks[task].steady and horizon is not None else horizon
    if not spec.is_encoder_known:
        return _compare_latents(config, runs, task, split, wanted)
    return _compare_fields(config, runs, task, split, wanted, others)


def _compare_fields(
    config: RunConfig,
    runs: Sequence[TrainedRun],
    task: str,
    split: str,
    horizon: int | None,
    others: Sequence[ComparedModel],
) -> Comparison:
    source, stride = config.training.field_source, runs[0].simulator.spec.stride
    most = config.evaluation.max_trajectories
    trajectories = open_trajectories(
        config.build, task, split, source=source, stride=stride, horizon=horizon, max_trajectories=most
    )
    _check_same_grid(runs[0].simulator, trajectories)
    train = open_fields(config.build, task, "train", source=source)
    operators = [
        OperatorForecaster(run.simulator, note=operator_note(run.simulator, run.logs)) for run in runs
    ]
    entries = [ComparedModel(operators, _seeds_of(runs))]
    info = trajectories.info
    lengths = directed_lengths(info.domain_lengths, info.coordinates)
    if steered := [row for run in runs for row in conditioned(run.simulator, config, task, lengths=lengths)]:
        entries.append(ComparedModel(steered, _seeds_of(runs)))
    entries += _entries_by_name(_generative(runs, task))
    baselines = ((run.seed, model) for run in runs for model in run.baselines if model.spec.task == task)
    entries += [*others, *_entries_by_name(baselines)]
    entries += [] if trajectories.info.steady else [ComparedModel([Persistence()])]
    entries.append(ComparedModel([TrainingMean(train)]))
    if floor := _floor(runs, train, getattr(torch, config.training.latent_cache_dtype)):
        entries.append(floor)
    return Comparison(trajectories, entries, "fields", train)


def _seeds_of(runs: Sequence[TrainedRun]) -> tuple[int, ...]:
    return tuple(run.seed for run in runs)


def _entries_by_name(found: Iterable[tuple[int, Forecaster]]) -> list[ComparedModel]:
    """A row of each name, of models and the seeds that they were trained with; a seed may lack it."""
    by_name: dict[str, dict[int, Forecaster]] = {}
    for seed, forecaster in found:
        by_name.setdefault(forecaster.name, {})[seed] = forecaster
    return [ComparedModel(list(by_seed.values()), tuple(by_seed)) for by_seed in by_name.values()]


def _generative(runs: Sequence[TrainedRun], task: str) -> Iterator[tuple[int, Forecaster]]:
    """Correctors and students, and priors of a steady task."""
    for run in runs:
        yield from ((run.seed, corrected_forecaster(model)) for model in run.corrected)
    for run in runs:
        if run.prior is not None and task in run.prior.spec.tasks:
            yield run.seed, prior_forecaster(run.prior)


def _floor(runs: Sequence[TrainedRun], train: Fields, dtype: torch.dtype) -> ComparedModel | None:
    """Of each seed's autoencoder; seeds that were given the same one share it."""
    by_weights = {run.simulator.spec.autoencoder_sha256: run for run in runs}
    floors = [
        AutoencoderFloor(model, latent_dtype=dtype, spectrum=spectrum_of_fields(model, train))
        for run in by_weights.values()
        if (model := run.simulator.autoencoder) is not None
    ]
    return ComparedModel(floors, _seeds_of(list(by_weights.values()))) if floors else None


def _compare_latents(
    config: RunConfig, runs: Sequence[TrainedRun], task: str, split: str, horizon: int | None
) -> Comparison:
    """On latents of an unknown encoder: there are no baselines and no floor, as there are no fields."""
    stride = runs[0].simulator.spec.stride
    most = config.evaluation.max_trajectories
    trajectories = open_latent_trajectories(
        config, task, split, stride=stride, horizon=horizon, max_trajectories=most
    )
    train = open_latent_fields(config, task, "train")
    operators = [LatentForecaster(run.simulator, note=operator_note(run.simulator, run.logs)) for run in runs]
    entries = [ComparedModel(operators, _seeds_of(runs))]
    entries += [] if trajectories.info.steady else [ComparedModel([Persistence()])]
    return Comparison(trajectories, [*entries, ComparedModel([TrainingMean(train)])], "latent", train)


def _check_same_grid(simulator: Simulator, trajectories: Trajectories) -> None:
    known, found = simulator.spec.tasks[trajectories.info.task].grid, trajectories.info.grid
    if found != known:
        raise ConfigError(
            "fields on another grid than the operator's",
            kind="other_grid",
            path=trajectories.origin,
            expected=known.name,
            found=found.name,
            hint="check data.reduce_space",
        )


@dataclass(frozen=True)
class OtherOperator:
    """An operator beside the one that a run has trained.

    Attributes:
        simulator: In evaluation mode, on the device of the run's own.
        path: Its checkpoint.
        logs: Of its training, as far as they are known.
        seed: Of its training.
        family: Equal for operators that were trained alike but for the seed; None if that isn't known.
    """

    simulator: Simulator
    path: Path
    logs: Sequence[StageLog] = ()
    seed: int = 0
    family: str | None = None


def entries_of(others: Sequence[OtherOperator], own: Simulator) -> list[ComparedModel]:
    """Their rows, `operator_latent` or `operator_fields` by their states, numbered from the second on."""
    count: Counter[str] = Counter()
    entries = []
    for members in _families(others):
        states = members[0].simulator.spec.states
        count[states] += 1
        number = "" if count[states] == 1 else str(count[states])
        what = f"other {_LABELS[states]}" if states == own.spec.states else _LABELS[states]
        forecasters = [
            OperatorForecaster(
                other.simulator,
                note=f"{other.path}; {operator_note(other.simulator, other.logs)}",
                name="_".join(filter(None, ("operator", states, number))),
                label=" ".join(filter(None, (what, number))),
            )
            for other in members
        ]
        entries.append(ComparedModel(forecasters, tuple(other.seed for other in members)))
    return entries


def entry_of_best(best: OtherOperator) -> ComparedModel:
    """The row `best`: what a run has to improve on, by itself whatever seed it was trained with."""
    note = f"{best.path}; {operator_note(best.simulator, best.logs)}"
    forecaster = OperatorForecaster(best.simulator, note=note, name=BEST, label="best operator so far")
    return ComparedModel([forecaster], (best.seed,))


def _families(others: Sequence[OtherOperator]) -> list[list[OtherOperator]]:
    """Operators of one row each; the same seed again is a row of its own."""
    rows: list[list[OtherOperator]] = []
    for other in others:
        for row in rows:
            is_alike = other.family is not None and row[0].family == other.family
            if is_alike and other.seed not in [member.seed for member in row]:
                row.append(other)
                break
        else:
            rows.append([other])
    return rows


def operator_note(simulator: Simulator, logs: Sequence[StageLog]) -> str:
    """Sizes, and what the training took, as far as logs say."""
    parts = [f"operator {shown_size(simulator.operator)}, {_architecture(simulator.spec)}"]
    if simulator.autoencoder is not None:
        parts.append(f"autoencoder {shown_size(simulator.autoencoder)}")
    parts += [
        f"{log.stage} trained for {log.seconds - log.startup_s:.0f} s after {log.startup_s:.0f} s of "
        f"startup, {log.steps:,} steps, {log.samples:,} samples{_work(log)}"
        for log in used_stages(logs)
    ]
    return "; ".join(parts)


def _work(log: StageLog) -> str:
    """Operations and processor time of a stage; nothing where an earlier version wrote its log."""
    if not log.flops:
        return ""
    encoding = f" and {log.preparation_flops:.3g} for encoding" if log.preparation_flops else ""
    return f", {log.flops:.3g} FLOP{encoding}, {log.processor_s:.0f} s of processor time"


def _architecture(spec: SimulatorSpec) -> str:
    """Levels, what mixes their tokens, and how far attention reaches in the finest."""
    size = OperatorSize.from_json(spec.operator)
    mixers = [size.mixer(level) for level in range(len(size.depths))]
    kinds = [name for name, before in zip(mixers, [None, *mixers], strict=False) if name != before]
    levels = (
        f"{'one level' if len(mixers) == 1 else f'{len(mixers)} levels'} of {' over '.join(kinds)} blocks"
    )
    if mixers[0] not in ("attention", "hybrid"):
        return levels
    longest = max(length for task in spec.tasks.values() for length in task.tokens)
    is_whole = size.window >= longest
    return f"{levels} with {'one window over all tokens' if is_whole else f'windows of {size.window} tokens'}"


def check_comparable(other: OtherOperator, config: RunConfig, own: Simulator) -> None:
    """Refuse an operator that doesn't predict what a run's own does.

    Args:
        config: Configuration of the run, with the tasks that are evaluated.
        own: Of the run.

    Raises:
        ConfigError: Kinds "unknown_encoder", "other_task", "other_grid", "other_stride".
    """
    theirs, path = other.simulator.spec, other.path
    if not (own.spec.is_encoder_known and theirs.is_encoder_known):
        problem = "operators are compared as fields, and nothing decodes latents of an unknown encoder"
        raise ConfigError(problem, kind="unknown_encoder", path=path)
    for task in config.data.tasks:
        if task not in theirs.tasks:
            problem, known = "the operator wasn't trained for this task", " or ".join(sorted(theirs.tasks))
            raise ConfigError(problem, kind="other_task", path=path, expected=known, found=task)
        if task in own.spec.tasks:  # else the run itself is refused
            _check_same_frames(task, theirs, own.spec, path)


def _check_same_frames(task: str, theirs: SimulatorSpec, own: SimulatorSpec, path: Path) -> None:
    expected, found = own.tasks[task].grid, theirs.tasks[task].grid
    if found != expected:
        problem = f"the operator is for another grid of {task}"
        raise ConfigError(problem, kind="other_grid", path=path, expected=expected.name, found=found.name)
    if theirs.stride != own.stride and not own.tasks[task].steady:
        raise ConfigError(
            "the operator takes another time stride",
            kind="other_stride",
            path=path,
            expected=own.stride,
            found=theirs.stride,
        )
