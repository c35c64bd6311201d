"""What an autoencoder is made of and for which tasks: everything about it but the weights. No torch here."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ups.errors import CheckpointError, ConfigError
from ups.grid import GridSpec, TokenGrid, cut_grid

AUTOENCODER = "autoencoder"  # kind of checkpoint
AUTOENCODER_FILE = "autoencoder.safetensors"


@dataclass(frozen=True)
class TaskSpec:
    """What an autoencoder knows about a task.

    Attributes:
        grid: Its grid.
        channels: Names along the channel axis of "fields".
        steady: Whether a sample is one state instead of a trajectory.
        statistics: For each array {"mean": [...], "std": [...]} by channel, of the training split.
    """

    grid: GridSpec
    channels: tuple[str, ...]
    steady: bool
    statistics: Mapping[str, Mapping[str, list[float]]]

    def to_json(self) -> dict[str, Any]:
        """JSON values, for `from_json`."""
        return {
            "grid": self.grid.to_json(),
            "channels": list(self.channels),
            "steady": self.steady,
            "statistics": {name: dict(values) for name, values in self.statistics.items()},
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> TaskSpec:
        """The task that `to_json` described."""
        grid = GridSpec.from_json(values["grid"])
        return cls(grid, tuple(values["channels"]), values["steady"], values["statistics"])


@dataclass(frozen=True)
class AutoencoderSpec:
    """Everything that decides the architecture and the normalisation; the weights aside.

    Attributes:
        tasks: By name, sorted.
        parameters: Names of the equations' parameters, in the order of `Condition.parameters`.
        latent_dim: D.
        num_tokens: L.
        patch_size: Points of a patch along each axis.
        encoder: `width`, `depth` and `num_heads` of the encoders.
        decoder: `width`, `depth`, `num_heads` and `radius` of the decoders.
    """

    tasks: Mapping[str, TaskSpec]
    parameters: tuple[str, ...]
    latent_dim: int
    num_tokens: int
    patch_size: int
    encoder: Mapping[str, int]
    decoder: Mapping[str, int]

    def cut(self, grid: GridSpec) -> TokenGrid:
        """Patches and tokens of a grid."""
        return cut_grid(grid, patch_size=self.patch_size, num_tokens=self.num_tokens)

    def tasks_on(self, grid: GridSpec) -> list[str]:
        """Names of the tasks on a grid, sorted; their places are the numbers in `Condition.task`."""
        return sorted(name for name, task in self.tasks.items() if task.grid == grid)

    def to_json(self) -> dict[str, Any]:
        """JSON values, for `from_json`."""
        return {
            "tasks": {name: self.tasks[name].to_json() for name in sorted(self.tasks)},
            "parameters": list(self.parameters),
            "latent_dim": self.latent_dim,
            "num_tokens": self.num_tokens,
            "patch_size": self.patch_size,
            "encoder": dict(self.encoder),
            "decoder": dict(self.decoder),
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> AutoencoderSpec:
        """The spec that `to_json` described."""
        tasks = {name: TaskSpec.from_json(task) for name, task in values["tasks"].items()}
        return cls(**{**values, "tasks": tasks, "parameters": tuple(values["parameters"])})


def parse_spec(document: Mapping[str, Any], path: str | os.PathLike[str]) -> AutoencoderSpec:
    """The specification in a checkpoint's document.

    Raises:
        CheckpointError: Kind "no_spec" if it isn't there or incomplete, such as without statistics.
    """
    try:
        spec = AutoencoderSpec.from_json(document["spec"])
        for task in spec.tasks.values():
            for array, num_channels in task.grid.channels:
                statistics = task.statistics[array]
                if not len(statistics["mean"]) == len(statistics["std"]) == num_channels:
                    raise ValueError(f"statistics of {array!r}")
        return spec
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        hint = "train the autoencoder again"
        problem = f"its specification is incomplete ({error!r})"
        raise CheckpointError(problem, kind="no_spec", path=path, hint=hint) from error


def expect_task(spec: AutoencoderSpec, task: str | None, path: object) -> str:
    """The task, or the only one if none is named.

    Raises:
        ConfigError: Kind "other_task".
    """
    if task is None and len(spec.tasks) == 1:
        return next(iter(spec.tasks))
    if task is None or task not in spec.tasks:
        expected = " or ".join(sorted(spec.tasks))
        raise ConfigError(
            "the autoencoder wasn't trained for this task",
            kind="other_task",
            path=path,
            expected=expected,
            found=task or "none named",
        )
    return task
