"""Baselines: networks on the fields of one task that stand beside an operator, and the files that hold them.

FNO and U-Net come with the package; any operator of one's own may be one, on patches of the fields. Letters:
B trajectories, K steps, X the axes of the grid, C channels, L tokens, D channels of a token, P parameters.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Unpack

import numpy as np
import torch
from torch import Tensor, nn

from ups.config import RunConfig
from ups.config.architecture import BaselinesConfig
from ups.config.stages import shown_amount
from ups.data.fields import given_array
from ups.data.statistics import measure_statistics
from ups.data.windows import Trajectories, parameter_table
from ups.errors import ConfigError, MissingExtraError, check_installed, needs
from ups.eval.forecasters import Start, shown_size
from ups.eval.training_logs import StageLog, read_stage_log
from ups.grid import FIELDS, Grid, GridSpec, boundary_types, cut_grid
from ups.models.grid_networks import beside_fields, coordinates_of
from ups.models.operator_size import FnoConfig, UnetConfig
from ups.models.operators import NamedOperator, States, Step, dotted_name, operators, read_config
from ups.nn.layers import Condition, patchify, unpatchify
from ups.parsing import Count, Finite, Length, Levels, Parsed, Positive, Statistics
from ups.stages import BASELINES, OWN_BASELINE
from ups.trained.checkpoint import load_checkpoint
from ups.trained.model_files import OfTraining, TrainedModel, filled, save_model
from ups.trained.specs import incomplete_spec

with needs("train"):
    from typing_extensions import TypedDict

BASELINE = "baseline"  # kind of checkpoint
LABELS = {"fno": "FNO", "unet": "U-Net", "fno_neuraloperator": "FNO of neuraloperator"}  # of the package's
DEFAULT_KINDS = ("fno", "unet")  # those that need no other package
_DT_TOLERANCE = 1e-3
_OF_OWN = {"config", "patch_size", "boundary", "ranges", "predicts_change"}  # size of one's own


def check_kinds(kinds: Sequence[str] | None) -> list[str]:
    """Kinds of baselines as files name them; those that need no other package by default.

    Args:
        kinds: Of `LABELS`, or an operator of one's own: a registered name, or module:class.
    """
    checked = []
    for kind in kinds or DEFAULT_KINDS:
        if kind == "fno_neuraloperator":
            check_installed("neuralop", extra="neuraloperator")
        elif kind not in LABELS:
            own = dotted_name(kind) if ":" in kind or kind in operators.names() else kind
            if ":" not in own:  # unknown, or the package's own operator, which has other keys
                expected = f"{', '.join(LABELS)} or module:class of your own"
                raise ConfigError("--kind", expected=expected, found=repr(kind))
            kind = own
        checked.append(kind)
    return checked


def own_kind(config: RunConfig) -> str:
    """The kind that stage `own_baseline` trains, of the caller's own configuration."""
    if (name := config.baselines.own.name) is None:
        raise ConfigError("baselines.own.name", expected="module:class of your own", found="nothing")
    return check_kinds([name])[0]


def stage_of(kind: str) -> str:
    """The stage that trains a kind."""
    return kind if kind in BASELINES else OWN_BASELINE.name


def folder_name(kind: str) -> str:
    """A kind as folders are named: mylab.model:Net is mylab_model_Net."""
    return re.sub(r"\W", "_", kind)


class NetworkSize(TypedDict, total=False):
    """Arguments of an FNO or a U-Net; of an operator of one's own what `OnPatches` takes."""

    width: Count
    modes: Count
    depth: Count
    levels: Levels
    predicts_change: bool
    config: dict[str, Any]
    patch_size: Length
    boundary: list[str]
    ranges: dict[str, tuple[Finite, Finite]]


