"""What a baseline is but for its weights: kind, task, grid, statistics, size of its network."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from ups.config.architecture import BaselinesConfig
from ups.data.fields import FieldsInfo, given_array
from ups.data.statistics import measure_statistics
from ups.data.windows import Trajectories
from ups.errors import ConfigError, check_installed, needs
from ups.grid import Grid, GridSpec
from ups.models.operator_size import FnoConfig, UnetConfig
from ups.parsing import Count, Levels, Parsed, Positive, Statistics

with needs("train"):
    from typing_extensions import TypedDict

Kind = Literal["fno", "unet", "fno_neuraloperator"]


LABELS: Mapping[Kind, str] = {"fno": "FNO", "unet": "U-Net", "fno_neuraloperator": "FNO of neuraloperator"}


DEFAULT_KINDS: tuple[Kind, ...] = ("fno", "unet")  # those that need no other package


def check_kinds(kinds: Sequence[str] | None) -> list[Kind]:
    """Kinds of baselines; those that need no other package by default.

    Raises:
        ConfigError: For another name.
        MissingExtraError: For neuraloperator's, if its package is missing.
    """
    known: dict[str, Kind] = {kind: kind for kind in LABELS}
    if unknown := [kind for kind in kinds or () if kind not in known]:
        raise ConfigError("--kind", expected=" or ".join(known), found=repr(unknown[0]))
    wanted = [known[kind] for kind in kinds or DEFAULT_KINDS]
    if "fno_neuraloperator" in wanted:
        check_installed("neuralop", extra="neuraloperator")
    return wanted


class NetworkSize(TypedDict, total=False):
    """Arguments of a network, an FNO's or a U-Net's."""

    width: Count
    modes: Count
    depth: Count
    levels: Levels
    predicts_change: bool


@dataclass(frozen=True)
class BaselineSpec(Parsed):
    """Everything about a baseline but its weights.

    Attributes:
        kind: "fno", "unet" or "fno_neuraloperator".
        task: The one task that it is for.
        grid: Its grid.
        given_array: Array that a prediction starts from.
        dt: Time from one frame to the next in training; None of a steady task.
        stride: Stored time steps from one frame to the next.
        parameters: Names of the parameters, in the order that the network takes them.
        statistics: For "fields" and the given array {"mean": [...], "std": [...]} by channel; for
            "parameters" the same by parameter. Of the training split.
        size: Arguments of the network.
    """

    kind: Kind
    task: str
    grid: Grid
    given_array: str
    dt: Positive | None
    stride: Count
    parameters: tuple[str, ...]
    statistics: Mapping[str, Statistics]
    size: NetworkSize

    def to_json(self) -> dict[str, Any]:
        """JSON values, for `from_json`."""
        return {**asdict(self), "grid": self.grid.to_json(), "parameters": list(self.parameters)}

    def as_stored(self) -> Any:
        """What reading `to_json` from a file gives: lists for tuples."""
        return json.loads(json.dumps(self.to_json()))


def make_spec(
    kind: Kind, trajectories: Trajectories, *, stride: int, sizes: BaselinesConfig | None = None
) -> BaselineSpec:
    """What a baseline will be; reads all training fields for their statistics.

    Args:
        kind: Which.
        trajectories: Of the training split of one task.
        stride: Stored time steps from one frame to the next.
        sizes: Of the networks.

    Raises:
        ConfigError: As `network_size`.
    """
    fields = trajectories.fields
    info: FieldsInfo = fields.info
    size = network_size(kind, info.grid, sizes or BaselinesConfig())
    statistics: dict[str, Any] = {
        array: values.to_json() for array, values in measure_statistics(fields).items()
    }
    columns = fields.parameters(np.arange(len(fields.num_steps)))
    table = np.stack([columns[name] for name in info.parameters], 1) if info.parameters else np.zeros((1, 0))
    # A parameter that doesn't vary says nothing.
    spread = np.where(np.ptp(table, axis=0) > 0, table.std(0), 1.0)
    statistics["parameters"] = {"mean": table.mean(0).tolist(), "std": spread.tolist()}
    return BaselineSpec(
        kind=kind,
        task=info.task,
        grid=info.grid,
        given_array=given_array(info),
        dt=trajectories.dt,
        stride=stride,
        parameters=info.parameters,
        statistics=statistics,
        # From its input to a solution there is no change: they are different quantities.
        size={**size, "predicts_change": False} if info.steady else size,
    )


def network_size(kind: Kind, grid: GridSpec, sizes: BaselinesConfig) -> NetworkSize:
    """Arguments of the network that suit a grid; errors as of `FnoConfig.on`."""
    config: FnoConfig | UnetConfig = getattr(sizes, kind)
    return config.on(grid.points, key=f"baselines.{kind}")  # type: ignore[return-value]
