"""One store from end to end, as `python -m ups_store.build` makes it, and what became of it."""

from __future__ import annotations

import time
from dataclasses import replace

from ups_store.build.progress import Watcher
from ups_store.build.readers import Readers
from ups_store.build.result import BuildResult
from ups_store.build.store_build import Build
from ups_store.build.tuning import Tuner, Tuning
from ups_store.check.statistics import Statistics
from ups_store.system import files


def build_store(build: Build, *, readers: Readers, watcher: Watcher, overwrite: bool = False) -> BuildResult:
    """Build one store, continue it, or find that it is valid.

    Args:
        build: Its build, of at least one sample; closed afterwards.
        readers: Read the sources.
        watcher: Hears how it goes.
        overwrite: Whether to build from scratch whatever is there.
    Raises:
        SourceError: If a source is unreadable, changed, or holds NaN or Inf that aren't to be kept.
        UnreadSamplesError: If samples were skipped; the others are committed.
        BuildInterruptedError: On Ctrl-C; what is committed stays.
        StoreError: As `Build.begin` and `Build.finish`.
    """
    with build:
        build.begin(overwrite=overwrite)
        if build.is_reused:
            return _result(build)
        statistics, tuning = Statistics(), None
        if not build.is_finished:
            try:
                tuning = _fill(build, readers, watcher)
                if build.rank.is_builder:
                    statistics = build.filling.statistics()
            except KeyboardInterrupt as error:
                raise build.filling.interruption(overwrite=overwrite) from error
        build.finish()
        result = _result(build, statistics)
        return replace(result, tuning=tuning.to_json() if tuning else None)


def _fill(build: Build, readers: Readers, watcher: Watcher) -> Tuning | None:
    """Commit this process's share; its machine's builder then also what the others haven't come to."""
    rank, missing = build.rank, build.missing()
    share = rank.share(missing, build.num_samples)
    if not rank.is_builder:
        watcher.stage(f"{build.title}: samples of rank {rank.local_rank}", len(share), unit="samples")
        build.fill()
        return None
    num_there = build.num_samples - len(missing)
    watcher.stage(f"{build.title}: samples", build.num_samples, unit="samples")
    if num_there:
        watcher.note(f"{build.path}: {num_there} of {build.num_samples} samples are there, continuing")
    watcher.advance(num_there)
    filling, tuning = build.filling, None
    if readers.is_tuned and len(share):
        tuner = Tuner(filling, readers, clock=build.clock, note=watcher.note)
        tuning = tuner.tune(share, is_alone=rank.num_local == 1)
        share = filling.left_of(share)
    filling.fill(share)
    filling.fill_rest()
    filling.check_complete()
    return tuning


def _result(build: Build, statistics: Statistics | None = None) -> BuildResult:
    """What became of a store that is finished, which is closed."""
    plan = build.plan
    with build.store as store:
        return BuildResult(
            path=plan.path,
            task=plan.task.name,
            split=plan.split,
            config_hash=store.config_hash,
            reused=build.is_reused,
            num_samples=len(store),
            num_committed=build.num_committed,
            source_sample_nbytes=plan.source_sample_nbytes,
            nbytes=store.nbytes,
            age_s=round(max(0.0, time.time() - files.modified_s(plan.path)), 1),
            seconds=build.clock.to_json(),
            statistics=statistics.to_json() if statistics else {},
        )