@dataclass(frozen=True)
class BaselineSpec(Parsed):
    """Everything about a baseline but its weights.

    Attributes:
        kind: "fno", "unet", "fno_neuraloperator", or module:class of one's own.
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

    kind: str
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


def make_spec(kind: str, trajectories: Trajectories, config: RunConfig) -> BaselineSpec:
    """What a baseline will be; reads all training fields for their statistics."""
    fields = trajectories.fields
    info = fields.info
    statistics: dict[str, Any] = {
        array: values.to_json() for array, values in measure_statistics(fields).items()
    }
    columns = fields.parameters(np.arange(len(fields.num_steps)))
    table = np.stack([columns[name] for name in info.parameters], 1) if info.parameters else np.zeros((1, 0))
    # A parameter that doesn't vary says nothing.
    spread = np.where(np.ptp(table, axis=0) > 0, table.std(0), 1.0)
    statistics["parameters"] = {"mean": table.mean(0).tolist(), "std": spread.tolist()}
    size: NetworkSize
    if kind in LABELS:
        # From its input to a solution there is no change: they are different quantities.
        size = network_size(kind, info.grid, config.baselines)
        size = {**size, "predicts_change": False} if info.steady else size
    else:
        patch_size, ends = config.encoder.patch_size, (table.min(0), table.max(0))
        cut_grid(info.grid, patch_size=patch_size, num_tokens=None)
        size = {
            "config": read_config(kind, config.baselines.own.config).model_dump(mode="json"),
            "patch_size": patch_size,
            "boundary": list(boundary_types(info.boundary, ndim=info.grid.ndim)),
            "ranges": dict(zip(info.parameters, np.stack(ends, 1).tolist(), strict=True)),
            "predicts_change": not info.steady,
        }
    return BaselineSpec(
        kind=kind,
        task=info.task,
        grid=info.grid,
        given_array=given_array(info),
        dt=trajectories.dt,
        stride=config.training.stride,
        parameters=info.parameters,
        statistics=statistics,
        size=size,
    )


def network_size(kind: str, grid: GridSpec, sizes: BaselinesConfig) -> NetworkSize:
    """Arguments of the network that suit a grid; errors as of `FnoConfig.on`."""
    config: FnoConfig | UnetConfig = getattr(sizes, kind)
    return config.on(grid.points, key=f"baselines.{kind}")  # type: ignore[return-value]


@dataclass(frozen=True)
class Effort(Parsed):
    """What a training was allowed, and what it took.

    Attributes:
        limit: What the budget counts: "flops", "samples", "seconds" of processor time, or "steps".
        allowed: How many of them.
        steps: Optimiser steps.
        samples: Windows that were trained on, of one step or several.
        flops: Counted floating-point operations of the steps.
        seconds: Their processor time.
        step_ratio: Processor time of a step over one of the operator's, where that was measured.
    """

    limit: Literal["flops", "samples", "seconds", "steps"]
    allowed: float
    steps: int
    samples: int
    flops: float
    seconds: float
    step_ratio: float | None = None

    @property
    def budget(self) -> str:
        """What it was allowed, for people."""
        return shown_amount(self.limit, self.allowed)

    def __str__(self) -> str:
        parts = [
            f"trained for a budget of {self.budget}: {self.steps:,} steps, {self.samples:,} samples",
            shown_amount("flops", self.flops),
            f"{shown_amount('seconds', round(self.seconds, 1))} of processor time",
        ]
        if self.step_ratio is not None:
            parts.append(f"a step takes {self.step_ratio:.2g} times one of the operator's")
        return ", ".join(parts)


class OnPatches(nn.Module):
    """An operator of one's own on the fields of one task, whose patches are its tokens."""

    def __init__(
        self, spec: BaselineSpec, channels: int, *, allow_code: str | Iterable[str] | None = None
    ) -> None:
        super().__init__()
        size, boundary = spec.size, tuple(spec.size["boundary"])
        self.points, self.patch_size = spec.grid.points, size["patch_size"]
        self.dt = 1.0 if spec.dt is None else spec.dt
        tokens = cut_grid(spec.grid, patch_size=self.patch_size, num_tokens=None).tokens
        states = States(
            channels * self.patch_size**spec.grid.ndim,
            tokens={spec.task: tokens},
            boundary={spec.task: boundary},
            ranges=size["ranges"],
        )
        self.operator = NamedOperator(spec.kind, size["config"], states, allow_code=allow_code)
        self.geometry = self.operator.geometry(tokens, boundary, steady=not size["predicts_change"])

    def conditions(self, parameters_BP: Tensor) -> Step:
        """What all steps are given besides the field; parameters in physical units."""
        dt_B = torch.full((len(parameters_BP),), self.dt, device=parameters_BP.device)
        return self.operator.conditions(Condition(0, parameters_BP), dt_B, self.geometry)

    def advance(self, field_BCX: Tensor, step: Step) -> Tensor:
        """See `FieldNetwork.advance`."""
        state_BLD = patchify(field_BCX.movedim(1, -1), patch_size=self.patch_size)
        state_BLD = self.operator.advance(state_BLD, step, self.geometry)
        return unpatchify(state_BLD, points=self.points, patch_size=self.patch_size).movedim(-1, 1)


