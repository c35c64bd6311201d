"""What the commands of evaluation share: a trained simulator with its configuration, flags, the report."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import typer
from rich.console import Console

from ups.commands import resolve_config
from ups.config import RunConfig
from ups.device import choose_device
from ups.errors import CheckpointError, ConfigError
from ups.eval.baseline_model import DEFAULT_KINDS, LABELS, Kind
from ups.eval.neuraloperator_fno import expect_neuraloperator
from ups.eval.operator_rows import OtherOperator, expect_comparable
from ups.eval.report import Report
from ups.eval.report_files import write_report
from ups.eval.report_table import show_evaluation
from ups.eval.training_logs import StageLog, read_stage_logs
from ups.output import Note
from ups.trained.checkpoint import read_document
from ups.trained.simulator import Simulator, load_simulator
from ups.trained.specs import OPERATOR, OPERATOR_FILE

_TRAIN_IT = "train it with `python scripts/train.py --stage operator`"


def config_of(checkpoint: Path, overrides: Sequence[str], *, tell: Note) -> RunConfig:
    """The configuration that an operator's checkpoint was made with, with overrides.

    Raises:
        CheckpointError: If there is no such checkpoint, or it is damaged.
        ConfigError: If it is no configuration of today, or an override is wrong.
    """
    with _hinting():
        document = read_document(checkpoint, kind=OPERATOR)
    where = f"the configuration in {checkpoint}"
    return resolve_config(dict(document["config"]), overrides, tell=tell, name=where)


def open_run(
    checkpoint: Path | None, *, config_path: Path | None, overrides: Sequence[str], tell: Note
) -> tuple[RunConfig, Simulator]:
    """A trained simulator and the configuration to use it with.

    Args:
        checkpoint: The operator's file; by default `operator.safetensors` in the configuration's
            `checkpoint.dir`.
        config_path: YAML file; by default the configuration that the checkpoint was made with.
        overrides: `key=value`.
        tell: Told warnings.

    Raises:
        CheckpointError: If the checkpoint is missing or damaged.
        ConfigError: If neither is given, or the configuration is wrong.
    """
    if checkpoint is None and config_path is None:
        raise ConfigError("which operator?", expected="--config FILE or --checkpoint FILE")
    if checkpoint is None:
        config = resolve_config(config_path, overrides, tell=tell)
        path, hint = config.checkpoint.dir / OPERATOR_FILE, f"{_TRAIN_IT}, or say --checkpoint FILE"
        return config, _load(path, device=_device(config, tell), hint=hint)
    if config_path is None:
        config = config_of(checkpoint, overrides, tell=tell)
    else:
        config = resolve_config(config_path, overrides, tell=tell)
    return config, _load(checkpoint, device=_device(config, tell))


def open_others(
    paths: Sequence[Path], config: RunConfig, simulator: Simulator, *, tell: Note
) -> list[OtherOperator]:
    """Other operators that are to stand in the table of a run.

    One whose configuration is none any more is a row all the same, without what its training took.

    Args:
        paths: Their checkpoints.
        config: Configuration of the run.
        simulator: Of the run.
        tell: Told warnings.

    Raises:
        CheckpointError: If one is missing or damaged.
        ConfigError: As `expect_comparable`.
    """
    found = []
    for path in paths:
        other = OtherOperator(_load(path, device=str(simulator.device)), path, _logs_of(path, tell))
        expect_comparable(other, config, simulator)
        found.append(other)
    return found


def _logs_of(path: Path, tell: Note) -> list[StageLog]:
    """Of the run that made a checkpoint, if it lies where that run has left it."""
    try:
        config = config_of(path, (), tell=lambda text: tell(f"{path}: {text}"))
    except ConfigError as error:  # of an earlier version; it says no more than where its logs are
        tell(f"warning: what its training took isn't told: {error}")
        return []
    own = config.checkpoint.dir / OPERATOR_FILE
    return read_stage_logs(config, note=tell) if path.resolve() == own.resolve() else []


def _device(config: RunConfig, tell: Note) -> str:
    return str(choose_device(config.training.device, note=tell))


def _load(path: Path, *, device: str, hint: str = _TRAIN_IT) -> Simulator:
    with _hinting(hint):
        return load_simulator(path, device=device)


@contextmanager
def _hinting(hint: str = _TRAIN_IT) -> Iterator[None]:
    """Inside, a missing checkpoint says how to get one."""
    try:
        yield
    except CheckpointError as error:
        if error.kind == "missing" and error.hint is None:
            error.hint = hint
        raise


def expect_kinds(kinds: Sequence[str] | None) -> list[Kind]:
    """Kinds of baselines; those that need no other package by default.

    Raises:
        ConfigError: For another name; kind "no_neuraloperator", if its package isn't installed.
    """
    known: dict[str, Kind] = {kind: kind for kind in LABELS}
    if unknown := [kind for kind in kinds or () if kind not in known]:
        raise ConfigError("--kind", expected=" or ".join(known), found=repr(unknown[0]))
    wanted = [known[kind] for kind in kinds or DEFAULT_KINDS]
    if "fno_neuraloperator" in wanted:
        expect_neuraloperator()
    return wanted


def parse_numbers(flag: str, given: Sequence[str]) -> dict[str, float]:
    """Numbers by name from `name=number`.

    Raises:
        ConfigError: For anything else; names the flag.
    """
    found: dict[str, float] = {}
    for one in given:
        name, _, number = one.rpartition("=")
        try:
            found[name] = float(number)
        except ValueError:
            name = ""
        if not name:
            raise ConfigError(flag, expected="name=number", found=repr(one))
    return found


def publish(report: Report, folder: Path, *, as_json: bool, tell: Note) -> None:
    """Write a report; on stdout are its table and where its files lie, or all of it as JSON.

    Args:
        report: What was found.
        folder: Where `report.json`, `report.csv` and `report.html` go.
        as_json: Whether stdout is for a program: then `tell` is told where the files lie.
        tell: Told what is no result.

    Raises:
        OutputError: None of the files is changed then.
    """
    paths = write_report(folder, report)
    if as_json:
        typer.echo(json.dumps(report.to_json(), default=str))
    else:
        show_evaluation(report, Console(soft_wrap=True, highlight=False))
    for path in paths.values():
        (tell if as_json else typer.echo)(str(path))
