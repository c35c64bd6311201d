"""What runs have left, opened: operators, with the models and logs that lie with them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ups.config import RunConfig, load_config
from ups.config.after_training import ENSEMBLE_ROWS
from ups.config.seeds import family_of, seed_folder, trained_seeds, with_seeds
from ups.device import choose_device
from ups.errors import CheckpointError, ConfigError, MissingExtraError
from ups.eval.baseline_model import Baseline, folder_name, load_baseline, stage_of
from ups.eval.forecasters import missed_by
from ups.eval.training_logs import StageLog, read_stage_logs
from ups.log import logger, prefixed, quiet
from ups.stages import BASELINES, STAGES
from ups.trained.checkpoint import hash_tensors, missing_checkpoint, read_document
from ups.trained.corrected import CorrectedSimulator, candidate_of, load_corrected
from ups.trained.prior import SteadyPrior, load_prior
from ups.trained.simulator import Simulator, load_simulator
from ups.trained.specs import CORRECTOR, OPERATOR, OPERATOR_FILE, PRIOR_FILE, STUDENT

_BASELINES = "baselines"  # in the folder of the checkpoints


@dataclass(frozen=True)
class Run:
    """What the training of an operator with one seed has left.

    Attributes:
        operator: In evaluation mode.
        seed: Of the training.
        config: Of the run with this seed; None where an earlier version made it, and it is none any more.
        path: The operator's checkpoint.
        folder: Of the checkpoints of all seeds, where uses of the test split are counted.
        logs: Of its training, as far as they are known.
        baselines: Trained with the same seed, of any of the tasks.
        corrected: The operator with its corrector, and with a student.
        prior: Of steady solutions.
    """

    operator: Simulator
    seed: int = 0
    config: RunConfig | None = None
    path: Path | None = None
    folder: Path | None = None
    logs: Sequence[StageLog] = ()
    baselines: Sequence[Baseline] = ()
    corrected: Sequence[CorrectedSimulator] = ()
    prior: SteadyPrior | None = None


# --- opening -------------------------------------------------------------------------------------------


def open_runs(
    checkpoint: Path | None, *, config_path: Path | None, overrides: Sequence[str], seeds: Sequence[int] = ()
) -> list[Run]:
    """Open a trained operator, one for each seed, with the configuration to use it with.

    Args:
        checkpoint: The operator's file; by default `operator.safetensors` in the configuration's
            `checkpoint.dir`, or where there is none, in its folders of seeds.
        config_path: YAML file; by default the configuration that the checkpoint was made with.
        seeds: Which seeds; by default all that are there.
    """
    if checkpoint is None and config_path is None:
        raise ConfigError("which operator?", expected="--config FILE or --checkpoint FILE")
    if checkpoint is not None:
        if seeds:
            raise ConfigError("--seeds", expected="--config FILE without --checkpoint", found="--checkpoint")
        _check_operator(checkpoint)
    if checkpoint is not None and config_path is None:
        config = config_of(checkpoint, overrides)
    else:
        config = load_config(config_path, overrides=overrides)
    folder = config.checkpoint.dir
    if checkpoint is not None:
        return [_open_run(config, checkpoint, checkpoint.parent)]
    if not seeds and (seeds := trained_seeds(folder)) and (folder / OPERATOR_FILE).exists():
        flag = f"--seeds {','.join(map(str, seeds))}"
        logger.info(
            f"{folder} has an operator, which is evaluated, and seeds beside it: {flag} evaluates them"
        )
        seeds = ()
    configs = with_seeds(config, seeds, config_path=config_path, overrides=overrides)
    paths = [own.checkpoint.dir / OPERATOR_FILE for own in configs]
    for path in paths:
        if not path.exists():
            flag = "" if path.parent == folder else " --seeds"
            raise missing_checkpoint(path, hint=f"train it with `ups train{flag}`, or say --checkpoint FILE")
    families = {path: family_of(config_of(path, ())) for path in paths} if len(paths) > 1 else {}
    for path, family in families.items():  # else the seeds' spread would be of something else
        if family != families[paths[0]]:
            raise ConfigError(
                f"it was trained with another configuration than {paths[0]}",
                kind="other_training",
                path=path,
                expected="seeds that were trained alike",
                hint="train it again with `ups train --seeds`, or choose others with --seeds",
            )
    return [_open_run(own, path, folder) for own, path in zip(configs, paths, strict=True)]


def _open_run(config: RunConfig, path: Path, folder: Path) -> Run:
    device = choose_device(config.training.device)
    return Run(
        load_simulator(path, device=str(device)), config.seed, config, path, folder, _logs_of(path, config)
    )


def opened(run: Run) -> tuple[RunConfig, Path]:
    """Give configuration of a run that `open_runs` opened, and the folder of the checkpoints of all seeds."""
    assert run.config is not None
    assert run.folder is not None
    return run.config, run.folder


def trained_run(config: RunConfig, *, folder: Path) -> Run:
    """Open what a training with one seed has just left; `folder` is that of all seeds."""
    return _open_run(config, config.checkpoint.dir / OPERATOR_FILE, folder)


def with_companions(run: Run, *, has_members: bool) -> Run:
    """Add the baselines that lie with an operator, and where ensembles are asked for what makes them."""
    assert run.config is not None
    baselines = find_baselines(run.config, run.operator)
    if not has_members or run.path is None:
        return replace(run, baselines=baselines)
    device, prior = str(run.operator.device), run.path.with_name(PRIOR_FILE)
    return replace(
        run,
        baselines=baselines,
        corrected=find_corrected(run.path, device=device),
        prior=load_prior(prior, device=device) if prior.exists() else None,
    )


def open_others(paths: Sequence[Path], config: RunConfig, operator: Simulator) -> list[Run]:
    """Open other operators that are to stand in the table of a run.

    One whose configuration is none any more is a row all the same, without what its training took.

    Args:
        paths: Their checkpoints, or folders of them: with one operator, or with one for each seed.
        config: Of the run, with the tasks that are evaluated.
        operator: Of the run.
    """
    others = []
    for path in operator_paths(paths):
        _check_operator(path)
        theirs = load_simulator(path, device=str(operator.device))
        trained = _trained_with(path)
        seed = 0 if trained is None else trained.seed
        other = Run(theirs, seed, trained, path, logs=_logs_of(path, trained))
        check_comparable(other, config, operator)
        others.append(other)
    return others


def operator_paths(paths: Sequence[Path]) -> Iterator[Path]:
    """Checkpoints themselves; of a folder the operator in it, or where there is none, those of its seeds."""
    for path in paths:
        if not path.is_dir():
            yield path
        elif (path / OPERATOR_FILE).exists() or not (seeds := trained_seeds(path)):
            yield path / OPERATOR_FILE
        else:
            yield from (seed_folder(path, seed) / OPERATOR_FILE for seed in seeds)


def join_alike(runs: Sequence[Run], others: Sequence[Run]) -> tuple[list[Run], list[Run]]:
    """Let other operators that are the run's own, trained with other seeds, join its row."""
    joined, left = list(runs), []
    with quiet():  # the run's own configuration was read before
        trained = None if runs[0].path is None else _trained_with(runs[0].path)
    family = None if trained is None else family_of(trained)
    for other in others:
        is_alike = other.config is not None and family_of(other.config) == family
        if is_alike and other.seed not in [run.seed for run in joined]:
            joined.append(other)
        else:
            left.append(other)
    return joined, left


