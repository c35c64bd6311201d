"""Partitions as tasks: planned once, made anywhere, twice or again, with the bytes of one process."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import h5py
import numpy as np
import pytest
from build_helpers import BURGERS, Recorder, build, plan, settings, write_burgers

import ups_store
from ups_store.building.partitions import PartitionTask, build_partitions, make_partition
from ups_store.building.place import create_file
from ups_store.building.plan import partition_of
from ups_store.building.result import BuildReport, BuildResult
from ups_store.errors import ConfigError, SourceError
from ups_store.system import files

N = 40
PATTERN = "cache/burgers1d_train-*-of-00003.zarr.zip"


class Here:
    """An engine of this process, whose tasks travel as they would to another one."""

    def __init__(self, *, num_workers: int = 3, work: Callable[[PartitionTask], BuildResult] | None = None):
        self.tasks: list[PartitionTask] = []
        self._num_workers, self._work = num_workers, work or make_partition

    def num_workers(self) -> int:
        return self._num_workers

    def run(
        self, tasks: Sequence[PartitionTask]
    ) -> Iterator[tuple[PartitionTask, BuildResult | BaseException]]:
        for task in reversed(tasks):  # they end in any order
            self.tasks.append(task)
            try:
                yield task, self._work(pickle.loads(pickle.dumps(task)))
            except Exception as error:
                yield task, error


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_burgers(tmp_path / "source" / BURGERS, num_samples=N)
    return tmp_path


def run(folder: Path, engine: Here | None = None, **keys: object) -> BuildReport:
    config = settings(folder, split="train", **keys)
    return build_partitions(config, engine or Here(), watcher=Recorder())


def assert_is_the_split(folder: Path, pattern: str = PATTERN) -> None:
    """The bytes of its partitions are those that one process makes of them."""
    config = settings(folder, split="train", cache_dir=str(folder / "alone"), cache_partitions=3)
    build(config)
    made = sorted(folder.glob(pattern))
    assert len(made) == 3
    for path in made:
        assert path.read_bytes() == (folder / "alone" / path.name).read_bytes()
    with ups_store.open(folder / pattern) as store:
        assert len(store) == 32


def test_tasks_make_the_bytes_of_one_process(folder: Path) -> None:
    report = run(folder)
    assert [result.path.name[-23:-9] for result in report.stores] == [f"0000{i}-of-00003" for i in range(3)]
    assert [result.num_committed for result in report.stores] == [10, 11, 11]
    assert_is_the_split(folder)


def test_tasks_digest_no_source(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(task: PartitionTask) -> BuildResult:
        with monkeypatch.context() as patched:
            patched.setattr("ups_store.building.digests.DigestCache.digest", None)
            return make_partition(task)

    run(folder, Here(work=refuse))
    assert_is_the_split(folder)


def test_source_that_is_another_one_for_the_worker_is_refused(folder: Path) -> None:
    def changed(task: PartitionTask) -> BuildResult:
        with h5py.File(folder / "source" / BURGERS, "r+") as file:
            file["tensor"][0] = 0
        return make_partition(task)

    with pytest.raises(SourceError) as caught:
        run(folder, Here(work=changed))
    assert caught.value.kind == "source_changed"


def test_store_that_is_valid_is_kept_without_tasks(folder: Path) -> None:
    run(folder)
    engine = Here(num_workers=7)
    (kept,) = run(folder, engine).stores
    assert (engine.tasks, kept.reused, kept.num_samples) == ([], True, 32)


def test_partition_that_is_lost_is_made_again_whatever_the_number_of_workers(folder: Path) -> None:
    run(folder)
    lost = folder / PATTERN.replace("*", "00001")
    lost.unlink()
    engine = Here(num_workers=8)
    results = run(folder, engine).stores
    assert [(task.number, task.count) for task in engine.tasks] == [(2, 3), (1, 3), (0, 3)]
    assert [result.reused for result in results] == [True, False, True]
    assert_is_the_split(folder)


def test_task_that_fails_leaves_the_others_their_time(folder: Path) -> None:
    def fail(task: PartitionTask) -> BuildResult:
        if task.number == 2:
            raise SourceError("the disk of this worker is gone", kind="test")
        return make_partition(task)

    with pytest.raises(SourceError, match="is gone"):
        run(folder, Here(work=fail))
    assert len(list(folder.glob(PATTERN))) == 2
    run(folder)
    assert_is_the_split(folder)


def test_task_whose_partition_another_process_still_has_makes_it_elsewhere(folder: Path) -> None:
    """Such as a straggler that was given up: whichever ends first publishes, and both have the same bytes."""

    def overtake(task: PartitionTask) -> BuildResult:
        planned = partition_of(plan(task.config), task.rank)
        with ups_store.open(folder / "whole" / "burgers1d_train.zarr.zip") as whole:
            content = whole.identity
        with create_file(planned, content) as straggler:
            result = make_partition(task, folder)
            assert result.path.exists()
            assert straggler.missing().size == task.num_samples
        return result

    build(settings(folder, split="train", cache_dir=str(folder / "whole")))
    run(folder, Here(work=overtake))
    assert list(folder.glob("ups-store-*")) == []
    for building in folder.glob("cache/*.building"):
        building.unlink()
    assert_is_the_split(folder)


def test_partitions_on_a_network_file_system_are_built_elsewhere_and_appear_whole(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[set[str]] = []

    def look(task: PartitionTask) -> BuildResult:
        with monkeypatch.context() as patched:
            patched.setattr(files, "is_network", lambda path: Path(path) == folder / "cache")
            patched.setattr(
                "ups_store.building.partitions._copy",
                lambda path, place: (
                    seen.append({found.name for found in place.parent.iterdir()}),
                    copy(path, place),
                ),
            )
            return make_partition(task, folder)

    from ups_store.building.partitions import _copy as copy

    run(folder, Here(work=look))
    assert all(name.endswith((".zarr.zip", ".json")) for names in seen for name in names)
    assert len(seen) == 3
    results = run(folder, Here(work=look)).stores
    assert (len(seen), [result.reused for result in results]) == (3, [True])
    (folder / PATTERN.replace("*", "00001")).unlink()
    results = run(folder, Here(work=look)).stores
    assert (len(seen), [result.reused for result in results]) == (4, [True, False, True])
    assert_is_the_split(folder)


def test_relative_folders_are_those_of_the_process_that_plans(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    def move(task: PartitionTask) -> BuildResult:
        with monkeypatch.context() as patched:
            patched.chdir(tmp_path_factory.getbasetemp())
            return make_partition(task)

    monkeypatch.chdir(folder)
    config = settings(Path(), split="train")
    build_partitions(config, Here(work=move), watcher=Recorder(), log_json=Path("log/events.jsonl"))
    assert_is_the_split(folder)
    logs = sorted((folder / "log").iterdir())
    assert [log.name for log in logs] == [f"events-burgers1d_train-0000{i}-of-00003.jsonl" for i in range(3)]
    lines = [json.loads(log.read_text().splitlines()[-1]) for log in logs]
    assert [(line["event"], line["rank"]) for line in lines] == [("end", 0), ("end", 1), ("end", 2)]
    assert len({line["run"] for line in lines}) == 1


def test_worker_of_another_version_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def work(task: PartitionTask) -> BuildResult:
        with monkeypatch.context() as patched:
            patched.setattr(ups_store, "__version__", "0.0.1")
            return make_partition(task)

    with pytest.raises(ConfigError) as caught:
        run(folder, Here(work=work))
    assert caught.value.kind == "version"


def test_cluster_without_workers_needs_a_number_of_partitions(folder: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        run(folder, Here(num_workers=0))
    assert caught.value.kind == "no_workers"
    run(folder, Here(num_workers=0), cache_partitions=3)
    assert_is_the_split(folder)


def test_partitions_replace_a_store_in_another_number_of_files(folder: Path) -> None:
    run(folder, Here(num_workers=2))
    run(folder, Here(num_workers=5), cache_partitions=3, limit=30)
    names = sorted(path.name for path in folder.glob("cache/*.zarr.zip"))
    assert names == [f"burgers1d_train-0000{i}-of-00003.zarr.zip" for i in range(3)]
    with ups_store.open(folder / PATTERN) as store:
        np.testing.assert_array_equal(store.gather([0])["nu"], [0.01])
