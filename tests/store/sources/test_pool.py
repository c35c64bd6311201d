"""Readers that hang, crash, are killed or stopped: all end in time, in the right error, leaving nothing."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import PIPE
from typing import Any

import h5py
import numpy as np
import psutil
import pytest
from faulty_disk import FaultyDisk
from hanging_files import hanging
from pdebench_files import Size, write, write_scalar_1d
from reader_faults import (
    CrashingRead,
    CutAmidRead,
    FakeRead,
    FaultyRead,
    SteadyRead,
    call,
    core_limit,
    fake,
    modules,
)

from ups_store import ReadTimeoutError, SourceError, StoreError
from ups_store.sources import reader_pool
from ups_store.sources.contents import EVERYTHING
from ups_store.sources.reader_pool import Patience, ReadBatch, ReaderPool, ReaderProcess, Skipped
from ups_store.sources.reader_process import (
    MAX_MESSAGE_BYTES,
    MAX_SAMPLES,
    Activity,
    Answer,
    ReadRequest,
    Request,
    describe_request,
    send_answer,
)
from ups_store.sources.source import open_source
from ups_store.sources.tasks import get_task

pytestmark = pytest.mark.multi_process

SLOT = 1 << 20
GRACE_S = 30.0  # after its deadline everything has to be over: far sooner than what hangs, for 60 s
ONCE = Patience(timeout_s=0.3, open_timeout_s=0.3, retries=0)  # for what never comes
SOON = Patience(
    timeout_s=1.5, open_timeout_s=1.5, retries=0
)  # kept on a busy machine by what isn't disturbed


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    """No process and no descriptor outlives a test."""
    gc.collect()
    fds, others = set(os.listdir("/proc/self/fd")), psutil.Process().children()
    yield
    left = [process for process in psutil.Process().children() if process not in others]
    for process in left:
        process.kill()
    assert left == []
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= len(fds)


def requests_for(path: Path, *, num_samples: int, size: int = 2, **options: Any) -> list[ReadRequest]:
    """Requests for all samples of a 1-D file in batches, called by 100 + their number."""
    options = {"dtypes": {"fields": "float32"}, **options}
    batches = [np.arange(first, min(first + size, num_samples)) for first in range(0, num_samples, size)]
    return [ReadRequest(path, None, EVERYTHING, batch + 100, batch, **options) for batch in batches]


def read_all(pool: ReaderPool, requests: list[ReadRequest]) -> list[Any]:
    """Copies of what the pool reads."""
    items: list[Any] = []
    for item in pool.read(requests):
        if isinstance(item, Skipped):
            items.append(item)
        else:
            items.append((item[0].tolist(), {name: array.copy() for name, array in item[1].items()}))
    return items


def warm_up(pool: ReaderPool, *, num_workers: int = 1) -> None:
    """Have the readers started, so that what is timed next is the deadline only."""
    for _ in pool.read([fake(FakeRead, i) for i in range(num_workers)]):
        pass


@contextlib.contextmanager
def ends_within(seconds: float) -> Iterator[None]:
    started = time.monotonic()
    yield
    assert time.monotonic() - started < seconds


# --- reading ------------------------------------------------------------------------------------------


def test_pool_reads_what_a_source_reads_in_order(tmp_path: Path) -> None:
    path = write_scalar_1d(tmp_path / "a.h5", Size(7))
    with open_source(path) as source:
        expected = source.read(range(7))["fields"]
    with ReaderPool(2, slot_nbytes=SLOT) as pool:
        items = read_all(pool, requests_for(path, num_samples=7))
    assert [samples for samples, _ in items] == [[100, 101], [102, 103], [104, 105], [106]]
    np.testing.assert_array_equal(np.concatenate([arrays["fields"] for _, arrays in items]), expected)


def test_results_come_in_order_of_requests_whichever_is_ready_first() -> None:
    requests = [fake(FakeRead, i, pause_s=0.1 if i % 5 == 0 else 0.0) for i in range(20)]
    with ReaderPool(2, slot_nbytes=SLOT, num_slots=3) as pool:
        items = read_all(pool, requests)
    assert [arrays["fields"].tolist() for _, arrays in items] == [[i] for i in range(20)]


def test_slow_caller_bounds_the_requests_that_are_taken_and_keeps_its_arrays() -> None:
    taken = 0

    def requests() -> Iterator[ReadRequest]:
        nonlocal taken
        for taken in range(1, 13):
            yield fake(FakeRead, taken)

    with ReaderPool(2, slot_nbytes=SLOT, num_slots=2) as pool:
        for number, item in enumerate(pool.read(requests())):
            time.sleep(0.05)  # the readers go on meanwhile, into other slots
            assert isinstance(item, ReadBatch)
            assert item.arrays["fields"].tolist() == item.samples.tolist() == [number + 1]
            assert taken <= number + 4


def test_pool_reads_again_after_the_caller_stopped_halfway() -> None:
    with ReaderPool(2, slot_nbytes=SLOT) as pool:
        for _ in pool.read([fake(FakeRead, i, pause_s=0.1 * i) for i in range(4)]):
            break
        gc.collect()
        items = read_all(pool, [fake(FakeRead, i) for i in range(5)])
    assert [samples for samples, _ in items] == [[i] for i in range(5)]


@pytest.mark.parametrize("value", [np.nan, 1e6])
def test_value_that_is_not_finite_is_refused_with_its_sample(tmp_path: Path, value: float) -> None:
    path = write_scalar_1d(tmp_path / "a.h5")
    with h5py.File(path, "r+") as file:
        file["tensor"][3, 2, 1] = value
    requests = requests_for(path, num_samples=5, size=5, dtypes={"fields": "float16"}, check_finite=True)
    with ReaderPool(1, slot_nbytes=SLOT) as pool, pytest.raises(SourceError) as caught:
        read_all(pool, requests)
    assert (caught.value.kind, caught.value.sample, caught.value.array) == ("not_finite", 3, "fields")
    assert ("the cast to float16" in str(caught.value)) == (value == 1e6)


def test_describe_gives_the_info_of_each_file_in_order(tmp_path: Path) -> None:
    paths = [write_scalar_1d(tmp_path / f"{n}.h5", Size(n)) for n in (3, 1, 2)]
    with ReaderPool(2, slot_nbytes=SLOT) as pool:
        infos = list(pool.ask_each([describe_request(path) for path in paths]))
    assert [(info.path, info.num_samples) for info in infos] == list(zip(paths, (3, 1, 2), strict=True))
    assert infos[0].arrays["fields"].dims == ("time", "x", "channel")


def test_describe_gives_coordinates_that_are_longer_than_a_message(tmp_path: Path) -> None:
    x = np.linspace(0, 1, MAX_MESSAGE_BYTES // 4 + 1, dtype="f4")
    path = write(tmp_path / "a.h5", {"tensor": np.zeros((1, 1, len(x)), "f4"), "x-coordinate": x})
    with ReaderPool(1, slot_nbytes=2 * x.nbytes) as pool:
        info = pool.ask(describe_request(path))
    np.testing.assert_array_equal(info.constants["x"], x)


def test_reader_imports_neither_torch_nor_command_line_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReaderPool, "process_class", ReaderProcess)
    with ReaderPool(1, slot_nbytes=SLOT) as pool:
        imported = pool.ask(call(modules))
    assert "h5py" in imported
    assert imported.isdisjoint({"torch", "typer", "rich", "pydantic", "scipy", "psutil", "zarr"})


def test_requests_that_fill_the_socket_are_sent_when_there_is_room() -> None:
    requests = [fake(FakeRead, i, count=MAX_SAMPLES, pause_s=0.1) for i in range(6)]
    with ReaderPool(1, slot_nbytes=SLOT, num_slots=6) as pool:
        items = read_all(pool, requests)
    assert [samples[0] for samples, _ in items] == list(range(6))


def test_batch_beyond_its_slot_is_told_as_a_defect() -> None:
    with ReaderPool(1, slot_nbytes=4096) as pool, pytest.raises(StoreError, match="slot of 4096") as caught:
        read_all(pool, [fake(FakeRead, 0, count=513)])
    assert caught.value.kind == "reader_failed"


def test_defect_in_a_request_is_told_with_its_traceback() -> None:
    with ReaderPool(1, slot_nbytes=SLOT) as pool, pytest.raises(StoreError, match="LookupError") as caught:
        read_all(pool, [fake(FaultyRead, 0)])
    assert "reader_faults.py" in caught.value.__notes__[0]


def test_answer_of_a_reader_that_died_with_a_request_unread_is_not_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The system reports the reset connection before it gives what came over it."""
    channels: list[socket.socket] = []

    def start(reader: ReaderProcess, channel_fd: int, memory_fd: int) -> subprocess.Popen[bytes]:
        channels.append(socket.socket(fileno=os.dup(channel_fd)))
        return subprocess.Popen(["true"])

    monkeypatch.setattr(ReaderProcess, "start", start)
    reader = ReaderProcess(num_slots=2, slot_nbytes=SLOT)
    for number in range(2):
        assert reader.send(fake(FakeRead, number), request_id=number, slot=number)
    (channel,) = channels
    channel.recv(MAX_MESSAGE_BYTES)
    channel.send(pickle.dumps("the answer"))
    channel.close()
    assert [*reader.receive()] == ["the answer", None]
    reader._process.wait()
    reader.close()


