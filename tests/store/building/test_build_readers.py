"""How many readers a build has, what it tells while it waits, and that none of it decides what is stored."""

from __future__ import annotations

import io
import json
import os
import re
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from build_helpers import BURGERS, Recorder, build, hash_of, plan, settings, write_burgers
from rich.console import Console

from ups_store import ArraySpec
from ups_store.building import progress, read, readers
from ups_store.building.config import BuildConfig, ReadingConfig, load_config
from ups_store.building.fill import Filling
from ups_store.building.progress import Stopwatch, Watcher
from ups_store.building.read import UnreadSamplesError
from ups_store.building.readers import chosen, fitting
from ups_store.building.watch import BuildWatcher, EventLog
from ups_store.errors import (
    BuildInterruptedError,
    CommitError,
    ConfigError,
    DiskFullError,
    SourceError,
    StoreError,
)
from ups_store.sources import open_source
from ups_store.sources.contents import EVERYTHING
from ups_store.sources.reader_pool import PoolStatus, ReaderStatus, Skipped
from ups_store.sources.tasks import get_task
from ups_store.system import files
from ups_store.writing.writer import StoreWriter

MIB = 1 << 20
PLENTY = 1 << 40


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_burgers(tmp_path / "source" / BURGERS)


def reading(tmp_path: Path, **keys: Any) -> BuildConfig:
    config = settings(tmp_path, split="train")
    return config.model_copy(update={"reading": ReadingConfig(**keys)})


# --- configuration ------------------------------------------------------------------------------------


def test_how_sources_are_read_is_not_part_of_the_identity(source: Path, tmp_path: Path) -> None:
    other = reading(tmp_path, num_workers=3, timeout_s=1, open_timeout_s=1, retries=0, on_error="skip")
    assert hash_of(other) == hash_of(settings(tmp_path, split="train"))


@pytest.mark.parametrize("value", ["many", "-1", "257", "1.5", "true"])
def test_number_of_readers_that_is_none_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match=r"reading\.num_workers: expected auto, or a whole number 0\.\.256"):
        load_config(flags={"data.tasks": "burgers1d"}, overrides=[f"reading.num_workers={value}"])


@pytest.mark.parametrize("key", ["timeout_s", "open_timeout_s", "stall_warning_s"])
@pytest.mark.parametrize("value", ["0", "-1", ".nan", ".inf"])
def test_time_that_is_no_deadline_is_refused(key: str, value: str) -> None:
    with pytest.raises(ConfigError, match=rf"reading\.{key}"):
        load_config(flags={"data.tasks": "burgers1d"}, overrides=[f"reading.{key}={value}"])


# --- how many -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "memory", "descriptors", "expected"),
    [
        (4, PLENTY, 1000, (4, 2)),
        (4, 2 * (80 + 24 + 2 * 16) * MIB, 1000, (2, 2)),
        (4, (80 + 24 + 16) * MIB, 1000, (1, 1)),
        (4, PLENTY, 40, (2, 2)),
    ],
)
def test_readers_are_as_many_as_fit(
    wanted: int, memory: int, descriptors: int, expected: tuple[int, int]
) -> None:
    assert fitting(wanted, slot_nbytes=16 * MIB, memory=memory, descriptors=descriptors) == expected


@pytest.mark.parametrize(
    ("memory", "descriptors", "kind", "both"),
    [
        (50_000_000, 1000, "no_memory", ("125,829,120", "50,000,000")),
        (PLENTY, 35, "no_descriptors", ("36", "35")),
    ],
)
def test_lack_of_room_for_one_reader_is_an_error_with_both_numbers(
    memory: int, descriptors: int, kind: str, both: tuple[str, str]
) -> None:
    with pytest.raises(StoreError) as caught:
        fitting(2, slot_nbytes=16 * MIB, memory=memory, descriptors=descriptors)
    assert caught.value.kind == kind
    assert all(number in str(caught.value) for number in both)


@pytest.mark.parametrize(
    ("nbytes", "rate", "most", "num_workers", "why"),
    [
        (10**11, 3e9, 4, 1, "100.0 GB at 3.0 GB/s by one reader, faster than commits"),
        (10**11, 2e8, 4, 4, "100.0 GB at 200.0 MB/s by one reader, at most 4"),
        (10**8, 2e8, 4, 1, "100.0 MB at 200.0 MB/s by one reader: another would take longer to start than"),
        (3 * 10**8, 3e8, 4, 2, "another would take longer to start than it saves"),
    ],
)
def test_readers_are_as_many_as_are_worth_their_start(
    nbytes: int, rate: float, most: int, num_workers: int, why: str
) -> None:
    found, shown = chosen(nbytes, rate=rate, most=most)
    assert found == num_workers
    assert why in shown


