"""Who predicts: persistence, the training mean, the operator, what draws ensembles; and the floor.

Letters: B trajectories, T time steps, X the axes of the grid, C channels, P parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard

import numpy as np
import torch
from torch import Tensor, nn

from ups.data.observations import masks_of_samples
from ups.data.statistics import frame_items
from ups.data.windows import Fields, evenly_spread, parameter_table
from ups.grid import FIELDS
from ups.models.any_point_decoder import grid_queries
from ups.trained.autoencoder import Autoencoder
from ups.trained.corrected import CorrectedSimulator
from ups.trained.isometry import DecoderSpectrum
from ups.trained.prior import SteadyPrior
from ups.trained.simulator import Simulator
from ups.trained.specs import SimulatorSpec

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
        self, model: Any, *, note: str, name: str, label: str, members: int = 16, seed: int = 0
    ) -> None:
        self.model, self.note, self.name, self.label = model, note, name, label
        self._members, self._seed = members, seed

    def forecast(self, start: Start, steps: int) -> Tensor:
        """The mean of an ensemble; see `Forecaster.forecast`."""
        frames = self.forecast_members(start, steps, members=self._members, seed=self._seed)
        return torch.stack([frame.mean(dim=1) for frame in frames], dim=1)

    def forecast_members(self, start: Start, steps: int, *, members: int, seed: int) -> Iterator[Tensor]:
        """See `EnsembleForecaster.forecast_members`; a member is the same whatever their number."""
        found: Iterator[Tensor] = self.model.rollout_steps(
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
        return found

    def _options_of(self, start: Start) -> dict[str, Any]:
        """What the model is asked for besides."""
        raise NotImplementedError


class CorrectedForecaster(_Members):
    """The operator with its corrector.

    Args:
        model: In evaluation mode.
        note: What the reader has to know.
        name: Of its row.
        label: For people.
        **sampling: `sampler` and `num_sampler_steps`, as `CorrectedSimulator.rollout` has them.
    """

    model: CorrectedSimulator

    def __init__(
        self,
        model: CorrectedSimulator,
        *,
        note: str = "",
        name: str = "corrected",
        label: str = "operator with corrector",
        **sampling: Any,
    ) -> None:
        super().__init__(model, note=note, name=name, label=label)
        self._sampling = sampling

    def _options_of(self, start: Start) -> dict[str, Any]:
        return self._sampling


class PriorForecaster(_Members):
    """Draws solutions; where the prior is given its input at few points, these depend on the sample alone.

    Args:
        model: In evaluation mode.
        note: What the reader has to know.
        seed: Of the ensemble whose mean `forecast` gives, and of the points that are observed.
    """

    model: SteadyPrior

    def __init__(self, model: SteadyPrior, *, note: str = "", seed: int = 0) -> None:
        label, members = ("prior", 16) if model.prior_spec.method == "flow" else ("direct regression", 1)
        super().__init__(model, note=note, name="prior", label=label, members=members, seed=seed)

    def observed(self, given_BXC: Tensor) -> Tensor | None:
        """The points at which inputs are observed; None for all of them."""
        num = self.model.prior_spec.observed_points
        return None if num is None else masks_of_samples(given_BXC, num=num, seed=self._seed)

    def _options_of(self, start: Start) -> dict[str, Any]:
        return {"observed": self.observed(start.given)}


class LatentForecaster:
    """The operator on latents that nothing can decode: latents are given, and latents predicted.

    Args:
        simulator: In evaluation mode.
        note: What the reader has to know.
    """

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


def shown_size(*models: nn.Module) -> str:
    """Number of parameters, for people: "1.23 M parameters"."""
    weights = [weight for model in models for weight in model.parameters()]
    num = sum(weight.numel() * (2 if weight.is_complex() else 1) for weight in weights)
    shown = f"{num / 1e6:.2f} M" if num >= 1e6 else f"{num / 1e3:.0f} k" if num >= 1e4 else f"{num:,}"
    return f"{shown} parameters"
