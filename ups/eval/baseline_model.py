"""`Baseline`: a trained network with what it needs to predict, and the file that holds it.

Beside our FNO and U-Net it may be the FNO of the package neuraloperator, to check ours against: its layers,
ratios of widths and initialisation are the package's defaults (Kossaifi et al. 2024, arXiv:2412.10354),
inputs, outputs and training are those of `ups.eval.baselines.FourierNeuralOperator`. Letters: B trajectories,
K steps, X and G the axes of the grid, C channels, P parameters, W width.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ups.data.windows import parameter_table
from ups.errors import ConfigError, MissingExtraError, check_installed
from ups.eval.baselines import FieldNetwork, FourierNeuralOperator, UNet, padding_behind, zeroed
from ups.eval.forecasters import Start, shown_size
from ups.grid import FIELDS, GridSpec
from ups.trained.checkpoint import fill_weights, load_checkpoint, read_document, save_checkpoint
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
        x_BWG = self.lift(given_BXG)
        grid = x_BWG.shape[2:]
        x_BWG = F.pad(x_BWG, padding_behind(grid, self.periodic))
        for number in range(self.layers.n_layers):
            x_BWG = self.layers(x_BWG, number)
        out: Tensor = self.out(x_BWG[(slice(None), slice(None), *(slice(length) for length in grid))])
        return out


def neuraloperator_modes(modes: int, *, ndim: int) -> tuple[int, ...]:
    """`n_modes` of neuraloperator's layers that keep what `SpectralConv(modes=modes)` keeps.

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


_NETWORKS: Mapping[Kind, Callable[..., nn.Module]] = {
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

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> BaselineSpec:
        """The spec that `to_json` described."""
        grid = GridSpec.from_json(values["grid"])
        return cls(**{**values, "grid": grid, "parameters": tuple(values["parameters"])})


@dataclass(frozen=True)
class Effort:
    """What a training took, and what it was allowed.

    Attributes:
        limit: "seconds" or "samples".
        allowed: How many of them.
        seconds: Wall time of the training.
        samples: Windows that were trained on, of one step or several.
        steps: Optimiser steps.
        curve: Pairs of optimiser step and training loss.
    """

    limit: Literal["seconds", "samples"]
    allowed: float
    seconds: float
    samples: int
    steps: int
    curve: tuple[tuple[int, float], ...] = field(default=(), repr=False)

    @property
    def budget(self) -> str:
        """What it was allowed, for people."""
        return f"{self.allowed:,.4g} s" if self.limit == "seconds" else f"{self.allowed:,.0f} samples"

    def __str__(self) -> str:
        return (
            f"trained for a budget of {self.budget}: {self.seconds:.0f} s, {self.steps:,} steps, "
            f"{self.samples:,} samples"
        )


class Baseline(nn.Module):
    """One step ahead on normalised fields, again and again.

    Args:
        spec: What it is.
        effort: What its training took; None before.
    """

    def __init__(self, spec: BaselineSpec, effort: Effort | None = None) -> None:
        super().__init__()
        self.spec, self.effort = spec, effort
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
        for name, statistics in spec.statistics.items():
            for which in ("mean", "std"):
                self.register_buffer(f"{name}_{which}", torch.tensor(statistics[which]), persistent=False)

    @property
    def name(self) -> str:
        """Of its row: its kind, and what its budget counts unless that is seconds."""
        counts_samples = self.effort is not None and self.effort.limit == "samples"
        return f"{self.spec.kind}_samples" if counts_samples else self.spec.kind

    @property
    def label(self) -> str:
        """For people: what it is, and its budget."""
        kind = LABELS[self.spec.kind]
        return kind if self.effort is None else f"{kind} ({self.effort.budget})"

    @property
    def note(self) -> str:
        """Its size and what its training took."""
        return f"{shown_size(self.network)}; {self.effort or 'untrained'}"

    def forward(self, given_BXC: Tensor, parameters_BP: Tensor, *, steps: int) -> Tensor:
        """The frames after a given one, physical units: (B, X..., C) to (B, K, X..., C)."""
        known, array = self.get_buffer, self.spec.given_array
        parameters_BP = (parameters_BP - known("parameters_mean")) / known("parameters_std")
        field_BXC = (given_BXC - known(f"{array}_mean")) / known(f"{array}_std")
        field_BCX = field_BXC.movedim(-1, 1)
        frames = []
        for _ in range(steps):
            field_BCX = self.network(field_BCX, parameters_BP)
            frames.append(field_BCX.movedim(1, -1))
        return torch.stack(frames, dim=1) * known("fields_std") + known("fields_mean")

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
        frames: Tensor = self(start.given.to(device), table.to(device), steps=steps)
        return frames


def network_size(kind: Kind, grid: GridSpec) -> dict[str, int]:
    """Arguments of the network that suit a grid: no more modes or levels than it has room for.

    Raises:
        ConfigError: For fields of more than two axes.
    """
    if grid.ndim not in _MODES:
        raise ConfigError("baselines are made for 1D and 2D fields", found=f"{grid.ndim} axes")
    if kind != "unet":
        return {"modes": min(_MODES[grid.ndim], min(grid.points) // 2)}
    levels = 1
    while levels < _LEVELS and all(points % 2**levels == 0 for points in grid.points):
        levels += 1
    return {"levels": levels}


def save_baseline(path: str | os.PathLike[str], model: Baseline, *, settings: Mapping[str, Any]) -> None:
    """Write a trained baseline with the settings of its training, JSON values."""
    assert model.effort is not None
    document = {"spec": model.spec.to_json(), "effort": asdict(model.effort), "settings": dict(settings)}
    save_checkpoint(path, model.state_dict(), kind=BASELINE, document=document)


def trained_with(path: str | os.PathLike[str]) -> Any:
    """The settings that `save_baseline` was given; None where a file has none."""
    return read_document(path, kind=BASELINE).get("settings")


def load_baseline(path: str | os.PathLike[str], *, device: str = "cpu") -> Baseline:
    """Read a baseline, in evaluation mode.

    Raises:
        MissingExtraError: If it needs a package that isn't installed.
        ConfigError: If its specification is of another version.
        CheckpointError: As `load_checkpoint`; kind "no_spec" or "other_weights" if it doesn't hold together.
    """
    tensors, document = load_checkpoint(path, kind=BASELINE, device=device)
    try:
        effort = {**document["effort"], "curve": tuple(map(tuple, document["effort"]["curve"]))}
        model = Baseline(BaselineSpec.from_json(document["spec"]), Effort(**effort)).to(device)
    except (ConfigError, MissingExtraError) as error:
        error.path = str(path)
        raise
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise incomplete_spec(error, path, what="baseline") from error
    fill_weights(model, tensors, path=path)
    return model.eval()
