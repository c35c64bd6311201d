"""Test-time conditioning: rollouts whose steps are chosen and corrected by what the laws of their task say.

A step may be tried from several states, with noise on all but the first; the one that disagrees least with
the laws is kept (best of N). Then the equation's residual r is subtracted from it as long as that makes r
less: the fixed point of u - r(u) solves an implicit exponential integrator of fourth order, so the operator's
prediction is the first guess of a solver. Conserved means are put back last. None of it needs the truth, or
training.

Letters: B samples, N candidates, K steps, X the axes of the grid, C channels, L tokens, D channels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from ups.config import RunConfig
from ups.config.training import TtcConfig
from ups.errors import ConfigError
from ups.eval.forecasters import Start
from ups.eval.physics import physics_of
from ups.grid import FIELDS
from ups.laws import Prior
from ups.physics.priors import Step, TaskPhysics
from ups.physics.residual import LINE_EQUATIONS
from ups.trained.rollout_inputs import Numbers
from ups.trained.simulator import Simulator

# What a candidate's score sums, all relative.
_SCORED: tuple[Prior, ...] = ("conservation", "divergence", "residual")


class ConditionedForecaster:
    """The operator with test-time conditioning, as `ups.eval.forecasters.Forecaster`."""

    name, label = "operator_ttc", "operator, conditioned"

    def __init__(
        self, simulator: Simulator, config: RunConfig, *, lengths: Mapping[str, Mapping[str, float]]
    ) -> None:
        self._simulator, self._settings, self._seed = simulator, config.ttc, config.seed
        self._physics = {
            task: physics_of(config, simulator.spec, task, lengths=domain, cell=0)
            for task, domain in lengths.items()
        }
        for task, physics in self._physics.items():
            _check_useful(task, physics, self._settings)
        self.note = described(self._settings)

    def forecast(self, start: Start, steps: int) -> Tensor:
        """See `Forecaster.forecast`."""
        parameters = start.parameters_of(self._simulator.spec)
        conditions: dict[str, Any] = {"parameters": parameters, "dt": start.dt, "extrapolate": True}
        return self.rollout(start.given, steps, task=start.task, **conditions)

    @torch.no_grad()
    def rollout(
        self,
        fields: Tensor | npt.NDArray[Any],
        steps: int,
        *,
        task: str,
        parameters: Mapping[str, Numbers],
        dt: Numbers | None = None,
        extrapolate: bool = False,
    ) -> Tensor:
        """Predict what follows; arguments, result and errors as those of `Simulator.rollout`."""
        simulator, physics = self._simulator, self._physics[task]
        conditions: dict[str, Any] = {"parameters": parameters, "dt": dt, "extrapolate": extrapolate}
        start = simulator.begin(fields, steps, task=task, **conditions)
        given_BXC, state_BLD, parameters_BP = start.given_BXC, start.state_BLD, start.parameters_BP
        names = simulator.spec.tasks[task].parameters
        values = {name: parameters_BP[:, simulator.spec.parameters.index(name)] for name in names}
        generator = torch.Generator().manual_seed(self._seed)
        before_BXC, frames = given_BXC, []
        for dt_B in start.dt_BK.unbind(1):
            candidates = []  # states after the step, and their fields
            for tried_BLD in self._tried(state_BLD, generator):
                after_BLD = simulator.step(tried_BLD, parameters_BP, task=task, dt_B=dt_B)
                fields_BXC = simulator.decode(after_BLD, parameters_BP, task=task).float()
                candidates.append((after_BLD, fields_BXC))
            step = Step(before_BXC, before_BXC, given_BXC, values, dt_B)
            state_BLD, after_BXC = _best(physics, candidates, step)
            corrected_BXC = self._corrected(physics, dataclasses.replace(step, after=after_BXC))
            # The next residual is of what this step became, so the state has to become it, too; of latents
            # that costs the autoencoder's floor, which is less than what corrections gain.
            if corrected_BXC is not after_BXC:
                state_BLD = simulator.encode(corrected_BXC, parameters_BP, task=task, array=FIELDS)
            before_BXC = corrected_BXC
            frames.append(corrected_BXC)
        return torch.stack(frames, dim=1)

    def _tried(self, state_BLD: Tensor, generator: torch.Generator) -> list[Tensor]:
        """The state, and others with noise; the same for every sample, so batches don't matter."""
        shape = (self._settings.candidates - 1, 1, *state_BLD.shape[1:])
        noise = self._settings.noise_std * torch.randn(shape, generator=generator)
        return [state_BLD, *(state_BLD + noise.to(state_BLD))]

    def _corrected(self, physics: TaskPhysics, step: Step) -> Tensor:
        """The step after corrections, shape (B, X..., C)."""
        after_BXC = step.after
        if _is_correctable(physics):
            after_BXC = corrected(physics, step, self._settings.corrections)
        return physics.project(after_BXC, step.start) if self._settings.project else after_BXC


