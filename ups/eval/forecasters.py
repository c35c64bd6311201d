"""Forecasters: whatever predicts, and so is a row of a report; and their rollouts.

Rollouts are autoregressive, from one given frame (a Markov operator needs no more, where PDEBench gives ten)
to the end of the trajectory; of a steady task the constant field is given that decides the solution, which
one step predicts. Letters: B trajectories, T time steps, X the axes of the grid, C channels, P parameters.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard

import numpy as np
import torch
from torch import Tensor, nn

from ups.data.fields import Fields, evenly_spread
from ups.data.observations import masks_of_samples
from ups.data.statistics import frame_items
from ups.data.windows import Trajectories, TrajectoryBatch, parameter_table
from ups.errors import ShapeError
from ups.eval.metrics import Errors, MetricContext, OwnMetric, join, measure, measure_own, shell_energy
from ups.grid import FIELDS, domain_lengths
from ups.models.any_point_decoder import grid_queries
from ups.output import progress_bar
from ups.trained.autoencoder import Autoencoder
from ups.trained.checkpoint import read_any_document
from ups.trained.corrected import CorrectedSimulator
from ups.trained.isometry import DecoderSpectrum
from ups.trained.loading import missed_gates
from ups.trained.prior import SteadyPrior
from ups.trained.simulator import Simulator
from ups.trained.specs import CORRECTOR, STUDENT, SimulatorSpec

_MAX_FRAMES_OF_MEAN = 4096  # of the training split, evenly spread
_FRAMES_AT_ONCE = 256


@dataclass(frozen=True)
class Start:
    """What a forecaster is given; the frames to be predicted are not part of it.

    Attributes:
        task: Name of the task.
        given: Physical units, float32, shape (B, X..., C).
        parameters: Parameters of the equation by name, each (B,).
        dt: Time from one frame to the next; None of a steady task.
    """

    task: str
    given: Tensor
    parameters: Mapping[str, Tensor]
    dt: float | None

    def parameters_of(self, spec: SimulatorSpec) -> dict[str, Tensor]:
        """Those that a model knows of the task."""
        known = spec.tasks[self.task].parameters
        return {name: values for name, values in self.parameters.items() if name in known}


class Forecaster(Protocol):
    """Something that predicts."""

    @property
    def name(self) -> str:
        """Of its row: "operator", "persistence", "mean", "fno", ..."""
        ...

    @property
    def label(self) -> str:
        """For people."""
        ...

    @property
    def note(self) -> str:
        """What the reader has to know, such as its budget."""
        ...

    def forecast(self, start: Start, steps: int) -> Tensor:
        """Predict the frames after the given one, physical units, shape (B, steps, X..., C)."""
        ...


class EnsembleForecaster(Forecaster, Protocol):
    """Something that predicts several equally probable futures."""

    def forecast_members(self, start: Start, steps: int, *, members: int, seed: int) -> Iterator[Tensor]:
        """Predict members time step by time step, so that those of a long rollout needn't fit into memory.

        Args:
            start: Where they all start.
            steps: T.
            members: M.
            seed: Decides all that is random, the same for every forecaster of the same states: a student with
                the seed of its teacher starts at the same noise.

        Yields:
            T times the members of a time step, physical units, shape (B, M, X..., C); the caller's.
        """
        ...


def has_members(forecaster: object) -> TypeGuard[EnsembleForecaster]:
    """Whether it is an `EnsembleForecaster`."""
    return callable(getattr(forecaster, "forecast_members", None))


class Persistence:
    """The given frame for ever; there is none of a steady task."""

    name, label, note = "persistence", "persistence", "the given frame, unchanged"

    def forecast(self, start: Start, steps: int) -> Tensor:
        """See `Forecaster.forecast`; a view."""
        return start.given.unsqueeze(1).expand(-1, steps, *(-1,) * (start.given.ndim - 1))


class TrainingMean:
    """The mean field of the training split at every step.

    Args:
        train: Training fields; at most 4096 frames, evenly spread, are looked at.
    """

    name, label, note = "mean", "training mean", "the mean frame of all training trajectories"

    def __init__(self, train: Fields) -> None:
        samples, steps = frame_items(train, FIELDS)
        chosen = evenly_spread(len(samples), _MAX_FRAMES_OF_MEAN)
        firsts = range(0, len(chosen), _FRAMES_AT_ONCE)
        parts = [chosen[first : first + _FRAMES_AT_ONCE] for first in firsts]
        sums = [train.read(FIELDS, samples[part], steps[part]).sum(0, dtype=np.float64) for part in parts]
        self._mean = torch.from_numpy(np.sum(sums, axis=0) / len(chosen)).float()

    def forecast(self, start: Start, steps: int) -> Tensor:
        """See `Forecaster.forecast`; a view."""
        return self._mean.expand(len(start.given), steps, *self._mean.shape)


class OperatorForecaster:
    """The trained simulator: encoded once, advanced in its states, decoded at every step.

    Args:
        simulator: In evaluation mode.
        note: What the reader has to know.
        name: Of its row.
        label: For people; by default what its states are.
        resample: Whether fields of other resolutions are interpolated onto the training grid, and back.
    """

    def __init__(
        self,
        simulator: Simulator,
        *,
        note: str = "",
        name: str = "operator",
        label: str | None = None,
        resample: bool = False,
    ) -> None:
        self.simulator, self.note, self.name, self._resample = simulator, note, name, resample
        self.label = label or f"{'latent ' if simulator.spec.states == 'latent' else ''}operator"

    def forecast(self, start: Start, steps: int) -> Tensor:
        """See `Forecaster.forecast`."""
        parameters = start.parameters_of(self.simulator.spec)
        # The truth is at hand: whatever it is of, an evaluation measures it.
        conditions: dict[str, Any] = {"parameters": parameters, "dt": start.dt, "extrapolate": True}
        return self.simulator.rollout(
            start.given, steps, task=start.task, resample=self._resample, **conditions
        )


class _Members:
    """What predicts ensembles, and their mean where one forecast is asked for (`EnsembleForecaster`)."""

    def __init__(
        self,
        model: Any,
        *,
        note: str,
        name: str,
        label: str,
        members: int = 16,
        seed: int = 0,
        **options: Any,
    ) -> None:
        self.model, self.note, self.name, self.label = model, note, name, label
        self._members, self._seed, self._options = members, seed, options

    def forecast(self, start: Start, steps: int) -> Tensor:
        """The mean of an ensemble; see `Forecaster.forecast`."""
        frames = self.forecast_members(start, steps, members=self._members, seed=self._seed)
        return torch.stack([frame.mean(dim=1) for frame in frames], dim=1)

    def forecast_members(self, start: Start, steps: int, *, members: int, seed: int) -> Iterator[Tensor]:
        """See `EnsembleForecaster.forecast_members`; a member is the same whatever their number."""
        frames: Iterator[Tensor] = self.model.rollout_steps(
            start.given,
            steps,
            members=members,
            seed=seed,
            task=start.task,
            parameters=start.parameters_of(self.model.spec),
            dt=start.dt,
            extrapolate=True,
            **self._options_of(start),
        )
        return frames

    def _options_of(self, start: Start) -> dict[str, Any]:
        """What the model is asked for besides."""
        return self._options


class CorrectedForecaster(_Members):
    """The operator with its corrector, or with a student: row `corrected` or `student`."""

    def __init__(self, model: CorrectedSimulator, **sampling: Any) -> None:
        kind, drawn = kind_of(model), model.corrector_spec.sampling
        sampler = "adaptive" if drawn.sampler == "adaptive" else f"{drawn.sampler}, {drawn.num_steps}"
        note = f"{kind} {shown_size(model.corrector)}, sampler {sampler}"
        note += "; one forecast is the mean of an ensemble"
        if missed := missed_by(model):
            note += f"; {missed}"
        name = "corrected" if kind == CORRECTOR else kind
        super().__init__(model, name=name, label=f"operator with {kind}", note=note, **sampling)


def kind_of(model: CorrectedSimulator) -> str:
    """Of its checkpoint, "corrector" or "student"."""
    return CORRECTOR if model.corrector_spec.taught is None else STUDENT


def missed_by(model: CorrectedSimulator) -> str:
    """Say that its file was exported in spite of gates; empty if it wasn't."""
    missed = missed_gates(read_any_document(model.path)[1]) if model.path is not None else []
    return f"exported although it missed gates: {'; '.join(missed)}" if missed else ""


