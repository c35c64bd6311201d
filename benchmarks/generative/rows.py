"""The rows of the benchmark, in the order of its tables, and the numbers that all parts of it share."""

from __future__ import annotations

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
