"""Models that a run is given: the operator that is corrected, the corrector that is distilled; no torch.

Stages refuse what doesn't fit when they are made; runs, and `ups validate config`, before anything is built.
"""

from __future__ import annotations

from pathlib import Path

from ups import stages
from ups.config import RunConfig
from ups.errors import ConfigError
from ups.stages import CORRECTOR_MODEL, OPERATOR_MODEL
from ups.train.saved_state import state_path
from ups.trained.checkpoint import hash_tensors, hinting_where_missing, read_document
from ups.trained.specs import (
    CORRECTOR,
    OPERATOR,
    SimulatorSpec,
    check_simulated_task,
    parse_simulator_spec,
    parse_specs,
)

OTHER_OPERATOR = "other_operator"
HOW_TO_HAVE_OPERATOR, HOW_TO_HAVE_TEACHER = (
    f"train it with `ups train --stage {stage.name}`, or name one by {stage.makes[0].key}"
    for stage in (stages.OPERATOR, stages.CORRECTOR)
)
HOW_TO_HAVE_ENCODER = "train it with `--stage autoencoder`, or operator.state=fields does without"
_SHOWN = 12  # digits of a hash


def check_corrected_operator(config: RunConfig) -> None:
    """Refuse an operator that the run doesn't train itself and that isn't there, or isn't for its tasks.

    Raises:
        CheckpointError: As `read_document`.
        ConfigError: Kind "other_task".
    """
    path = config.corrected_operator_path
    if not config.trains_model(OPERATOR_MODEL):
        _check_tasks(config, parse_simulator_spec(_document(path, OPERATOR, HOW_TO_HAVE_OPERATOR), path))


def check_teacher(config: RunConfig) -> None:
    """Refuse a teacher that the run doesn't train itself and that isn't there, or corrects another operator.

    Raises:
        CheckpointError: As `read_document`.
        ConfigError: Kinds "other_task", "other_operator".
    """
    path = config.teacher_path
    if config.trains_model(CORRECTOR_MODEL):
        return
    spec, corrector = parse_specs(_document(path, CORRECTOR, HOW_TO_HAVE_TEACHER), path)
    _check_tasks(config, spec)
    is_begun = state_path(config, stages.OPERATOR.name).exists() or config.corrected_operator_path.exists()
    if config.trains_model(OPERATOR_MODEL) and not is_begun:
        raise ConfigError(
            "the teacher corrects another operator than the one that this run would train",
            kind=OTHER_OPERATOR,
            path=path,
            found=f"that of operator {corrector.operator_sha256[:_SHOWN]}",
            hint="name its operator by diffusion.operator, with stages.operator.epochs=0; or leave out "
            "training.distill_teacher, and train a corrector, too (stages.corrector)",
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
        hint=f"train the corrector again with `ups train --stage {stages.CORRECTOR.name}`, name another one "
        "by training.distill_teacher, or the teacher's operator by diffusion.operator",
    )


def _document(path: Path, kind: str, hint: str) -> dict[str, object]:
    with hinting_where_missing(hint):
        return read_document(path, kind=kind)


def _check_tasks(config: RunConfig, spec: SimulatorSpec) -> None:
    for task in config.data.tasks:
        check_simulated_task(spec, task)
