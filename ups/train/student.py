"""Stage `student`: a student that draws a residual in one to four steps learns from a corrector.

The teacher is loaded from its file, and is frozen, in evaluation mode and, unless that is asked for, not
compiled. A student of its size begins with its weights. Letters: B batch, L tokens, D channels of a token; e,
r, t, x, v as in `ups.diffusion.paths`.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ups import stages
from ups.config import RunConfig
from ups.config.operator_size import student_size
from ups.data.augment import Draws
from ups.data.batches import TrainingData, batch_size_of, random_order, rows_of_rank
from ups.data.held_out import PARTS, HeldOutPart, Items
from ups.data.residuals import (
    FlowBatch,
    PairBatch,
    PairBuild,
    PairSource,
    ResidualBatch,
    ResidualBuild,
    shifted_pairs,
    wanted_residuals,
)
from ups.device import with_compiled
from ups.diffusion.distillation import (
    consistency_error,
    consistency_intervals,
    consistency_target,
    own_times,
)
from ups.diffusion.paths import LAST_TIME, at_time, flow_time
from ups.diffusion.samplers import Velocity
from ups.distributed.sharding import ShardedPart
from ups.eval.forecasters import (
    CorrectedForecaster,
    OperatorForecaster,
)
from ups.eval.gate_verdicts import GateVerdict
from ups.eval.generative_gates import corrector_gates, student_gates
from ups.models.operator_size import OperatorSize
from ups.nn.layers import Condition
from ups.train.checks import HOW_TO_HAVE_TEACHER, check_same_operator
from ups.train.flow import (
    VAL_PAIRS,
    CorrectorStage,
    Measured,
    Stores,
    identity_of,
    open_residuals,
    open_stores,
)
from ups.train.stage import QUIET_START, Losses, StageStart
from ups.trained.checkpoint import hash_tensors, hinting_where_missing
from ups.trained.corrected import CorrectedSimulator, load_corrected
from ups.trained.simulator import Simulator
from ups.trained.specs import STUDENT, STUDENT_FILE, CorrectorSpec, Sampling, Taught, check_simulated_task

_TARGET = "target."  # beginning of the names of the target's weights

Wanted = Mapping[str, Mapping[HeldOutPart, ResidualBuild]]
WantedPairs = Mapping[str, Mapping[HeldOutPart, PairBuild]]


@dataclass(frozen=True)
class Lesson:
    """What a student is made from.

    Attributes:
        teacher: In evaluation mode, frozen.
        path: Its file.
        wanted: What the stores of residuals were made of, by task and part.
        stores: Residuals, whose conditions pairs take.
        wanted_pairs: What the stores of pairs were made of.
        pairs: Noises, and what the teacher makes of them; without part "fit" where none is needed.
    """

    teacher: CorrectedSimulator
    path: Path
    wanted: Wanted
    stores: Stores
    wanted_pairs: WantedPairs
    pairs: Stores


def make_student_stage(
    config: RunConfig, *, device: torch.device, start: StageStart = QUIET_START
) -> StudentStage:
    """Load the teacher, open or build the stores of residuals and pairs, and build the student."""
    training, path, method = (
        config.training,
        config.teacher_path,
        config.stage(stages.STUDENT.name).method or "reflow",
    )
    with start.phase("teacher_loaded"):
        with hinting_where_missing(HOW_TO_HAVE_TEACHER):
            teacher = load_corrected(path, device=str(device))
        check_same_operator(config, teacher.corrector_spec.operator_sha256)
        for task in config.data.tasks:
            check_simulated_task(teacher.spec, task)
        teacher, digest = teacher.requires_grad_(False).eval(), hash_tensors(path)
    spec = teacher.corrector_spec
    with start.phase("data_opening"):
        wanted = wanted_residuals(config, teacher.simulator, operator_sha256=spec.operator_sha256)
        # Rectified flow is trained on pairs; every student is validated on some.
        parts: tuple[HeldOutPart, ...] = PARTS if method == "reflow" else ("check",)
        wanted_pairs = {
            task: {
                part: PairBuild.of(
                    builds[part],
                    part,
                    folder=training.distill_pair_dir or config.checkpoint.dir / "pairs",
                    teacher_sha256=digest,
                    num_pairs=training.distill_num_pairs if part == "fit" else VAL_PAIRS,
                    sampling=spec.sampling,
                    seed=config.seed,
                )
                for part in parts
            }
            for task, builds in wanted.items()
        }
        start.check_data(identity_of(wanted_pairs))
        stores = open_residuals(config, wanted, teacher.simulator)
    if training.distill_compile_teacher:
        teacher = with_compiled(teacher, ("conditions", "velocity"))
    with start.phase("teacher_pairs"):
        pairs = open_stores(
            config,
            wanted_pairs,
            lambda build, task, part: build.make(teacher, stores[task][part]),
            what="pairs",
        )
    with start.phase("model_built"):
        torch.manual_seed(config.seed)
        spec = dataclasses.replace(
            spec,
            size=student_size(config, OperatorSize.from_json(spec.size)).to_json(),
            sampling=Sampling("euler", training.distill_num_steps),
            taught=Taught(digest, method),
        )
        kind = {"reflow": ReflowStage, "consistency": ConsistencyStage}[method]
        model = kind.made(teacher, spec).to(device)
    lesson = Lesson(teacher, path, wanted, stores, wanted_pairs, pairs)
    return kind(config, model, lesson=lesson, device=device)


class StudentStage(CorrectorStage):
    """What both methods share; see `ups.train.stage.Stage`.

    Args:
        model: The student, on its device.
        lesson: What it is made from.
        device: Where the models are.
    """

    facts = stages.STUDENT
    score_name = "distance"  # mean square, of its residuals from the teacher's, over sigma_c^2
    file_name, kind = STUDENT_FILE, STUDENT

    def __init__(
        self, config: RunConfig, model: CorrectedSimulator, *, lesson: Lesson, device: torch.device
    ) -> None:
        self._lesson, self._teacher = lesson, lesson.teacher
        super().__init__(config, model, wanted=lesson.wanted, stores=lesson.stores, device=device)
        checked = {task: parts["check"] for task, parts in lesson.pairs.items()}
        self._checked = PairSource(checked, num_parameters=len(model.spec.parameters))
        training = config.training
        rows = rows_of_rank(config.stage(stages.STUDENT.name)) * training.distill_num_taus
        self.num_micro_batches = math.ceil(rows / (training.distill_micro_batch or rows))

    @classmethod
    def made(cls, teacher: CorrectedSimulator, spec: CorrectorSpec) -> CorrectedSimulator:
        """A student, with its teacher's weights if it is of the same size; else it corrects nothing yet."""
        model = cls.new(teacher.simulator, spec)
        model.seams.load_state_dict(teacher.seams.state_dict())
        if spec.size == teacher.corrector_spec.size:
            model.corrector.load_state_dict(teacher.corrector.state_dict())
        return model

    @staticmethod
    def new(simulator: Simulator, spec: CorrectorSpec) -> CorrectedSimulator:
        """What is trained, with new weights."""
        return CorrectedSimulator(simulator, spec)

    def data_identity(self) -> Mapping[str, Any]:
        """Hashes of what decides the pairs, teacher included, by task and part."""
        return identity_of(self._lesson.wanted_pairs)

    def rows_of(self, model: CorrectedSimulator) -> dict[str, CorrectedForecaster | OperatorForecaster]:
        """The student beside its teacher, with the same noise, and the operator."""
        return {
            "student": CorrectedForecaster(model),
            "teacher": CorrectedForecaster(self._teacher),
            "operator": OperatorForecaster(model.simulator),
        }

    def judge(self, rows: Mapping[str, Measured], task: str) -> list[GateVerdict]:
        """What the gates say of a task: beside the teacher all, beside the operator two."""
        student, teacher, operator = (rows[name].errors[task] for name in ("student", "teacher", "operator"))
        what = f"the student on {task}"
        beside_operator = corrector_gates(student, operator, what=what)
        alone = [verdict for verdict in beside_operator if verdict.gate in ("crps", "mean_nrmse")]
        return [*student_gates(student, teacher, what=what), *alone]

    def checked_errors(self, task: str, numbers: Items) -> Tensor:
        """Distances of the student's residuals from the teacher's, from the same noise, shape (B,)."""
        batch = self._checked.read(task, numbers)
        assert isinstance(batch, PairBatch)
        states, noise, parameters, dt = self._moved(batch.states, batch.noise, batch.parameters, batch.dt)
        given_BLD, predicted_BLD, taught_BLD = states.unbind(1)
        spec, given = self.model.corrector_spec, (given_BLD, predicted_BLD)
        drawn_BLD = self.called.residual(noise, given, parameters, task=task, dt_B=dt, sampling=spec.sampling)
        difference = (drawn_BLD - taught_BLD)[..., : self._states.own_dim(task)] / spec.sigma[task]
        return difference.square().flatten(1).mean(dim=1)

    def _facts_of(self, model: CorrectedSimulator) -> dict[str, Any]:
        taught, facts = model.corrector_spec.taught, super()._facts_of(model)
        assert taught is not None
        del facts["operator"]  # it is in the teacher's file
        return {
            **facts,
            "teacher": str(self._lesson.path),
            "method": taught.method,
            "num_steps": model.corrector_spec.sampling.num_steps,
            "pairs": {
                task: {part: len(store) for part, store in parts.items()}
                for task, parts in self._lesson.pairs.items()
            },
        }

    def _drawn_times(self, draws: Draws) -> Tensor:
        """tau for these rows, `distill_num_taus` for each, one row after the other."""
        num = self._config.training.distill_num_taus
        tau = self._times.draw(draws.num_rows * num, draws.generator)
        return draws.of_rows(tau.unflatten(0, (draws.num_rows, num))).flatten()


