"""`CorrectedSimulator`: an operator and a generative model of its residual, which together give ensembles.

A step of a member is z' = p + sigma_c r, p = op(z) + A op(z). A is a linear map of tokens and their
neighbours (`ups.data.seams`), which takes off the seams that patches leave; r is drawn from the flow whose
velocity the corrector has learnt, given z, p, the time step, parameters, boundary types and task. The file of
one holds all of it, the operator and its autoencoder included, and the hash of the operator's file.

Letters: B batch, M members, K steps, X the axes of the grid, C channels, L tokens, D channels of a token, P
parameters, N = B M rows.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

import numpy.typing as npt
import torch
from torch import Tensor, nn

from ups.diffusion.paths import member_generators, member_noise
from ups.diffusion.samplers import sample
from ups.errors import CheckpointError
from ups.models.corrector import FlowConditions, VelocityNetwork
from ups.models.operator_size import OperatorSize, token_axes
from ups.nn.layers import Condition
from ups.nn.patches import NeighbourMap
from ups.trained.autoencoder import Autoencoder, spec_of_autoencoder, spec_within
from ups.trained.checkpoint import hash_tensors, load_checkpoint
from ups.trained.model_files import OfTraining, TrainedModel, filled, save_model
from ups.trained.rollout_inputs import Numbers, RolloutStart, check_members, check_seed
from ups.trained.simulator import Simulator
from ups.trained.specs import (
    CORRECTOR,
    STUDENT,
    CorrectorSpec,
    Sampler,
    Sampling,
    SimulatorSpec,
    checked_sampling,
    parse_specs,
)
from ups.trained.state_space import Geometries

_OPERATOR = "simulator."  # beginning of the names of the operator's tensors
_GIVEN = 2  # states beside the one that flows: z and p
_ROWS = 256  # members, of all samples, that are advanced at once


class CorrectedSimulator(TrainedModel):
    """A frozen simulator, and the corrector of its steps. Untrained, it corrects nothing.

    Args:
        simulator: The operator; its states can be encoded and decoded.
        corrector: What the corrector is.
    """

    def __init__(self, simulator: Simulator, corrector: CorrectorSpec) -> None:
        super().__init__()
        self.simulator, self.corrector_spec = simulator, corrector
        simulator.requires_grad_(False).eval()
        spec = simulator.spec
        self.corrector = VelocityNetwork(
            spec.state_dim,
            num_given=_GIVEN,
            num_tasks=len(spec.tasks),
            ranges=spec.ranges,
            size=OperatorSize.from_json(corrector.size),
            axes=token_axes((task.tokens, task.is_periodic) for task in spec.tasks.values()),
        )
        self.flow_geometry = Geometries(self.corrector, spec)
        self.seams = nn.ModuleDict(
            {
                name: NeighbourMap(spec.state_dim, grid=task.tokens, periodic=task.is_periodic)
                for name, task in spec.tasks.items()
                if corrector.takes_seams
            }
        )

    @property
    def spec(self) -> SimulatorSpec:
        """Of the simulator."""
        return self.simulator.spec

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.simulator.device

    @property
    def uses_all_weights(self) -> bool:
        """Whether a velocity needs every weight of the corrector."""
        return self.flow_geometry.need_all_weights(self.corrector)

    def train(self, mode: bool = True) -> CorrectedSimulator:
        """As `nn.Module.train`; the simulator stays in evaluation mode."""
        super().train(mode)
        self.simulator.eval()
        return self

    def set_seams(self, task: str, weight: Tensor) -> None:
        """Give A of a task its weight, shape ((1 + 2 axes) D, D)."""
        self.seams[task].get_buffer("weight").copy_(weight)

    def conditions(self, parameters_BP: Tensor, *, task: str, dt_B: Tensor) -> FlowConditions:
        """What flows are under besides states, for steps by the physical times `dt_B`, shape (B,)."""
        condition = Condition(self.spec.task_number(task), parameters_BP)
        return self.corrector.conditions(condition, dt_B, self.flow_geometry.of(task))

    def velocity(
        self, x_BLD: Tensor, t_B: Tensor, given: Sequence[Tensor], conditions: FlowConditions, *, task: str
    ) -> Tensor:
        """Velocity of residuals over sigma_c; see `VelocityNetwork.velocity`."""
        return self.corrector.velocity(x_BLD, t_B, given, conditions, self.flow_geometry.of(task))

    def forward(
        self,
        x_BLD: Tensor,
        t_B: Tensor,
        given: Sequence[Tensor],
        parameters_BP: Tensor,
        *,
        task: str,
        dt_B: Tensor,
    ) -> Tensor:
        """Conditions and velocity in one call, as training does; same shape as x."""
        conditions = self.conditions(parameters_BP, task=task, dt_B=dt_B)
        return self.velocity(x_BLD, t_B, given, conditions, task=task)

    def offset(self, predicted_BLD: Tensor, *, task: str) -> Tensor:
        """A op(z), same shape, float32; zero where the corrector was made without."""
        if not self.corrector_spec.takes_seams:
            return torch.zeros_like(predicted_BLD)
        offset: Tensor = self.seams[task](predicted_BLD)
        return offset

    def flow_of(
        self, given: Sequence[Tensor], residual_BLD: Tensor, *, task: str
    ) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """What the flow of a known residual is between.

        Args:
            given: z and op(z), normalised states.
            residual_BLD: y - op(z).
        Returns:
            The states that the velocity is given, z and p, and r = (y - p) / sigma_c.
        """
        state_BLD, predicted_BLD = given
        offset_BLD = self.offset(predicted_BLD, task=task)
        r_BLD = (residual_BLD - offset_BLD) / self.corrector_spec.sigma[task]
        return (state_BLD, predicted_BLD + offset_BLD), r_BLD

    def residual(
        self,
        noise_BLD: Tensor,
        given: Sequence[Tensor],
        parameters_BP: Tensor,
        *,
        task: str,
        dt_B: Tensor,
        sampling: Sampling,
    ) -> Tensor:
        """Draw residuals of a step, A op(z) + sigma_c r.

        Args:
            noise_BLD: Standard normal, float32.
            given: z and op(z), normalised states.
            parameters_BP: In the order of `spec.parameters`.
            dt_B: Physical time of the step.
            sampling: How.
        Returns:
            Shape (B, L, D), float32.
        """
        offset_BLD = self.offset(given[1], task=task)
        given = (given[0], given[1] + offset_BLD)
        conditions = self.conditions(parameters_BP, task=task, dt_B=dt_B)
        drawn = sample(
            lambda x, t: self.velocity(x, t, given, conditions, task=task),
            noise_BLD,
            **vars(sampling),
        )
        r_BLD = self.simulator.own_channels(drawn.x, task=task)
        return offset_BLD + self.corrector_spec.sigma[task] * r_BLD

    def rollout(
        self,
        fields: Tensor | npt.NDArray[Any],
        steps: int,
        *,
        members: int | None = None,
        seed: int = 0,
        sampler: Sampler | None = None,
        num_sampler_steps: int | None = None,
        task: str | None = None,
        parameters: Mapping[str, Numbers] | None = None,
        dt: Numbers | None = None,
        resample: bool = False,
        extrapolate: bool = False,
    ) -> Tensor:
        """Predict what may follow, as so many members of an ensemble.

        Args:
            fields: As of `Simulator.rollout`, like `steps`, `task`, `parameters`, `dt`, `resample` and
                `extrapolate`.
            members: M; None for one sample path, without an axis of members.
            seed: Of the ensemble; a member is the same whatever their number.
            sampler: "euler", "heun" or "adaptive"; by default as trained.
            num_sampler_steps: Of Euler's and Heun's method; by default as trained.
        Returns:
            Physical units, float32, shape (B, M, K, X..., C), or (B, K, X..., C) without `members`.
        Raises:
            ConfigError: As `Simulator.rollout`; kinds "members", "sampler"; kind "no_memory" where
                `rollout_steps` may do with less.
            ShapeError: As `Simulator.rollout`.
        """
        frames = self._frames(
            fields,
            steps,
            members=1 if members is None else members,
            is_streamed=False,
            seed=seed,
            sampler=sampler,
            num_sampler_steps=num_sampler_steps,
            task=task,
            parameters=parameters,
            dt=dt,
            resample=resample,
            extrapolate=extrapolate,
        )
        stacked = torch.stack(list(frames), dim=2)
        return stacked[:, 0] if members is None else stacked

    def rollout_steps(
        self, fields: Tensor | npt.NDArray[Any], steps: int, *, members: int, **options: Any
    ) -> Iterator[Tensor]:
        """As `rollout`, one time step after the other: only one of them is held.

        Args:
            fields: As of `rollout`, like `steps`, `members` and the other options.
        Returns:
            An iterator over K tensors of shape (B, M, X..., C); what is wrong is raised before the first.
        """
        return self._frames(fields, steps, members=members, is_streamed=True, **options)

    def _frames(
        self,
        fields: Tensor | npt.NDArray[Any],
        steps: int,
        *,
        members: int,
        is_streamed: bool,
        seed: int = 0,
        sampler: Sampler | None = None,
        num_sampler_steps: int | None = None,
        **conditions: Any,
    ) -> Iterator[Tensor]:
        """Frames of all members, one time step after the other; what is given is checked at once."""
        members, own = check_members(members), self.corrector_spec.sampling
        sampling = checked_sampling(
            replace(
                own,
                sampler=own.sampler if sampler is None else sampler,
                num_steps=own.num_steps if num_sampler_steps is None else num_sampler_steps,
            )
        )
        with torch.no_grad():
            start = self.simulator.begin(
                fields, steps, members=members, is_streamed=is_streamed, **conditions
            )
        return self._advanced(start, member_generators(check_seed(seed), members), sampling)

    def _advanced(
        self, start: RolloutStart, generators: Sequence[torch.Generator], sampling: Sampling
    ) -> Iterator[Tensor]:
        num, members = len(start.state_BLD), len(generators)
        state_NLD = start.state_BLD.repeat_interleave(members, dim=0)
        parameters_NP = start.parameters_BP.repeat_interleave(members, dim=0)
        rows = [slice(first, first + _ROWS) for first in range(0, len(state_NLD), _ROWS)]
        for dt_B in start.dt_BK.unbind(1):
            noise_NLD = member_noise(generators, start.state_BLD)
            dt_N = dt_B.repeat_interleave(members)
            states, frames = [], []
            with torch.no_grad():
                for some in rows:
                    own: dict[str, Any] = {"task": start.task, "dt_B": dt_N[some]}
                    given_NP, before_NLD = parameters_NP[some], state_NLD[some]
                    predicted_NLD = self.simulator.step(before_NLD, given_NP, **own)
                    given = (before_NLD, predicted_NLD)
                    drawn_NLD = self.residual(noise_NLD[some], given, given_NP, sampling=sampling, **own)
                    states.append(predicted_NLD + drawn_NLD)
                    frames.append(self.simulator.frame(states[-1], given_NP, start))
                state_NLD = torch.cat(states)
            yield torch.cat(frames).unflatten(0, (num, members))


def candidate_of(path: Path) -> Path:
    """What has not passed its gates yet, and so hasn't the name of a checkpoint."""
    return path.with_name(f"{path.stem}.candidate{path.suffix}")


