"""All stores of a configuration, one after the other; or what would become of each."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from typing import Any

from ups_store.building.build import Build, open_build
from ups_store.building.config import BuildConfig
from ups_store.building.decide import Explanation, explain
from ups_store.building.digests import DigestCache, Digests
from ups_store.building.making import build_store
from ups_store.building.plan import StorePlan
from ups_store.building.progress import Stopwatch, Watcher
from ups_store.building.ranks import BuildRank
from ups_store.building.read import UnreadSamplesError
from ups_store.building.readers import Readers
from ups_store.building.result import BuildReport, BuildResult, Startup
from ups_store.building.shared import SharedStores
from ups_store.building.staging import Sources
from ups_store.errors import SourceError
from ups_store.printable import counted
from ups_store.read.recovery import building_path
from ups_store.sources.source_files import SPLITS, split_range
from ups_store.system import files


def build_all(
    config: BuildConfig,
    *,
    watcher: Watcher,
    overwrite: bool = False,
    rehash: bool = False,
    skip_missing: bool = False,
    clock: Stopwatch | None = None,
    rank: BuildRank | None = None,
    digests: Digests | None = None,
) -> BuildReport:
    """Build every task and split of a configuration.

    A split without samples is skipped with a note when others of its task were asked for too.

    Args:
        config: What to build.
        watcher: Hears how it goes; `QuietWatcher()` shows nothing.
        overwrite: Whether to build from scratch whatever is there.
        rehash: Whether known digests aren't believed.
        skip_missing: Whether a task without any sources is skipped with a note, too.
        clock: Has counted "imports" already, where those belong to the run.
        rank: Place of this process among those that build together; by default as the environment says.
        digests: Known digests of the sources; by default those beside the stores.
    Raises:
        SourceError: If nothing is left to build, a task has no sources, or a source is unusable.
        StoreError: As `Build.begin` and `Build.finish`.
    """
    clock = clock or Stopwatch()
    skipped: dict[str, str] = {}
    sources = Sources(config, watcher=watcher)
    with clock.timed("stage"):
        sources.stage_all()
    with (
        Readers(config.reading, note=watcher.note) as readers,
        SharedStores(config, watcher=watcher) as shared,
    ):
        watcher.watch(readers.pool)
        digests = digests or DigestCache(config.cache.dir, rehash=rehash, readers=readers)
        with clock.timed("plan"):
            options: dict[str, Any] = {
                "readers": readers,
                "digests": digests,
                "sources": sources,
                "rank": rank,
                "skip_missing": skip_missing,
            }
            builds = list(open_builds(config, skipped, watcher, **options))
        if not overwrite:
            _check_room([build.plan for build in builds])
        results: list[BuildResult] = []
        unread: list[UnreadSamplesError] = []
        for build in builds:
            try:
                options = {"readers": readers, "watcher": watcher, "shared": shared}
                result = build_store(build, overwrite=overwrite, **options)
                results.append(result)
                for line in _losses(result, build.plan):
                    watcher.note(line)
            except UnreadSamplesError as error:  # the other stores needn't wait for that one's sources
                if unread:  # the first is the one that is raised
                    watcher.note(str(error))
                unread.append(error)
        if unread:
            raise unread[0]
    return BuildReport(tuple(results), skipped, readers.choice, Startup.of(results, clock))


def explain_all(
    config: BuildConfig,
    *,
    watcher: Watcher,
    rehash: bool = False,
    overwrite: bool = False,
    skip_missing: bool = False,
) -> list[Explanation]:
    """Explain every store that this machine would build; of its ranks the first one does."""
    if not BuildRank.from_environment().is_builder:
        return []
    with Readers(config.reading, note=watcher.note) as readers:
        watcher.watch(readers.pool)
        digests = DigestCache(config.cache.dir, rehash=rehash, save=False, readers=readers)
        sources = Sources(config, watcher=watcher, is_dry=True)
        options: dict[str, Any] = {"readers": readers, "digests": digests, "sources": sources}
        builds = open_builds(config, {}, watcher, skip_missing=skip_missing, **options)
        return [explain(build, overwrite=overwrite) for build in builds]


def _losses(result: BuildResult, plan: StorePlan) -> Iterator[str]:
    """A line for each array that was written with values that aren't finite, or that a cast lost."""
    for name, found in result.statistics.items():
        where, cast = f"{result.path}: array {name!r}", f"the cast to {plan.arrays[name].dtype}"
        if found["num_nan"] or found["num_inf"]:
            made = f", {found['num_overflow']:,} of them by {cast}" if found["num_overflow"] else ""
            yield f"{where} holds {found['num_nan']:,} NaN and {found['num_inf']:,} Inf{made}"
        if found["num_underflow"]:
            num = found["num_underflow"]
            yield f"{where}: {cast} made {counted(num, 'value')} 0; a wider dtype keeps such small ones"
        channels = (plan.arrays[name].attrs or {}).get("channels") or ()
        for number, num in enumerate(found.get("num_flat", ())):
            if num:
                channel = repr(channels[number]) if number < len(channels) else number
                lost = f"what varies in channel {channel} of samples with {counted(num, 'value')}"
                yield f"{where}: {cast} loses {lost}; a wider dtype tells them apart"