class ReflowStage(StudentStage):
    """Flow matching on the teacher's pairs, whose paths it makes straight (2-rectified flow).

    Source: Liu et al. 2023, section 2.1 and algorithm 1 (arXiv:2209.03003).
    """

    def losses(self, forward: Callable[..., Tensor], batch: FlowBatch) -> Losses:
        """The mean of `flow_errors`."""
        return {"flow": self.flow_errors(forward, batch).mean()}

    def _training_data(self) -> TrainingData[Any]:
        fit = {task: parts["fit"] for task, parts in self._lesson.pairs.items()}
        size, seed = batch_size_of(self._config.stage(self.name)), self._config.seed
        order = random_order([len(store) for store in fit.values()], global_batch_size=size, seed=seed)
        return TrainingData(PairSource(fit, num_parameters=len(self.model.spec.parameters)), order, seed=seed)

    def _prepare(self, batch: ResidualBatch, number: int) -> FlowBatch:
        """Shifted together with the noise, with flow times."""
        assert isinstance(batch, PairBatch)
        training = self._config.training
        if training.augment:
            task = self.model.spec.tasks[batch.task]
            batch = shifted_pairs(batch, tokens=task.tokens, periodic=task.is_periodic)
        tau = self._drawn_times(batch.draws)
        return FlowBatch(**vars(batch.repeated(training.distill_num_taus)), tau=tau)

    def _drawn_times(self, draws: Draws) -> Tensor:
        """As drawn, and a share of them the student's own; of all rows, whichever ranks share them."""
        training = self._config.training
        num = training.distill_num_taus
        t = flow_time(self._times.draw(draws.num_rows * num, draws.generator))
        t = own_times(t, training.distill_own_times, training.distill_num_steps, draws.generator)
        return draws.of_rows((t / LAST_TIME).unflatten(0, (draws.num_rows, num))).flatten()


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

    The student jumps to where it jumps from the teacher's next point; that target is given by an average of
    its weights, which follows after each step.

    Source: Song et al. 2023, algorithm 2 (arXiv:2303.01469); Heek et al. 2024, algorithm 1
        (arXiv:2403.06807).
    """

    model: StudentWithTarget

    @classmethod
    def made(cls, teacher: CorrectedSimulator, spec: CorrectorSpec) -> CorrectedSimulator:
        """See `StudentStage.made`."""
        model = super().made(teacher, spec)
        assert isinstance(model, StudentWithTarget)
        model.follow(0.0)
        return model

    @staticmethod
    def new(simulator: Simulator, spec: CorrectorSpec) -> CorrectedSimulator:
        """See `StudentStage.new`."""
        return StudentWithTarget(simulator, spec)

    def losses(self, forward: Callable[..., Tensor], batch: FlowBatch) -> Losses:
        """|f(x_t, t) - f(x_u, u)|^2, x_u where the teacher gets from x_t, the second f the target's."""
        assert isinstance(forward, StudentWithTarget)
        training, (tau, noise, parameters) = (
            self._config.training,
            self._moved(batch.tau, batch.noise, batch.parameters),
        )
        table: Any = consistency_intervals(training.distill_num_steps, training.distill_num_intervals)
        number = (tau * len(table)).long().clamp(max=len(table) - 1)
        t, u, s = torch.tensor(table, device=tau.device)[number].unbind(1)  # the teacher's steps
        given, r = self.flow_of(batch, parameters)
        x, under = at_time(noise, r, t), {"task": batch.task, **self._more(batch)}
        with torch.no_grad():
            conditions = self._teacher.conditions(parameters, **under)
            aim = consistency_target(
                lambda x, t: self._teacher.velocity(x, t, given, conditions, task=batch.task),
                forward.target_velocity(given, parameters, **under),
                x,
                t=t,
                u=u,
                s=s,
            )
        v = forward(x, t, given, parameters, **under)
        dim = self._states.own_dim(batch.task)
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
