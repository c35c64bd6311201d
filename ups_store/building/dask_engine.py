"""`--engine dask`: a cluster that there is already makes the partitions of every store, whole or not at all.

A task may be run again, or twice at a time, whatever became of it before: what it makes has the same bytes,
and appears by a rename.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ups_store
from ups_store.building.config import BuildConfig
from ups_store.building.decide import count_files, is_finished
from ups_store.building.plan import DigestCache, FileSignature
from ups_store.building.progress import BuildReport, BuildResult, Startup, Stopwatch, Watcher
from ups_store.building.ranks import ALONE, BuildRank
from ups_store.building.readers import Readers
from ups_store.building.staging import Sources
from ups_store.building.stores import build_all, build_store, open_builds, remove_replaced
from ups_store.building.watch import BuildWatcher, EventLog
from ups_store.errors import BuildLockedError, ConfigError, StoreError, needs
from ups_store.launch import run_id
from ups_store.sources.contents import changed
from ups_store.sources.reader_process import DigestKind
from ups_store.system import files
from ups_store.system.files import Progress
from ups_store.system.paths import partitions_pattern
from ups_store.writing.target import new_file

with needs("dask"):
    import dask
    from distributed import Client, as_completed, get_worker
    from distributed.scheduler import KilledWorker
    from pydantic import BaseModel

RETRIES = 3  # of a task that failed; how many workers it may take down is Dask's scheduler.allowed-failures


@contextlib.contextmanager
def connected(address: str | None) -> Iterator[Client]:
    """Connect to a cluster by its address or scheduler file; by default as Dask is configured."""
    address = address or dask.config.get("scheduler-address", None)
    hint = "give --dask-scheduler, set DASK_SCHEDULER_ADDRESS, or start one with `dask scheduler`"
    if address is None:
        raise ConfigError("no Dask cluster is known", kind="no_cluster", hint=hint)
    where: dict[str, Any] = {"scheduler_file" if os.path.isfile(address) else "address": address}
    try:
        client = Client(**where, set_as_default=False)
    except (OSError, ValueError) as error:
        facts: dict[str, Any] = {"path": address, "found": str(error), "hint": hint}
        raise ConfigError("no Dask scheduler answers", kind="no_cluster", **facts) from error
    with client:
        yield client


@dataclasses.dataclass(frozen=True)
class PartitionTask:
    """One partition of one store, for any process that sees the same sources; picklable."""

    config: BuildConfig  # of one task and split, paths absolute
    rank: BuildRank  # a machine of its own
    config_hash: str
    num_samples: int
    digests: dict[str, Any]
    overwrite: bool
    log_json: Path | None
    run: str
    version: str = ups_store.__version__


def build_partitions(
    config: BuildConfig,
    client: Client,
    *,
    watcher: Watcher,
    overwrite: bool = False,
    rehash: bool = False,
    skip_missing: bool = False,
    log_json: Path | None = None,
    clock: Stopwatch | None = None,
) -> BuildReport:
    """Build every store of a configuration in partitions: this process plans and digests, workers build.

    A valid store is kept. Results are of each partition; the first error is raised once all have ended.
    """
    clock, config, skipped = clock or Stopwatch(), _absolute(config), dict[str, str]()
    results, planned, tasks = list[BuildResult](), [], list[PartitionTask]()
    sources = Sources(config, watcher=watcher)
    with clock.timed("stage"):
        sources.stage_all()
    with Readers(config.reading, note=watcher.note) as readers:
        digests = DigestCache(config.cache.dir, rehash=rehash, readers=readers)
        options: dict[str, Any] = {"readers": readers, "digests": digests, "sources": sources, "rank": ALONE}
        for build in open_builds(config, skipped, watcher, skip_missing=skip_missing, **options):
            if build.find(overwrite=overwrite):
                results.append(build_store(build, readers=readers, watcher=watcher))
                continue
            count = count_files(build)
            if build.plan.num_files is None and count == 1 and not (count := len(client.nthreads())):
                hint = "say --partitions N, or start workers first"
                raise ConfigError("the cluster has no workers yet", kind="no_workers", hint=hint)
            planned.append((build, min(count, build.num_samples)))
    for build, count in planned:
        task, split = build.plan.task.name, build.plan.split
        data = config.data.model_copy(update={"tasks": (task,), "split": (split,)})
        one = config.model_copy(update={"data": data})
        log = log_json and log_json.absolute().with_stem(f"{log_json.stem}-{task}_{split}")
        for number in range(count):
            part, rank = build.part(number, count), BuildRank(machine=number, num_machines=count)
            facts = part.config_hash, part.num_samples, digests.known, overwrite, log and rank.own_file(log)
            tasks.append(PartitionTask(one, rank, *facts, run=run_id()))

    watcher.stage("partitions", sum(task.num_samples for task in tasks), unit="samples")
    futures = client.map(_make, tasks, retries=RETRIES, pure=False)
    errors = []
    try:
        for future in as_completed(futures, loop=client.loop):
            done = tasks[futures.index(future)]
            if future.status != "finished":  # the other partitions needn't wait for what this one lacks
                errors.append(_error_of(future))
                title = f"{done.config.data.tasks[0]} {done.config.data.split[0]}"
                watcher.note(f"{title}, {done.rank}: {errors[-1]}")
            watcher.advance(done.num_samples)
        if errors:
            raise errors[0]
        results += [future.result() for future in futures]
    finally:
        client.cancel(futures)
    for build, count in planned:
        path = build.path if count == 1 else partitions_pattern(build.path, count)
        if not is_finished(path, build.config_hash):
            watcher.note(f"{path} isn't to be seen from here: copy the workers' files into one folder")
            continue
        remove_replaced(build, count, watcher)
        if count > 1:
            watcher.note(f"{path} opens as one store; `ups-store concat` makes one file of it")
    return BuildReport(tuple(results), skipped, readers.choice, Startup.of(results, clock))


def _error_of(future: Any) -> BaseException:
    error = future.exception() if future.status == "error" else None
    if isinstance(error, KilledWorker):
        last = error.last_worker.address
        problem = f"{error.allowed_failures + 1} workers died over it, the last one {last}"
        hint = "look at its log (memory, the encoder's deadline); run the same command again"
        return StoreError(problem, kind="workers_died", hint=hint)
    return error or StoreError(f"Dask gave it up as {future.status}", kind="cluster", hint="run it again")


def _absolute(section: Any) -> Any:
    """Return a section with all of its paths absolute: workers have folders of their own."""
    if isinstance(section, BaseModel):
        return section.model_copy(update={name: _absolute(value) for name, value in section})
    return section.absolute() if isinstance(section, Path) else section


# --- a worker -----------------------------------------------------------------------------------------


class _PlannedDigests(DigestCache):
    """Digests that the planning process knows, of files that are the same here by size and time."""

    def digest(self, path: Path, kind: DigestKind, progress: Progress) -> str:
        entry, signature = self.known.get(f"{kind}:{os.path.realpath(path)}"), FileSignature.of(path)
        if entry is None:
            return super().digest(path, kind, progress)
        if any(entry["signature"][name] != getattr(signature, name) for name in ("size", "mtime_ns")):
            raise changed(path)
        progress(signature.size)
        return str(entry["digest"])


def _make(task: PartitionTask) -> BuildResult:
    return make_partition(task, get_worker().local_directory)


def make_partition(task: PartitionTask, folder: str | Path | None = None) -> BuildResult:
    """Make one partition, or find that it is there; what a worker runs.

    It is built in its place, where an earlier attempt is continued. It is built in a folder of this machine,
    and copied, if its place lies on a network file system, whose locks and syncs may not hold what a build
    relies on; or if an earlier attempt still has it, such as one that hangs.
    """
    if task.version != ups_store.__version__:
        versions: dict[str, Any] = {"expected": task.version, "found": ups_store.__version__}
        hint = "install the same on all machines"
        problem = "the worker has another version of ups-store"
        raise ConfigError(problem, kind="version", hint=hint, **versions)
    config, cache, rank = task.config, task.config.cache, task.rank
    digests = _PlannedDigests(Path(), rehash=True, save=False)
    digests.known = task.digests
    with contextlib.ExitStack() as stack:
        watcher: Watcher = Watcher()
        if task.log_json:
            origin = {"run": task.run, "rank": rank.machine}
            log = stack.enter_context(EventLog(task.log_json, origin=origin))
            watcher = stack.enter_context(BuildWatcher(log=log))
        options: dict[str, Any] = {"digests": digests, "overwrite": task.overwrite}
        options |= {"watcher": watcher, "rank": rank}
        files.make_folder(cache.dir, hint="check cache.dir")
        path = rank.path(cache.dir / f"{config.data.tasks[0]}_{config.data.split[0]}.zarr.zip")
        is_there = not task.overwrite and is_finished(path, task.config_hash)
        if is_there or not files.is_network(cache.dir):
            try:
                return build_all(config, **options).stores[0]
            except BuildLockedError as error:
                watcher.note(f"{path}: {error.found} still builds it, so it is built elsewhere")
        temporary = stack.enter_context(tempfile.TemporaryDirectory(prefix="ups-store-", dir=folder))
        update: dict[str, Any] = {"cache": cache.model_copy(update={"dir": Path(temporary)})}
        update["data"] = config.data.model_copy(update={"stage_dir": config.stage_dir})  # copies stay there
        (result,) = build_all(config.model_copy(update=update), **options).stores
        with files.opened(result.path) as made, new_file(path, force=True, needed_bytes=result.nbytes) as fd:
            files.copy_range(made, 0, fd, 0, result.nbytes)
        return dataclasses.replace(result, path=path)