def save_corrected(
    path: str | os.PathLike[str], model: CorrectedSimulator, **training: Unpack[OfTraining]
) -> None:
    """Write weights of corrector, operator and autoencoder, and their specifications.

    The file of a corrector that was taught by another is of the kind "student", else "corrector". Arguments
    and errors are those of `save_model`.
    """
    inner = spec_within(model.simulator.autoencoder)
    spec = {**model.spec.to_json(), CORRECTOR: model.corrector_spec.to_json()}
    kind = CORRECTOR if model.corrector_spec.taught is None else STUDENT
    save_model(path, model, kind=kind, spec=spec, training=training, autoencoder=inner)


def load_corrected(
    path: str | os.PathLike[str],
    *,
    device: str = "cpu",
    kind: str = CORRECTOR,
    allow_code: str | Iterable[str] = (),
) -> CorrectedSimulator:
    """Read a corrected simulator, in evaluation mode; the one file is enough.

    Args:
        kind: "corrector" or "student".
        allow_code: As of `ups.load`.
    """
    tensors, document = load_checkpoint(path, kind=kind, device=device)
    spec, corrector = parse_specs(document, path)
    _check_bound(path, found=hash_tensors(path, prefix=_OPERATOR), corrector=corrector)
    inner = spec_of_autoencoder(document, path)

    def build() -> CorrectedSimulator:
        autoencoder = Autoencoder(inner) if inner else None
        return CorrectedSimulator(Simulator(spec, autoencoder, allow_code=allow_code), corrector)

    return filled(build, tensors, path=path, device=device, is_trusted=":" in spec.operator.get("name", ""))


def _check_bound(path: str | os.PathLike[str], *, found: str, corrector: CorrectorSpec) -> None:
    if found != corrector.operator_sha256:
        raise CheckpointError(
            "a corrector of another operator, whose residuals are others",
            kind="other_operator",
            path=path,
            expected=f"the operator {corrector.operator_sha256[:12]}",
            found=found[:12],
            hint="train the corrector again: `ups train --stage corrector`",
        )
