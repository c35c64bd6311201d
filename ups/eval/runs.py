"""Evaluating what a run has trained: its operator and configuration are opened, its baselines found."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ups.config import RunConfig, load_config
from ups.config.seeds import family_of, seed_folder, trained_seeds, with_seeds
from ups.device import choose_device
from ups.errors import CheckpointError, ConfigError
from ups.eval.baseline_files import find_baselines
from ups.eval.comparison import OtherOperator, TrainedRun, check_comparable
from ups.eval.ensemble_files import find_corrected, find_prior
from ups.eval.evaluate import evaluate
from ups.eval.report import Report
from ups.eval.split_uses import check_split, count_test_uses, daily_split, record_test_use
from ups.eval.training_logs import StageLog, read_stage_logs
from ups.log import logger, prefixed, quiet
from ups.output import check_writable
from ups.trained.checkpoint import missing_checkpoint, read_document
from ups.trained.simulator import Simulator, load_simulator
from ups.trained.specs import CORRECTOR, OPERATOR, OPERATOR_FILE, STUDENT


@dataclass(frozen=True)
class OpenedRun:
    """What a run trained with one seed.

    Attributes:
        config: Of the run with this seed.
        simulator: The operator, in evaluation mode.
        path: Its checkpoint.
        folder: Of the checkpoints of all seeds, where uses of the test split are counted.
    """

    config: RunConfig
    simulator: Simulator
    path: Path
    folder: Path


def evaluate_run(
    checkpoint: Path | None,
    *,
    config_path: Path | None,
    overrides: Sequence[str],
    seeds: Sequence[int] = (),
    split: str | None = None,
    horizon: int | None = None,
    members: int | None = None,
    seed: int = 0,
    also: Sequence[Path] = (),
    best: Path | None = None,
    phases: Mapping[str, float] | None = None,
    title: str | None = None,
) -> Report:
    """Evaluate a run's operator, with all its seeds, beside the baselines that lie with it.

    The test split is evaluated only if `split` names it, and every time is counted.

    Args:
        checkpoint: As `open_runs`, like `config_path`, `overrides` and `seeds`.
        split: By default `evaluation.split`, and "dev" where that is "test".
        horizon: Steps to predict; by default as `evaluation.horizon` says.
        members: Of ensembles; by default as `evaluation.members` says.
        seed: Of the members' noise.
        also: Checkpoints of other operators of the same tasks.
        best: Checkpoint of the best operator so far, for a row of its own.
        phases: Seconds of what happened before, by name, for the report.
        title: Heading of the report.

    Raises:
        UpsError: As `open_runs`, `open_others` and `evaluate`; if a use of the test split can't be counted.
        ups_store.StoreError: If the data can't be read.
    """
    runs = open_runs(checkpoint, config_path=config_path, overrides=overrides, seeds=seeds)
    first = runs[0]
    is_test = split is not None and check_split(split) == "test"
    which = "test" if is_test else daily_split(split, first.config.evaluation.split)
    if is_test:
        check_writable(first.folder)
    others = open_others(also, first.config, first.simulator)
    rival = open_others([best] if best else [], first.config, first.simulator)
    has_members = (first.config.evaluation.members if members is None else members) is not None
    trained = [with_others(run, has_members=has_members) for run in runs]
    trained, others = join_alike(trained, others, first)
    report = evaluate(
        first.config,
        first.simulator,
        also=others,
        best=rival[0] if rival else None,
        split=which,
        horizon=horizon,
        members=members,
        seed=seed,
        baselines=trained[0].baselines,
        corrected=trained[0].corrected,
        prior=trained[0].prior,
        logs=trained[0].logs,
        other_seeds=trained[1:],
        phases=phases,
    )
    if is_test:
        paths = [*(run.path for run in runs), *_operators([*also, *([best] if best else [])])]
        record_test_use(first.folder, config=first.config, checkpoints=paths)
    report = replace(report, test_uses=count_test_uses(first.folder))
    return replace(report, title=title) if title else report


def with_others(
    run: OpenedRun,
    *,
    has_members: bool,
) -> TrainedRun:
    """A run, the baselines that lie with it, and where ensembles are asked for what makes them.

    Args:
        run: With its operator.
        has_members: Whether ensembles are asked for.
    """
    device = str(run.simulator.device)
    return TrainedRun(
        run.simulator,
        run.config.seed,
        find_baselines(run.config, run.simulator),
        _logs_of(run.path, run.config),
        find_corrected(run.path, device=device) if has_members else (),
        find_prior(run.path, device=device) if has_members else None,
    )


def join_alike(
    trained: Sequence[TrainedRun], others: Sequence[OtherOperator], first: OpenedRun
) -> tuple[list[TrainedRun], list[OtherOperator]]:
    """Other operators that are the run's own, trained with other seeds, join its row."""
    joined, left = list(trained), []
    with quiet():
        family = _trained_with(first.path)
    for other in others:
        is_alike = family is not None and other.family == family_of(family)
        if is_alike and other.seed not in [run.seed for run in joined]:
            joined.append(TrainedRun(other.simulator, other.seed, logs=other.logs))
        else:
            left.append(other)
    return joined, left


def config_of(checkpoint: Path, overrides: Sequence[str], *, kind: str = OPERATOR) -> RunConfig:
    """The configuration that a checkpoint, by default an operator's, was made with, with overrides.

    Raises:
        CheckpointError: If there is no such checkpoint, or it is damaged.
        ConfigError: If it is no configuration of today, or an override is wrong.
    """
    document = read_document(checkpoint, kind=kind)
    where = f"the configuration in {checkpoint}"
    return load_config(dict(document["config"]), overrides=overrides, name=where)