class PriorForecaster(_Members):
    """Draws solutions, row `prior`; where it is given inputs at few points, these depend on the sample alone.

    Args:
        model: In evaluation mode.
        seed: Of the ensemble whose mean `forecast` gives, and of the points that are observed.
    """

    def __init__(self, model: SteadyPrior, *, seed: int = 0) -> None:
        label, members = ("prior", 16) if model.prior_spec.method == "flow" else ("direct regression", 1)
        num = model.prior_spec.observed_points
        given = "whole inputs" if num is None else f"inputs at {num} random points, where the others see all"
        note = f"{shown_size(model.network)}, given {given}"
        super().__init__(model, note=note, name="prior", label=label, members=members, seed=seed)

    def observed(self, given_BXC: Tensor) -> Tensor | None:
        """The points at which inputs are observed; None for all of them."""
        num = self.model.prior_spec.observed_points
        return None if num is None else masks_of_samples(given_BXC, num=num, seed=self._seed)

    def _options_of(self, start: Start) -> dict[str, Any]:
        return {"observed": self.observed(start.given)}


class LatentForecaster:
    """The operator on latents that nothing can decode: latents are given, and latents predicted."""

    name, label = "operator", "latent operator"

    def __init__(self, simulator: Simulator, *, note: str = "") -> None:
        self.simulator, self.note = simulator, note

    @torch.no_grad()
    def forecast(self, start: Start, steps: int) -> Tensor:
        """See `Forecaster.forecast`; shape (B, steps, L, D)."""
        simulator, known = self.simulator, self.simulator.spec.tasks[start.task]
        device, num = simulator.device, len(start.given)
        table_BP = parameter_table(start.parameters, simulator.spec.parameters, num).to(device)
        dt_B = torch.full((num,), known.dt if start.dt is None else start.dt, device=device)
        state_BLD = simulator.normalise(start.given.to(device), task=start.task, array=known.input_array)
        states_BKLD = simulator(state_BLD, table_BP, task=start.task, dt_B=dt_B, steps=steps)
        return simulator.normalizer_of(start.task, FIELDS).inverse(states_BKLD)


