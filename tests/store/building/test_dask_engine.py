"""`--engine dask`: partitions by the processes of a Dask cluster, of which some die or hang."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import pytest
from build_helpers import BURGERS, Recorder, build, settings, write_burgers

import ups_store
from ups_store.build import BuildRank
from ups_store.building.progress import BuildResult
from ups_store.errors import ConfigError, SourceError, StoreError
from ups_store.format.build_tail import BUILDER_LOCK
from ups_store.read.recovery import building_path
from ups_store.system import files, locks

dask, distributed = pytest.importorskip("dask"), pytest.importorskip("distributed")
from ups_store.building import dask_engine  # noqa: E402
from ups_store.building.dask_engine import PartitionTask, build_partitions, connected, make_partition  # noqa: E402

pytestmark = [
    # Dask's own: sockets and loops that it leaves to the garbage collector, and what its nannies say
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning:distributed"),
]

N = 40
COUNT = 4  # partitions by processes
FEW = 2  # by the thread that is in this one


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_burgers(tmp_path / "source" / BURGERS, num_samples=N)
    return tmp_path


@pytest.fixture(scope="module")
def cluster() -> Iterator[distributed.LocalCluster]:
    """Two workers, processes that a nanny starts again."""
    options = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": None}
    with distributed.LocalCluster(**options) as made:
        yield made


def run(folder: Path, cluster: distributed.LocalCluster, watcher: Recorder | None = None) -> list[Path]:
    config = settings(folder, split="train", cache_partitions=COUNT)
    with connected(cluster.scheduler_address) as engine:
        report = build_partitions(config, engine, watcher=watcher or Recorder())
    return [result.path for result in report.stores]


def assert_are_the_split(folder: Path, paths: list[Path]) -> None:
    alone = settings(folder, split="train", cache_dir=str(folder / "alone"), cache_partitions=len(paths))
    build(alone)
    assert [path.name for path in paths] == sorted(path.name for path in folder.glob("alone/*.zarr.zip"))
    assert all(path.read_bytes() == (folder / "alone" / path.name).read_bytes() for path in paths)


def once(marker: Path, act: Callable[[], None]) -> Callable[[PartitionTask, str | None], object]:
    """A `make_partition` that does something before it makes its first partition, in whichever process."""

    def make(task: PartitionTask, folder: str | None = None) -> object:
        if task.rank.machine == 1:
            try:
                marker.touch(exist_ok=False)
            except FileExistsError:
                pass
            else:
                act()
        return make_partition(task, folder)

    return make


# --- workers in this process, without the seconds that others take to start


@pytest.fixture(scope="module")
def client() -> Iterator[distributed.Client]:
    options = {"processes": False, "n_workers": 1, "threads_per_worker": 1, "dashboard_address": None}
    with distributed.Client(**options, set_as_default=False) as made:
        yield made


def made(
    folder: Path, client: distributed.Client, *, overwrite: bool = False, **keys: Any
) -> list[BuildResult]:
    config = settings(folder, split="train", **{"cache_partitions": FEW, **keys})
    return list(build_partitions(config, client, watcher=Recorder(), overwrite=overwrite).stores)


Work = Callable[[PartitionTask], BuildResult]


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Callable[[Work], None]:
    """Has workers do something else with a task."""
    return lambda doing: monkeypatch.setattr(dask_engine, "make_partition", lambda task, _: doing(task))


def test_tasks_make_the_bytes_of_one_process_and_digest_no_source(
    folder: Path, client: distributed.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = made(folder, client)
    assert [result.num_committed for result in results] == [16] * FEW
    assert_are_the_split(folder, [result.path for result in results])
    (kept,) = made(folder, client)
    assert (kept.reused, kept.num_samples) == (True, 32)
    results[1].path.unlink()
    monkeypatch.setattr("ups_store.building.plan.DigestCache.digest", None)
    task = PartitionTask(
        settings(folder, split="train"),
        BuildRank(machine=1, num_machines=FEW),
        results[1].config_hash,
        16,
        json.loads((folder / "cache" / ".source_digests.json").read_text()),
        *(False, None, ""),
    )
    assert make_partition(pickle.loads(pickle.dumps(task))).num_committed == 16


def test_partition_that_is_lost_is_made_again_whatever_the_number_of_workers(
    folder: Path, client: distributed.Client
) -> None:
    paths = [result.path for result in made(folder, client)]
    paths[1].unlink()
    assert [result.reused for result in made(folder, client, cache_partitions=None)] == [True, False]
    assert_are_the_split(folder, paths)


def test_source_that_is_another_one_for_the_worker_is_refused(
    folder: Path, client: distributed.Client, work: Callable[[Work], None]
) -> None:
    def change(task: PartitionTask) -> BuildResult:
        with h5py.File(folder / "source" / BURGERS, "r+") as file:
            file["tensor"][0] = 0
        return make_partition(task)

    work(change)
    with pytest.raises(SourceError) as caught:
        made(folder, client)
    assert caught.value.kind == "source_changed"


def test_task_that_fails_is_tried_again_and_leaves_the_others_their_time(
    folder: Path, client: distributed.Client, work: Callable[[Work], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[int] = []

    def fail(task: PartitionTask) -> BuildResult:
        tried.append(task.rank.machine)
        if task.rank.machine == 1:
            raise SourceError("gone", kind="test", path="a.h5")
        return make_partition(task)

    work(fail)
    with pytest.raises(SourceError, match=r"a\.h5: gone"):  # as it was raised
        made(folder, client)
    assert sorted(tried) == [0, 1, 1, 1, 1]
    assert len(list(folder.glob("cache/*.zarr.zip"))) == FEW - 1


def test_task_whose_partition_another_process_still_has_makes_it_elsewhere(
    folder: Path, client: distributed.Client, work: Callable[[Work], None]
) -> None:
    """Such as a straggler that was given up: whichever ends first publishes, and both have the same bytes."""

    def overtake(task: PartitionTask) -> BuildResult:
        path = task.rank.path(folder / "cache" / "burgers1d_train.zarr.zip")
        building = building_path(path)
        shutil.copy(folder / "whole" / path.name, building)
        fd = files.open_existing(building, writable=True)
        assert locks.try_lock(fd, BUILDER_LOCK)
        try:
            return make_partition(task, folder)
        finally:
            files.close(fd)
            building.unlink()

    build(settings(folder, split="train", cache_dir=str(folder / "whole"), cache_partitions=FEW))
    work(overtake)
    paths = [result.path for result in made(folder, client)]
    assert list(folder.glob("ups-store-*")) == []
    assert_are_the_split(folder, paths)


def test_partitions_on_a_network_file_system_are_built_elsewhere_and_appear_whole(
    folder: Path, client: distributed.Client, work: Callable[[Work], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[set[str]] = []
    copy = files.copy_range

    def look(*arguments: Any) -> None:
        seen.append({path.name for path in (folder / "cache").iterdir()})
        copy(*arguments)

    monkeypatch.setattr(files, "is_network", lambda path: Path(path) == folder / "cache")
    monkeypatch.setattr(files, "copy_range", look)
    work(lambda task: make_partition(task, folder))
    paths = [result.path for result in made(folder, client)]
    assert len(seen) == FEW
    paths[1].unlink()
    assert [result.reused for result in made(folder, client)] == [True, False]
    assert len(seen) == FEW + 1
    assert_are_the_split(folder, paths)


def test_relative_folders_and_logs_are_those_of_the_process_that_plans(
    folder: Path,
    client: distributed.Client,
    work: Callable[[Work], None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    def move(task: PartitionTask) -> BuildResult:
        with monkeypatch.context() as patched:
            patched.chdir(tmp_path_factory.getbasetemp())
            return make_partition(task)

    work(move)
    monkeypatch.chdir(folder)
    config = settings(Path(), split="train", cache_partitions=2)
    build_partitions(config, client, watcher=Recorder(), log_json=Path("log/events.jsonl"))
    logs = sorted((folder / "log").iterdir())
    assert [log.name for log in logs] == [f"events-burgers1d_train-0000{i}-of-00002.jsonl" for i in range(2)]
    lines = [json.loads(log.read_text().splitlines()[-1]) for log in logs]
    assert [(line["event"], line["rank"]) for line in lines] == [("end", 0), ("end", 1)]
    assert len({line["run"] for line in lines}) == 1


def test_worker_of_another_version_is_refused(
    folder: Path, client: distributed.Client, work: Callable[[Work], None]
) -> None:
    work(lambda task: make_partition(dataclasses.replace(task, version="0.0.1")))
    with pytest.raises(ConfigError) as caught:
        made(folder, client)
    assert caught.value.kind == "version"


def test_partitions_replace_a_store_in_another_number_of_files(
    folder: Path, client: distributed.Client
) -> None:
    made(folder, client, cache_partitions=None)  # as many as there are workers: one
    assert sorted(path.name for path in folder.glob("cache/*.zip")) == ["burgers1d_train.zarr.zip"]
    made(folder, client, cache_partitions=3, limit=30, cache_dtype="float16", overwrite=True)
    names = sorted(path.name for path in folder.glob("cache/*.zip"))
    assert names == [f"burgers1d_train-0000{i}-of-00003.zarr.zip" for i in range(3)]


def test_cluster_without_workers_needs_a_number_of_partitions(folder: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        build_partitions(settings(folder, split="train"), SimpleNamespace(nthreads=dict), watcher=Recorder())
    assert caught.value.kind == "no_workers"


def test_no_scheduler_is_an_error_that_says_where_it_was_looked_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with dask.config.set({"scheduler-address": None}), pytest.raises(ConfigError) as caught, connected(None):
        pass
    assert caught.value.kind == "no_cluster"
    with (
        dask.config.set({"distributed.comm.timeouts.connect": "1s"}),
        pytest.raises(ConfigError, match="no Dask scheduler answers"),
        connected("tcp://127.0.0.1:9"),
    ):
        pass


@pytest.mark.slow
@pytest.mark.multi_process
def test_command_has_the_workers_build_and_logs_of_each_partition(
    folder: Path, cluster: distributed.LocalCluster
) -> None:
    command = [sys.executable, "-m", "ups_store", "build", "--engine", "dask", "--json"]
    command += ["--dask-scheduler", cluster.scheduler_address, "--log-json", "log/build.jsonl"]
    command += ["--tasks", "burgers1d", "--split", "train", "--root", "source", "--partitions", str(COUNT)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    stores = json.loads(done.stdout)["stores"]
    assert_are_the_split(folder, [Path(store["path"]) for store in stores])
    assert "opens as one store" in done.stderr
    command = [sys.executable, "-m", "ups_store", "status", "log", "--json"]
    (machine,) = json.loads(subprocess.check_output(command, cwd=folder))["machines"]
    assert [process["state"] for process in machine["processes"]] == ["finished"] * (COUNT + 1)


@pytest.mark.slow
@pytest.mark.multi_process
def test_worker_that_is_killed_is_replaced_and_its_partition_made(
    folder: Path, cluster: distributed.LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr("ups_store.building.dask_engine._make", once(folder / "killed", die))
    assert_are_the_split(folder, run(folder, cluster))
    assert (folder / "killed").exists()


@pytest.mark.slow
@pytest.mark.multi_process
def test_task_that_kills_every_worker_is_given_up_and_the_others_end(
    folder: Path, cluster: distributed.LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def always(task: PartitionTask) -> object:
        if task.rank.machine == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return make_partition(task)

    monkeypatch.setattr("ups_store.building.dask_engine._make", always)
    with pytest.raises(StoreError) as caught:
        run(folder, cluster)
    assert caught.value.kind == "workers_died"
    made = len(list(folder.glob("cache/*.zarr.zip")))
    assert 0 < made < COUNT  # Dask also counts the death against what was queued at the worker
    monkeypatch.undo()
    assert_are_the_split(folder, run(folder, cluster))


@pytest.mark.slow
@pytest.mark.multi_process
def test_worker_that_stops_amid_a_partition_is_overtaken(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds the lock of its building file all the while; what then wakes up changes nothing."""

    def straggle(task: PartitionTask) -> object:
        from ups_store.building.fill import Filling

        marker, plain = folder / "stopped", Filling.fill
        if task.rank.machine != 1 or marker.exists():
            return make_partition(task)

        def stop(self: Filling, samples: object) -> None:
            marker.write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
            Filling.fill = plain
            self.fill(samples)

        Filling.fill = stop
        return make_partition(task)

    monkeypatch.setattr("ups_store.building.dask_engine._make", straggle)
    options = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": None}
    try:
        with (
            dask.config.set({"distributed.scheduler.worker-ttl": "5s"}),
            distributed.LocalCluster(**options) as cluster,
        ):
            assert_are_the_split(folder, run(folder, cluster))
    finally:
        pid = int((folder / "stopped").read_text())
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    with ups_store.open(folder / f"cache/burgers1d_train-*-of-{COUNT:05d}.zarr.zip") as store:
        assert len(store) == 32
