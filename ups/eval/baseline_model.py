"""`Baseline`: a trained network with what it needs to predict, and the file that holds it.

Beside our FNO and U-Net it may be the FNO of the package neuraloperator, to check ours against: its layers,
ratios of widths and initialisation are the package's defaults (Kossaifi et al. 2024, arXiv:2412.10354),
inputs, outputs and training are those of `ups.eval.baselines.FourierNeuralOperator`. Letters: B trajectories,
K steps, X and G the axes of the grid, C channels, P parameters, W width.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from ups.config.run import BaselinesConfig, FnoConfig, UnetConfig, shown_amount
from ups.data.fields import FieldsInfo
from ups.data.statistics import measure_statistics
from ups.data.trajectories import Trajectories, given_array
from ups.data.windows import parameter_table
from ups.errors import ConfigError, MissingExtraError, check_installed
from ups.eval.baselines import (
    GROUPS,
    FieldNetwork,
    FourierNeuralOperator,
    UNet,
    beside_fields,
    coordinates_of,
    cut_to,
    padded,
    zeroed,
)
from ups.eval.forecasters import Start, shown_size
from ups.eval.training_logs import StageLog, read_stage_log
from ups.grid import FIELDS, GridSpec
from ups.nn.activation_checkpointing import recomputed
from ups.trained.checkpoint import fill_weights, load_checkpoint, save_checkpoint
from ups.trained.specs import incomplete_spec

BASELINE = "baseline"  # kind of checkpoint
Kind = Literal["fno", "unet", "fno_neuraloperator"]
LABELS: Mapping[Kind, str] = {"fno": "FNO", "unet": "U-Net", "fno_neuraloperator": "FNO of neuraloperator"}
DEFAULT_KINDS: tuple[Kind, ...] = ("fno", "unet")  # those that need no other package
_DT_TOLERANCE = 1e-3
_MODES = {1: 16, 2: 12}  # of both FNOs, along each axis
_LEVELS = 4  # of the U-Net


class NeuraloperatorFNO(FieldNetwork):
    """neuraloperator's FNO; axes that aren't periodic are treated as in our own.

    On two axes version 2.0.0 moves the spectrum by one mode where the first has an odd length, the zeros
    behind it counted (mended later: pull request 688 of neuraloperator), so grids should be even there.

    Args:
        channels: C.
        width: W.
        modes: Fourier modes along each axis, as in our own FNO.
        depth: Layers.
        shared: See `FieldNetwork`.

    Raises:
        MissingExtraError: If the package isn't installed.
    """

    def __init__(
        self, channels: int, *, width: int = 32, modes: int = 16, depth: int = 4, **shared: Any
    ) -> None:
        super().__init__(channels, **shared)
        check_neuraloperator()
        from neuralop.models import FNO

        fno = FNO(
            n_modes=neuraloperator_modes(modes, ndim=self.ndim),
            in_channels=self.num_given,
            out_channels=channels,
            hidden_channels=width,
            n_layers=depth,
            positional_embedding=None,
        )
        # Its parts, not itself: the arguments of its constructor would be among the weights of a checkpoint.
        self.lift, self.layers, self.out = fno.lifting, fno.fno_blocks, fno.projection
        zeroed(self.out.fcs[-1])

    def compute(self, given_BXG: Tensor) -> Tensor:
        """See `FieldNetwork.compute`."""
        x_BWG = padded(self.lift(given_BXG), self.periodic)
        for number in range(self.layers.n_layers):
            x_BWG = self._layer(x_BWG, number)
        return self._output(cut_to(x_BWG, given_BXG.shape[2:]))

    @recomputed
    def _layer(self, x_BWG: Tensor, number: int) -> Tensor:
        after: Tensor = self.layers(x_BWG, number)
        return after

    @recomputed
    def _output(self, x_BWG: Tensor) -> Tensor:
        out: Tensor = self.out(x_BWG)
        return out


def neuraloperator_modes(modes: int, *, ndim: int) -> tuple[int, ...]:
    """`n_modes` of neuraloperator's layers that keep what `SpectralConv(modes=(modes,) * ndim)` keeps.

    It counts modes of both signs; of the last axis, where one sign suffices, it keeps n // 2 + 1.
    """
    return (*(2 * modes,) * (ndim - 1), 2 * (modes - 1))


def check_neuraloperator() -> None:
    """Check that the package is there.

    Raises:
        MissingExtraError: If it isn't.
    """
    check_installed("neuralop", extra="neuraloperator")


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
        check_neuraloperator()
    return wanted


_NETWORKS: Mapping[Kind, Callable[..., FieldNetwork]] = {
    "fno": FourierNeuralOperator,
    "unet": UNet,
    "fno_neuraloperator": NeuraloperatorFNO,
}


@dataclass(frozen=True)
class BaselineSpec:
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
    grid: GridSpec
    given_array: str
    dt: float | None
    stride: int
    parameters: tuple[str, ...]
    statistics: Mapping[str, Mapping[str, list[float]]]
    size: Mapping[str, int]

    def to_json(self) -> dict[str, Any]:
        """JSON values, for `from_json`."""
        return {**asdict(self), "grid": self.grid.to_json(), "parameters": list(self.parameters)}

    def as_stored(self) -> Any:
        """What reading `to_json` from a file gives: lists for tuples."""
        return json.loads(json.dumps(self.to_json()))

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> BaselineSpec:
        """The spec that `to_json` described."""
        grid = GridSpec.from_json(values["grid"])
        return cls(**{**values, "grid": grid, "parameters": tuple(values["parameters"])})


@dataclass(frozen=True)
class Effort:
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


class Baseline(nn.Module):
    """One step ahead on normalised fields, again and again.

    Args:
        spec: What it is.
        effort: What its training was allowed and took; None until it is over.
        log: Of its training, where it lies beside its file.
    """

    coordinates: Tensor  # along axes with ends, a function of the grid alone

    def __init__(self, spec: BaselineSpec, effort: Effort | None = None, log: StageLog | None = None) -> None:
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
        self.network = _NETWORKS[spec.kind](
            channels, num_parameters=len(spec.parameters), periodic=spec.grid.periodic, **spec.size
        )
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
        kind = LABELS[self.spec.kind]
        return kind if self.effort is None else f"{kind} ({self.effort.budget})"

    @property
    def note(self) -> str:
        """Its size and what its training took."""
        return f"{shown_size(self.network)}; {self.effort or 'untrained'}"

    def normalise(self, values: Tensor, *, array: str) -> Tensor:
        """Physical units to normalised ones; fields (..., C), or parameters (..., P) as "parameters"."""
        return (values - self.get_buffer(f"{array}_mean")) / self.get_buffer(f"{array}_std")

    def forward(self, given_BXC: Tensor, parameters_BP: Tensor, *, steps: int) -> Tensor:
        """The frames after a given one, normalised as it is: (B, X..., C) to (B, K, X..., C).

        Parameters are in physical units.
        """
        parameters_BP = self.normalise(parameters_BP, array="parameters")
        beside, frames = beside_fields(parameters_BP, self.coordinates), []
        # Laid out as the later fields are: a compiled step has one form then.
        field_BCX = given_BXC.movedim(-1, 1).clone(memory_format=torch.contiguous_format)
        for _ in range(steps):
            field_BCX = self.advance(field_BCX, beside)
            frames.append(field_BCX.movedim(1, -1))
        return torch.stack(frames, dim=1)

    def advance(self, field_BCX: Tensor, beside: Tensor) -> Tensor:
        """One step from a normalised field and what stands beside it, (B, C, X...) to the same shape."""
        return self.network.advance(field_BCX, beside)

    @torch.no_grad()
    def forecast(self, start: Start, steps: int) -> Tensor:
        """See `ups.eval.forecasters.Forecaster`.

        Raises:
            ConfigError: Kind "time_step", for another time step than that of the training.
        """
        expected = self.spec.dt
        found = expected if start.dt is None else start.dt
        if expected is not None and found is not None and abs(found / expected - 1) > _DT_TOLERANCE:
            raise ConfigError(
                f"time step of {LABELS[self.spec.kind]}", kind="time_step", expected=expected, found=found
            )
        device = self.get_buffer("fields_mean").device
        table = parameter_table(start.parameters, self.spec.parameters, len(start.given))
        given = self.normalise(start.given.to(device), array=self.spec.given_array)
        frames: Tensor = self(given, table.to(device), steps=steps).float()
        return frames * self.get_buffer("fields_std") + self.get_buffer("fields_mean")


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
        size=size | ({"predicts_change": False} if info.steady else {}),
    )


def network_size(kind: Kind, grid: GridSpec, sizes: BaselinesConfig) -> dict[str, int]:
    """Arguments of the network that suit a grid.

    Args:
        kind: Which.
        grid: Of the task.
        sizes: As configured; what they leave open is no more than the grid has room for.

    Raises:
        ConfigError: For fields of more than two axes; kind "size", for more modes or levels than there is
            room for, or a width that groups don't divide.
    """
    if grid.ndim not in _MODES:
        raise ConfigError("baselines are made for 1D and 2D fields", found=f"{grid.ndim} axes")
    if kind == "unet":
        return _unet_size(sizes.unet, grid)
    size: FnoConfig = getattr(sizes, kind)
    most = min(grid.points) // 2
    if size.modes is not None and size.modes > most:
        raise _too_large(f"baselines.{kind}.modes", most, size.modes, grid)
    modes = size.modes or min(_MODES[grid.ndim], most)
    return {"width": size.width, "modes": modes, "depth": size.depth}


def _unet_size(size: UnetConfig, grid: GridSpec) -> dict[str, int]:
    if size.width % GROUPS:
        raise ConfigError(
            "baselines.unet.width", kind="size", expected=f"a multiple of {GROUPS}", found=size.width
        )
    most = 1
    while most < (size.levels or _LEVELS) and all(points % 2**most == 0 for points in grid.points):
        most += 1
    if size.levels is not None and size.levels > most:
        raise _too_large("baselines.unet.levels", most, size.levels, grid)
    return {"width": size.width, "levels": most}


def _too_large(key: str, most: int, found: int, grid: GridSpec) -> ConfigError:
    return ConfigError(
        f"{key} on a grid of {grid.name}", kind="size", expected=f"at most {most}", found=found
    )


def save_baseline(
    path: str | os.PathLike[str],
    model: Baseline,
    *,
    config: Mapping[str, Any],
    report: Mapping[str, Any],
    weights: Mapping[str, Tensor] | None = None,
) -> None:
    """Write a baseline with its effort, the configuration of its training, and the validation's report.

    Args:
        path: Where the file goes; its model card goes beside it.
        model: To be written.
        config: Of the run.
        report: Validation errors by name.
        weights: Its `state_dict`, whole; by default the model's own.
    """
    effort = None if model.effort is None else asdict(model.effort)
    document = {
        "spec": model.spec.to_json(),
        "effort": effort,
        "config": dict(config),
        "report": dict(report),
    }
    tensors = model.state_dict() if weights is None else weights
    save_checkpoint(path, tensors, kind=BASELINE, document=document)


def load_baseline(path: str | os.PathLike[str], *, device: str = "cpu") -> Baseline:
    """Read a baseline, in evaluation mode, with its training's log where that lies beside it.

    Raises:
        MissingExtraError: If it needs a package that isn't installed.
        ConfigError: If its specification is of another version.
        CheckpointError: As `load_checkpoint`; kind "no_spec" or "other_weights" if it doesn't hold together.
    """
    tensors, document = load_checkpoint(path, kind=BASELINE, device=device)
    try:
        spec, effort = BaselineSpec.from_json(document["spec"]), document["effort"]
        log = read_stage_log(Path(path).with_suffix(".jsonl"), spec.kind)
        model = Baseline(spec, effort and Effort(**effort), log).to(device)
    except (ConfigError, MissingExtraError) as error:
        error.path = str(path)
        raise
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise incomplete_spec(error, path, what="baseline") from error
    fill_weights(model, tensors, path=path)
    return model.eval()