def operator_forecaster(simulator: Simulator) -> OperatorForecaster | LatentForecaster:
    """The operator in the space in which it can be compared: of fields, unless nothing decodes its states."""
    return OperatorForecaster(simulator) if simulator.spec.is_encoder_known else LatentForecaster(simulator)


class AutoencoderFloor:
    """decoder(encoder(truth)): sees the truth, so it is no forecast but what no latent operator can beat.

    Args:
        model: In evaluation mode.
        latent_dtype: Dtype that latents are rounded to, as in a store.
        spectrum: Singular values of its decoder, for the note.
    """

    name, label = "autoencoder_floor", "autoencoder floor"

    def __init__(
        self,
        model: Autoencoder,
        *,
        latent_dtype: torch.dtype = torch.float32,
        spectrum: DecoderSpectrum | None = None,
    ) -> None:
        self._model, self._latent_dtype = model, latent_dtype
        self.note = f"decoder(encoder(truth)), latents in {str(latent_dtype).removeprefix('torch.')}"
        if spectrum is not None:
            values, condition = spectrum.singular_values, spectrum.condition
            shown = f"{values[0]:.3g} to {values[-1]:.3g}, condition {condition:.3g}"
            self.note += f"; singular values of the decoder {shown}"

    @torch.no_grad()
    def restore(self, truth: Tensor, start: Start) -> Tensor:
        """Encode and decode every frame: (B, T, X..., C) to the same."""
        model, task = self._model, start.task
        device = model.device
        query = grid_queries(truth.shape[2:-1]).to(device)
        parameters = parameter_table(start.parameters, model.spec.parameters, len(truth)).to(device)
        frames = []
        for frame in truth.unbind(1):
            tokens = model.encode(frame.to(device), parameters, task=task)
            tokens = tokens.to(self._latent_dtype).float()
            frames.append(model.decode(tokens, query, parameters, task=task).reshape(frame.shape).cpu())
        return torch.stack(frames, dim=1)