def open_runs(
    checkpoint: Path | None,
    *,
    config_path: Path | None,
    overrides: Sequence[str],
    seeds: Sequence[int] = (),
) -> list[OpenedRun]:
    """A trained simulator and the configuration to use it with; one for each seed.

    Args:
        checkpoint: The operator's file; by default `operator.safetensors` in the configuration's
            `checkpoint.dir`, or where there is none, in its folders of seeds.
        config_path: YAML file; by default the configuration that the checkpoint was made with.
        seeds: Which seeds; by default all that are there.

    Raises:
        CheckpointError: If a checkpoint is missing or damaged.
        ConfigError: If neither is given, or the configuration is wrong; kind "other_training", if the seeds
            weren't trained alike.
    """
    if checkpoint is None and config_path is None:
        raise ConfigError("which operator?", expected="--config FILE or --checkpoint FILE")
    if checkpoint is not None and seeds:
        raise ConfigError("--seeds", expected="--config FILE without --checkpoint", found="--checkpoint")
    if checkpoint is not None:
        _check_operator(checkpoint)
    if checkpoint is not None and config_path is None:
        config = config_of(checkpoint, overrides)
    else:
        config = load_config(config_path, overrides=overrides)
    device = choose_device(config.training.device)
    folder = config.checkpoint.dir
    if checkpoint is None:
        wanted = seeds or _default_seeds(folder)
        configs = with_seeds(config, wanted, config_path=config_path, overrides=overrides)
        paths = [own.checkpoint.dir / OPERATOR_FILE for own in configs]
    else:
        configs, paths, folder = [config], [checkpoint], checkpoint.parent
    for path in paths:
        if checkpoint is None and not path.exists():
            flag = "" if path.parent == folder else " --seeds"
            raise missing_checkpoint(path, hint=f"train it with `ups train{flag}`, or say --checkpoint FILE")
    _check_alike(paths)
    return [
        OpenedRun(own, load_simulator(path, device=str(device)), path, folder)
        for own, path in zip(configs, paths, strict=True)
    ]


def _check_operator(path: Path) -> None:
    """Refuse the checkpoint of another kind, saying what evaluates it.

    Raises:
        CheckpointError: As `read_document`.
    """
    try:
        read_document(path, kind=OPERATOR)
    except CheckpointError as error:
        if error.kind == "other_kind" and error.found in (CORRECTOR, STUDENT):
            operator = path.with_name(OPERATOR_FILE)
            error.hint = (
                f"give the operator that it corrects, such as {operator}; --members evaluates the corrector "
                "and the student beside --checkpoint, too"
            )
        raise


def _default_seeds(folder: Path) -> tuple[int, ...]:
    """The seeds that were trained into folders of their own; none where an operator lies beside them."""
    seeds = trained_seeds(folder)
    if seeds and (folder / OPERATOR_FILE).exists():
        flag = f"--seeds {','.join(map(str, seeds))}"
        logger.info(
            f"{folder} has an operator, which is evaluated, and seeds beside it: {flag} evaluates them"
        )
        return ()
    return seeds


def _check_alike(paths: Sequence[Path]) -> None:
    """Refuse seeds whose trainings differed otherwise, too: their spread would be of something else."""
    if len(paths) == 1:
        return
    configs = {path: config_of(path, ()) for path in paths}
    first, *others = paths
    for path in others:
        if family_of(configs[path]) != family_of(configs[first]):
            raise ConfigError(
                f"it was trained with another configuration than {first}",
                kind="other_training",
                path=path,
                expected="seeds that were trained alike",
                hint="train it again with `ups train --seeds`, or choose others with --seeds",
            )


def open_others(paths: Sequence[Path], config: RunConfig, simulator: Simulator) -> list[OtherOperator]:
    """Other operators that are to stand in the table of a run.

    One whose configuration is none any more is a row all the same, without what its training took.

    Args:
        paths: Their checkpoints, or folders of them: with one operator, or with one for each seed.
        simulator: Of the run.

    Raises:
        CheckpointError: If one is missing or damaged.
        ConfigError: As `check_comparable`.
    """
    found = []
    for path in _operators(paths):
        _check_operator(path)
        theirs = load_simulator(path, device=str(simulator.device))
        trained = _trained_with(path)
        other = OtherOperator(
            theirs,
            path,
            _logs_of(path, trained),
            seed=0 if trained is None else trained.seed,
            family=None if trained is None else family_of(trained),
        )
        check_comparable(other, config, simulator)
        found.append(other)
    return found


def _operators(paths: Sequence[Path]) -> Iterator[Path]:
    """Checkpoints themselves; of a folder the operator in it, or where there is none, those of its seeds."""
    for path in paths:
        if not path.is_dir():
            yield path
        elif (path / OPERATOR_FILE).exists() or not (seeds := trained_seeds(path)):
            yield path / OPERATOR_FILE
        else:
            yield from (seed_folder(path, seed) / OPERATOR_FILE for seed in seeds)


def _trained_with(path: Path) -> RunConfig | None:
    """The configuration in a checkpoint; None for one of an earlier version that is none any more."""
    try:
        with prefixed(f"{path}: "):
            return config_of(path, ())
    except ConfigError as error:
        logger.warning(f"what its training took isn't known: {error}")
        return None


def _logs_of(
    path: Path,
    config: RunConfig | None,
) -> list[StageLog]:
    """Of the run that made a checkpoint, if it lies where that run has left it."""
    if config is None or path.resolve() != (config.checkpoint.dir / OPERATOR_FILE).resolve():
        return []
    return read_stage_logs(config)
