"""`SteadyPrior`: a generative model of steady solutions, given their input, perhaps at few points; its file.

A solution is drawn by a flow from noise to a normalised state, latents or patches of the field, given the
input and the parameters. Where the input is known at some points only, each token is given the values of its
own points, 0 where they are unknown, beside a mask that says which these are. By direct regression, the same
network predicts the mean of all solutions that go with what is given.

Letters: B batch, M members, X the axes of the grid, C channels, L tokens, D channels of a token, P
parameters, N = B M rows.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Unpack

import numpy.typing as npt
import torch
from torch import Tensor, nn

from ups.diffusion.paths import member_generators, member_noise
from ups.diffusion.samplers import sample
from ups.errors import ConfigError, ShapeError
from ups.models.corrector import FlowConditions, VelocityNetwork
from ups.models.operator_size import OperatorSize, token_axes
from ups.nn.layers import Condition, cut_cells
from ups.trained.autoencoder import Autoencoder, Normalizer, spec_of_autoencoder, spec_within
from ups.trained.checkpoint import load_checkpoint
from ups.trained.model_files import OfTraining, filled, save_model
from ups.trained.rollout_inputs import (
    Numbers,
    check_members,
    check_room,
    check_seed,
    check_steps,
    check_within_training,
    frames_of,
    parse_parameters,
)
from ups.trained.specs import (
    PRIOR,
    PriorSpec,
    Sampling,
    SimulatedTask,
    SimulatorSpec,
    check_simulated_task,
    parse_joined_specs,
)
from ups.trained.state_space import Geometries, StateSpace

_ROWS = 256  # members, of all samples, that are drawn at once
_REGRESSION = Sampling(sampler="euler", num_steps=1)  # from no noise: what the network says at flow time 0


class SteadyPrior(StateSpace):
    """A prior of steady solutions, with what turns fields into its states and back.

    Args:
        spec: Steady tasks, statistics, architecture.
        prior: What else it is.
        autoencoder: Encoder and decoder where states are latents; frozen here.
    """

    def __init__(self, spec: SimulatorSpec, prior: PriorSpec, autoencoder: Autoencoder | None = None) -> None:
        super().__init__(spec, autoencoder)
        self.prior_spec = prior
        self._num_given = prior.num_given(spec)
        self.network = VelocityNetwork(
            spec.state_dim,
            num_given=self._num_given,
            num_tasks=len(spec.tasks),
            ranges=spec.ranges,
            size=OperatorSize.from_json(spec.operator),
            axes=token_axes((task.tokens, task.is_periodic) for task in spec.tasks.values()),
        )
        self.geometry = Geometries(self.network, spec)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.network.out.weight.device

    @property
    def uses_all_weights(self) -> bool:
        """Whether a velocity needs every weight of the network."""
        return self.geometry.need_all_weights(self.network)

    def given(
        self, values_BXC: Tensor, observed_BX: Tensor | None, parameters_BP: Tensor, *, task: str
    ) -> tuple[Tensor, ...]:
        """What the network is given of the input.

        Args:
            values_BXC: The input in physical units; where it isn't observed, any finite numbers.
            observed_BX: Where it is, bool, shape (B, X...); None for everywhere.
            parameters_BP: In the order of `spec.parameters`, NaN where unknown.
        Returns:
            States of shape (B, L, D), as many as the network takes.
        """
        known = self.spec.tasks[task]
        if self.prior_spec.is_encoded(self.spec):
            return (self.encode(values_BXC, parameters_BP, task=task, array=known.input_array),)
        values_BXC = self._field_normalizer(task)(values_BXC)
        if self.prior_spec.observed_points is not None:
            assert observed_BX is not None
            mask_BXC = observed_BX.unsqueeze(-1).to(values_BXC.dtype)
            values_BXC = torch.cat([values_BXC * mask_BXC, mask_BXC], dim=-1)
        sizes = tuple(num // cells for num, cells in zip(known.grid.points, known.tokens, strict=True))
        tokens = cut_cells(values_BXC, sizes).flatten(2)
        missing = self._num_given * self.spec.state_dim - tokens.shape[-1]
        return nn.functional.pad(tokens, (0, missing)).split(self.spec.state_dim, dim=-1)

    def conditions(self, parameters_BP: Tensor, *, task: str) -> FlowConditions:
        """What flows are under besides the input."""
        condition = Condition(self.spec.task_number(task), parameters_BP)
        dt_B = torch.ones(len(parameters_BP), device=parameters_BP.device)
        return self.network.conditions(condition, dt_B, self.geometry.of(task))

    def velocity(
        self, x_BLD: Tensor, t_B: Tensor, given: Sequence[Tensor], conditions: FlowConditions, *, task: str
    ) -> Tensor:
        """Velocity of normalised solutions; see `VelocityNetwork.velocity`."""
        return self.network.velocity(x_BLD, t_B, given, conditions, self.geometry.of(task))

    def forward(
        self, x_BLD: Tensor, t_B: Tensor, given: Sequence[Tensor], parameters_BP: Tensor, *, task: str
    ) -> Tensor:
        """Conditions and velocity in one call, as training does; same shape as x."""
        return self.velocity(x_BLD, t_B, given, self.conditions(parameters_BP, task=task), task=task)

    def drawn(
        self, noise_BLD: Tensor, given: Sequence[Tensor], parameters_BP: Tensor, *, task: str
    ) -> Tensor:
        """Normalised solutions at the ends of flows that begin at some noise; same shape, float32."""
        conditions = self.conditions(parameters_BP, task=task)
        is_flow = self.prior_spec.method == "flow"
        sampling = self.prior_spec.sampling if is_flow else _REGRESSION
        found = sample(
            lambda x, t: self.velocity(x, t, given, conditions, task=task),
            noise_BLD if is_flow else torch.zeros_like(noise_BLD),
            **vars(sampling),
        )
        return self.own_channels(found.x, task=task)

    @torch.no_grad()
    def solve(
        self,
        fields: Tensor | npt.NDArray[Any],
        *,
        members: int,
        seed: int = 0,
        observed: Tensor | npt.NDArray[Any] | None = None,
        task: str | None = None,
        parameters: Mapping[str, Numbers] | None = None,
        extrapolate: bool = False,
    ) -> Tensor:
        """Draw solutions that go with an input.

        Args:
            fields: The input in physical units, shape (B, X..., C); the axis C may be missing where there is
                one channel. Where it isn't observed, its values have to be finite and don't matter.
            members: M, draws for each input; 1 of a regression.
            seed: Of the draws; a member is the same whatever their number.
            observed: Where the input is known, bool, shape (B, X...), or (X...) for all of them alike.
            task: Name of the task; may be left out where there is only one.
            parameters: Numbers or arrays (B,) by name; may be left out where training knew one value only.
            extrapolate: Take parameters that training knew nothing like, too.
        Returns:
            Physical units, float32, shape (B, M, X..., C), on the model's device.
        Raises:
            ConfigError: As `Simulator.rollout`; kinds "members", "no_ensemble" of several members of a
                regression; "observed", if a mask is missing or has no effect.
            ShapeError: If the fields or the mask aren't on the task's grid.
        """
        name = check_simulated_task(self.spec, task)
        known = self.spec.tasks[name]
        members = self._checked_members(members)
        values_BXC = frames_of(fields, known, device=self.device)
        num = len(values_BXC)
        mask_BX = self._checked_mask(observed, num, known)
        check_room(known, num=num, members=members, steps=1, device=self.device)
        order = self.spec.parameters
        parameters_BP = parse_parameters(parameters or {}, known, order=order, num=num, device=self.device)
        check_within_training(known, parameters, None, extrapolate=extrapolate)
        given = self.given(values_BXC, mask_BX, parameters_BP, task=name)
        like = torch.empty(num, given[0].shape[1], self.spec.state_dim, device=self.device)
        rows = partial(torch.repeat_interleave, repeats=members, dim=0)
        inputs = (member_noise(member_generators(check_seed(seed), members), like), rows(parameters_BP))
        parts = zip(*(each.split(_ROWS) for each in (*inputs, *map(rows, given))), strict=True)
        frames = [self._frames(noise, some, states, task=name) for noise, some, *states in parts]
        return torch.cat(frames).unflatten(0, (num, members))

    def rollout(
        self,
        fields: Tensor | npt.NDArray[Any],
        steps: int = 1,
        *,
        members: int | None = None,
        seed: int = 0,
        observed: Tensor | npt.NDArray[Any] | None = None,
        task: str | None = None,
        parameters: Mapping[str, Numbers] | None = None,
        dt: Numbers | None = None,
        resample: bool = False,
        extrapolate: bool = False,
    ) -> Tensor:
        """As `solve`, called as other models are: of a steady task there is one step.

        Args:
            fields: As of `solve`, like `seed`, `observed`, `task` and `parameters`.
            steps: 1.
            members: M; None for one draw, without an axis of members.
            dt: None; a steady task has no time step.
            resample: Not of priors.
        Returns:
            Shape (B, M, 1, X..., C), or (B, 1, X..., C) without `members`.
        Raises:
            ConfigError: As `solve`; kinds "steps", "resample".
            ShapeError: As `solve`.
        """
        name = check_simulated_task(self.spec, task)
        check_steps(steps, self.spec.tasks[name])
        if resample:
            raise ConfigError(
                "resample",
                kind="resample",
                expected="fields on the grid of the training, which a prior of solutions is about",
            )
        solved = self.solve(
            fields,
            members=1 if members is None else members,
            seed=seed,
            observed=observed,
            task=name,
            parameters=parameters,
            extrapolate=extrapolate,
        )
        return solved if members is None else solved.unsqueeze(2)

    def rollout_steps(
        self, fields: Tensor | npt.NDArray[Any], steps: int = 1, *, members: int, **options: Any
    ) -> Iterator[Tensor]:
        """As `rollout` with `members`, as an iterator over its one step, shape (B, M, X..., C)."""
        return iter(self.rollout(fields, steps, members=members, **options).unbind(2))

    def _frames(
        self, noise_NLD: Tensor, parameters_NP: Tensor, given: Sequence[Tensor], *, task: str
    ) -> Tensor:
        states_NLD = self.drawn(noise_NLD, given, parameters_NP, task=task)
        return self.decode(states_NLD, parameters_NP, task=task)

    def _checked_members(self, members: int) -> int:
        if check_members(members) > 1 and self.prior_spec.method == "regression":
            raise ConfigError(
                f"a regression predicts one solution, not {members}",
                kind="no_ensemble",
                path=self.path,
                expected="members=1, or a prior of prior.method=flow",
            )
        return members

    def _checked_mask(
        self, observed: Tensor | npt.NDArray[Any] | None, num: int, task: SimulatedTask
    ) -> Tensor | None:
        num_points = self.prior_spec.observed_points
        if (observed is None) != (num_points is None):
            found, expected = "no mask", f"which points are known, such as {num_points} of them"
            if observed is not None:
                found, expected = "a mask", "none: it was trained on whole inputs"
            raise ConfigError("observed", kind="observed", path=self.path, expected=expected, found=found)
        if observed is None:
            return None
        mask = torch.as_tensor(observed, device=self.device)
        points = task.grid.points
        if mask.dtype != torch.bool or tuple(mask.shape) not in (points, (num, *points)):
            shown = ", ".join(map(str, points))
            found = f"{tuple(mask.shape)} of {mask.dtype}"
            raise ShapeError("observed", expected=f"(B, {shown}) of torch.bool", found=found)
        return mask.expand(num, *points)

    def _field_normalizer(self, task: str) -> Normalizer:
        """Of the input's values, not of latents."""
        array = self.spec.tasks[task].input_array
        return (self if self.autoencoder is None else self.autoencoder).normalizer_of(task, array)


def save_prior(path: str | os.PathLike[str], model: SteadyPrior, **training: Unpack[OfTraining]) -> None:
    """Write weights of prior and autoencoder, and their specifications.

    Arguments and errors are those of `save_model`.
    """
    inner, spec = spec_within(model.autoencoder), {**model.spec.to_json(), PRIOR: model.prior_spec.to_json()}
    save_model(path, model, kind=PRIOR, spec=spec, training=training, autoencoder=inner)


def load_prior(path: str | os.PathLike[str], *, device: str = "cpu") -> SteadyPrior:
    """Read a prior, in evaluation mode; the one file is enough."""
    tensors, document = load_checkpoint(path, kind=PRIOR, device=device)
    spec, prior = parse_joined_specs(document, path, name=PRIOR, parse=PriorSpec.from_json)
    inner = spec_of_autoencoder(document, path)
    build = lambda: SteadyPrior(spec, prior, Autoencoder(inner) if inner else None)  # noqa: E731
    return filled(build, tensors, path=path, device=device)