def test_lack_of_memory_for_slots_is_an_error_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with ReaderPool(1, slot_nbytes=SLOT) as pool, pytest.raises(StoreError) as caught:
        read_all(pool, [fake(FakeRead, 0)])
    assert caught.value.kind == "no_memory"


# --- readers that are late ----------------------------------------------------------------------------


def test_opening_that_hangs_ends_at_the_deadline_with_stack_and_file(tmp_path: Path) -> None:
    patience = Patience(open_timeout_s=0.3, retries=0)
    with (
        hanging(tmp_path / "burgers1d_train.h5") as (path,),
        ReaderPool(1, slot_nbytes=SLOT, patience=patience) as pool,
    ):
        warm_up(pool)
        with ends_within(0.3 + GRACE_S), pytest.raises(ReadTimeoutError) as caught:
            read_all(pool, requests_for(path, num_samples=2))
    error = caught.value
    assert (error.exit_code, error.kind, error.path, error.sample) == (4, "read_timeout", str(path), 0)
    assert str(error.found).startswith("opening for ")
    assert "reading.open_timeout_s" in str(error)
    assert "open_hdf5" in error.__notes__[0]


def test_request_that_is_always_late_is_tried_as_often_as_asked_with_growing_pauses() -> None:
    notes: list[str] = []
    patience = Patience(timeout_s=0.1, retries=2, backoff_s=0.1)
    with (
        ReaderPool(1, slot_nbytes=SLOT, patience=patience, note=notes.append) as pool,
        pytest.raises(ReadTimeoutError, match="attempt 3 of 3"),
    ):
        read_all(pool, [fake(FakeRead, 0, pause_s=60)])
    assert [note.rpartition(" again in ")[2] for note in notes] == ["0.1 s", "0.2 s"]


