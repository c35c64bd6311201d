"""Distillation by consistency: the student jumps to where it jumps from the teacher's next point.

The target of a jump is given by an average of the student's weights, which follows after each step. With
several steps the student jumps to the ends of as many segments. Letters: those of `ups.train.distillation`.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ups.data.cached import FlowBatch, ResidualBatch
from ups.diffusion.distillation import consistency_error, consistency_intervals, consistency_target
from ups.diffusion.paths import at_time
from ups.diffusion.samplers import Velocity
from ups.distributed.sharding import ShardedPart
from ups.nn.layers import Condition
from ups.train.distillation import StudentStage
from ups.train.stage import Losses
from ups.trained.corrected import CorrectedSimulator
from ups.trained.corrector_spec import CorrectorSpec
from ups.trained.simulator import Simulator

_TARGET = "target."  # beginning of the names of the target's weights


class StudentWithTarget(CorrectedSimulator):
    """A student, and the frozen average of its weights: what is trained, not what is exported.

    Attributes:
        target: Of the student's architecture.
    """

    def __init__(self, simulator: Simulator, corrector: CorrectorSpec) -> None:
        super().__init__(simulator, corrector)
        self.target = copy.deepcopy(self.corrector).requires_grad_(False).eval()

    def train(self, mode: bool = True) -> StudentWithTarget:
        """As `nn.Module.train`; simulator and target stay in evaluation mode."""
        super().train(mode)
        self.target.eval()
        return self

    def target_velocity(
        self, given: Sequence[Tensor], parameters_BP: Tensor, *, task: str, dt_B: Tensor
    ) -> Velocity:
        """The target's velocity under conditions; arguments are those of `CorrectedSimulator.residual`."""
        geometry = self.flow_geometry.of(task)
        condition = Condition(self.spec.task_number(task), parameters_BP)
        conditions = self.target.conditions(condition, dt_B, geometry)
        return lambda x, t: self.target.velocity(x, t, given, conditions, geometry)

    @torch.no_grad()
    def follow(self, decay: float) -> None:
        """Let the target take in the student's weights; it keeps a share `decay` of its own."""
        current = [weight.detach() for weight in self.corrector.parameters()]
        torch._foreach_lerp_(list(self.target.parameters()), current, 1 - decay)


class ConsistencyStage(StudentStage):
    """Consistency distillation along the teacher's path, in as many segments as the student has steps.

    Source: Song et al. 2023, algorithm 2 (arXiv:2303.01469); Heek et al. 2024, algorithm 1
        (arXiv:2403.06807).
    """

    model: StudentWithTarget

    @classmethod
    def made(cls, teacher: CorrectedSimulator, spec: CorrectorSpec) -> StudentWithTarget:
        """See `StudentStage.made`."""
        model = StudentWithTarget(teacher.simulator, spec)
        cls.begin(model, teacher)
        model.follow(0.0)
        return model

    def losses(self, forward: Callable[..., Tensor], batch: FlowBatch) -> Losses:
        """|f(x_t, t) - f(x_u, u)|^2, x_u where the teacher gets from x_t, the second f the target's."""
        assert isinstance(forward, StudentWithTarget)
        states, noise, tau, parameters, dt = (
            tensor.to(self._device, non_blocking=True)
            for tensor in (batch.states, batch.noise, batch.tau, batch.parameters, batch.dt)
        )
        given_BLD, predicted_BLD, residual_BLD = states.unbind(1)
        t, u, s = self._intervals_at(tau)
        given, r = self.model.flow_of((given_BLD, predicted_BLD), residual_BLD, task=batch.task)
        x = at_time(noise, r, t)
        own: dict[str, Any] = {"task": batch.task, "dt_B": dt}
        with torch.no_grad():
            conditions = self._teacher.conditions(parameters, **own)
            aim = consistency_target(
                lambda x, t: self._teacher.velocity(x, t, given, conditions, task=batch.task),
                forward.target_velocity(given, parameters, **own),
                x,
                t=t,
                u=u,
                s=s,
            )
        v = forward(x, t, given, parameters, **own)
        dim = self.model.simulator.own_dim(batch.task)
        return {"consistency": consistency_error(v[..., :dim], x[..., :dim], aim[..., :dim], t=t, s=s).mean()}

    def after_step(self, step: int) -> None:
        """The target follows."""
        self.model.follow(self._config.training.distill_target_decay)

    def export(self, metrics: dict[str, float], weights: Mapping[str, Tensor]) -> Path:
        """As of a corrector, without the target."""
        kept = {name: weight for name, weight in weights.items() if not name.startswith(_TARGET)}
        return super().export(metrics, kept)

    def sharded_parts(self) -> list[ShardedPart]:
        """Student and target; teacher and operator stay whole on every rank."""
        return [*super().sharded_parts(), ShardedPart(self.model.target, ("conditions", "velocity"))]

    def _prepare(self, batch: ResidualBatch, number: int) -> FlowBatch:
        """Shifted, with noise and flow times."""
        prepared = super()._prepare(batch, number)
        num = self._config.training.distill_num_taus
        if num == 1:
            return prepared
        return dataclasses.replace(prepared.repeated(num), tau=self._drawn_times(batch.draws))

    def _intervals_at(self, tau: Tensor) -> Sequence[Tensor]:
        """The teacher's steps that flow times fall into: t, u and s, each of shape (B,)."""
        training = self._config.training
        table: Any = consistency_intervals(training.distill_num_steps, training.distill_num_intervals)
        number = (tau * len(table)).long().clamp(max=len(table) - 1)
        return torch.tensor(table, device=tau.device)[number].unbind(1)
