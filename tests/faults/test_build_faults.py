"""Builds whose sources hang, fail or are damaged: each ends in time and the next run makes the same store.

Most run in this process with reader processes of their own, so that a fault can be put at an exact place.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import psutil
import pytest
from build_helpers import BURGERS, Recorder, build, settings
from faulty_disk import FaultyDisk
from inline_readers import in_this_process
from reader_faults import FakeRead, fake

import ups_store
from ups_store.building import read
from ups_store.building.config import BuildConfig, ReadingConfig
from ups_store.building.read import UnreadSamplesError
from ups_store.console import interruptible
from ups_store.errors import BuildInterruptedError, IdentityMismatchError, ReadTimeoutError, SourceError
from ups_store.read.recovery import building_path
from ups_store.sources.reader_pool import ReaderPool
from ups_store.writing.writer import StoreWriter

pytestmark = pytest.mark.multi_process

NAME = "burgers1d_train.zarr.zip"
NUM_SAMPLES, NUM_TRAIN = 20, 16
GRACE_S = 20.0  # after its deadlines everything has to be over: far sooner than what hangs, for 60 s
SHORT_S = 1.5  # a deadline that is meant to pass, and before it is kept on a busy machine
LONGER_S = 1.5  # one that a reader which isn't disturbed keeps, also on a busy machine
PAUSE_S = 0.5  # before a request is tried again the first time


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    """No process, descriptor or mapped slot outlives a test; slots have no name that could stay."""
    gc.collect()
    fds = len(os.listdir("/proc/self/fd"))
    others = psutil.Process().children()
    yield
    left = [process for process in psutil.Process().children(recursive=True) if process not in others]
    for process in left:
        process.kill()
    assert left == []
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= fds
    assert "memfd:ups_store" not in Path("/proc/self/maps").read_text()


@pytest.fixture(scope="module")
def start_s() -> float:
    """What starting a reader takes now, on a machine that may be busy, with as much again to spare."""
    started = time.monotonic()
    with ReaderPool(1, slot_nbytes=1 << 20) as pool:
        list(pool.read([fake(FakeRead, 0)]))
    return 2 * (time.monotonic() - started)


@contextlib.contextmanager
def ends_within(seconds: float) -> Iterator[None]:
    """The block is over in time, with the grace."""
    started = time.monotonic()
    yield
    assert time.monotonic() - started < seconds + GRACE_S


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Samples of 8 KiB, of which 16 are for training, in a contiguous dataset."""
    path = tmp_path / "source" / BURGERS
    path.parent.mkdir()
    write_tensor(path, tensor={})
    return path


def write_tensor(path: Path, *, tensor: dict[str, Any], shape: tuple[int, int] = (8, 256)) -> None:
    """PDEBench's layout; `tensor` are options of the dataset, such as its compression."""
    fields = np.random.default_rng(0).random((NUM_SAMPLES, *shape), dtype=np.float32)
    with h5py.File(path, "w") as file:
        file.create_dataset("tensor", data=fields, **tensor)
        file["x-coordinate"] = np.linspace(0, 1, shape[1], dtype="f4")
        file["t-coordinate"] = np.linspace(0, 1, shape[0] + 1, dtype="f4")
        file.attrs["Nu"] = 0.01


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FaultyDisk:
    return FaultyDisk(tmp_path, monkeypatch)


@pytest.fixture
def sample_by_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read, "BATCH_BYTES", 1)


def reading(folder: Path, *, split: str = "train", **keys: Any) -> BuildConfig:
    """As a user who says nothing about readers."""
    config = settings(folder, split=split)
    return config.model_copy(update={"reading": ReadingConfig(**keys)})


def at_sample(num_samples: int, act: Callable[[Recorder], None]) -> Recorder:
    """A watcher that acts once, when so many samples were committed."""
    acted = False

    def look(watcher: Recorder) -> None:
        nonlocal acted
        if not acted and watcher.stages[-1][2] == "samples" and watcher.num_samples >= num_samples:
            acted = True
            act(watcher)

    return Recorder(on_advance=look)


def signal_readers(number: signal.Signals) -> Callable[[Recorder], None]:
    """Signal all readers; of several one may still be starting, whose limit is another."""

    def send(watcher: Recorder) -> None:
        for reader in watcher.pool.status().readers:
            os.kill(reader.pid, number)

    return send