def test_late_request_ends_after_all_before_it_were_given() -> None:
    requests = [fake(FakeRead, i, pause_s=60 if i == 5 else 0.05) for i in range(9)]
    with ReaderPool(2, slot_nbytes=SLOT, patience=SOON) as pool:
        reading = pool.read(requests)
        assert [int(next(reading)[0][0]) for _ in range(5)] == [0, 1, 2, 3, 4]
        with pytest.raises(ReadTimeoutError) as caught:
            next(reading)
    assert caught.value.sample == 5


def test_all_readers_late_at_once_end_together() -> None:
    requests = [fake(FakeRead, i, pause_s=60) for i in range(2)]
    with ReaderPool(2, slot_nbytes=SLOT, patience=ONCE, on_error="skip") as pool:
        warm_up(pool, num_workers=2)
        with ends_within(0.3 + GRACE_S):
            items = read_all(pool, requests)
    assert [type(item.error) for item in items] == [ReadTimeoutError] * 2


def test_request_that_gets_on_outlives_its_timeout() -> None:
    with ReaderPool(1, slot_nbytes=SLOT, patience=SOON) as pool:
        started = time.monotonic()
        assert len(read_all(pool, [fake(SteadyRead, 0, pause_s=0.2)])) == 1
    assert time.monotonic() - started > SOON.timeout_s


def test_time_of_a_slow_caller_is_not_counted_against_readers() -> None:
    with ReaderPool(1, slot_nbytes=SLOT, patience=SOON) as pool:
        for _ in pool.read([fake(FakeRead, i, pause_s=0.05) for i in range(2)]):
            time.sleep(1.6)


