"""Where the records of a run go: a file of JSON lines, and Weights & Biases where it is switched on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from ups.config import RunConfig
from ups.config.run import WandbConfig
from ups.errors import ConfigError

Record = Mapping[str, Any]


class Sink(Protocol):
    """Takes the records of a run.

    Attributes:
        run_id: Id under which another service knows the run, to continue it.
    """

    run_id: str | None

    def write(self, record: Record) -> None:
        """Take a record: JSON values by name, with `event`, `stage`, `time` and mostly `step`."""
        ...

    def close(self, *, has_failed: bool) -> None:
        """The run is over."""
        ...


class JsonLines:
    """Appends every record to a file, one JSON document a line.

    Args:
        path: The file; its folder is made.
    """

    run_id: str | None = None

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")

    def write(self, record: Record) -> None:
        """See `Sink.write`; a reader sees the line at once."""
        self._file.write(json.dumps(dict(record)) + "\n")
        self._file.flush()

    def close(self, *, has_failed: bool) -> None:
        """See `Sink.close`."""
        self._file.close()


class WandbSink:
    """Sends numbers to Weights & Biases; `WANDB_MODE=offline` keeps them on this machine.

    Args:
        config: Project, names and tags.
        stage: Job type of the run.
        folder: Where wandb keeps its files.
        run_config: The run's resolved configuration.
        run_id: Run to continue, or None.

    Attributes:
        run_id: The run's id, for continuing it.

    Raises:
        ConfigError: Kinds "no_wandb" if it isn't installed, "wandb" if it can't begin.
    """

    def __init__(
        self, config: WandbConfig, *, stage: str, folder: Path, run_config: Record, run_id: str | None
    ) -> None:
        wandb = import_wandb()
        folder.mkdir(parents=True, exist_ok=True)
        try:
            self._run = wandb.init(
                project=config.project,
                entity=config.entity,
                name=config.run_name,
                group=config.group,
                tags=list(config.tags),
                notes=config.notes,
                job_type=stage,
                dir=str(folder),
                config=dict(run_config),
                id=run_id,
                resume="allow",
            )
        except wandb.Error as error:
            raise ConfigError(
                f"Weights & Biases can't begin a run ({str(error).strip()})",
                kind="wandb",
                hint="set WANDB_MODE=offline, run `wandb login`, or logging.wandb.enabled=false",
            ) from error
        self.run_id: str | None = self._run.id

    def write(self, record: Record) -> None:
        """Send the numbers of a record under its step; what a stage reports becomes the run's summary."""
        if record["event"] == "end":
            self._run.summary.update(_numbers(record.get("report", {})))
            return
        if numbers := _numbers({name: value for name, value in record.items() if name not in _NO_METRICS}):
            self._run.log(numbers, step=record.get("step"))

    def close(self, *, has_failed: bool) -> None:
        """See `Sink.close`; waits until everything is sent."""
        self._run.finish(exit_code=int(has_failed))


_NO_METRICS = ("event", "stage", "time", "step", "config")


def _numbers(values: Record, prefix: str = "") -> dict[str, float]:
    """Numbers at any depth, names joined by slashes."""
    found: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found |= _numbers(value, f"{prefix}{name}/")
        elif isinstance(value, int | float):
            found[f"{prefix}{name}"] = value
    return found


def import_wandb() -> Any:
    """The module.

    Raises:
        ConfigError: Kind "no_wandb".
    """
    try:
        return import_module("wandb")
    except ImportError as error:
        raise ConfigError(
            "logging.wandb.enabled = true, but wandb isn't installed",
            kind="no_wandb",
            hint="pip install 'ups-store[wandb]', or logging.wandb.enabled=false",
        ) from error


def open_sinks(config: RunConfig, stage: str, *, run_id: str | None) -> list[Sink]:
    """The sinks that a configuration asks for.

    Args:
        config: Configuration of the run.
        stage: Name of the stage.
        run_id: Run at Weights & Biases to continue.

    Raises:
        ConfigError: As `WandbSink`.
    """
    folder = config.checkpoint.dir
    sinks: list[Sink] = []
    if config.logging.wandb.enabled:
        values = config.model_dump(mode="json")
        sinks.append(
            WandbSink(config.logging.wandb, stage=stage, folder=folder, run_config=values, run_id=run_id)
        )
    sinks.append(JsonLines(config.training.log_path or folder / f"{stage}.jsonl"))
    return sinks