class Baseline(TrainedModel):
    """One step ahead on normalised fields, again and again.

    Args:
        spec: What it is.
        effort: What its training was allowed and took; None until it is over.
        log: Of its training, where it lies beside its file.
        allow_code: As of `ups.load`; None where an operator of one's own is the caller's own choice.
    """

    coordinates: Tensor  # along axes with ends, a function of the grid alone

    def __init__(
        self,
        spec: BaselineSpec,
        effort: Effort | None = None,
        log: StageLog | None = None,
        *,
        allow_code: str | Iterable[str] | None = None,
    ) -> None:
        super().__init__()
        self.spec, self.effort, self.log = spec, effort, log
        channels = dict(spec.grid.channels)[FIELDS]
        if dict(spec.grid.channels)[spec.given_array] != channels:
            raise ConfigError(
                f"baselines of {spec.task} need an input of as many channels as its solution",
                kind="channels",
                expected=channels,
                found=dict(spec.grid.channels)[spec.given_array],
            )
        self.network: Any  # a `FieldNetwork` or `OnPatches`; each takes the conditions that it is given
        if spec.kind in LABELS:
            self.network = operators.find(spec.kind)(
                channels, num_parameters=len(spec.parameters), periodic=spec.grid.periodic, **spec.size
            )
        else:
            self.network = OnPatches(spec, channels, allow_code=allow_code)
        coordinates = coordinates_of(spec.grid.points, spec.grid.periodic)
        self.register_buffer("coordinates", coordinates, persistent=False)
        for name, statistics in spec.statistics.items():
            for which in ("mean", "std"):
                self.register_buffer(f"{name}_{which}", torch.tensor(statistics[which]), persistent=False)

    @property
    def name(self) -> str:
        """Of its row: its kind, and what its budget counts unless that is seconds."""
        limit = "seconds" if self.effort is None else self.effort.limit
        return self.spec.kind if limit == "seconds" else f"{self.spec.kind}_{limit}"

    @property
    def label(self) -> str:
        """For people: what it is, and its budget."""
        kind = LABELS.get(self.spec.kind, self.spec.kind)
        return kind if self.effort is None else f"{kind} ({self.effort.budget})"

    @property
    def note(self) -> str:
        """Its size and what its training took."""
        settings = ", ".join(f"{key} {value}" for key, value in self.spec.size.get("config", {}).items())
        parts = [shown_size(self.network), f"with {settings}" if settings else ""]
        return f"{' '.join(filter(None, parts))}; {self.effort or 'untrained'}"

    def normalise(self, values: Tensor, *, array: str) -> Tensor:
        """Physical units to normalised ones; fields (..., C), or parameters (..., P) as "parameters"."""
        return (values - self.get_buffer(f"{array}_mean")) / self.get_buffer(f"{array}_std")

    def forward(self, given_BXC: Tensor, parameters_BP: Tensor, *, steps: int) -> Tensor:
        """The frames after a given one, normalised as it is: (B, X..., C) to (B, K, X..., C).

        Parameters are in physical units.
        """
        conditions: Tensor | Step
        if isinstance(self.network, OnPatches):
            conditions = self.network.conditions(parameters_BP)
        else:
            parameters_BP = self.normalise(parameters_BP, array="parameters")
            conditions = beside_fields(parameters_BP, self._coordinates_at(given_BXC.shape[1:-1]))
        # Laid out as the later fields are: a compiled step has one form then.
        field_BCX, frames = given_BXC.movedim(-1, 1).clone(memory_format=torch.contiguous_format), []
        for _ in range(steps):
            field_BCX = self.advance(field_BCX, conditions)
            frames.append(field_BCX.movedim(1, -1))
        return torch.stack(frames, dim=1)

    def _coordinates_at(self, points: tuple[int, ...]) -> Tensor:
        """Of the training's grid, or of another one in the same domain."""
        if self.coordinates.shape[1:] == points:
            return self.coordinates
        return coordinates_of(points, self.spec.grid.periodic).to(self.coordinates.device)

    def advance(self, field_BCX: Tensor, conditions: Tensor | Step) -> Tensor:
        """One step from a normalised field and what all steps are given besides; same shape."""
        advanced: Tensor = self.network.advance(field_BCX, conditions)
        return advanced

    @torch.no_grad()
    def forecast(self, start: Start, steps: int) -> Tensor:
        """See `ups.eval.forecasters.Forecaster`."""
        expected, given_dt = self.spec.dt, start.dt
        if expected is not None and given_dt is not None and abs(given_dt / expected - 1) > _DT_TOLERANCE:
            of = LABELS.get(self.spec.kind, self.spec.kind)
            raise ConfigError(f"time step of {of}", kind="time_step", expected=expected, found=given_dt)
        device = self.get_buffer("fields_mean").device
        table = parameter_table(start.parameters, self.spec.parameters, len(start.given))
        given = self.normalise(start.given.to(device), array=self.spec.given_array)
        frames: Tensor = self(given, table.to(device), steps=steps).float()
        return frames * self.get_buffer("fields_std") + self.get_buffer("fields_mean")