def test_small_build_has_one_reader_and_says_why(source: Path, tmp_path: Path) -> None:
    config = settings(tmp_path, split="train", num_workers="auto")
    report = build(config)
    assert report.readers.num_workers == 1
    assert "sooner than another one starts" in report.readers.why
    again = build(config)
    assert (again.readers.num_workers, again.readers.why) == (1, "one opens the sources")


def test_large_build_measures_a_reader_and_gives_the_same_bytes(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = build(settings(tmp_path, split="train")).stores[0].path.read_bytes()
    monkeypatch.setattr(readers, "TINY_NBYTES", 0)
    monkeypatch.setattr(read, "BATCH_BYTES", 1)
    watcher = Recorder()
    report = build(settings(tmp_path, split="train", num_workers="auto"), watcher, overwrite=True)
    assert report.readers.num_workers == 1  # another would take longer to start than all of it to read
    assert "by one reader" in report.readers.why
    assert report.readers.sentence() in watcher.notes
    assert "reading with 1 reader process, chosen automatically (" in report.readers.sentence()
    assert report.stores[0].path.read_bytes() == expected


def test_a_slow_source_is_measured_twice_and_one_that_can_t_be_read_once(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "TINY_NBYTES", 0)
    monkeypatch.setattr(readers, "START_S", 0.0)  # so that nothing is soon through
    monkeypatch.setattr(readers, "chosen", lambda nbytes, **given: (given["most"], "measured"))
    asked: list[Any] = []
    unread = Skipped(np.arange(1), SourceError("gone", path=source))
    for batch, times, why in (
        (SimpleNamespace(arrays={"u": np.ones(MIB)}), 2, "measured"),
        (unread, 1, "can't be read"),
    ):
        asked.clear()
        with readers.Readers(ReadingConfig(num_workers="auto")) as measured:
            monkeypatch.setattr(measured.pool, "read", lambda requests, b=batch: asked.append(b) or [b])
            measured.for_samples(["one", "two"], nbytes=MIB, stored_nbytes=1, slot_nbytes=MIB)  # type: ignore[list-item]
            assert len(asked) == times
            assert why in measured.choice.why


def test_samples_of_one_file_are_read_in_batches(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "_BATCH_NBYTES", 1)
    task = get_task("burgers1d")
    with readers.Readers(ReadingConfig(num_workers=1)) as one, open_source(source, task=task) as direct:
        info = one.describe(source, task)
        found = one.read(info, task, EVERYTHING, range(1, 4))
        for name, values in direct.read([1, 2, 3]).items():
            np.testing.assert_array_equal(found[name], values)
        (source).write_bytes(b"")
        with pytest.raises(SourceError):
            one.read(info, task, EVERYTHING, range(1, 4))


@pytest.mark.multi_process
def test_tasks_and_splits_share_the_readers(source: Path, tmp_path: Path) -> None:
    pids: set[int] = set()

    def look(watcher: Recorder) -> None:
        pids.update(reader.pid for reader in watcher.pool.status().readers)

    all_splits = settings(tmp_path).model_copy(update={"reading": ReadingConfig(num_workers=1)})
    report = build(all_splits, Recorder(on_advance=look))
    assert len(report.stores) == 3
    assert len(pids) == 1


def test_valid_store_starts_no_reader(source: Path, tmp_path: Path) -> None:
    build(settings(tmp_path, split="train"))
    watcher = Recorder()
    build(settings(tmp_path, split="train"), watcher)
    assert watcher.pool.status().readers == ()


# --- disks --------------------------------------------------------------------------------------------


def test_disk_without_room_for_all_stores_is_refused_before_digesting(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").mkdir()
    monkeypatch.setattr(files, "free_bytes", lambda folder: 1000)
    watcher = Recorder()
    with pytest.raises(DiskFullError) as caught:
        build(settings(tmp_path), watcher)
    assert (caught.value.needed_bytes, caught.value.free_bytes) == (20 * (7 * 10 * 4 + 8), 1000)
    assert watcher.stages == []


# --- samples that are skipped -------------------------------------------------------------------------


def test_skipped_samples_are_named_and_other_stores_are_built(tmp_path: Path) -> None:
    fields = np.random.default_rng(0).random((20, 7, 10)).astype("f4")
    fields[6, 0, 0] = np.nan  # sample 4 of train
    write_burgers(tmp_path / "source" / BURGERS, fields=fields)
    config = settings(tmp_path).model_copy(update={"reading": ReadingConfig(on_error="skip")})
    watcher = Recorder()
    with pytest.raises(UnreadSamplesError) as caught:
        build(config, watcher)
    assert (caught.value.samples, caught.value.exit_code) == ((4,), 3)
    assert [path.name for path in sorted(config.cache.dir.glob("*.zip"))] == [
        "burgers1d_test.zarr.zip",
        "burgers1d_val.zarr.zip",
    ]
    assert sum(note.startswith("skipped: ") for note in watcher.notes) == 1


def test_file_that_is_lost_is_asked_for_nothing_more(tmp_path: Path) -> None:
    for nu in (0.01, 0.1):
        write_burgers(tmp_path / "source" / f"1D_Burgers_Sols_Nu{nu}.hdf5", nu=nu)
    config = settings(tmp_path, split="train").model_copy(update={"reading": ReadingConfig(on_error="skip")})
    seen: list[str] = []

    def remove(watcher: Recorder) -> None:
        if not seen and watcher.stages[-1][2] == "samples":
            seen.append("removed")
            (tmp_path / "source" / "1D_Burgers_Sols_Nu0.1.hdf5").unlink()

    with pytest.raises(UnreadSamplesError) as caught:
        build(config, Recorder(on_advance=remove))
    assert caught.value.samples == tuple(range(16, 32))


# --- what is told -------------------------------------------------------------------------------------


def test_stages_tell_what_everything_waits_for(source: Path, tmp_path: Path) -> None:
    watcher = Recorder()
    build(settings(tmp_path, split="train"), watcher)
    assert watcher.waited_for == ["digest", "open", "open", "read", "commit", "read", "finish"]


def test_rate_of_a_stage_is_what_was_done_while_it_was_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 1.0, 3.0, 4.0])
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: next(now)))
    watcher = Watcher()
    watcher.stage("samples", 10, unit="samples")
    watcher.waits("read")  # at 1 s
    watcher.waits("commit")  # at 3 s
    watcher.waits("read")  # at 4 s
    assert watcher.per_second() == {}
    watcher.advance(10)
    assert watcher.per_second() == {"read": 5.0, "commit": 10.0}
    watcher.stage("samples", 10, unit="samples")
    assert watcher.per_second() == {}