class AnswersLater(ReaderProcess):
    """A process that says it is idle, having begun long ago: its answer is on the way."""

    def start(self, channel_fd: int, memory_fd: int) -> subprocess.Popen[bytes]:
        self.channel = socket.socket(fileno=os.dup(channel_fd))
        return subprocess.Popen(["sleep", "60"])

    def send(self, request: Request, *, request_id: int, slot: int) -> bool:
        now = time.monotonic()
        self.memory.write_status(Activity(request_id, now - 60, now, "idle"))
        threading.Timer(0.2, lambda: send_answer(self.channel, Answer(request_id))).start()
        return True

    def close(self) -> None:
        self.channel.close()
        super().close()


def test_reader_that_has_answered_just_now_is_not_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReaderPool, "process_class", AnswersLater)
    with ReaderPool(1, slot_nbytes=SLOT, patience=Patience(timeout_s=30, retries=0)) as pool:
        assert pool.ask(call(modules)) is None


def test_stopped_reader_is_replaced_and_its_request_read_by_the_next() -> None:
    notes: list[str] = []
    patience = Patience(timeout_s=SOON.timeout_s, retries=1, backoff_s=0.0)
    with ReaderPool(1, slot_nbytes=SLOT, patience=patience, note=notes.append) as pool:
        warm_up(pool)
        os.kill(pool.status().readers[0].pid, signal.SIGSTOP)
        items = read_all(pool, [fake(FakeRead, 7)])
    assert items[0][0] == [7]
    assert "process stopped" in notes[0]


def test_stopped_reader_ends_at_the_deadline(tmp_path: Path) -> None:
    with ReaderPool(1, slot_nbytes=SLOT, patience=ONCE) as pool:
        warm_up(pool)
        os.kill(pool.status().readers[0].pid, signal.SIGSTOP)
        with ends_within(0.3 + GRACE_S), pytest.raises(ReadTimeoutError, match="process stopped"):
            read_all(pool, [fake(FakeRead, 7)])