def save_baseline(path: str | os.PathLike[str], model: Baseline, **training: Unpack[OfTraining]) -> None:
    """Write weights, specification and effort of a baseline.

    Arguments and errors are those of `save_model`.
    """
    effort = None if model.effort is None else asdict(model.effort)
    save_model(path, model, kind=BASELINE, spec=model.spec.to_json(), training=training, effort=effort)


def load_baseline(
    path: str | os.PathLike[str], *, device: str = "cpu", allow_code: str | Iterable[str] = ()
) -> Baseline:
    """Read a baseline, in evaluation mode, with its training's log where that lies beside it.

    Args:
        allow_code: As of `ups.load`.
    """
    tensors, document = load_checkpoint(path, kind=BASELINE, device=device)
    try:
        spec = BaselineSpec.from_json(document["spec"])
        effort = None if document["effort"] is None else Effort.from_json(document["effort"])
        is_own = spec.kind not in LABELS
        if is_own and not (":" in spec.kind and spec.size.keys() >= _OF_OWN):
            raise ValueError(f"kind: {spec.kind}")
    except (KeyError, TypeError, ValueError) as error:
        raise incomplete_spec(error, path, what="baseline") from error
    log = read_stage_log(Path(path).with_suffix(".jsonl"), stage_of(spec.kind))
    try:
        build = lambda: Baseline(spec, effort, log, allow_code=allow_code)  # noqa: E731
        return filled(build, tensors, path=path, device=device, is_trusted=is_own)
    except (ConfigError, MissingExtraError) as error:
        error.path = str(path)
        raise