def committed(folder: Path) -> int:
    with ups_store.open(building_path(folder / "cache" / NAME), partial=True) as store:
        return int(store.committed.sum())


def expect_finished_as_undisturbed(folder: Path, *, num_committed: int | None = None) -> None:
    """The next run finishes the store, with the bytes of one that nothing happened to."""
    with contextlib.contextmanager(in_this_process)():  # which spares starting readers, twice
        (result,) = build(settings(folder, split="train")).stores
        (other,) = build(settings(folder, split="train", cache_dir=str(folder / "undisturbed"))).stores
    assert num_committed in (None, result.num_committed)
    assert result.path.read_bytes() == other.path.read_bytes()


def expect_made_anew_as_undisturbed(folder: Path) -> None:
    """A mended file has another digest than what is there was made of: the next run says so."""
    with contextlib.contextmanager(in_this_process)():
        with pytest.raises(IdentityMismatchError, match="--overwrite"):
            build(settings(folder, split="train"))
        build(settings(folder, split="train"), overwrite=True)
    expect_finished_as_undisturbed(folder, num_committed=0)


# --- sources that hang --------------------------------------------------------------------------------


def test_pipe_as_source_is_refused_by_name(source: Path, tmp_path: Path) -> None:
    whole = source.read_bytes()
    source.unlink()
    os.mkfifo(source)
    with ends_within(0), pytest.raises(SourceError, match="not a regular file") as caught:
        build(reading(tmp_path))
    assert (caught.value.path, caught.value.exit_code) == (str(source), 3)
    source.unlink()
    source.write_bytes(whole)
    expect_finished_as_undisturbed(tmp_path, num_committed=NUM_TRAIN)


@pytest.mark.parametrize("digest", ["full", "sampled"])
def test_source_that_becomes_a_pipe_is_refused_by_name(source: Path, tmp_path: Path, digest: str) -> None:
    whole = source.read_bytes()

    class Replacing(Recorder):
        def stage(self, name: str, total: int, *, unit: str) -> None:
            super().stage(name, total, unit=unit)
            source.unlink()
            os.mkfifo(source)

    config = reading(tmp_path, timeout_s=60, retries=0)
    data = config.data.model_copy(update={"source_digest": digest})
    with pytest.raises(SourceError, match="not a regular file any more") as caught:
        build(config.model_copy(update={"data": data}), Replacing())
    assert (caught.value.kind, caught.value.exit_code, caught.value.path) == ("not_a_file", 3, str(source))
    source.unlink()
    source.write_bytes(whole)
    expect_finished_as_undisturbed(tmp_path, num_committed=NUM_TRAIN)


@pytest.mark.parametrize("compression", [None, "gzip"])
def test_read_that_hangs_ends_at_the_deadline_and_says_where(
    source: Path, tmp_path: Path, disk: FaultyDisk, start_s: float, compression: str | None
) -> None:
    write_tensor(source, tensor={"compression": compression, "chunks": (4, 8, 256) if compression else None})
    disk.begin("hang")
    with ends_within(SHORT_S + start_s), pytest.raises(ReadTimeoutError) as caught:
        build(reading(tmp_path, timeout_s=SHORT_S, retries=0))
    error = caught.value
    assert (error.exit_code, error.path, error.dataset, error.sample) == (4, str(source), "tensor", 2)
    assert f"was late with samples 2..17 (attempt 1 of 1): expected at most {SHORT_S} s" in str(error)
    assert "found reading dataset 'tensor' for " in str(error)
    assert "in read_hyperslabs" in error.__notes__[0]  # the reader's stack
    disk.end()
    expect_finished_as_undisturbed(tmp_path, num_committed=NUM_TRAIN)


def test_digest_that_hangs_ends_at_the_deadline(
    source: Path, tmp_path: Path, disk: FaultyDisk, start_s: float
) -> None:
    disk.begin("hang", digests=True)
    with ends_within(SHORT_S + start_s), pytest.raises(ReadTimeoutError) as caught:
        build(reading(tmp_path, timeout_s=SHORT_S, retries=0))
    assert str(caught.value.found).startswith("digesting for ")
    disk.end()
    expect_finished_as_undisturbed(tmp_path, num_committed=NUM_TRAIN)