def config_of(checkpoint: Path, overrides: Sequence[str], *, kind: str = OPERATOR) -> RunConfig:
    """Read the configuration that a checkpoint, by default an operator's, was made with, with overrides.

    It is without metrics of one's own, and without stages whose code isn't imported.
    """
    values = dict(read_document(checkpoint, kind=kind)["config"])
    if isinstance(values.get("evaluation"), dict):  # metrics are code, which a file doesn't import by itself
        values["evaluation"] = {**values["evaluation"], "metrics": ()}
    if values.get("code") and isinstance(stages := values.get("stages"), dict):  # so are stages of one's own
        values["stages"] = {name: keys for name, keys in stages.items() if name in STAGES}
    return load_config(values, overrides=overrides, name=f"the configuration in {checkpoint}")


def _trained_with(path: Path) -> RunConfig | None:
    """The configuration in a checkpoint; None for one of an earlier version that is none any more."""
    try:
        with prefixed(f"{path}: "):
            return config_of(path, ())
    except ConfigError as error:
        logger.warning(f"what its training took isn't known: {error}")
        return None


def _logs_of(path: Path, config: RunConfig | None) -> list[StageLog]:
    """Of the run that made a checkpoint, if it lies where that run has left it."""
    if config is None or path.resolve() != (config.checkpoint.dir / OPERATOR_FILE).resolve():
        return []
    return read_stage_logs(config)


def _check_operator(path: Path) -> None:
    """Refuse the checkpoint of another kind, saying what evaluates it."""
    try:
        read_document(path, kind=OPERATOR)
    except CheckpointError as error:
        if error.kind == "other_kind" and error.found in (CORRECTOR, STUDENT):
            error.hint = (
                f"give the operator that it corrects, such as {path.with_name(OPERATOR_FILE)}; --members "
                "evaluates the corrector and the student beside --checkpoint, too"
            )
        raise


