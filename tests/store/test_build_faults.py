"""Builds whose sources hang, fail or are damaged: each ends in time and the next run makes the same store."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import h5py
import numpy as np
import psutil
import pytest
from build_helpers import BURGERS, build, settings, write_burgers

import ups_store
from ups_store.recovery import building_path

# Deadlines of seconds against a machine under load: run alone, by `make test-slow`.
pytestmark = [pytest.mark.multi_process, pytest.mark.slow]

NAME = "burgers1d_train.zarr.zip"
START_S = 8.0  # for Python and a reader on a busy machine, beside the deadline
GRACE_S = 2.0

# One sample a commit; after the fifth, signal $1 goes to every reader, as the fault of a machine would.
DISTURBED = """
import os, sys, psutil
from ups_store.build import read, run as running
from ups_store.build.command import main
from ups_store.console import run

read.BATCH_BYTES = 1
number = int(sys.argv.pop(1))
add, num = running.Statistics.add, 0

def add_and_disturb(self, arrays):
    global num
    add(self, arrays)
    num += 1
    if num == 5:
        for reader in psutil.Process().children():
            reader.send_signal(number)

running.Statistics.add = add_and_disturb
run(main)
"""


@contextmanager
def started(folder: Path, *flags: str, code: str | None = None) -> Iterator[subprocess.Popen[str]]:
    """A build of the folder's train split in a session of its own, of which nothing may be left."""
    program = ["-m", "ups_store.build"] if code is None else ["-c", code]
    number, *others = flags if code else ("", *flags)
    paths = ["--root", str(folder / "source"), "--cache-dir", str(folder / "cache")]
    words = [*([number] if code else []), "--tasks", "burgers1d", "--splits", "train", *paths, *others]
    with subprocess.Popen(
        [sys.executable, *program, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()
    assert session_of(process.pid) == []


def session_of(leader: int) -> list[int]:
    left = []
    for pid in psutil.pids():
        try:
            if os.getsid(pid) == leader and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                left.append(pid)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return left


def ended(folder: Path, *flags: str, code: str | None = None, within_s: float = 0.0) -> tuple[int, str]:
    """Exit code and stderr of a build that has to end by itself."""
    with started(folder, *flags, code=code) as process:
        _, err = process.communicate(timeout=START_S + within_s + GRACE_S)
    return process.returncode, err


def expect_finished_as_undisturbed(folder: Path, *, num_committed: int | None = None) -> None:
    """The next run finishes the store, with the bytes of one that nothing happened to."""
    (result,) = build(settings(folder, split="train")).stores
    assert num_committed in (None, result.num_committed)
    (other,) = build(settings(folder, split="train", cache_dir=str(folder / "undisturbed"))).stores
    assert result.path.read_bytes() == other.path.read_bytes()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """20 samples of 8 KiB, of which 16 are for training."""
    fields = np.random.default_rng(0).random((20, 8, 256), dtype=np.float32)
    path = tmp_path / "source" / BURGERS
    path.parent.mkdir()
    with h5py.File(path, "w") as file:
        file["tensor"] = fields
        file["x-coordinate"] = np.linspace(0, 1, 256, dtype="f4")
        file["t-coordinate"] = np.linspace(0, 1, 9, dtype="f4")
        file.attrs["Nu"] = 0.01
    return path


@pytest.fixture
def slow_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Makes builds that start from now on misbehave in reads, as long as the returned file is there."""
    if shutil.which("gcc") is None:
        pytest.skip("gcc: not found")
    shim, flag = tmp_path / "slow_disk.so", tmp_path / "slow"
    code = Path(__file__).with_name("slow_disk.c")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", shim, code, "-ldl"], check=True)

    def begin(how: str, *, nbytes: int = 4096) -> Path:
        monkeypatch.setenv("LD_PRELOAD", str(shim))
        monkeypatch.setenv("SLOW_DISK", str(flag))
        monkeypatch.setenv("SLOW_DISK_HOW", how)
        monkeypatch.setenv("SLOW_DISK_BYTES", str(nbytes))
        flag.touch()
        return flag

    return begin


# --- sources that hang --------------------------------------------------------------------------------


def test_pipe_as_source_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    path = tmp_path / "source" / BURGERS
    os.mkfifo(path)
    code, err = ended(tmp_path)
    assert code == 3
    assert f"error: {path}: not a regular file: expected an HDF5 file, found a pipe" in err
    path.unlink()
    write_burgers(path)
    expect_finished_as_undisturbed(tmp_path, num_committed=16)


def test_read_that_hangs_ends_with_4_and_says_where(
    source: Path, tmp_path: Path, slow_disk: Callable[..., Path]
) -> None:
    flag = slow_disk("hang")
    code, err = ended(tmp_path, "--num-workers=1", "--timeout=2", "--retries=0", "-vv", within_s=2.0)
    assert code == 4
    assert f"{source}, sample 2: reader " in err
    assert "was late with samples 2..17 (attempt 1 of 1): expected at most 2 s, found reading for " in err
    assert "in read_samples" in err  # its stack
    flag.unlink()
    expect_finished_as_undisturbed(tmp_path, num_committed=16)


def test_open_that_hangs_ends_with_4(source: Path, tmp_path: Path, slow_disk: Callable[..., Path]) -> None:
    flag = slow_disk("hang", nbytes=1)
    flags = ("--num-workers=2", "--open-timeout=1", "--retries=1")
    code, err = ended(tmp_path, *flags, within_s=1 * 2 + 0.5 + 0.5)
    assert code == 4
    assert "was late with the structure (attempt 2 of 2): expected at most 1 s, found opening for" in err
    flag.unlink()
    expect_finished_as_undisturbed(tmp_path, num_committed=16)


def test_first_line_and_diagnosis_are_told_while_a_read_hangs(
    source: Path, tmp_path: Path, slow_disk: Callable[..., Path]
) -> None:
    slow_disk("hang")
    log = tmp_path / "log.json"
    flags = ("--num-workers=1", "--timeout=3", "--retries=0", "--stall-warning=0.4", f"--log-json={log}")
    with started(tmp_path, *flags) as process:
        assert process.stderr is not None
        begun = time.monotonic()
        first = process.stderr.readline()
        assert time.monotonic() - begun < START_S
        assert (
            first == f"building burgers1d (train): sources in {source.parent}, stores in {tmp_path}/cache\n"
        )
        assert process.poll() is None
        err = process.communicate(timeout=START_S)[1]
    assert "burgers1d train: samples (0 of 16 done) waits for read" in err
    assert f": samples 2..17 of {source}" in err
    assert "in read_samples" in err
    assert "free memory " in err
    events = [json.loads(line) for line in log.read_text().splitlines()]
    assert {"start", "stage", "progress", "stalled", "error", "end"} <= {event["event"] for event in events}
    assert next(event for event in events if event["event"] == "error")["kind"] == "read_timeout"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("nbytes", [1, 4096], ids=["opening", "reading"])
def test_stop_while_a_source_hangs_ends_with_5(
    source: Path, tmp_path: Path, slow_disk: Callable[..., Path], number: signal.Signals, nbytes: int
) -> None:
    flag = slow_disk("hang", nbytes=nbytes)
    with started(tmp_path, "--num-workers=2", "--stall-warning=0.2") as process:
        assert process.stderr is not None
        what = "opening for" if nbytes == 1 else "reading for"
        while what not in process.stderr.readline():
            assert process.poll() is None
        process.send_signal(number)
        begun = time.monotonic()
        process.communicate(timeout=START_S)
        assert time.monotonic() - begun < GRACE_S
    assert process.returncode == 5
    flag.unlink()
    expect_finished_as_undisturbed(tmp_path, num_committed=16)


# --- readers that are stopped or killed ---------------------------------------------------------------


@pytest.mark.parametrize(("number", "code"), [(signal.SIGSTOP, 4), (signal.SIGKILL, 3)])
def test_reader_that_is_lost_for_good_ends_the_build_and_keeps_what_is_committed(
    source: Path, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    flags = ("--num-workers=1", "--timeout=2", "--retries=0")
    got, err = ended(tmp_path, str(int(number)), *flags, code=DISTURBED, within_s=4.0)
    assert got == code
    assert "process stopped" in err if number == signal.SIGSTOP else "killed by SIGKILL" in err
    with ups_store.open(building_path(tmp_path / "cache" / NAME), partial=True) as store:
        committed = int(store.committed.sum())
    assert 5 <= committed < 16
    expect_finished_as_undisturbed(tmp_path, num_committed=16 - committed)


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_reader_that_is_lost_once_is_replaced(source: Path, tmp_path: Path, number: signal.Signals) -> None:
    flags = ("--num-workers=2", "--timeout=2", "--retries=1")
    code, err = ended(tmp_path, str(int(number)), *flags, code=DISTURBED, within_s=4.0)
    assert code == 0
    assert "trying again" in err
    expect_finished_as_undisturbed(tmp_path, num_committed=0)


# --- sources that are damaged -------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [0, 1])
def test_truncated_source_ends_with_3(source: Path, tmp_path: Path, num_workers: int) -> None:
    whole = source.read_bytes()
    os.truncate(source, len(whole) // 2)
    code, err = ended(tmp_path, f"--num-workers={num_workers}")
    assert code == 3
    assert f"{source}: the file ends before its data does" in err
    source.write_bytes(whole)
    expect_finished_as_undisturbed(tmp_path, num_committed=16)


def write_damaged(tmp_path: Path, *, chunks: tuple[int, ...]) -> Path:
    """A compressed file of the train split of 16 samples, with damage in chunks of one sample each."""
    path = tmp_path / "source" / "burgers1d_train.h5"
    path.parent.mkdir()
    fields = np.random.default_rng(0).random((16, 8, 256), dtype=np.float32)
    with h5py.File(path, "w") as file:
        file.create_dataset("data", data=fields, chunks=(1, 8, 256), compression="gzip")
        offsets = [file["data"].id.get_chunk_info(chunk).byte_offset for chunk in chunks]
    with path.open("r+b") as raw:
        for offset in offsets:
            raw.seek(offset)
            raw.write(b"\xff" * 16)
    return path


@pytest.mark.parametrize("num_workers", [0, 2])
def test_damaged_chunks_are_skipped_and_exactly_they_are_named(tmp_path: Path, num_workers: int) -> None:
    path = write_damaged(tmp_path, chunks=(3, 9))
    code, err = ended(tmp_path, f"--num-workers={num_workers}", "--on-error=skip")
    assert code == 3
    assert "2 of 16 samples can't be read and were skipped: 3, 9" in err
    lines = [line for line in err.splitlines() if line.startswith(f"skipped: {path}, sample ")]
    assert [line.split(" sample ")[1].split(":")[0] for line in lines] == ["3", "9"]
    with ups_store.open(building_path(tmp_path / "cache" / NAME), partial=True) as store:
        assert np.flatnonzero(~store.committed).tolist() == [3, 9]
    code, err = ended(tmp_path, "--on-error=skip")
    assert "14 of 16 samples are there, continuing" in err
    assert code == 3


def test_damaged_chunk_ends_with_3_unless_it_is_skipped(tmp_path: Path) -> None:
    path = write_damaged(tmp_path, chunks=(3,))
    code, err = ended(tmp_path)
    assert code == 3
    assert f"error: {path}, sample 0: can't read samples 0..15 of dataset 'data'" in err


def test_input_output_errors_are_skipped_and_read_once_the_disk_answers(
    source: Path, tmp_path: Path, slow_disk: Callable[..., Path]
) -> None:
    flag = slow_disk("fail")
    code, err = ended(tmp_path, "--num-workers=1", "--retries=0", "--on-error=skip", within_s=5.0)
    assert code == 3
    assert "16 of 16 samples can't be read and were skipped: 0, 1, 2, 3, 4, 5, 6, 7, ...; the others" in err
    flag.unlink()
    expect_finished_as_undisturbed(tmp_path, num_committed=16)
