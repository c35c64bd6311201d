"""The errors of the training stack: a tree by what the caller can do about them.

As in `ups_store.errors`, every error carries what it knows as attributes and a stable `kind`; people read the
sentence: where, what was found, what was expected, what to do. A missing package is an error of `ups_store`.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from ups_store.errors import MissingExtraError as MissingExtraError
from ups_store.errors import StoreError, common_kind, mistakes
from ups_store.errors import check_installed as check_installed
from ups_store.errors import did_you_mean as did_you_mean
from ups_store.errors import needs as needs
from ups_store.printable import one_line, printable, without_secrets

_EXIT_DISK_FULL = 6  # as in `ups_store.errors`


class UpsError(Exception):
    """Root of every error that the training stack raises on purpose.

    Args:
        problem: What is wrong, lower case, no full stop.
        kind: Stable identifier of the defect, snake case; the class's own by default.
        path: File that the error is about.
        expected: What should have been there.
        found: What was there.
        hint: What to do about it, as an imperative.
        continued_by: What continues the work that it ended, such as "the same command".
    """

    kind = "ups"
    exit_code = 1

    def __init__(
        self,
        problem: str,
        *,
        kind: str | None = None,
        path: object = None,
        expected: Any = None,
        found: Any = None,
        hint: str | None = None,
        continued_by: str | None = None,
    ) -> None:
        problem = without_secrets(problem)
        self.problem = problem
        self.kind = kind or type(self).kind
        self.path = None if path is None else without_secrets(str(path))
        self.expected = without_secrets(expected) if isinstance(expected, str) else expected
        self.found = without_secrets(found) if isinstance(found, str) else found
        self.hint = hint
        self.continued_by = continued_by
        super().__init__(problem)

    def __str__(self) -> str:
        sentence = self.problem if self.path is None else f"{one_line(self.path)}: {self.problem}"
        if self.expected is not None:
            sentence += f": expected {self.expected}"
            sentence += "" if self.found is None else f", found {self.found}"
        elif self.found is not None:
            sentence += f": found {self.found}"
        continues = self.continued_by and f"{self.continued_by} continues"
        return printable(without_secrets("; ".join(filter(None, (sentence, self.hint, continues)))))


class ConfigError(UpsError, ValueError):
    """A configuration key, flag or combination of them is wrong.

    Attributes:
        problems: The single ones, where this one says several at once; else empty.
    """

    kind = "config"
    exit_code = 2
    problems: tuple[UpsError | StoreError, ...] = ()

    @classmethod
    def joined(cls, problems: Sequence[UpsError | StoreError]) -> UpsError | StoreError:
        """One error of several, a line each; of one kind if all are. One alone stays as it is."""
        if len(problems) == 1:
            return problems[0]
        error = cls(mistakes(problems), kind=common_kind(problems))
        error.problems = tuple(problems)
        return error


class ShapeError(UpsError, ValueError):
    """A tensor's shape isn't what the model or metric was built for."""

    kind = "shape"


class CheckpointError(UpsError):
    """A checkpoint is missing, damaged, or of something else."""

    kind = "checkpoint"


class OtherTensorsError(CheckpointError):
    """A checkpoint's tensors aren't those that were expected.

    Attributes:
        missing: Names that it lacks.
        unexpected: Names that nothing takes.
        reshaped: Names of tensors of another shape.
    """

    kind = "other_weights"
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    reshaped: tuple[str, ...] = ()


class OutputError(UpsError):
    """A file can't be written; what was there before is still there. Exit code 6 where the disk is full."""

    kind = "not_written"

    @classmethod
    def of(
        cls, error: OSError, path: object, *, doing: str = "can't be written", flag: str | None = None
    ) -> OutputError:
        """What the system said about a path.

        Args:
            error: What it raised.
            path: What the error is about.
            doing: What failed.
            flag: Of the command, where the path is from.
        """
        if isinstance(error, StoreError):  # which says all of it already
            return cls(error.problem, kind=error.kind, path=error.path, found=error.found, hint=error.hint)
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        elsewhere = f"give {flag} another folder" if flag else "write elsewhere"
        checked = flag or "the path and its permissions"
        hint = f"free some space, or {elsewhere}" if is_full else f"check {checked}"
        made = cls(f"{doing} ({(error.strerror or str(error)).lower()})", path=path, hint=hint)
        made.exit_code = _EXIT_DISK_FULL if is_full else cls.exit_code
        return made


class DivergedError(UpsError):
    """A loss became NaN or infinite; the last good checkpoint is still there.

    Attributes:
        step: Optimiser step at which it was first seen, counted from 1.
        loss_name: Which loss.
    """

    kind = "diverged"
    step: int
    loss_name: str


class InterruptedTrainingError(UpsError):
    """Training was asked to stop and has saved itself; the same command continues it."""

    kind = "interrupted"
    exit_code = 5


class StalledError(UpsError):
    """Training made no progress for `training.stall_timeout_s`, so it was ended; saved states are kept."""

    kind = "stalled"
    exit_code = 4


class GateMissedError(UpsError):
    """A run didn't reach what its configuration asks for; everything that it made is kept.

    Attributes:
        verdicts: On every gate of the evaluation, JSON values.
        report: Of the stage that missed them, JSON values; empty where it was an evaluation.
    """

    kind = "gate_missed"
    exit_code = 10
    verdicts: tuple[dict[str, Any], ...] = ()
    report: Mapping[str, Any] = MappingProxyType({})


class LaunchError(UpsError):
    """No machine was rented, or it doesn't start; the message says whether one has to be paid for.

    Attributes:
        instance: Number of the instance that there is; None if there is none.
    """

    kind = "launch"
    instance: int | None = None


class MissedGatesWarning(UserWarning):
    """A model that was exported although it isn't as good as it should be."""


class ConfigWarning(UserWarning):
    """A setting that has no effect."""