def check_comparable(other: Run, config: RunConfig, operator: Simulator) -> None:
    """Refuse an operator that doesn't predict what a run's own does."""
    own, theirs, path = operator.spec, other.operator.spec, other.path
    if not (own.is_encoder_known and theirs.is_encoder_known):
        problem = "operators are compared as fields, and nothing decodes latents of an unknown encoder"
        raise ConfigError(problem, kind="unknown_encoder", path=path)
    for task in config.data.tasks:
        if task not in theirs.tasks:
            problem, known = "the operator wasn't trained for this task", " or ".join(sorted(theirs.tasks))
            raise ConfigError(problem, kind="other_task", path=path, expected=known, found=task)
        if task not in own.tasks:  # the run itself is refused
            continue
        grid, their_grid = own.tasks[task].grid, theirs.tasks[task].grid
        if their_grid != grid:
            problem = f"the operator is for another grid of {task}"
            raise ConfigError(
                problem, kind="other_grid", path=path, expected=grid.name, found=their_grid.name
            )
        if theirs.stride != own.stride and not own.tasks[task].steady:
            raise ConfigError(
                "the operator takes another time stride",
                kind="other_stride",
                path=path,
                expected=own.stride,
                found=theirs.stride,
            )


# --- what lies with an operator ------------------------------------------------------------------------


def baseline_path(config: RunConfig, kind: str, task: str, limit: str) -> Path:
    """Name the file of a baseline with a budget of "flops", "samples", "seconds" or "steps".

    Each is in a folder of its own, `<checkpoint.dir>/baselines/<task>_<kind>_<budget>`, with its training
    state and log.
    """
    folder = config.checkpoint.dir / _BASELINES / f"{task}_{folder_name(kind)}_{limit}"
    return folder / f"{stage_of(kind)}.safetensors"


def find_baselines(config: RunConfig, operator: Simulator) -> list[Baseline]:
    """Load the baselines of a run that predict what its operator does; others are named."""
    folder, baselines = config.checkpoint.dir / _BASELINES, []
    for path in sorted(folder.glob("*.safetensors")):
        logger.info(f"{path} is left out: an earlier version made it; train it again")
    for path in sorted(path for kind in BASELINES for path in folder.glob(f"*/{kind}.safetensors")):
        try:
            model = load_baseline(path, device=str(operator.device))
        except (CheckpointError, ConfigError, MissingExtraError) as error:
            if isinstance(error, CheckpointError) and error.kind != "foreign_code":
                raise
            error.path = None  # another machine may have had the package, or was told to import the code
            logger.info(f"{path} is left out: {error}")
            continue
        if problem := _mismatch(model, config, operator):
            logger.info(f"{path} is left out: {problem}")
        else:
            baselines.append(model)
    return baselines


def _mismatch(model: Baseline, config: RunConfig, operator: Simulator) -> str | None:
    """Say why a baseline doesn't belong into the table."""
    spec = model.spec
    if spec.task not in config.data.tasks or spec.task not in operator.spec.tasks:
        return f"it is of another task, {spec.task}"
    task = operator.spec.tasks[spec.task]
    if spec.grid != task.grid:
        return f"it is for another grid, {spec.grid.name}"
    if task.steady and spec.size.get("predicts_change", True):
        return "it predicts a change of its input, which is no solution; train it again"
    if spec.stride != operator.spec.stride and not task.steady:
        return f"it takes another time stride, {spec.stride}"
    if model.effort is None:
        return "its training isn't over; the same command continues it"
    return None


def find_corrected(operator: Path, *, device: str) -> list[CorrectedSimulator]:
    """Load what was trained to correct an operator, from the files in its folder; others are named."""
    models, digest = [], hash_tensors(operator)
    for kind, row in ((CORRECTOR, "corrected"), (STUDENT, "student")):
        stage, file = ENSEMBLE_ROWS[row]
        path = operator.with_name(file)
        if not path.exists():
            if (candidate := candidate_of(path)).exists():
                logger.warning(
                    f"{path} isn't there, so it isn't evaluated: {candidate} hasn't passed its gates; "
                    f"`ups train --stage {stage}` trains it to its end and says what it missed, and with "
                    "--export-anyway exports it, marked"
                )
            continue
        model = load_corrected(path, device=device, kind=kind)
        if model.corrector_spec.operator_sha256 != digest:
            logger.info(f"{path} is left out: it corrects another operator; train it again")
            continue
        models.append(model)
        if missed := missed_by(model):
            logger.warning(f"{path} was {missed}")
    return models