def test_open_that_hangs_is_tried_again_and_ends_at_its_deadline(
    source: Path, tmp_path: Path, disk: FaultyDisk, start_s: float
) -> None:
    disk.begin("hang", nbytes=1)
    watcher = Recorder()
    with ends_within(2 * (SHORT_S + start_s) + PAUSE_S), pytest.raises(ReadTimeoutError) as caught:
        build(reading(tmp_path, open_timeout_s=SHORT_S, retries=1), watcher)
    assert f"was late with the structure (attempt 2 of 2): expected at most {SHORT_S} s" in str(caught.value)
    assert str(caught.value.found).startswith("opening for ")
    assert "trying again in 0.5 s" in watcher.notes[0]
    disk.end()
    expect_finished_as_undisturbed(tmp_path, num_committed=NUM_TRAIN)


# --- readers that are stopped, killed, or out of memory -----------------------------------------------


@pytest.mark.parametrize(
    ("number", "error", "found"),
    [
        (signal.SIGSTOP, ReadTimeoutError, "process stopped"),
        (signal.SIGKILL, SourceError, "killed by SIGKILL"),
    ],
)
@pytest.mark.usefixtures("sample_by_sample")
def test_reader_that_is_lost_for_good_ends_the_build_and_keeps_what_is_committed(
    source: Path,
    tmp_path: Path,
    start_s: float,
    number: signal.Signals,
    error: type[SourceError],
    found: str,
) -> None:
    watcher = at_sample(5, signal_readers(number))
    with ends_within(LONGER_S + start_s), pytest.raises(error, match=found) as caught:
        build(reading(tmp_path, timeout_s=LONGER_S, retries=0, num_workers=1), watcher)
    assert caught.value.exit_code == (4 if number == signal.SIGSTOP else 3)
    kept = committed(tmp_path)
    assert 5 <= kept < NUM_TRAIN
    expect_finished_as_undisturbed(tmp_path, num_committed=NUM_TRAIN - kept)


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
@pytest.mark.usefixtures("sample_by_sample")
def test_reader_that_is_lost_once_is_replaced(
    source: Path, tmp_path: Path, start_s: float, number: signal.Signals
) -> None:
    watcher = at_sample(5, signal_readers(number))
    with ends_within(LONGER_S + PAUSE_S + 2 * start_s):
        build(reading(tmp_path, timeout_s=LONGER_S, retries=1, num_workers=1), watcher)
    assert "trying again" in watcher.notes[0]
    expect_finished_as_undisturbed(tmp_path, num_committed=0)


@pytest.mark.usefixtures("sample_by_sample")
def test_reader_at_its_memory_limit_says_so(source: Path, tmp_path: Path, start_s: float) -> None:
    # Chunks of 64 MiB that were never written and mean NaN: reading one takes that much memory.
    source.unlink()
    shape = (NUM_SAMPLES, 64, 1 << 18)
    with h5py.File(source, "w") as file:
        options = {"chunks": (1, *shape[1:]), "compression": "gzip", "fillvalue": np.nan}
        file.create_dataset("tensor", shape, "f4", **options)
        file["x-coordinate"] = np.linspace(0, 1, shape[2], dtype="f4")
        file["t-coordinate"] = np.linspace(0, 1, shape[1] + 1, dtype="f4")
        file.attrs["Nu"] = 0.01

    class Limiting(Recorder):
        def stage(self, name: str, total: int, *, unit: str) -> None:
            super().stage(name, total, unit=unit)
            for reader in self.pool.status().readers if unit == "samples" else ():
                limit = psutil.Process(reader.pid).memory_info().vms
                resource.prlimit(reader.pid, resource.RLIMIT_AS, (limit, limit))

    config = reading(tmp_path, retries=0)
    data = config.data.model_copy(
        update={"reduce_space": 1 << 12, "limit": 2, "on_nan": "keep"}
    )  # stores little of it
    config = config.model_copy(update={"data": data})
    with ends_within(start_s), pytest.raises(SourceError) as caught:
        build(config, Limiting())
    assert (caught.value.kind, caught.value.exit_code, caught.value.sample) == ("no_memory", 3, 2)
    assert "lower reading.num_workers" in str(caught.value)
    assert build(config).stores[0].num_committed == 2


