"""`TensorboardSink`: the numbers of records as events that TensorBoard shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ups.errors import check_installed
from ups.train.numbers import Record, numbers_of, numbers_within


class TensorboardSink:
    """Writes the numbers of records over their optimiser steps.

    Args:
        folder: Of the stage's events; TensorBoard shows each folder as a run.

    Raises:
        MissingExtraError: If the package tensorboard isn't installed.
    """

    run_id: str | None = None

    def __init__(self, folder: Path) -> None:
        check_tensorboard()
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder))

    def write(self, record: Record) -> None:
        """See `Sink.write`; a reader sees the numbers once an epoch is over."""
        numbers = numbers_of(record)
        if record["event"] == "end":
            numbers |= numbers_within(record.get("report", {}), "report/")
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, global_step=record.get("step"), walltime=record["time"])
        if record["event"] == "epoch":
            self._writer.flush()

    def close(self, *, has_failed: bool) -> None:
        """See `Sink.close`."""
        self._writer.close()


def check_tensorboard() -> None:
    """Check that events can be written.

    Raises:
        MissingExtraError: If the package isn't installed.
    """
    check_installed("tensorboard", extra="tensorboard")
