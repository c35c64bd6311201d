"""Models that a run is given: the operator that is corrected, the corrector that is distilled; no torch.

Stages refuse what doesn't fit when they are made; runs, and `ups validate config`, before anything is built.
"""

from __future__ import annotations

from pathlib import Path

from ups.config import RunConfig
from ups.errors import ConfigError
from ups.train.saved_state import state_path
from ups.trained.checkpoint import hash_tensors, hinting_where_missing, read_document
from ups.trained.specs import (
    CORRECTOR,
    CORRECTOR_FILE,
    OPERATOR,
    OPERATOR_FILE,
    SimulatorSpec,
    check_simulated_task,
    parse_simulator_spec,
    parse_specs,
)

OTHER_OPERATOR = "other_operator"
HOW_TO_HAVE_OPERATOR = "train it with `ups train --stage operator`, or name one by diffusion.operator"
HOW_TO_HAVE_TEACHER = (
    "train it with `ups train --stage diff_residual`, or name one by training.distill_teacher"
)
_SHOWN = 12  # digits of a hash


def check_corrected_operator(config: RunConfig) -> None:
    """Refuse an operator that the run doesn't train itself and that isn't there, or isn't for its tasks.

    Raises:
        CheckpointError: As `read_document`.
        ConfigError: Kind "other_task".
    """
    path = config.corrected_operator_path
    if not _trains_operator(config):
        _check_tasks(config, parse_simulator_spec(_document(path, OPERATOR, HOW_TO_HAVE_OPERATOR), path))


def check_teacher(config: RunConfig) -> None:
    """Refuse a teacher that the run doesn't train itself and that isn't there, or corrects another operator.

    Raises:
        CheckpointError: As `read_document`.
        ConfigError: Kinds "other_task", "other_operator".
    """
    path, own = config.teacher_path, config.checkpoint.dir / CORRECTOR_FILE
    if config.trains_corrector and path.absolute() == own.absolute():
        return
    spec, corrector = parse_specs(_document(path, CORRECTOR, HOW_TO_HAVE_TEACHER), path)
    _check_tasks(config, spec)
    is_begun = state_path(config, "operator").exists() or config.corrected_operator_path.exists()
    if _trains_operator(config) and not is_begun:
        raise ConfigError(
            "the teacher corrects another operator than the one that this run would train",
            kind=OTHER_OPERATOR,
            path=path,
            found=f"that of operator {corrector.operator_sha256[:_SHOWN]}",
            hint="name its operator by diffusion.operator, with stages.operator.epochs=0; or leave out "
            "training.distill_teacher, and train a corrector, too (stages.diff_residual)",
        )
    check_same_operator(config, corrector.operator_sha256)


def check_same_operator(config: RunConfig, of_teacher: str) -> None:
    """Refuse a teacher of another operator than the run's, where that is there.

    Raises:
        ConfigError: Kind "other_operator", with both hashes.
    """
    path = config.corrected_operator_path
    if not path.exists() or (own := hash_tensors(path)) == of_teacher:
        return
    raise ConfigError(
        "the teacher corrects another operator than the run's",
        kind=OTHER_OPERATOR,
        path=config.teacher_path,
        expected=f"operator {own[:_SHOWN]}, as in {path}",
        found=of_teacher[:_SHOWN],
        hint="train the corrector again with `ups train --stage diff_residual`, name another one by "
        "training.distill_teacher, or the teacher's operator by diffusion.operator",
    )


def _trains_operator(config: RunConfig) -> bool:
    """Whether the run itself makes what is corrected."""
    own, path = config.checkpoint.dir / OPERATOR_FILE, config.corrected_operator_path
    return path.absolute() == own.absolute() and (
        config.stage("operator").epochs > 0 or config.trains_jointly
    )


def _document(path: Path, kind: str, hint: str) -> dict[str, object]:
    with hinting_where_missing(hint):
        return read_document(path, kind=kind)


def _check_tasks(config: RunConfig, spec: SimulatorSpec) -> None:
    for task in config.data.tasks:
        check_simulated_task(spec, task)
