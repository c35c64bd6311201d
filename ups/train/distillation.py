"""Stage `consistency_distill`: a student that draws a residual in one to four steps learns from a corrector.

Here is what both methods share, and rectified flow; `ups.train.consistency` has the other. The teacher is
loaded from its file, and is frozen, in evaluation mode and, unless that is asked for, not compiled. A student
of the teacher's size begins with its weights. Letters: B batch, L tokens, D channels of a token; the others
as in `ups.diffusion.paths`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ups.config import RunConfig
from ups.config.corrector_size import student_size
from ups.config.stages import DistillMethod
from ups.data.augment import Draws
from ups.data.batches import TrainingData, batch_size_of, random_order, rows_of_rank
from ups.data.cached import (
    FlowBatch,
    PairBatch,
    PairBuild,
    PairSource,
    ResidualBatch,
    ResidualBuild,
    shifted_pairs,
    wanted_residuals,
)
from ups.data.held_out import PARTS, HeldOutPart
from ups.device import with_compiled
from ups.diffusion.distillation import own_times
from ups.diffusion.schedules import LAST_TIME, flow_time
from ups.eval.forecasters import CorrectedForecaster, OperatorForecaster
from ups.eval.gate_verdicts import GateVerdict
from ups.eval.generative_gates import corrector_gates, student_gates
from ups.models.operator_size import OperatorSize
from ups.train.corrector import VAL_PAIRS, VAL_ROWS, CorrectorStage, Stores, identity_of, open_stores
from ups.train.ensemble_validation import Measured, columns_of, numbers_of
from ups.train.gated_export import GatedFile
from ups.train.given_models import HOW_TO_HAVE_TEACHER, check_same_operator
from ups.train.meter import startup_phase
from ups.train.stage import QUIET_START, StageStart
from ups.train.validation import mean_error, scored
from ups.trained.checkpoint import hash_tensors, hinting_where_missing
from ups.trained.corrected import CorrectedSimulator
from ups.trained.corrected_files import load_corrected
from ups.trained.corrector_spec import CorrectorSpec, Sampling, Taught
from ups.trained.specs import STUDENT, STUDENT_FILE, check_simulated_task

STAGE = "consistency_distill"
# Module and class of each method.
_METHODS = {
    "reflow": ("ups.train.distillation", "ReflowStage"),
    "consistency": ("ups.train.consistency", "ConsistencyStage"),
}

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
    """Load the teacher, open or build the stores of residuals and pairs, and build the student.

    Raises:
        CheckpointError: If there is no teacher, or it is damaged.
        ConfigError: As `make_corrector_stage`; kind "other_operator", if it corrects another one.
        ups_store.StoreError: If the data can't be read, or the stores not be written.
    """
    method = config.stage(STAGE).method or "reflow"
    path = config.teacher_path
    with startup_phase("teacher_loaded"):
        teacher, digest = _load_teacher(path, config, device), hash_tensors(path)
    with startup_phase("data_opening"):
        operator_sha256 = teacher.corrector_spec.operator_sha256
        wanted = wanted_residuals(config, teacher.simulator, operator_sha256=operator_sha256)
        wanted_pairs = _wanted_pairs(config, wanted, teacher, digest, method)
        start.check_data(identity_of(wanted_pairs))
        operator = teacher.simulator
        stores = open_stores(
            config,
            wanted,
            lambda build, task, part: build.make(operator),
            what="residuals",
            start=start,
        )
    if config.training.distill_compile_teacher:
        teacher = with_compiled(teacher, ("conditions", "velocity"))
    with startup_phase("teacher_pairs"):
        pairs = open_stores(
            config,
            wanted_pairs,
            lambda build, task, part: build.make(teacher, stores[task][part]),
            what="pairs",
            start=start,
        )
    with startup_phase("model_built"):
        torch.manual_seed(config.seed)
        spec = _student_spec(config, teacher.corrector_spec, digest, method)
        module, name = _METHODS[method]
        kind: type[StudentStage] = getattr(import_module(module), name)
        model = kind.made(teacher, spec).to(device)
    lesson = Lesson(teacher, path, wanted, stores, wanted_pairs, pairs)
    return kind(config, model, lesson=lesson, device=device)


def _wanted_pairs(
    config: RunConfig, wanted: Wanted, teacher: CorrectedSimulator, digest: str, method: DistillMethod
) -> WantedPairs:
    """Those for training, of rectified flow, and those for validation."""
    training = config.training
    parts: tuple[HeldOutPart, ...] = PARTS if method == "reflow" else ("check",)
    return {
        task: {
            part: PairBuild.of(
                builds[part],
                part,
                folder=training.distill_pair_dir or config.checkpoint.dir / "pairs",
                teacher_sha256=digest,
                num_pairs=training.distill_num_pairs if part == "fit" else VAL_PAIRS,
                sampling=teacher.corrector_spec.sampling,
                seed=config.seed,
            )
            for part in parts
        }
        for task, builds in wanted.items()
    }


def _student_spec(
    config: RunConfig, teacher: CorrectorSpec, digest: str, method: DistillMethod
) -> CorrectorSpec:
    size = student_size(config, OperatorSize.from_json(teacher.size))
    sampling = Sampling("euler", config.training.distill_num_steps)
    return replace(teacher, size=size.to_json(), sampling=sampling, taught=Taught(digest, method))


def _load_teacher(path: Path, config: RunConfig, device: torch.device) -> CorrectedSimulator:
    with hinting_where_missing(HOW_TO_HAVE_TEACHER):
        teacher = load_corrected(path, device=str(device))
    check_same_operator(config, teacher.corrector_spec.operator_sha256)
    for task in config.data.tasks:
        check_simulated_task(teacher.spec, task)
    return teacher.requires_grad_(False).eval()


class StudentStage(CorrectorStage):
    """What both methods share; see `ups.train.stage.Stage`.

    Args:
        model: The student, on its device.
        lesson: What it is made from.
        device: Where the models are.
    """

    name = STAGE

    def __init__(
        self,
        config: RunConfig,
        model: CorrectedSimulator,
        *,
        lesson: Lesson,
        device: torch.device,
    ) -> None:
        self._lesson, self._teacher = lesson, lesson.teacher
        super().__init__(config, model, wanted=lesson.wanted, stores=lesson.stores, device=device)
        checked = {task: parts["check"] for task, parts in lesson.pairs.items()}
        self._checked_pairs = PairSource(checked, num_parameters=len(model.spec.parameters))
        self.file = GatedFile(config.checkpoint.dir / STUDENT_FILE, kind=STUDENT)
        self.num_micro_batches = _num_parts(config)

    @classmethod
    def made(cls, teacher: CorrectedSimulator, spec: CorrectorSpec) -> CorrectedSimulator:
        """A student, with its teacher's weights if it is of the same size; else it corrects nothing yet."""
        model = CorrectedSimulator(teacher.simulator, spec)
        cls.begin(model, teacher)
        return model

    @staticmethod
    def begin(model: CorrectedSimulator, teacher: CorrectedSimulator) -> None:
        """Give a student what its teacher takes off the operator's steps, and its weights, if of its size."""
        model.seams.load_state_dict(teacher.seams.state_dict())
        if model.corrector_spec.size == teacher.corrector_spec.size:
            model.corrector.load_state_dict(teacher.corrector.state_dict())

    def validate(self) -> dict[str, float]:
        """Mean square distance of its residuals from the teacher's, from the same noise, over sigma_c^2."""
        return scored({task: self._distance(task) for task in self._lesson.pairs}, "distance")

    def data_identity(self) -> Mapping[str, Any]:
        """Hashes of what decides the pairs, teacher included, by task and part."""
        return identity_of(self._lesson.wanted_pairs)

    def finish(self) -> dict[str, Any]:
        """Judge what was exported beside its teacher, with the same noise, and give it its name.

        Raises:
            GateMissedError: If it missed a gate; nothing is exported then.
        """
        student = load_corrected(self.file.latest, device=str(self._device), kind=STUDENT)
        ensembles = self.ensembles()
        rows = {
            "student": ensembles.members_of(CorrectedForecaster(student)),
            "teacher": ensembles.members_of(CorrectedForecaster(self._teacher)),
            "operator": ensembles.forecasts_of(OperatorForecaster(student.simulator)),
        }
        verdicts = [verdict for task in self._wanted for verdict in _judged(rows, task)]
        report = {**self._facts_of(student), **columns_of(rows), "ensembles": numbers_of(rows)}
        return self.file.publish(report, verdicts, stage=self.name, config=self._config, ranks=self.ranks)

    def _facts_of(self, model: CorrectedSimulator) -> dict[str, Any]:
        taught = model.corrector_spec.taught
        assert taught is not None
        facts = super()._facts_of(model)
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

    @torch.no_grad()
    def _distance(self, task: str) -> float:
        return mean_error(
            lambda numbers: self._distances(self._checked_pairs.read(task, numbers)),
            num=len(self._checked_pairs.tasks[task]),
            most=VAL_PAIRS,
            rows=VAL_ROWS,
            ranks=self.ranks,
        )

    def _distances(self, batch: PairBatch) -> Tensor:
        """Of each pair, shape (B,)."""
        states, noise, parameters, dt = (
            tensor.to(self._device) for tensor in (batch.states, batch.noise, batch.parameters, batch.dt)
        )
        given_BLD, predicted_BLD, taught_BLD = states.unbind(1)
        spec = self.model.corrector_spec
        drawn_BLD = self.called.residual(
            noise, (given_BLD, predicted_BLD), parameters, task=batch.task, dt_B=dt, sampling=spec.sampling
        )
        own = self.model.simulator.own_dim(batch.task)
        difference = (drawn_BLD - taught_BLD)[..., :own] / spec.sigma[batch.task]
        return difference.square().flatten(1).mean(dim=1)

    def _drawn_times(self, draws: Draws) -> Tensor:
        """tau for these rows, `distill_num_taus` for each, one row after the other."""
        num = self._config.training.distill_num_taus
        tau = self._times.draw(draws.num_rows * num, draws.generator)
        return draws.of_rows(tau.unflatten(0, (draws.num_rows, num))).flatten()


