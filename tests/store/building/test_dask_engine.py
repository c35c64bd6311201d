"""`--engine dask`: partitions by the processes of a Dask cluster, of which some die or hang."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from build_helpers import BURGERS, Recorder, build, settings, write_burgers

import ups_store
from ups_store.building.partitions import PartitionTask, build_partitions
from ups_store.errors import ConfigError, SourceError, StoreError

dask, distributed = pytest.importorskip("dask"), pytest.importorskip("distributed")
pytestmark = [
    pytest.mark.multi_process,
    # Dask's own: sockets and loops that it leaves to the garbage collector, and what its nannies say
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning:distributed"),
]

N = 40
COUNT = 4


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
    from ups_store.building.dask_engine import connected

    config = settings(folder, split="train", cache_partitions=COUNT)
    with connected(cluster.scheduler_address) as engine:
        report = build_partitions(config, engine, watcher=watcher or Recorder())
    return [result.path for result in report.stores]


def assert_are_the_split(folder: Path, paths: list[Path]) -> None:
    build(settings(folder, split="train", cache_dir=str(folder / "alone"), cache_partitions=COUNT))
    assert [path.name for path in paths] == sorted(path.name for path in folder.glob("alone/*.zarr.zip"))
    assert all(path.read_bytes() == (folder / "alone" / path.name).read_bytes() for path in paths)


def once(marker: Path, act: Callable[[], None]) -> Callable[[PartitionTask, str | None], object]:
    """A `make_partition` that does something before it makes its first partition, in whichever process."""

    def make(task: PartitionTask, folder: str | None = None) -> object:
        from ups_store.building.partitions import make_partition

        if task.number == 1:
            try:
                marker.touch(exist_ok=False)
            except FileExistsError:
                pass
            else:
                act()
        return make_partition(task, folder)

    return make


def test_tasks_run_by_a_cluster_in_this_process_make_the_split(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The adapter itself, without the seconds that processes take to start."""
    from ups_store.building.dask_engine import DaskEngine

    config = settings(folder, split="train", cache_partitions=COUNT)
    options = {"processes": False, "n_workers": 1, "threads_per_worker": 2, "dashboard_address": None}
    with distributed.Client(**options, set_as_default=False) as client:
        engine = DaskEngine(client)
        assert engine.num_workers() == 1
        report = build_partitions(config, engine, watcher=Recorder())
        paths = [result.path for result in report.stores]
        assert_are_the_split(folder, paths)

        def fail(task: PartitionTask, folder: str) -> None:
            tried.append(task.number)
            raise SourceError("gone", kind="test", path="a.h5")

        paths[2].unlink()
        tried: list[int] = []
        monkeypatch.setattr("ups_store.building.dask_engine.make_partition", fail)
        with pytest.raises(SourceError, match=r"a\.h5: gone"):  # as it was raised
            build_partitions(config, engine, watcher=Recorder())
        assert tried.count(2) == 4


def test_no_scheduler_is_an_error_that_says_where_it_was_looked_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ups_store.building.dask_engine import connected

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
def test_worker_that_is_killed_is_replaced_and_its_partition_made(
    folder: Path, cluster: distributed.LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr("ups_store.building.dask_engine._make", once(folder / "killed", die))
    assert_are_the_split(folder, run(folder, cluster))
    assert (folder / "killed").exists()


@pytest.mark.slow
def test_task_that_kills_every_worker_is_given_up_and_the_others_end(
    folder: Path, cluster: distributed.LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def always(task: PartitionTask) -> object:
        from ups_store.building.partitions import make_partition

        if task.number == 1:
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
def test_worker_that_stops_amid_a_partition_is_overtaken(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds the lock of its building file all the while; what then wakes up changes nothing."""

    def straggle(task: PartitionTask) -> object:
        from ups_store.building.fill import Filling
        from ups_store.building.partitions import make_partition

        marker, plain = folder / "stopped", Filling.fill
        if task.number != 1 or marker.exists():
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
