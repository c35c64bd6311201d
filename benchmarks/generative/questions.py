"""Tasks on which a deterministic operator can't be right: its states leave open what follows.

Training data, models and budgets are made as for `benchmarks.models`; what is added are the sizes and budgets
of corrector and student.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.models.ablations import latents
from benchmarks.models.questions import VORTICITY, Question

# The rows of the benchmark, in the order of its tables, and the numbers that all parts of it share.
OPERATOR, CORRECTOR, TRUTH = "operator", "corrector", "truth"
STUDENTS = {1: "student, 1 step", 2: "student, 2 steps"}
LABELS = {
    OPERATOR: "operator alone",
    CORRECTOR: "with corrector, 32 steps",
    **{name: f"with {name}" for name in STUDENTS.values()},
    TRUTH: "the equation itself",
}
SEEDS = (0, 1, 2)
MEMBERS, MEMBER_SEED = 64, 7
CORRECTOR_STEPS = 32
ROUNDS, TIMED_STEPS, TIMED_MEMBERS = 5, 4, 16

_LINE = {"points": 128, "frames": 21, "end_time": 2.0}


@dataclass(frozen=True)
class Task:
    """A question with how it is asked here."""

    question: Question  # data, operator and its budget
    why: str  # a state leaves open what follows, for people
    corrector_flops: float  # budget of the corrector's training, counted operations
    student_flops: float
    num_trajectories: int  # of the test split, that are predicted
    horizon: int  # time steps of each
    # Steps of the operator's own rollouts that residuals are taken from: 1 where what follows a true state is
    # random by itself, more where the operator's errors grow by themselves.
    lead_times: int = 1
    num_pairs: int = 8192  # of noise and the teacher's residual, that the student learns from
    num_judged: int = 8  # validation trajectories that gates are judged by

    @property
    def overrides(self) -> Sequence[str]:
        """Give `key=value` of the run besides those of the question."""
        return (
            f"stages.corrector.budget.flops={self.corrector_flops}",
            f"stages.student.budget.flops={self.student_flops}",
            f"diffusion.lead_times={self.lead_times}",
            "diffusion.export_anyway=true",  # the page says which gates are missed on the test split
            "training.distill_num_steps=2",
            "training.distill_hidden_dim=16",
            f"training.distill_num_pairs={self.num_pairs}",
            f"operator.val_trajectories={self.num_judged}",
        )


KICKED = Task(
    Question(
        name="kicked",
        title="Burgers with random kicks",
        task="burgers1d",
        settings={"nu": 0.02, "kicks": 0.05, **_LINE},
        shifts={},
        num_samples=200,
        num_held_out=200,
        patch=4,
        flops=2e11,
    ),
    why="a random field, which no model sees, is added after every step",
    corrector_flops=2e11,
    student_flops=1e11,
    num_trajectories=24,
    horizon=20,
)

COMPRESSED = replace(
    KICKED,
    question=replace(
        KICKED.question,
        name="compressed",
        title="Burgers with random kicks, in latents compressed 4x",
        overrides=latents(4)(KICKED.question),
    ),
    why="the same kicks; of 4 values of the fields the operator's state has one",
)

TURBULENCE = Task(
    replace(
        VORTICITY,
        name="turbulence",
        title="2D decaying vorticity, long steps",
        settings={"nu": 5e-4, "points": 48, "frames": 11, "end_time": 4.0},
        shifts={},
        num_samples=100,
        num_held_out=100,
        flops=3e11,
    ),
    why="small eddies and chaos over steps of 0.4 time units: what the operator can't tell, it blurs",
    corrector_flops=4e11,
    student_flops=2e11,
    num_trajectories=20,
    horizon=6,
    lead_times=3,
    num_pairs=4096,
    num_judged=4,
)

TASKS = (KICKED, COMPRESSED, TURBULENCE)