def corrected(physics: TaskPhysics, step: Step, times: int) -> Tensor:
    """`step.after` less its residual, `times` times, each kept by the samples whose residual it makes less.

    Returns:
        Shape (B, X, 1).
    """
    after_BXC = step.after
    residual_BX = physics.residual(step)
    for _ in range(times):
        tried_BXC = after_BXC - residual_BX.unsqueeze(-1)
        left_BX = physics.residual(dataclasses.replace(step, after=tried_BXC))
        is_less_B = left_BX.square().mean(1) < residual_BX.square().mean(1)
        after_BXC = torch.where(is_less_B[:, None, None], tried_BXC, after_BXC)
        residual_BX = torch.where(is_less_B[:, None], left_BX, residual_BX)
    return after_BXC


def score(physics: TaskPhysics, step: Step) -> Tensor:
    """How far a step is from the laws, a sum of relative mean squares, shape (B,)."""
    total_B = torch.zeros_like(step.dt)
    for prior in _SCORED:
        if physics.why_not(prior) is None:
            total_B = total_B + physics.error(prior, step) / physics.scale(prior, step)
    return total_B


def _best(
    physics: TaskPhysics, candidates: Sequence[tuple[Tensor, Tensor]], step: Step
) -> tuple[Tensor, Tensor]:
    """State and fields of each sample's candidate of the least score; the first of equal ones."""
    if len(candidates) == 1:
        return candidates[0]
    scores = [score(physics, dataclasses.replace(step, after=after_BXC)) for _, after_BXC in candidates]
    best_B = torch.stack(scores).argmin(0)
    rows = torch.arange(len(best_B), device=best_B.device)
    states, fields = (torch.stack(each)[best_B, rows] for each in zip(*candidates, strict=True))
    return states, fields


def conditioned(
    simulator: Simulator, config: RunConfig, task: str, *, lengths: Mapping[str, float]
) -> list[ConditionedForecaster]:
    """The row of test-time conditioning, if it is asked for; none of one task among several without a law."""
    if not config.ttc.enabled:
        return []
    try:
        return [ConditionedForecaster(simulator, config, lengths={task: lengths})]
    except ConfigError as error:
        if error.kind != "no_law" or len(config.data.tasks) == 1:
            raise
        return []


def described(settings: TtcConfig) -> str:
    """What is done, for the report."""
    parts = [f"best of {settings.candidates} by the laws of the task"] if settings.candidates > 1 else []
    parts += [f"{settings.corrections} corrections by its equation"] if settings.corrections else []
    parts += ["conserved means put back"] if settings.project else []
    return ", ".join(parts) or "nothing"


def _is_correctable(physics: TaskPhysics) -> bool:
    return physics.why_not("residual") is None and physics.laws.equation in LINE_EQUATIONS


def _check_useful(task: str, physics: TaskPhysics, settings: TtcConfig) -> None:
    uses = [
        settings.candidates > 1 and any(physics.why_not(prior) is None for prior in _SCORED),
        settings.corrections > 0 and _is_correctable(physics),
        settings.project and bool(physics.conserved),
    ]
    if not any(uses):
        raise ConfigError(
            f"ttc.enabled: nothing is known of {task} that its settings use",
            kind="no_law",
            expected=f"candidates, corrections or projection that {task} has a law for",
            found=f"{physics.why_not('conservation')}; {physics.why_not('residual')}",
            hint=f"say under laws.{task} what holds, or ttc.enabled=false",
        )