def _judged(rows: Mapping[str, Measured], task: str) -> list[GateVerdict]:
    student, teacher, operator = (rows[name].errors[task] for name in ("student", "teacher", "operator"))
    what = f"the student on {task}"
    beside_operator = corrector_gates(student, operator, what=what)
    alone = [verdict for verdict in beside_operator if verdict.gate in ("crps", "mean_nrmse")]
    return [*student_gates(student, teacher, what=what), *alone]


def _num_parts(config: RunConfig) -> int:
    """Parts of a rank's rows of a batch, by `training.distill_micro_batch`."""
    training = config.training
    rows = rows_of_rank(config.stage(STAGE)) * training.distill_num_taus
    return math.ceil(rows / (training.distill_micro_batch or rows))


class ReflowStage(StudentStage):
    """Flow matching on the teacher's pairs, whose paths it makes straight (2-rectified flow).

    Source: Liu et al. 2023, section 2.1 and algorithm 1 (arXiv:2209.03003).
    """

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
        return FlowBatch(
            **vars(batch.repeated(training.distill_num_taus)), tau=self._drawn_times(batch.draws)
        )

    def _drawn_times(self, draws: Draws) -> Tensor:
        """As drawn, and a share of them the student's own; of all rows, whichever ranks share them."""
        training = self._config.training
        num = training.distill_num_taus
        t = flow_time(self._times.draw(draws.num_rows * num, draws.generator))
        t = own_times(t, training.distill_own_times, training.distill_num_steps, draws.generator)
        return draws.of_rows((t / LAST_TIME).unflatten(0, (draws.num_rows, num))).flatten()