def _check_room(plans: Sequence[StorePlan]) -> None:
    """Refuse before the sources are digested what the disk has no room for; `create` reserves it for good."""
    new = [
        plan for plan in plans if not files.exists(plan.path) and not files.exists(building_path(plan.path))
    ]
    needed = sum(plan.num_samples * plan.sample_nbytes for plan in new if plan.codec == "none")
    for folder in {plan.path.parent for plan in new if os.path.isdir(plan.path.parent)}:
        if needed > files.free_bytes(folder):
            with files.disk_full_as_error(folder / new[0].path.name, needed):
                raise OSError(errno.ENOSPC, "no room for all stores")


def open_builds(
    config: BuildConfig,
    skipped: dict[str, str],
    watcher: Watcher,
    *,
    readers: Readers | None = None,
    digests: Digests | None = None,
    sources: Sources | None = None,
    rank: BuildRank | None = None,
    skip_missing: bool = False,
) -> Iterator[Build]:
    """Open the build of every store that has samples; the others go to `skipped` with the reason."""
    sources = sources or Sources(config, watcher=watcher)
    rank = rank or BuildRank.from_environment()
    both = [(task, split) for task in config.data.tasks for split in config.data.split]
    options: dict[str, Any] = {"readers": readers, "digests": digests, "sources": sources, "rank": rank}
    for task, split in both:
        try:
            build = open_build(config, task, split, watcher=watcher, **options)
            if not build.plan.is_empty:
                yield build
                continue
            error = _empty(build.plan, config)
        except SourceError as missing:
            if missing.kind != "no_source" or (split == "train" and config.stage_dir is not None):
                raise
            error = missing
        skipped[f"{task} {split}"] = str(error)
        is_without = error.kind == "no_source" and all(
            f"{task} {each}" in skipped for each in config.data.split
        )
        if len(skipped) == len(both) or (is_without and not skip_missing):
            if is_without and len(config.data.tasks) > 1:
                error.hint = f"{error.hint}; --skip-missing builds the other tasks"
            raise error
        watcher.note(f"skipped {task} {split}: {error}")


def _empty(plan: StorePlan, config: BuildConfig) -> SourceError:
    """Say what the fractions made of the sources, in samples."""
    data, counts = config.data, [info.num_samples for info in plan.infos]
    shares = []
    for split in SPLITS:
        options: dict[str, Any] = {"fractions": data.fractions, "test_part": plan.task.test_part}
        share = sum(len(split_range(count, split=split, **options)) for count in counts)
        shares.append(f"{share} to {split}")
    are = f"{counted(sum(counts), 'sample')} in {counted(len(counts), 'file')}"
    if any(counts):
        fractions = ", ".join(map(str, data.split_fractions))
        are += f", shared out {fractions}: {', '.join(shares)} (test and val rounded down in each file)"
    return SourceError(
        f"{plan.task.name} {plan.split} would be empty",
        kind="empty_split",
        path=data.root,
        found=are,
        hint="change data.split_fractions, or give the split a file of its own: "
        f"{plan.task.name}_{plan.split}.h5",
    )
