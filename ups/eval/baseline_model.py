"""`Baseline`: a trained network with what it needs to predict, and the file that holds it.

Letters: B trajectories, K steps, X the axes of the grid, C channels, P parameters.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, Unpack

import torch
from torch import Tensor

from ups.config.stages import shown_amount
from ups.data.windows import parameter_table
from ups.errors import ConfigError, MissingExtraError
from ups.eval.baseline_spec import LABELS, BaselineSpec
from ups.eval.forecasters import Start, shown_size
from ups.eval.training_logs import StageLog, read_stage_log
from ups.grid import FIELDS
from ups.models.grid_networks import beside_fields, coordinates_of
from ups.models.operators import operators
from ups.parsing import Parsed
from ups.trained.checkpoint import load_checkpoint
from ups.trained.model_files import OfTraining, TrainedModel, filled, save_model
from ups.trained.specs import incomplete_spec

BASELINE = "baseline"  # kind of checkpoint
_DT_TOLERANCE = 1e-3


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


class Baseline(TrainedModel):
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
        self.network = operators.find(spec.kind)(
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
        beside, frames = beside_fields(parameters_BP, self._coordinates_at(given_BXC.shape[1:-1])), []
        # Laid out as the later fields are: a compiled step has one form then.
        field_BCX = given_BXC.movedim(-1, 1).clone(memory_format=torch.contiguous_format)
        for _ in range(steps):
            field_BCX = self.advance(field_BCX, beside)
            frames.append(field_BCX.movedim(1, -1))
        return torch.stack(frames, dim=1)

    def _coordinates_at(self, points: tuple[int, ...]) -> Tensor:
        """Of the training's grid, or of another one in the same domain."""
        if self.coordinates.shape[1:] == points:
            return self.coordinates
        return coordinates_of(points, self.spec.grid.periodic).to(self.coordinates.device)

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


def save_baseline(path: str | os.PathLike[str], model: Baseline, **training: Unpack[OfTraining]) -> None:
    """Write weights, specification and effort of a baseline.

    Arguments and errors are those of `save_model`.
    """
    effort = None if model.effort is None else asdict(model.effort)
    save_model(path, model, kind=BASELINE, spec=model.spec.to_json(), training=training, effort=effort)


def load_baseline(path: str | os.PathLike[str], *, device: str = "cpu") -> Baseline:
    """Read a baseline, in evaluation mode, with its training's log where that lies beside it.

    Raises:
        MissingExtraError: If it needs a package that isn't installed.
        ConfigError: If its specification is of another version.
        CheckpointError: As `load_checkpoint`; kind "no_spec" or "other_weights" if it doesn't hold together.
    """
    tensors, document = load_checkpoint(path, kind=BASELINE, device=device)
    try:
        spec = BaselineSpec.from_json(document["spec"])
        effort = None if document["effort"] is None else Effort.from_json(document["effort"])
    except (KeyError, TypeError, ValueError) as error:
        raise incomplete_spec(error, path, what="baseline") from error
    log = read_stage_log(Path(path).with_suffix(".jsonl"), spec.kind)
    try:
        return filled(lambda: Baseline(spec, effort, log), tensors, path=path, device=device)
    except (ConfigError, MissingExtraError) as error:
        error.path = str(path)
        raise
