"""What the commands of evaluation share: configurations of checkpoints, errors as exit codes."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import typer
import yaml
from rich.console import Console

from ups.checkpoint import read_document
from ups.config import RunConfig, load_config
from ups.data.errors import StoreError
from ups.device import choose_device
from ups.errors import CheckpointError, ConfigError, ConfigWarning, OutputError, UpsError
from ups.eval.baseline_model import Kind
from ups.eval.evaluate import Split
from ups.simulator import Simulator, load_simulator
from ups.simulator_spec import CHECKPOINT_NAME, OPERATOR

EXIT_INTERRUPTED = 5  # as of all our commands


@contextmanager
def telling_errors(log: Console) -> Iterator[None]:
    """Inside, errors end the command with one sentence on `log` and their exit code."""
    try:
        yield
    except (UpsError, StoreError) as error:
        log.print(f"error: {error}", markup=False)
        raise typer.Exit(error.exit_code) from None
    except OSError as error:
        ours = OutputError.of(error, error.filename or "a file", doing="can't be used")
        log.print(f"error: {ours}", markup=False)
        raise typer.Exit(ours.exit_code) from None
    except KeyboardInterrupt:
        log.print("interrupted: the same command goes on")
        raise typer.Exit(EXIT_INTERRUPTED) from None


def resolve_config(path: Path | None, overrides: Sequence[str], *, log: Console) -> RunConfig:
    """Read a configuration and tell its warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ConfigWarning)
        config = load_config(path, overrides=overrides)
    for warning in caught:
        log.print(f"warning: {warning.message}", markup=False)
    return config


def config_of(document: Mapping[str, Any], overrides: Sequence[str], *, log: Console) -> RunConfig:
    """The configuration that a checkpoint was made with, with overrides."""
    with TemporaryDirectory() as folder:  # the one way in, so that the same checks are made
        path = Path(folder) / "config.yaml"
        path.write_text(yaml.safe_dump(dict(document["config"])), encoding="utf-8")
        return resolve_config(path, overrides, log=log)


def open_run(
    checkpoint: Path | None, *, config_path: Path | None, overrides: Sequence[str], log: Console
) -> tuple[RunConfig, Simulator]:
    """A trained simulator and the configuration to use it with.

    Args:
        checkpoint: The operator's file; by default `operator.safetensors` in the configuration's
            `checkpoint.dir`.
        config_path: YAML file; by default the configuration that the checkpoint was made with.
        overrides: `key=value`.
        log: Told warnings.

    Raises:
        CheckpointError: If the checkpoint is missing or damaged.
        ConfigError: If neither is given, or the configuration is wrong.
    """
    if checkpoint is None and config_path is None:
        raise ConfigError("which operator?", expected="--config FILE or --checkpoint FILE")
    if config_path is not None:
        config = resolve_config(config_path, overrides, log=log)
        path = checkpoint or config.checkpoint.dir / CHECKPOINT_NAME
        return config, _load(path, config, log)
    assert checkpoint is not None
    with _hinting_at_training():
        config = config_of(read_document(checkpoint, kind=OPERATOR), overrides, log=log)
    return config, _load(checkpoint, config, log)


def _load(path: Path, config: RunConfig, log: Console) -> Simulator:
    device = choose_device(config.training.device, note=lambda text: log.print(text, markup=False))
    with _hinting_at_training():
        return load_simulator(path, device=str(device))


@contextmanager
def _hinting_at_training() -> Iterator[None]:
    """Inside, a missing checkpoint says how to get one."""
    try:
        yield
    except CheckpointError as error:
        if error.kind == "missing" and error.hint is None:
            error.hint = "train it with `python scripts/train.py --stage operator`, or say --checkpoint FILE"
        raise


def expect_split(split: str) -> Split:
    """One of the splits; "valid" is "val", as for the build.

    Raises:
        ConfigError: For another name.
    """
    known: dict[str, Split] = {"train": "train", "val": "val", "valid": "val", "test": "test"}
    if split not in known:
        raise ConfigError("--split", expected="train, val or test", found=repr(split))
    return known[split]


def expect_kinds(kinds: Sequence[str] | None) -> list[Kind]:
    """Kinds of baselines; all by default.

    Raises:
        ConfigError: For another name.
    """
    known: dict[str, Kind] = {"fno": "fno", "unet": "unet"}
    if unknown := [kind for kind in kinds or () if kind not in known]:
        raise ConfigError("--kind", expected=" or ".join(known), found=repr(unknown[0]))
    return [known[kind] for kind in kinds or known]


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
