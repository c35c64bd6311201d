"""What gates say, of a run's evaluation and of a generative stage alike, and the error of those missed."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from ups.errors import GateMissedError

Limit = float | tuple[float, float] | None
How = Literal["at most", "at least", "less than", "more than"]
_HOWS = {
    "at most": operator.le,
    "at least": operator.ge,
    "less than": operator.lt,
    "more than": operator.gt,
}


@dataclass(frozen=True)
class GateVerdict:
    """A gate and what was found.

    Attributes:
        gate: Name, such as "ceiling", "throughput", "energy_score" or "band_high".
        what: What was measured, such as "nrmse of burgers1d".
        number: What was found; None if that is no finite number, or there is nothing to compare with.
        limit: What it is compared with; two ends where it has to lie between them.
        passed: Whether the gate lets the run go on.
        says: The same for people.
    """

    gate: str
    what: str
    number: float | None
    limit: Limit
    passed: bool
    says: str


def judge_number(gate: str, what: str, number: float | None, how: How, limit: float) -> GateVerdict:
    """The verdict on a number with one limit; one that isn't finite, or isn't there, never passes."""
    passed = number is not None and _HOWS[how](number, limit)
    return _verdict(gate, what, number, limit, passed, f"{how} {limit:g}")


def judge_range(gate: str, what: str, number: float | None, limits: tuple[float, float]) -> GateVerdict:
    """The verdict on a number that has to lie between two limits, both included; else as `judge_number`."""
    low, high = limits
    passed = number is not None and low <= number <= high
    return _verdict(gate, what, number, limits, passed, f"{low:g} to {high:g}")


def _verdict(
    gate: str, what: str, number: float | None, limit: Limit, passed: bool, expected: str
) -> GateVerdict:
    finite = number if number is not None and math.isfinite(number) else None
    says = f"{what} = {shown_number(finite)}, expected {expected}"
    return GateVerdict(gate, what, finite, limit, finite is not None and passed, says)


def check_gates(verdicts: Sequence[GateVerdict], *, where: str, hint: str) -> list[dict[str, Any]]:
    """Go on if no gate was missed.

    Args:
        verdicts: On all gates.
        where: Which gates they are, for the error, such as "gate after full-eval".
        hint: What has become of what was made, or what to do.

    Returns:
        Every gate's verdict as JSON values.

    Raises:
        GateMissedError: With all gates that were missed, number and limit of each; exit code 10.
    """
    found = [asdict(verdict) for verdict in verdicts]
    if missed := [verdict for verdict in verdicts if not verdict.passed]:
        error = GateMissedError(f"{where}: {'; '.join(verdict.says for verdict in missed)}", hint=hint)
        error.verdicts = tuple(found)
        raise error
    return found


def shown_number(number: float | None) -> str:
    """A number for people."""
    return "no number" if number is None else f"{number:.4g}"
