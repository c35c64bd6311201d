"""What every command shares: one sentence and an exit code for an error, warnings of a configuration."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import typer
from ups.cli.commands import resolve_config, telling_errors

from ups.errors import CheckpointError, ConfigError, InterruptedTrainingError
from ups_store.errors import (
    CorruptChunkError,
    DiskFullError,
    ReadTimeoutError,
    SourceError,
    StoreNotFoundError,
    TruncatedError,
)


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (CheckpointError("no such checkpoint", path="a.safetensors"), 1, "error: a.safetensors: no such"),
        (ConfigError("--split", expected="train"), 2, "error: --split: expected train"),
        (SourceError("no such source", path="a.hdf5"), 3, "a.hdf5"),
        (StoreNotFoundError("no such file", path="a.zarr.zip"), 3, "a.zarr.zip"),
        (TruncatedError("ends early", path="a.zarr.zip"), 3, "ends early"),
        (CorruptChunkError("other bytes", path="a.zarr.zip"), 3, "other bytes"),
        (ReadTimeoutError("too slow", path="a.hdf5"), 4, "too slow"),
        (InterruptedTrainingError("stopped"), 5, "stopped"),
        (KeyboardInterrupt(), 5, "told to stop"),
        (DiskFullError("no space left on device"), 6, "no space left"),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "out"), 6, "out: can't be used (no space left"),
        (PermissionError(errno.EACCES, os.strerror(errno.EACCES), "out"), 1, "check the path"),
    ],
)
def test_errors_end_a_command_with_one_sentence_and_their_code(
    error: BaseException, code: int, says: str
) -> None:
    told: list[str] = []
    with pytest.raises(typer.Exit) as ended, telling_errors(told.append, interrupted="told to stop"):
        raise error
    assert (ended.value.exit_code, len(told)) == (code, 1)
    assert says in told[0]


def test_bugs_pass() -> None:
    told: list[str] = []
    with pytest.raises(ZeroDivisionError), telling_errors(told.append):
        raise ZeroDivisionError
    assert told == []


def test_warnings_of_a_configuration_are_told(tmp_path: Path) -> None:
    path, told = tmp_path / "run.yaml", list[str]()
    path.write_text("training: {log_per_task_metrics: true}\ndata: {task: [burgers1d], root: .}\n")
    config = resolve_config(path, ["seed=3"], note=told.append)
    assert config.seed == 3
    assert len(told) == 1
    assert told[0].startswith("warning: ")


def test_ctrl_c_promises_no_more_than_every_command_keeps() -> None:
    told: list[str] = []
    with pytest.raises(typer.Exit), telling_errors(told.append):
        raise KeyboardInterrupt
    assert told == ["interrupted: run the same command again"]
