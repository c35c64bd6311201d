"""What checks of a run found, a line each: what is right, what is odd, and what would end it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from ups.errors import ConfigWarning, UpsError
from ups.output import with_nulls
from ups_store.errors import (
    CorruptChunkError,
    FormatError,
    MemoryLimitError,
    SourceError,
    StoreError,
    StoreNotFoundError,
)

if TYPE_CHECKING:
    from rich.console import Console

Mark = Literal["ok", "warning", "problem"]

CONFIG, DATA, DISK, GATE = 2, 3, 6, 10  # exit codes; the least of a report's problems is the command's
_OF_DATA = (SourceError, CorruptChunkError, FormatError, StoreNotFoundError)
_SIGNS: dict[Mark, tuple[str, str]] = {
    "ok": ("✓", "green"),
    "warning": ("!", "yellow"),
    "problem": ("✗", "red"),
}


@dataclass(frozen=True)
class Check:
    """One line of a report.

    Attributes:
        group: What it is about, such as "hardware".
        mark: "ok", "warning" or "problem".
        text: For people: where, what was found, what was expected, what to do.
        kind: Of the error, where there is one.
        exit_code: Of a problem; else 0.
        facts: What programs read: of an error its path, and what was expected and found.
    """

    group: str
    mark: Mark
    text: str
    kind: str = ""
    exit_code: int = 0
    facts: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of_error(cls, group: str, error: UpsError | StoreError) -> Check:
        """What an error says; one of a missing package among them."""
        names = ("path", "expected", "found", "hint")
        facts = {name: str(value) for name in names if (value := getattr(error, name)) is not None}
        return cls(group, "problem", str(error), error.kind, exit_code_of(error), facts)

    def to_json(self) -> dict[str, Any]:
        """JSON values."""
        values: dict[str, Any] = with_nulls(vars(self))
        return values


def exit_code_of(error: UpsError | StoreError) -> int:
    """What is to be mended: 2 the configuration, 3 the data, 6 the disk, 10 the machine."""
    if isinstance(error, _OF_DATA):
        return DATA
    if isinstance(error, MemoryLimitError):
        return GATE
    return error.exit_code if error.exit_code in (CONFIG, DATA, DISK) else CONFIG


@dataclass(frozen=True)
class Report:
    """All lines about one run.

    Attributes:
        checks: In the order of their groups.
        seconds: How long they took.
    """

    checks: tuple[Check, ...]
    seconds: float = 0.0

    @property
    def problems(self) -> tuple[Check, ...]:
        """What would end the run."""
        return tuple(check for check in self.checks if check.mark == "problem")

    @property
    def warnings(self) -> tuple[Check, ...]:
        """What it would do in spite of being odd."""
        return tuple(check for check in self.checks if check.mark == "warning")

    @property
    def exit_code(self) -> int:
        """0 without problems, else the least of theirs: the configuration is mended before the data."""
        return min((check.exit_code for check in self.problems), default=0)

    @property
    def summary(self) -> str:
        """Such as "2 problems, 1 warning, 14 checks in 1.2 s"."""
        counts = (
            (len(self.problems), "problem"),
            (len(self.warnings), "warning"),
            (len(self.checks), "check"),
        )
        words = ", ".join(f"{num} {word}{'' if num == 1 else 's'}" for num, word in counts)
        return f"{words} in {self.seconds:.1f} s"

    def to_json(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "exit_code": self.exit_code,
            "problems": len(self.problems),
            "warnings": len(self.warnings),
            "seconds": round(self.seconds, 3),
            "checks": [check.to_json() for check in self.checks],
        }

    def show(self, console: Console) -> None:
        """Write the lines, and how many problems there are."""
        show_checks(self.checks, console)
        console.print(self.summary)


def show_checks(checks: Sequence[Check], console: Console) -> None:
    """Write lines with their marks, the group before the first of each."""
    from rich.text import Text

    width = max((len(check.group) for check in checks), default=0)
    before = ""
    for check in checks:
        sign, style = _SIGNS[check.mark]
        group = check.group if check.group != before else ""
        before = check.group
        console.print(Text(sign, style=style), f"{group:<{width}}", check.text, soft_wrap=True)


class Checks:
    """Collects the lines of one group after another."""

    def __init__(self) -> None:
        self.lines: list[Check] = []

    def ok(self, group: str, text: str, **facts: Any) -> None:
        """Something is right."""
        self.lines.append(Check(group, "ok", text, facts=facts))

    def warn(self, group: str, text: str, **facts: Any) -> None:
        """Something is odd, but a run would go on."""
        self.lines.append(Check(group, "warning", text, facts=facts))

    def refuse(self, group: str, *errors: UpsError | StoreError) -> None:
        """Something would end a run; an error that joins several is as many lines."""
        for error in errors:
            for one in getattr(error, "problems", ()) or (error,):
                line = Check.of_error(group, one)
                if line not in self.lines:  # what several splits find alike is said once
                    self.lines.append(line)

    @contextmanager
    def collecting(self, group: str) -> Iterator[None]:
        """Inside, an error becomes a line."""
        try:
            yield
        except (UpsError, StoreError) as error:
            self.refuse(group, error)

    def passes(self, group: str, check: Callable[[], object]) -> bool:
        """Whether a check raises nothing; else it is a line."""
        before = len(self.lines)
        with self.collecting(group):
            check()
        return len(self.lines) == before

    def has_problem(self, group: str) -> bool:
        """Whether a group has one already."""
        return any(line.group == group and line.mark == "problem" for line in self.lines)

    def has_said(self, text: str) -> bool:
        """Whether a line says so already."""
        return any(line.text == text for line in self.lines)

    def all_of(self, groups: Iterable[str]) -> tuple[Check, ...]:
        """The lines in the order of these groups, those of other groups first."""
        order = {group: number for number, group in enumerate(groups)}
        return tuple(sorted(self.lines, key=lambda line: order.get(line.group, -1)))


def warnings_of(caught: Iterable[Any]) -> list[str]:
    """What was warned of settings, of warnings that `warnings.catch_warnings` recorded."""
    return [str(each.message) for each in caught if issubclass(each.category, ConfigWarning)]