AnyForecaster = Forecaster | AutoencoderFloor


# --- rollouts ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rollout:
    """What came of a forecaster on a split.

    Attributes:
        errors: Of all trajectories, and what metrics of one's own found.
        energy: Mean energy by wave number of the last predicted frame, all channels, shape (K,).
        true_energy: The same of the truth.
        seconds: Wall time of predicting, reading and measuring aside.
    """

    errors: Errors
    energy: Tensor
    true_energy: Tensor
    seconds: float


def roll_out(
    forecaster: AnyForecaster,
    trajectories: Trajectories,
    *,
    batch_size: int | None = None,
    own: Mapping[str, OwnMetric] | None = None,
) -> Rollout:
    """Predict all trajectories of a split and measure the errors, a batch at a time."""
    info = trajectories.info
    lengths = domain_lengths(info.domain_lengths, ndim=info.grid.ndim)
    parts: list[Errors] = []
    energies = [torch.zeros(()), torch.zeros(())]
    seconds = 0.0
    with progress_bar(f"{info.task}: {forecaster.label}", total=len(trajectories)) as advance:
        for batch in trajectories.batches(batch_size):
            began = time.perf_counter()
            prediction = predict(forecaster, batch, trajectories)
            seconds += time.perf_counter() - began
            given = None if info.steady else batch.given
            errors = measure(prediction, batch.truth, given=given, t=trajectories.t, lengths=lengths)
            if own:
                context = MetricContext(
                    info.task, info.channels, batch.given, batch.parameters, trajectories.t, lengths
                )
                errors |= measure_own(own, prediction, batch.truth, context)
            parts.append(errors)
            for i, fields in enumerate((prediction, batch.truth)):
                energies[i] = energies[i] + shell_energy(fields[:, -1:].double()).sum((0, 1, 3))
            advance(float(batch.samples[-1]) + 1)
    energy, true_energy = (total / len(trajectories) for total in energies)
    return Rollout(join(parts), energy, true_energy, seconds)


def predict(forecaster: AnyForecaster, batch: TrajectoryBatch, trajectories: Trajectories) -> Tensor:
    """Predict the frames of a batch, on the CPU, shape (B, T, X..., C)."""
    start = start_of(batch, trajectories)
    if isinstance(forecaster, AutoencoderFloor):
        return forecaster.restore(batch.truth, start)
    prediction = forecaster.forecast(start, trajectories.horizon).cpu()
    if prediction.shape != batch.truth.shape:
        raise ShapeError(
            f"forecast of {forecaster.name}", expected=tuple(batch.truth.shape), found=tuple(prediction.shape)
        )
    return prediction


def start_of(batch: TrajectoryBatch, trajectories: Trajectories) -> Start:
    """What forecasters are given of a batch."""
    return Start(trajectories.info.task, batch.given, batch.parameters, trajectories.dt)


def shown_size(*models: nn.Module) -> str:
    """Number of parameters, for people: "1.23 M parameters"."""
    weights = [weight for model in models for weight in model.parameters()]
    num = sum(weight.numel() * (2 if weight.is_complex() else 1) for weight in weights)
    shown = f"{num / 1e6:.2f} M" if num >= 1e6 else f"{num / 1e3:.0f} k" if num >= 1e4 else f"{num:,}"
    return f"{shown} parameters"
