"""What gates say, of a run's evaluation and of a generative stage alike, and the error of those missed."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from ups.errors import GateMissedError

Limit = float | tuple[float, float]
How = Literal["at most", "at least", "less than", "more than", "within"]
_HOWS: dict[How, Callable[[float, Any], bool]] = {
    "at most": operator.le,
    "at least": operator.ge,
    "less than": operator.lt,
    "more than": operator.gt,
    "within": lambda number, ends: ends[0] <= number <= ends[1],
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


def judge_number(gate: str, what: str, number: float | None, how: How, limit: Limit) -> GateVerdict:
    """Compare a number with its limit; one that isn't finite, or isn't there, never passes.

    Args:
        limit: One number, or of "within" two, both included.
    """
    finite = number if number is not None and math.isfinite(number) else None
    expected = f"{limit[0]:g} to {limit[1]:g}" if isinstance(limit, tuple) else f"{how} {limit:g}"
    passed = finite is not None and _HOWS[how](finite, limit)
    says = f"{what} = {shown_number(finite)}, expected {expected}"
    return GateVerdict(gate, what, finite, limit, passed, says)


def check_gates(verdicts: Sequence[GateVerdict], *, where: str, hint: str) -> list[dict[str, Any]]:
    """Go on if no gate was missed.

    Returns:
        Every gate's verdict as JSON values.
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