def test_bar_shows_what_is_waited_for_the_queue_and_the_rates(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read, "BATCH_BYTES", 1)
    shown: list[str] = []
    bar = BuildWatcher(Console(file=io.StringIO()))

    class Looking(Recorder):
        def advance(self, num: int) -> None:
            bar.advance(num)
            shown.append(bar.state())

        stage = staticmethod(bar.stage)  # type: ignore[assignment]
        watch = staticmethod(bar.watch)  # type: ignore[assignment]
        waits = staticmethod(bar.waits)  # type: ignore[assignment]

    build(settings(tmp_path, split="train"), Looking())
    assert re.match(r"waits for commit \(.* ready\); read [\d,]+/s, commit [\d,]+/s$", shown[-1])
    bar.watch(_Reading())  # type: ignore[arg-type]
    assert re.match(r"waits for finish \(reading 7\.\d s, idle 0\.\d s; 3 ready\); read ", bar.state())


class _Reading:
    """A pool in which one reader has read for 7 s."""

    doing = ("idle", 0), ("reading", 7)

    def status(self) -> PoolStatus:
        now = time.monotonic()
        readers = (ReaderStatus(1, what, now - for_s, None, 1) for what, for_s in self.doing)
        return PoolStatus(readers=tuple(readers), num_ready=3)


def test_bar_shows_the_four_readers_that_take_longest() -> None:
    bar, pool = BuildWatcher(Console(file=io.StringIO())), _Reading()
    pool.doing = (*_Reading.doing, *[("opening", 2)] * 4)
    bar.watch(pool)  # type: ignore[arg-type]
    bar.waits("read")
    shown = r"waits for read \(reading 7\.\d s, (opening 2\.\d s, ){3}2 more; 3 ready\)"
    assert re.match(shown, bar.state())


def test_bar_of_a_build_of_latents_shows_the_rate_of_encoding_too(source: Path, tmp_path: Path) -> None:
    shown: list[str] = []
    bar = BuildWatcher(Console(file=io.StringIO()))

    class Looking(Recorder):
        def waits(self, what: str) -> None:
            super().waits(what)
            bar.waits(what)
            shown.append(bar.state())

        advance = staticmethod(bar.advance)  # type: ignore[assignment]
        stage = staticmethod(bar.stage)  # type: ignore[assignment]

    watcher = Looking()
    build(of_latents(source, tmp_path), watcher)
    assert {"read", "encode", "commit", "finish"} <= set(watcher.waited_for)
    assert re.match(r"waits for finish; read [\d,]+/s, encode [\d,]+/s, commit [\d,]+/s$", shown[-1])