def test_reader_that_is_stopped_before_it_has_started_ends_at_the_deadline_of_opening(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program = "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"
    monkeypatch.setattr(reader_pool, "_PROGRAM", program)
    monkeypatch.setattr(ReaderPool, "process_class", ReaderProcess)
    with (
        ReaderPool(1, slot_nbytes=SLOT, patience=ONCE) as pool,
        ends_within(0.3 + GRACE_S),
        pytest.raises(
            ReadTimeoutError, match=r"starting for .* process stopped; find out what stops"
        ) as caught,
    ):
        read_all(pool, [fake(FakeRead, 7)])
    assert caught.value.expected == "at most 0.3 s"


def test_reader_that_cannot_be_killed_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []
    send_signal = ReaderProcess.signal
    pids = []

    def ignore_ends(reader: ReaderProcess, number: signal.Signals) -> None:
        pids.append(reader.pid)
        if number == signal.SIGUSR1:
            send_signal(reader, number)

    with ReaderPool(1, slot_nbytes=SLOT, patience=SOON, note=notes.append) as pool:
        warm_up(pool)
        monkeypatch.setattr(ReaderProcess, "signal", ignore_ends)
        with ends_within(0.3 + GRACE_S), pytest.raises(ReadTimeoutError):
            read_all(pool, [fake(FakeRead, 0, pause_s=60)])
        monkeypatch.setattr(ReaderProcess, "signal", send_signal)
        assert notes == [f"reader {pids[0]} can't be killed, process sleeping: left behind"]
        assert read_all(pool, [fake(FakeRead, 1)])[0][0] == [1]
        os.kill(pids[0], signal.SIGKILL)  # as if the disk answered at last
        psutil.Process(pids[0]).wait(60)


# --- readers that end ---------------------------------------------------------------------------------


def test_killed_reader_is_replaced_and_all_is_read_in_order(tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    flag.touch()
    requests = [fake(FakeRead, i) for i in range(8)]
    requests[3] = fake(CrashingRead, 3, unless_gone=flag)
    notes: list[str] = []
    patience = Patience(backoff_s=0.0)
    with ReaderPool(2, slot_nbytes=SLOT, patience=patience, note=notes.append) as pool:
        items = read_all(pool, requests)
    assert [arrays["fields"].tolist() for _, arrays in items] == [[i] for i in range(8)]
    assert len(notes) == 1
    assert "killed by SIGKILL while beginning" in notes[0]


def test_reader_killed_while_idle_is_replaced() -> None:
    with ReaderPool(1, slot_nbytes=SLOT, patience=Patience(retries=1, backoff_s=0.0)) as pool:
        warm_up(pool)
        os.kill(pool.status().readers[0].pid, signal.SIGKILL)
        assert read_all(pool, [fake(FakeRead, 1)])[0][0] == [1]


def test_reader_that_always_crashes_is_told_with_signal_and_stack() -> None:
    with ReaderPool(1, slot_nbytes=SLOT, patience=SOON) as pool, pytest.raises(SourceError) as caught:
        read_all(pool, [fake(CrashingRead, 4, number=signal.SIGSEGV)])
    error = caught.value
    assert (error.kind, error.exit_code, error.sample) == ("reader_died", 3, 4)
    assert "SIGSEGV" in str(error)
    assert "reader_faults.py" in error.__notes__[0]


@pytest.mark.parametrize("retries", [0, 1])
def test_file_cut_while_it_is_copied_out_of_a_mapping_has_a_name(tmp_path: Path, retries: int) -> None:
    path = write_scalar_1d(tmp_path / "1D_Burgers_Sols_Nu0.01.hdf5", Size(64))
    samples = np.arange(64)
    request = CutAmidRead(path, get_task("burgers1d"), EVERYTHING, samples, samples, {"fields": "float32"})
    patience = Patience(retries=retries, backoff_s=0.0)
    with ReaderPool(1, slot_nbytes=SLOT, patience=patience) as pool, pytest.raises(SourceError) as caught:
        read_all(pool, [request])
    error = caught.value
    assert error.path == str(path)
    if retries:
        assert error.kind == "not_hdf5"
        return
    assert (error.kind, error.dataset, error.sample) == ("reader_died", "tensor", 0)
    assert "SIGBUS" in str(error)
    assert "the file was cut" in str(error)


def test_reader_that_crashes_leaves_no_core_file() -> None:
    with ReaderPool(1, slot_nbytes=SLOT) as pool:
        assert pool.ask(call(core_limit)) == (0, 0)


def test_reader_without_memory_is_told_so(tmp_path: Path) -> None:
    path = tmp_path / "large.h5"
    shape = (1, 64, 1 << 20)
    with h5py.File(path, "w") as file:  # a chunk of 256 MiB, never written
        file.create_dataset("data", shape, np.float32, chunks=shape, compression="gzip", fillvalue=np.nan)
    with ReaderPool(1, slot_nbytes=1 << 28, patience=Patience(retries=0)) as pool:
        warm_up(pool)
        pid = pool.status().readers[0].pid
        limit = psutil.Process(pid).memory_info().vms + (64 << 20)
        resource.prlimit(pid, resource.RLIMIT_AS, (limit, limit))
        with pytest.raises(SourceError) as caught:
            read_all(pool, requests_for(path, num_samples=1))
    assert caught.value.kind == "no_memory"
    assert caught.value.path == str(path)


# --- sources that are damaged, or change --------------------------------------------------------------


@pytest.fixture
def slow_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes readers that start from now on misbehave in reads."""
    return FaultyDisk(tmp_path, monkeypatch).begin


def write_large(tmp_path: Path) -> Path:
    """A file whose samples are larger than anything that HDF5 reads when it opens one."""
    path = tmp_path / "large.h5"
    with h5py.File(path, "w") as file:
        file["data"] = np.arange(4 * 8 * 1024, dtype=np.float32).reshape(4, 8, 1024)
    return path


def test_read_that_hangs_is_told_with_samples_and_what_was_done(
    slow_disk: Callable[[str], None], tmp_path: Path
) -> None:
    path = write_large(tmp_path)
    slow_disk("hang")
    with ReaderPool(1, slot_nbytes=SLOT, patience=SOON) as pool:
        warm_up(pool)
        with ends_within(0.3 + GRACE_S), pytest.raises(ReadTimeoutError, match=r"samples 2\.\.3") as caught:
            read_all(pool, requests_for(path, num_samples=4)[1:])
    assert str(caught.value.found).startswith("reading dataset 'data' for ")
    assert caught.value.dataset == "data"
    assert "read_hyperslabs" in caught.value.__notes__[0]


@pytest.mark.parametrize(("how", "num_notes"), [("fail_once", 1), ("fail", 2)])
def test_input_output_error_is_tried_again(
    slow_disk: Callable[[str], None], tmp_path: Path, how: str, num_notes: int
) -> None:
    path = write_large(tmp_path)
    slow_disk(how)
    notes: list[str] = []
    patience = Patience(backoff_s=0.0)
    with ReaderPool(1, slot_nbytes=SLOT, patience=patience, on_error="skip", note=notes.append) as pool:
        items = read_all(pool, requests_for(path, num_samples=4, size=4))
    assert len(notes) == num_notes
    if how == "fail_once":
        assert items[0][1]["fields"].sum() == np.arange(4 * 8 * 1024, dtype=np.float32).sum()
    else:
        assert (items[0].error.kind, items[0].error.dataset) == ("read_failed", "data")


def cut_off(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 256)


def replace(path: Path) -> None:
    os.replace(write_scalar_1d(path.with_suffix(".new"), Size(9)), path)


@pytest.mark.parametrize("change", [cut_off, replace, Path.unlink])
def test_file_that_changes_while_it_is_read_is_told_so(
    tmp_path: Path, change: Callable[[Path], None]
) -> None:
    path = write_scalar_1d(tmp_path / "a.h5", Size(9))
    with ReaderPool(1, slot_nbytes=SLOT) as pool:
        reading = pool.read(requests_for(path, num_samples=9, size=1))
        next(reading)
        change(path)
        with pytest.raises(SourceError) as caught:
            list(reading)
    assert caught.value.kind == "source_changed"


def test_skipped_samples_leave_the_others_in_order(tmp_path: Path) -> None:
    good = write_scalar_1d(tmp_path / "good.h5", Size(6))
    good_requests = requests_for(good, num_samples=6)
    with (
        hanging(tmp_path / "bad.h5") as (path,),
        ReaderPool(2, slot_nbytes=SLOT, patience=SOON, on_error="skip") as pool,
    ):
        bad = requests_for(path, num_samples=2)
        items = read_all(pool, [*good_requests[:1], *bad, *good_requests[1:]])
    assert isinstance(items[1], Skipped)
    assert isinstance(items[1].error, ReadTimeoutError)
    assert [items[i][0] for i in (0, 2, 3)] == [[100, 101], [102, 103], [104, 105]]


# --- sight, and the end -------------------------------------------------------------------------------


def test_status_and_stacks_say_what_each_reader_does(tmp_path: Path) -> None:
    with hanging(tmp_path / "a.h5") as (path,), ReaderPool(1, slot_nbytes=SLOT) as pool:
        requests = [fake(FakeRead, 0), *requests_for(path, num_samples=4)]
        reading = pool.read(requests)
        next(reading)
        while pool.status().readers[0].doing != "opening":
            time.sleep(0.01)
        status = pool.status()
        (stack,) = pool.stacks().values()
        assert status.readers[0].request is requests[1]
        assert status.readers[0].num_waiting == 1
        assert 0 <= time.monotonic() - status.readers[0].since_s < 60
        assert status.num_ready == 1
        assert "open_hdf5" in stack


_SUPERVISOR = """
import sys, threading, time
from pathlib import Path
from ups_store.console import interruptible
from ups_store.sources.reader_pool import ReaderPool
from ups_store.sources.reader_process import describe_request

def tell(pool):
    while [reader.doing for reader in pool.status().readers] != ["opening", "opening"]:
        time.sleep(0.01)
    print(*(reader.pid for reader in pool.status().readers), flush=True)

if __name__ == "__main__":
    with interruptible(), ReaderPool(2, slot_nbytes=1 << 20) as pool:
        threading.Thread(target=tell, args=[pool], daemon=True).start()
        list(pool.ask_each([describe_request(Path(path)) for path in sys.argv[1:]]))
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_readers_end_with_their_supervisor(tmp_path: Path, number: signal.Signals) -> None:
    script = tmp_path / "supervisor.py"
    script.write_text(_SUPERVISOR)
    with (
        hanging(tmp_path / "a.h5", tmp_path / "b.h5") as paths,
        subprocess.Popen([sys.executable, script, *paths], stdout=PIPE, stderr=PIPE) as supervisor,
    ):
        assert supervisor.stdout
        readers = [psutil.Process(int(pid)) for pid in supervisor.stdout.readline().split()]
        supervisor.send_signal(number)
        with ends_within(GRACE_S):
            _, told = supervisor.communicate(timeout=60)
            _, alive = psutil.wait_procs(readers, timeout=GRACE_S)
        assert len(readers) == 2
        assert alive == []
    assert (b"BuildInterruptedError" in told) == (number != signal.SIGKILL)