def test_slots_larger_than_dev_shm_are_had(source: Path, tmp_path: Path) -> None:
    # The slots of two readers take 68 MB; /dev/shm has 1 MiB here, which must not matter.
    command = [sys.executable, "-m", "ups_store.build", "--tasks=burgers1d", "--splits=train"]
    command += ["--num-workers=2", f"--root={source.parent}", f"--cache-dir={tmp_path / 'cache'}"]
    mount = 'mount -t tmpfs -o size=1m shm /dev/shm && exec "$@"'
    isolated = ["unshare", "--mount", "sh", "-c", mount, "sh"]
    if subprocess.run([*isolated, "true"], capture_output=True, check=False).returncode:
        pytest.skip("unshare: mount namespaces aren't allowed")
    subprocess.run([*isolated, *command], check=True, capture_output=True, timeout=60)
    expect_finished_as_undisturbed(tmp_path, num_committed=0)


# --- sources that are damaged, change, or are locked --------------------------------------------------


@pytest.mark.parametrize(
    ("damage", "kind"),
    [
        (lambda whole: whole[: len(whole) // 2], "truncated"),
        (lambda whole: bytes(64) + whole[64:], "not_hdf5"),
        (lambda whole: whole[:8] + b"\xff" * 88 + whole[96:], "unreadable"),
    ],
    ids=["truncated", "no_signature", "corrupt_superblock"],
)
def test_source_with_a_damaged_header_is_refused(
    source: Path,
    tmp_path: Path,
    start_s: float,
    damage: Callable[[bytes], bytes],
    kind: str,
) -> None:
    whole = source.read_bytes()
    source.write_bytes(damage(whole))
    config = settings(tmp_path, split="train")
    with ends_within(start_s), pytest.raises(SourceError) as caught:
        build(config)
    assert (caught.value.kind, caught.value.path, caught.value.exit_code) == (kind, str(source), 3)
    source.write_bytes(whole)
    expect_finished_as_undisturbed(tmp_path, num_committed=NUM_TRAIN)


def damage_chunks(path: Path, *samples: int) -> None:
    with h5py.File(path) as file:
        offsets = [file["tensor"].id.get_chunk_info(sample).byte_offset for sample in samples]
    with path.open("r+b") as raw:
        for offset in offsets:
            raw.seek(offset)
            raw.write(b"\xff" * 16)


def test_damaged_chunks_are_skipped_and_exactly_they_are_named(
    source: Path, tmp_path: Path, start_s: float
) -> None:
    write_tensor(source, tensor={"chunks": (1, 8, 256), "compression": "gzip"})
    whole = source.read_bytes()
    damage_chunks(source, 5, 11)  # 3 and 9 of the split, which starts at 2
    config = reading(tmp_path, on_error="skip")
    skipping = config.reading.model_copy(update={"num_workers": 2})
    watcher = Recorder()
    with (
        ends_within(start_s),
        pytest.raises(UnreadSamplesError, match="2 of 16 samples can't be read") as caught,
    ):
        build(config.model_copy(update={"reading": skipping}), watcher)
    assert (caught.value.samples, caught.value.exit_code) == ((3, 9), 3)
    told = [note for note in watcher.notes if note.startswith(f"skipped: {source}, sample ")]
    assert [note.split(" sample ")[1].split(":")[0] for note in told] == ["5", "11"]
    assert all("of dataset 'tensor'" in note for note in told)
    assert committed(tmp_path) == NUM_TRAIN - 2
    source.write_bytes(whole)
    expect_made_anew_as_undisturbed(tmp_path)


def test_damaged_chunk_ends_the_build_unless_it_is_skipped(
    source: Path, tmp_path: Path, start_s: float
) -> None:
    write_tensor(source, tensor={"chunks": (1, 8, 256), "compression": "gzip"})
    whole = source.read_bytes()
    damage_chunks(source, 5)
    with ends_within(start_s), pytest.raises(SourceError) as caught:
        build(reading(tmp_path))
    assert (caught.value.kind, caught.value.dataset, caught.value.sample) == ("read_failed", "tensor", 2)
    assert "can't read samples 2..17 of dataset 'tensor'" in str(caught.value)
    source.write_bytes(whole)
    expect_finished_as_undisturbed(tmp_path, num_committed=NUM_TRAIN)


@pytest.mark.usefixtures("sample_by_sample")
def test_damage_that_comes_after_the_digest_is_mended_and_the_next_run_goes_on(
    source: Path, tmp_path: Path, start_s: float
) -> None:
    write_tensor(source, tensor={"chunks": (1, 8, 256), "compression": "gzip"})
    whole, times = source.read_bytes(), source.stat()

    def damage(watcher: Recorder) -> None:
        damage_chunks(source, 15)  # 13 of the split
        os.utime(source, ns=(times.st_atime_ns, times.st_mtime_ns))  # as a disk does it: nobody is told

    with ends_within(start_s), pytest.raises(SourceError) as caught:
        build(reading(tmp_path), at_sample(5, damage))
    assert (caught.value.kind, caught.value.sample) == ("read_failed", 15)
    kept = committed(tmp_path)
    assert 5 <= kept < NUM_TRAIN
    source.write_bytes(whole)
    expect_finished_as_undisturbed(tmp_path, num_committed=NUM_TRAIN - kept)


@pytest.mark.parametrize(
    "change",
    [
        Path.unlink,
        lambda path: os.truncate(path, path.stat().st_size // 2),
        lambda path: write_tensor(path.with_name("new"), tensor={}) or path.with_name("new").replace(path),
    ],
    ids=["deleted", "truncated", "replaced"],
)
@pytest.mark.usefixtures("sample_by_sample")
def test_source_that_changes_while_it_is_read_ends_the_build(
    source: Path, tmp_path: Path, start_s: float, change: Callable[[Path], object]
) -> None:
    whole = source.read_bytes()
    with ends_within(start_s), pytest.raises(SourceError, match="source changed") as caught:
        build(reading(tmp_path), at_sample(5, lambda watcher: change(source)))
    assert (caught.value.kind, caught.value.path, caught.value.exit_code) == (
        "source_changed",
        str(source),
        3,
    )
    kept = committed(tmp_path)
    assert 5 <= kept < NUM_TRAIN
    source.write_bytes(whole)
    expect_finished_as_undisturbed(tmp_path, num_committed=NUM_TRAIN - kept)


def test_source_that_a_simulation_writes_is_refused_until_it_is_closed(
    source: Path, tmp_path: Path, start_s: float
) -> None:
    code = "import h5py, sys; file = h5py.File(sys.argv[1], 'r+'); print(flush=True); sys.stdin.read()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code, source], **pipes) as simulation:
        simulation.stdout.readline()
        with ends_within(start_s), pytest.raises(SourceError) as caught:
            build(reading(tmp_path))
        simulation.communicate()
    assert (caught.value.kind, caught.value.exit_code) == ("being_written", 3)
    expect_finished_as_undisturbed(tmp_path, num_committed=NUM_TRAIN)


def test_input_output_errors_are_skipped_and_read_once_the_disk_answers(
    source: Path, tmp_path: Path, disk: FaultyDisk, start_s: float
) -> None:
    config = reading(tmp_path, retries=0, on_error="skip")
    config = config.model_copy(update={"data": config.data.model_copy(update={"limit": 3})})
    disk.begin("fail")
    # A failed read is another reader's next: of all three samples, then of each.
    with ends_within(4 * start_s), pytest.raises(UnreadSamplesError) as caught:
        build(config)
    assert caught.value.samples == (0, 1, 2)
    disk.end()
    assert build(config).stores[0].num_committed == 3


# --- a slow disk on the other side --------------------------------------------------------------------


@pytest.mark.usefixtures("sample_by_sample")
def test_slow_commits_fill_the_queue_and_are_not_held_against_the_readers(
    source: Path, tmp_path: Path, start_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    watcher = Recorder()
    waiting: list[int] = []
    commit_many, commit_s = StoreWriter.commit_many, 1.1 * LONGER_S

    def slow(self: StoreWriter, *batch: Any) -> np.ndarray:
        time.sleep(commit_s)
        status = watcher.pool.status()
        waiting.append(status.num_ready + sum(reader.num_waiting for reader in status.readers))
        return commit_many(self, *batch)

    monkeypatch.setattr(StoreWriter, "commit_many", slow)
    config = reading(tmp_path, timeout_s=LONGER_S, retries=0)
    with ends_within(3 * commit_s + start_s):
        build(config.model_copy(update={"data": config.data.model_copy(update={"limit": 3})}), watcher)
    assert max(waiting) == 2  # its slots


# --- Ctrl-C and SIGTERM -------------------------------------------------------------------------------


def hang_in_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StoreWriter, "commit_many", lambda self, *batch: time.sleep(60))


def hang_in_finish(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StoreWriter, "finish", lambda self: time.sleep(60))


STAGES: dict[str, Callable[[FaultyDisk, pytest.MonkeyPatch], None]] = {
    "opening": lambda disk, monkeypatch: disk.begin("hang", nbytes=1),
    "digest": lambda disk, monkeypatch: disk.begin("hang", digests=True),
    "read": lambda disk, monkeypatch: disk.begin("hang"),
    "commit": lambda disk, monkeypatch: hang_in_commit(monkeypatch),
    "finish": lambda disk, monkeypatch: hang_in_finish(monkeypatch),
}


STOPS = (signal.SIGINT, signal.SIGTERM)


class Reached:
    """Sends this process a signal once its build hangs in a stage."""

    def __init__(self, stage: str, number: signal.Signals, watcher: Recorder) -> None:
        self.sent_s = 0.0
        self._stage, self._number, self._watcher = stage, number, watcher
        self._thread = threading.Thread(target=self._wait)

    def _is_there(self) -> bool:
        waited_for = self._watcher.waited_for
        if self._stage in ("commit", "finish"):
            return waited_for[-1:] == [self._stage]
        readers = self._watcher.pool.status().readers if hasattr(self._watcher, "pool") else ()
        doing = {"opening": "opening", "digest": "digesting", "read": "reading"}[self._stage]
        return any(reader.doing == doing for reader in readers)

    def _wait(self) -> None:
        while not self._is_there():
            time.sleep(0.01)
        time.sleep(0.05)
        self.sent_s = time.monotonic()
        os.kill(os.getpid(), self._number)

    def __enter__(self) -> Reached:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._thread.join()


@pytest.mark.parametrize(("stage", "number"), [*zip(STAGES, itertools.cycle(STOPS), strict=False)])
def test_stop_in_each_stage_ends_the_build_at_once(
    source: Path,
    tmp_path: Path,
    disk: FaultyDisk,
    monkeypatch: pytest.MonkeyPatch,
    stage: str,
    number: signal.Signals,
) -> None:
    watcher = Recorder()
    with monkeypatch.context() as patched:
        STAGES[stage](disk, patched)
        with (
            pytest.raises(BuildInterruptedError) as caught,
            interruptible(),
            Reached(stage, number, watcher) as reached,
        ):
            build(reading(tmp_path), watcher)
        assert time.monotonic() - reached.sent_s < GRACE_S
    assert caught.value.exit_code == 5
    disk.end()
    expect_finished_as_undisturbed(tmp_path)


# --- the command --------------------------------------------------------------------------------------


@contextlib.contextmanager
def started(folder: Path, *flags: str) -> Iterator[subprocess.Popen[str]]:
    """The command, in a session of its own, of which nothing may be left."""
    paths = [f"--root={folder / 'source'}", f"--cache-dir={folder / 'cache'}"]
    words = ["--tasks=burgers1d", "--splits=train", *paths, *flags]
    with subprocess.Popen(
        [sys.executable, "-m", "ups_store.build", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()
    deadline_s = time.monotonic() + GRACE_S
    while (left := session_of(process.pid)) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    assert left == []


def session_of(leader: int) -> list[int]:
    left = []
    for pid in psutil.pids():
        try:
            if os.getsid(pid) == leader and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                left.append(pid)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return left


def test_first_line_comes_before_a_read_that_hangs_and_a_diagnosis_follows(
    source: Path, tmp_path: Path, disk: FaultyDisk, start_s: float
) -> None:
    disk.begin("hang", nbytes=1)
    flags = ("--num-workers=1", "--open-timeout=1.5", "--retries=0", "--stall-warning=0.3", "-vv")
    with started(tmp_path, *flags) as process:
        assert process.stderr is not None
        first = process.stderr.readline()
        _, err = process.communicate(timeout=60)
    assert first == f"building burgers1d (train): sources in {source.parent}, stores in {tmp_path}/cache\n"
    assert "no progress for " in err
    assert f": the structure of {source}" in err
    assert "in open_hdf5" in err
    assert "free memory " in err
    assert process.returncode == 4


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_command_that_is_stopped_leaves_no_process_behind(
    source: Path, tmp_path: Path, disk: FaultyDisk, number: signal.Signals
) -> None:
    disk.begin("hang")
    with started(tmp_path, "--num-workers=2", "--stall-warning=0.2") as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "reading for" in line:
                break
        process.send_signal(number)
        with ends_within(0):
            process.communicate(timeout=60)
    assert process.returncode == (-number if number == signal.SIGKILL else 5)
    disk.end()
    expect_finished_as_undisturbed(tmp_path, num_committed=NUM_TRAIN)
