"""Partitions of stores as tasks for a cluster: any worker makes any of them, whole or not at all.

A task may be run again, or twice at a time, whatever became of it before: what it makes has the same bytes,
and appears by a rename. What schedules tasks needs to know nothing of stores; `Engine` is all that is asked
of it, and `dask_engine` is the one that there is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import ups_store
from ups_store.building.config import BuildConfig
from ups_store.building.digests import DigestCache, DigestKind, FileSignature
from ups_store.building.events import EventLog
from ups_store.building.forms import count_files, place_of, remove_replaced
from ups_store.building.place import find_valid
from ups_store.building.progress import QuietWatcher, Stopwatch, Watcher
from ups_store.building.ranks import ALONE, BuildRank
from ups_store.building.readers import Readers
from ups_store.building.result import BuildReport, BuildResult, Startup
from ups_store.building.run import build_store
from ups_store.building.staging import Sources
from ups_store.building.store_build import Build
from ups_store.building.stores import build_all, open_builds
from ups_store.errors import BuildLockedError, ConfigError, StoreError, needs
from ups_store.launch import run_id
from ups_store.read.open import open_any
from ups_store.sources.file_state import changed
from ups_store.system import files
from ups_store.system.files import make_folder
from ups_store.system.paths import partition_path, partition_range
from ups_store.system.progress import Progress
from ups_store.write.target import new_file

with needs("hdf5"):
    from pydantic import BaseModel


@dataclasses.dataclass(frozen=True)
class PartitionTask:
    """One partition of one store, for any process that sees the same sources; picklable.

    Attributes:
        config: What is built: one task and split, paths absolute.
        number: Of the partition.
        count: Partitions of the store.
        num_samples: Samples of the partition.
        digests: What is known of sources: size, time of modification in ns and digest, by real path and kind.
        overwrite: Whether to build from scratch whatever is there.
        log_json: Where its events are appended, as a file of its own; None: nowhere.
        run: Id of the run, for that log.
        version: Of the package that made the task.
    """

    config: BuildConfig
    number: int
    count: int
    num_samples: int
    digests: Mapping[tuple[str, str], tuple[int, int, str]]
    overwrite: bool = False
    log_json: Path | None = None
    run: str = ""
    version: str = ups_store.__version__

    @property
    def title(self) -> str:
        """For people."""
        data = self.config.data
        return f"{data.tasks[0]} {data.split[0]}, partition {self.number} of 0..{self.count - 1}"

    @property
    def own_log(self) -> Path | None:
        """Where its events are appended: a file that no other partition of any store has."""
        if self.log_json is None:
            return None
        store = f"{self.config.data.tasks[0]}_{self.config.data.split[0]}"
        return self.rank.own_file(self.log_json.with_stem(f"{self.log_json.stem}-{store}"))

    @property
    def rank(self) -> BuildRank:
        """The place that the process has which runs it: a machine of its own."""
        return BuildRank(machine=self.number, num_machines=self.count)


class Engine(Protocol):
    """What runs tasks on the workers of a cluster."""

    def num_workers(self) -> int:
        """How many workers there are now."""

    def run(
        self, tasks: Sequence[PartitionTask]
    ) -> Iterator[tuple[PartitionTask, BuildResult | BaseException]]:
        """Have `make_partition` called with each, again where a worker is lost; as they end, in any order."""


def build_partitions(
    config: BuildConfig,
    engine: Engine,
    *,
    watcher: Watcher,
    overwrite: bool = False,
    rehash: bool = False,
    skip_missing: bool = False,
    log_json: Path | None = None,
    clock: Stopwatch | None = None,
) -> BuildReport:
    """Build every task and split of a configuration in partitions, on the workers of a cluster.

    This process plans and digests the sources, and the workers read, encode and write. A store that is valid
    already is kept. There are as many partitions as the configuration says, else as there are of this store
    already, else as there are workers.

    Args:
        config: What to build; its folders are those of the workers, too.
        engine: Runs the tasks.
        watcher: Hears how it goes.
        overwrite: Whether to build from scratch whatever is there.
        rehash: Whether known digests aren't believed.
        skip_missing: As in `build_all`.
        log_json: Where workers append events, a file for each partition.
        clock: Has counted "imports" already, where those belong to the run.
    Returns:
        A result for each partition, in the order of tasks, splits and partitions.
    Raises:
        SourceError: If nothing is left to build, or a source is unusable.
        StoreError: The first of the partitions' errors, once all others have ended; what was made stays.
    """
    clock, config = clock or Stopwatch(), _absolute(config)
    options: dict[str, Any] = {"overwrite": overwrite, "run": run_id()}
    options["log_json"] = log_json and log_json.absolute()
    make_folder(config.cache.dir, hint="check cache.dir")
    skipped: dict[str, str] = {}
    sources = Sources(config, watcher=watcher)
    with clock.timed("stage"):
        sources.stage_all()
    with Readers(config.reading, note=watcher.note) as readers:
        digests = _Recorded(DigestCache(config.cache.dir, rehash=rehash, readers=readers))
        given: dict[str, Any] = {"readers": readers, "digests": digests, "sources": sources, "rank": ALONE}
        given["skip_missing"] = skip_missing
        kept, planned = [], []
        for build in open_builds(config, skipped, watcher, **given):
            with clock.timed("digest"):
                found = None if overwrite else find_valid(build.plan, build.document, watcher.note)
            if found is not None:
                found.close()
                kept.append(build_store(build, readers=readers, watcher=watcher))
            else:
                planned.append((build, _count(build, engine)))
    tasks = [task for each in planned for task in _tasks_of(*each, config, digests.known, **options)]
    made = _run(engine, tasks, watcher)
    for build, count in planned:
        _check_together(build, count, watcher.note)
    return BuildReport((*kept, *made), skipped, readers.choice, Startup.of([*kept, *made], clock))


def make_partition(task: PartitionTask, folder: str | Path | None = None) -> BuildResult:
    """Make one partition, or find that it is there; what a worker of a cluster runs.

    It is built in its place, where an earlier attempt is continued. It is built elsewhere, and copied, if its
    place lies on a network file system, whose locks and syncs may not hold what a build relies on; or if an
    earlier attempt still has it, such as one that hangs.

    Args:
        task: The partition.
        folder: A folder of a local disk; by default the system's for temporary files.
    Raises:
        ConfigError: Kind "version", if another version of the package made the task.
        StoreError: As `build_all`.
    """
    if task.version != ups_store.__version__:
        raise ConfigError(
            "the worker has another version of ups-store",
            kind="version",
            expected=task.version,
            found=ups_store.__version__,
            hint="install the same on all machines",
        )
    with ExitStack() as stack:
        log, origin = task.own_log, {"run": task.run, "rank": task.number}
        watcher = stack.enter_context(EventLog(log, origin=origin)) if log else QuietWatcher()
        make_folder(task.config.cache.dir, hint="check cache.dir")
        if files.is_network(task.config.cache.dir) and not _is_there(task):
            return _make_elsewhere(task, folder, watcher)
        try:
            return _make(task, task.config, watcher)
        except BuildLockedError as error:
            watcher.note(f"{task.title}: {error.found} still builds it, so it is built elsewhere")
            return _make_elsewhere(task, folder, watcher)


def _make(task: PartitionTask, config: BuildConfig, watcher: Watcher) -> BuildResult:
    given: dict[str, Any] = {"rank": task.rank, "overwrite": task.overwrite}
    digests = _Given(task.digests, DigestCache(config.cache.dir, save=False))
    (result,) = build_all(config, watcher=watcher, digests=digests, **given).stores
    return result


def _make_elsewhere(task: PartitionTask, folder: str | Path | None, watcher: Watcher) -> BuildResult:
    """Build it in a folder of its own, and copy it to its place, where it appears whole."""
    with tempfile.TemporaryDirectory(prefix="ups-store-", dir=folder) as own:
        result = _make(task, _with_cache_dir(task.config, Path(own)), watcher)
        place = task.config.cache.dir / result.path.name
        _copy(result.path, place)
        return dataclasses.replace(result, path=place)


def _is_there(task: PartitionTask) -> bool:
    """Whether the partition is there, made from the same."""
    config = task.config
    with Readers(config.reading) as readers:
        digests = _Given(task.digests, DigestCache(config.cache.dir, save=False, readers=readers))
        options: dict[str, Any] = {"readers": readers, "digests": digests, "rank": task.rank}
        for build in open_builds(config, {}, QuietWatcher(), **options):
            found = None
            with contextlib.suppress(StoreError):  # what is wrong, building it says
                found = find_valid(build.plan, build.document, lambda sentence: None)
            if task.overwrite or found is None:
                return False
            found.close()
    return True


def _copy(path: Path, target: Path) -> None:
    """Copy a finished file to its place, which it takes by a rename once it is on the disk."""
    nbytes = path.stat().st_size
    with files.opened(path) as source, new_file(target, force=True, needed_bytes=nbytes) as new:
        files.copy_range(source, 0, new, 0, nbytes)


def _run(engine: Engine, tasks: Sequence[PartitionTask], watcher: Watcher) -> list[BuildResult]:
    """The results of all tasks in their order, or the first error once all have ended."""
    watcher.stage("partitions", sum(task.num_samples for task in tasks), unit="samples")
    results: dict[int, BuildResult] = {}
    errors: list[BaseException] = []
    numbers = {id(task): number for number, task in enumerate(tasks)}
    for task, outcome in engine.run(tasks) if tasks else ():
        if isinstance(outcome, BaseException):  # the others needn't wait for what this one lacks
            errors.append(outcome)
            watcher.note(f"{task.title}: {outcome}")
        else:
            results[numbers[id(task)]] = outcome
        watcher.advance(task.num_samples)
    if errors:
        raise errors[0]
    return [results[number] for number in sorted(results)]


def _tasks_of(
    build: Build, count: int, config: BuildConfig, digests: Mapping[Any, Any], **options: Any
) -> Iterator[PartitionTask]:
    plan = build.plan
    data = config.data.model_copy(update={"tasks": (plan.task.name,), "split": (plan.split,)})
    own = config.model_copy(update={"data": data})
    for number in range(count):
        num_samples = len(partition_range(plan.num_samples, number, count))
        yield PartitionTask(own, number, count, num_samples, digests, **options)


def _count(build: Build, engine: Engine) -> int:
    """In how many partitions a store is built."""
    as_planned = count_files(build)
    if build.plan.num_files is not None or as_planned > 1:
        return as_planned
    num_workers = engine.num_workers()
    if not num_workers:
        hint = "say --partitions N, or start workers first"
        raise ConfigError("the cluster has no workers yet", kind="no_workers", hint=hint)
    return min(num_workers, build.num_samples)


def _check_together(build: Build, count: int, note: Callable[[str], None]) -> None:
    """See that the partitions make the store, if this machine sees them; remove what they replace."""
    place = place_of(build, count)
    first = build.path if count == 1 else partition_path(build.path, 0, count)
    if not files.exists(first):
        note(f"{place} isn't to be seen from here: copy the workers' files into one folder")
        return
    with open_any(place) as store:
        assert store.config_hash == build.config_hash, "a partition has another identity than planned"
    remove_replaced(build, count, note)
    if count > 1:
        note(f"{place} opens as one store; `ups-store concat` makes one file of it")


def _with_cache_dir(config: BuildConfig, folder: Path) -> BuildConfig:
    cache = config.cache.model_copy(update={"dir": folder})
    data = config.data.model_copy(update={"stage_dir": config.stage_dir})  # copies stay where they are
    return config.model_copy(update={"cache": cache, "data": data})


def _absolute(section: Any) -> Any:
    """A section with all of its paths absolute: workers have folders of their own."""
    if isinstance(section, Path):
        return section.absolute()
    if isinstance(section, BaseModel):
        return section.model_copy(update={name: _absolute(value) for name, value in section})
    return section


class _Recorded:
    """Digests, and what is known once they were asked for."""

    def __init__(self, digests: DigestCache) -> None:
        self.known: dict[tuple[str, str], tuple[int, int, str]] = {}
        self._digests = digests

    def digest(self, path: Path, kind: DigestKind, progress: Progress) -> str:
        signature = FileSignature.of(path)
        digest = self._digests.digest(path, kind, progress)
        self.known[os.path.realpath(path), kind] = (signature.size, signature.mtime_ns, digest)
        return digest


class _Given:
    """Digests that another machine has found, of files that are the same here by size and time."""

    def __init__(self, known: Mapping[tuple[str, str], tuple[int, int, str]], others: DigestCache) -> None:
        self._known, self._others = known, others

    def digest(self, path: Path, kind: DigestKind, progress: Progress) -> str:
        if (os.path.realpath(path), kind) not in self._known:
            return self._others.digest(path, kind, progress)
        size, mtime_ns, digest = self._known[os.path.realpath(path), kind]
        signature = FileSignature.of(path)
        if (signature.size, signature.mtime_ns) != (size, mtime_ns):
            raise changed(path)
        progress(size)
        return digest
