"""`Simulator`: from fields to a rollout of fields, and the file that holds everything it needs.

What callers give is checked in `ups.trained.rollout_inputs`. Letters: B batch, X the axes of the grid, C
channels, L tokens of a state, D channels of a token, K steps, P parameters.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any, Unpack

import numpy.typing as npt
import torch
from torch import Tensor

from ups.errors import ConfigError
from ups.models.latent_operator import LatentOperator, StepConditions
from ups.models.operator_size import OperatorSize, token_axes
from ups.models.operators import NamedOperator, States, Step
from ups.nn.layers import Condition
from ups.nn.patches import resampled
from ups.trained.autoencoder import Autoencoder, spec_of_autoencoder, spec_within
from ups.trained.checkpoint import load_checkpoint
from ups.trained.model_files import OfTraining, filled, save_model
from ups.trained.rollout_inputs import (
    Numbers,
    RolloutStart,
    check_members,
    check_room,
    check_steps,
    check_within_training,
    frames_of,
    parse_parameters,
    step_times,
)
from ups.trained.specs import (
    OPERATOR,
    SimulatorSpec,
    check_known_encoder,
    check_simulated_task,
    parse_simulator_spec,
)
from ups.trained.state_space import Geometries, StateSpace

Conditions = StepConditions | Step


class Simulator(StateSpace):
    """An operator with what turns fields into its states and back; evaluation needs nothing else.

    The operator's first and last layer embed patches of fields and take them apart again.

    Args:
        spec: Tasks, statistics, architecture.
        autoencoder: Encoder and decoder where states are latents; frozen here.
        allow_code: As of `ups.load`; None where the operator is the caller's own choice.

    Attributes:
        path: The file that it was loaded from; None for one that wasn't.
    """

    def __init__(
        self,
        spec: SimulatorSpec,
        autoencoder: Autoencoder | None = None,
        *,
        allow_code: str | Iterable[str] | None = None,
    ) -> None:
        super().__init__(spec, autoencoder)
        self.operator: Any  # a LatentOperator or a NamedOperator; each takes the conditions that it gave
        if "name" in spec.operator:
            tasks = {name: spec.tasks[name] for name in sorted(spec.tasks)}
            states = States(
                spec.state_dim,
                tokens={name: task.tokens for name, task in tasks.items()},
                boundary={name: task.boundary for name, task in tasks.items()},
                ranges=dict(zip(spec.parameters, spec.ranges, strict=True)),
            )
            self.operator = NamedOperator(**spec.operator, states=states, allow_code=allow_code)
        else:
            self.operator = LatentOperator(
                spec.state_dim,
                num_tasks=len(spec.tasks),
                ranges=spec.ranges,
                size=OperatorSize.from_json(spec.operator),
                axes=token_axes((task.tokens, task.is_periodic) for task in spec.tasks.values()),
            )
        self.geometry = Geometries(self.operator, spec)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.operator.parameters()).device

    @property
    def uses_all_weights(self) -> bool:
        """Whether a step needs every weight of the operator."""
        return self.geometry.need_all_weights(self.operator)

    def conditions(self, parameters_BP: Tensor, *, task: str, dt_B: Tensor) -> Conditions:
        """What the steps by the physical times `dt_B`, shape (B,), take besides the state."""
        condition = Condition(self.spec.task_number(task), parameters_BP)
        conditions: Conditions = self.operator.conditions(condition, dt_B, self.geometry.of(task))
        return conditions

    def advance(self, state_BLD: Tensor, conditions: Conditions, *, task: str) -> Tensor:
        """Advance normalised states by one step; same shape, a new tensor."""
        advanced_BLD = self.operator.advance(state_BLD, conditions, self.geometry.of(task))
        return self.own_channels(advanced_BLD, task=task)

    def step(self, state_BLD: Tensor, parameters_BP: Tensor, *, task: str, dt_B: Tensor) -> Tensor:
        """Advance normalised states by the physical times `dt_B`, shape (B,); same shape, a new tensor."""
        return self.advance(state_BLD, self.conditions(parameters_BP, task=task, dt_B=dt_B), task=task)

    def forward(
        self, state_BLD: Tensor, parameters_BP: Tensor, *, task: str, dt_B: Tensor, steps: int = 1
    ) -> Tensor:
        """Several steps in one call, under the same conditions.

        Returns:
            States after each step, shape (B, K, L, D).
        """
        conditions, states = self.conditions(parameters_BP, task=task, dt_B=dt_B), []
        for _ in range(steps):
            state_BLD = self.advance(state_BLD, conditions, task=task)
            states.append(state_BLD)
        return torch.stack(states, dim=1)

    @torch.no_grad()
    def rollout(
        self,
        fields: Tensor | npt.NDArray[Any],
        steps: int,
        *,
        task: str | None = None,
        parameters: Mapping[str, Numbers] | None = None,
        dt: Numbers | None = None,
        resample: bool = False,
        members: int | None = None,
        seed: int = 0,
        extrapolate: bool = False,
    ) -> Tensor:
        """Predict what follows, decoding every state on the way.

        Args:
            fields: Initial fields in physical units, of a steady task its input, shape (B, X..., C); the axis
                C may be missing where there is one channel.
            steps: K; 1 for a steady task.
            task: Name of the task; may be left out where there is only one.
            parameters: Numbers or arrays (B,) by name; may be left out where training knew one value only.
            dt: Physical time of a step, a number, (B,), or (B, K) for steps of different lengths; by default
                that of the training data.
            resample: Take fields on another number of points of the same domain: they are interpolated onto
                the grid of the training, and what is predicted back onto theirs, by cubics.
            members: M of an ensemble: 1, since all of them would be the same.
            seed: Of an ensemble; has no effect here.
            extrapolate: Take parameters and time steps that training knew nothing like, too.
        Returns:
            Physical units, float32, shape (B, K, X..., C), on the model's device; without the initial state.
            With `members` (B, 1, K, X..., C).
        Raises:
            ConfigError: Another task, a missing or unknown parameter, steps of a steady task; kind
                "outside_training", as `check_within_training`; kind "unknown_encoder" of an operator whose
                states nothing can decode; kind "no_memory"; kind "no_ensemble" of several members.
            ShapeError: If the fields aren't on the task's grid, or with `resample` on one of its kind.
        """
        if members is not None and check_members(members) > 1:
            raise ConfigError(
                f"an operator predicts one future, not {members}",
                kind="no_ensemble",
                path=self.path,
                expected="members=1, or the file of a generative model",
                hint="train one with `ups train --stage corrector`, and load corrector.safetensors",
            )
        conditions: dict[str, Any] = {"parameters": parameters, "dt": dt, "extrapolate": extrapolate}
        start = self.begin(fields, steps, task=task, resample=resample, **conditions)
        state_BLD, frames = start.state_BLD, []
        for dt_B in start.dt_BK.unbind(1):
            state_BLD = self.step(state_BLD, start.parameters_BP, task=start.task, dt_B=dt_B)
            frames.append(self.frame(state_BLD, start.parameters_BP, start))
        stacked = torch.stack(frames, dim=1)
        return stacked if members is None else stacked.unsqueeze(1)

    def begin(
        self,
        fields: Tensor | npt.NDArray[Any],
        steps: int,
        *,
        task: str | None = None,
        parameters: Mapping[str, Numbers] | None = None,
        dt: Numbers | None = None,
        resample: bool = False,
        extrapolate: bool = False,
        members: int | None = None,
        is_streamed: bool = False,
    ) -> RolloutStart:
        """Check what a rollout is given, and encode the first state.

        Args:
            fields: As of `rollout`, like `steps`, `task`, `parameters`, `dt`, `resample` and `extrapolate`.
            members: Of an ensemble of each sample.
            is_streamed: Whether one time step is held at once, not all of them.
        """
        check_known_encoder(self.spec)
        name = check_simulated_task(self.spec, task)
        known = self.spec.tasks[name]
        values_BXC = frames_of(fields, known, device=self.device, any_points=resample)
        points, num = tuple(values_BXC.shape[1:-1]), len(values_BXC)
        steps = check_steps(steps, known)
        room: dict[str, Any] = {"device": self.device, "points": points, "members": members}
        check_room(known, num=num, steps=1 if is_streamed else steps, **room)
        order = self.spec.parameters
        parameters_BP = parse_parameters(parameters or {}, known, order=order, num=num, device=self.device)
        dt_BK = step_times(known.dt if dt is None else dt, num=num, steps=steps, device=self.device)
        check_within_training(known, parameters, dt, extrapolate=extrapolate)
        values_BXC = resampled(values_BXC, known.grid.points, periodic=known.grid.periodic)
        state_BLD = self.encode(values_BXC, parameters_BP, task=name, array=known.input_array)
        return RolloutStart(name, values_BXC, state_BLD, parameters_BP, dt_BK, points)


def save_simulator(
    path: str | os.PathLike[str], simulator: Simulator, **training: Unpack[OfTraining]
) -> None:
    """Write weights of operator and autoencoder, and their specifications.

    Arguments and errors are those of `save_model`.
    """
    inner, spec = spec_within(simulator.autoencoder), simulator.spec.to_json()
    save_model(path, simulator, kind=OPERATOR, spec=spec, training=training, autoencoder=inner)


def load_simulator(
    path: str | os.PathLike[str], *, device: str = "cpu", allow_code: str | Iterable[str] = ()
) -> Simulator:
    """Read a simulator, in evaluation mode; the one file is enough.

    Args:
        allow_code: As of `ups.load`.

    Raises:
        CheckpointError: As `load_checkpoint`; kind "no_spec" or "other_weights" if it doesn't hold together;
            kind "foreign_code".
    """
    tensors, document = load_checkpoint(path, kind=OPERATOR, device=device)
    spec = parse_simulator_spec(document, path)
    inner = spec_of_autoencoder(document, path)
    return filled(
        lambda: Simulator(spec, Autoencoder(inner) if inner else None, allow_code=allow_code),
        tensors,
        path=path,
        device=device,
        is_trusted=":" in spec.operator.get("name", ""),
    )