def of_latents(source: Path, tmp_path: Path) -> BuildConfig:
    flags = {"data.tasks": "burgers1d", "data.split": "train", "data.root": str(source.parent)}
    flags |= {"cache.dir": str(tmp_path / "cache"), "latent.encoder": f"{__name__}:Halves"}
    return load_config(flags={**flags, "latent.checkpoint": str(source), "reading.batch_size": 1})


class Halves:
    """An encoder without weights: every other point."""

    latent_shape = (5, 1)

    def __init__(self, checkpoint: Path, **options: Any) -> None: ...

    def identity(self) -> dict[str, Any]:
        return {"class": "Halves"}

    def output_spec(self, arrays: Mapping[str, ArraySpec]) -> dict[str, ArraySpec]:
        shape = (*arrays["fields"].shape[:2], *self.latent_shape)
        return {"latent": ArraySpec(shape, "float32"), "nu": arrays["nu"]}

    def encode(self, batch: Mapping[str, np.ndarray], *, samples: np.ndarray) -> dict[str, np.ndarray]:
        return {"latent": batch["fields"][:, :, ::2].copy(), "nu": batch["nu"].copy()}


@pytest.mark.parametrize("failing", ["commit", "encode"])
def test_latents_that_were_committed_stay_when_the_next_fail(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    """Of what another thread commits the batch at work is finished, and those behind it are dropped."""
    commit, encode, num = StoreWriter.commit_many, Halves.encode, {"commit": 0, "encode": 0}

    def fail_at_fourth(name: str) -> None:
        num[name] += 1
        if name == failing and num[name] == 4:
            raise CommitError("the disk is gone") if name == "commit" else KeyboardInterrupt

    def slowly(writer: StoreWriter, *arguments: Any) -> None:
        fail_at_fourth("commit")
        time.sleep(0.02)
        commit(writer, *arguments)

    def encoded(encoder: Halves, *arguments: Any, **options: Any) -> dict[str, np.ndarray]:
        fail_at_fourth("encode")
        return encode(encoder, *arguments, **options)

    config = of_latents(source, tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(StoreWriter, "commit_many", slowly)
        patched.setattr(Halves, "encode", encoded)
        with pytest.raises(CommitError if failing == "commit" else BuildInterruptedError):
            build(config)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("ups-store-commit")]
    assert build(config).stores[0].num_committed == 16 - (3 if failing == "commit" else num["commit"])


def test_interrupt_while_the_commit_thread_starts_leaves_no_commit_behind(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, commit, num_late = threading.Thread.start, StoreWriter.commit_many, list[int]()

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        if thread.name.startswith("ups-store-commit"):
            raise KeyboardInterrupt

    def slowly(writer: StoreWriter, *arguments: Any) -> None:
        time.sleep(0.2)
        num_late.append(writer.building.fd < 0)
        commit(writer, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", interrupted)
        patched.setattr(StoreWriter, "commit_many", slowly)
        with pytest.raises(BuildInterruptedError):
            build(of_latents(source, tmp_path))
        time.sleep(0.5)
    assert num_late == []


def test_stall_is_told_with_stage_and_own_stack(tmp_path: Path) -> None:
    noted: list[str] = []
    heard = threading.Event()

    def write(event: str, *, message: str = "", **details: Any) -> None:
        noted.append(message)
        if event == "stalled":
            heard.set()

    log: Any = SimpleNamespace(write=write)
    with BuildWatcher(log=log, stall_s=0.1, folder=tmp_path) as watcher:
        watcher.stage("burgers1d train: samples", 16, unit="samples")
        watcher.waits("commit")
        watcher.advance(3)
        assert heard.wait(60)
    assert "burgers1d train: samples (3 of 16 done) waits for commit" in noted[-1]
    assert "test_stall_is_told_with_stage_and_own_stack" in noted[-1]
    assert f"free disk in {tmp_path}" in noted[-1]
    assert "/dev/shm " in noted[-1]


def test_reader_that_begins_while_stacks_are_asked_for_has_not_begun_in_the_future(tmp_path: Path) -> None:
    def stacks() -> dict[int, str]:
        time.sleep(0.2)
        status = ReaderStatus(71, "reading", time.monotonic(), None, num_waiting=1)
        pool.status = lambda: PoolStatus((status,), 0)
        return {71: "in a file"}

    pool: Any = SimpleNamespace(stacks=stacks)
    watcher = BuildWatcher(stall_s=60.0, folder=tmp_path)
    watcher.watch(pool)
    assert re.search(r"reader 71: reading for \d+\.\d s\n    in a file", watcher.diagnosis())


def test_progress_keeps_a_stall_from_being_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("ups_store.building.watch.time.monotonic", lambda: now[0])
    out = io.StringIO()
    watcher = BuildWatcher(Console(file=out), stall_s=2.0, folder=tmp_path)
    for now[0] in range(1, 10):
        watcher.advance(1)
        watcher._look()
    assert out.getvalue() == ""
    now[0] += 2.0
    watcher._look()
    assert "no progress for 2.0 s" in out.getvalue()


def test_event_log_is_lines_of_json_and_is_continued(tmp_path: Path) -> None:
    path = tmp_path / "new" / "log.json"
    for _ in range(2):
        with EventLog(path) as events, BuildWatcher(log=events) as log:
            log.stage("a", 2, unit="samples")
            log.waits("read")
            log.advance(2)
            log.note("well")
    with pytest.raises(DiskFullError), EventLog(path):
        raise DiskFullError("no room")
    events = [json.loads(line) for line in path.read_text().splitlines()]
    one_run = ["start", "stage", "progress", "note", "end"]
    assert [event["event"] for event in events] == [*one_run, *one_run, "start", "error", "end"]
    progress = events[2]
    assert (progress["done"], progress["total"], progress["waits_for"]) == (2, 2, "read")
    assert events[-2]["kind"] == "disk_full"
    assert [event["is_done"] for event in events if event["event"] == "end"] == [True, True, False]


def test_event_log_that_can_not_be_written_is_a_wrong_flag(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="check --log-json"):
        EventLog(tmp_path)


def test_event_log_in_a_pipe_that_no_process_reads_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "log")
    with pytest.raises(ConfigError, match=r"no process reads the pipe.*; begin that first") as caught:
        EventLog(tmp_path / "log")
    assert (caught.value.kind, caught.value.path) == ("log", str(tmp_path / "log"))


def test_event_log_in_a_pipe_says_when_its_reader_is_gone(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "log")
    reader = os.open(tmp_path / "log", os.O_RDONLY | os.O_NONBLOCK)
    log = EventLog(tmp_path / "log").__enter__()
    assert json.loads(os.read(reader, 4096))["event"] == "start"
    os.close(reader)
    with pytest.raises(ConfigError, match="no process reads the pipe"):
        log.write("note", message="lost")
    log.__exit__(ValueError, ValueError("the first error"), None)  # is the one to report


@pytest.mark.parametrize("content", [b"PK\x03\x04", b"{}\n", b"[" * 5000, b"data: 3\n", b"\xff\xfe\n"])
def test_event_log_is_never_appended_to_another_file(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "burgers1d_train.zarr.zip"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="nothing is appended"):
        EventLog(path)
    assert path.read_bytes() == content


def test_event_log_begins_in_an_empty_file(tmp_path: Path) -> None:
    path = tmp_path / "log.json"
    path.touch()
    with EventLog(path):
        pass
    assert json.loads(path.read_text().splitlines()[0])["event"] == "start"


def test_reduced_source_is_weighed_by_what_it_takes_in_its_file(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings(tmp_path, split="train", reduce_space=4, num_workers="auto")
    planned = plan(config)
    assert planned.stored_sample_nbytes > 2 * planned.source_sample_nbytes
    nbytes = 16 * planned.source_sample_nbytes
    monkeypatch.setattr(readers, "TINY_NBYTES", nbytes)
    report = build(config)
    assert (report.readers.num_workers, "by one reader" in report.readers.why) == (1, True)


def test_of_many_samples_with_one_fault_the_first_are_noted_and_the_others_counted(
    source: Path, tmp_path: Path
) -> None:
    watcher = Recorder()
    planned = plan(settings(tmp_path, root=str(source.parent), split="train"))
    filling = Filling(planned, None, None, watcher=watcher, clock=Stopwatch(), on_nan="fail")  # type: ignore[arg-type]

    def skipped(samples: list[int], kind: str = "read_failed") -> Skipped:
        error = SourceError(f"can't be read at {samples[0]}", path="a.h5", kind=kind)
        return Skipped(np.array(samples), error)

    many = [skipped([i]) for i in range(1, 2001)]
    filling._skipped = [*many, skipped([7], "not_finite"), skipped([3000, 3001])]
    with pytest.raises(UnreadSamplesError):
        filling.check_complete()
    assert watcher.notes == [
        *(f"skipped: a.h5: can't be read at {i}" for i in (1, 2, 3)),
        "skipped: a.h5: 1,999 more samples (read_failed)",
        "skipped: a.h5: can't be read at 7",
    ]
