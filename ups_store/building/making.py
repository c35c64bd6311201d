"""One store from end to end: found, built, continued, pulled, packed; and what became of it."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from ups_store.building.build import Build
from ups_store.building.decide import count_files, hash_at
from ups_store.building.joining import remove_dead, wait_for_store
from ups_store.building.progress import Watcher
from ups_store.building.read import UnreadSamplesError, split_batches
from ups_store.building.readers import Readers
from ups_store.building.result import BuildResult
from ups_store.building.shared import SharedStores
from ups_store.building.tuning import Tuning, tune
from ups_store.check.info import mapped_nbytes
from ups_store.check.statistics import Statistics
from ups_store.read.base import AnyStore
from ups_store.read.open import open_any
from ups_store.read.several import parts_of
from ups_store.system import files
from ups_store.system.paths import partition_counts, partition_path, partitions_pattern
from ups_store.write.target import payload_nbytes as payload_of


def build_store(
    build: Build,
    *,
    readers: Readers,
    watcher: Watcher,
    overwrite: bool = False,
    shared: SharedStores | None = None,
) -> BuildResult:
    """Build one store, continue it, or find that it is valid; in the end it is packed as configured.

    A valid mapped store is packed, or a packed one unpacked: no sample is read or encoded for that.
    """
    with build:
        maker = _Maker(build, readers, watcher, overwrite=overwrite)
        is_here = build.find(overwrite=overwrite)
        is_pulled = bool(shared and not is_here and not overwrite and shared.pull(build))
        store = maker.packed(build, build.store) if is_here or is_pulled else maker.make()
        with store:
            result = maker.result(store)
            result.pulled = is_pulled
            if shared and not is_pulled:
                result.pushed = shared.push(build, store)
    return result


class _Maker:
    """Makes the files of a store, one after the other."""

    def __init__(self, build: Build, readers: Readers, watcher: Watcher, *, overwrite: bool) -> None:
        self._build, self._readers, self._watcher = build, readers, watcher
        self._overwrite = overwrite
        self._statistics = Statistics()
        self._tuning: Tuning | None = None
        self._batch_size: int | None = None
        self._num_committed = 0

    def make(self) -> AnyStore:
        """Build all files of the store, and open it."""
        build, count = self._build, count_files(self._build)
        if count == 1:
            store = self._make_file(build)
        else:
            unread = []
            for number in range(count):
                try:
                    self._make_file(build.part(number, count)).close()
                except UnreadSamplesError as error:  # the other files needn't wait for this one's sources
                    unread.append(error)
            if unread:
                raise unread[0]
            store = open_any(partitions_pattern(build.path, count))
        if build.rank.is_builder and not build.plan.is_partition:
            remove_replaced(build, count, self._watcher)
        return store

    def _make_file(self, part: Build) -> AnyStore:
        is_builder, plan = part.rank.is_builder, part.plan
        if is_builder:
            remove_dead(part.path, codec=plan.codec)
        with part:
            part.begin(overwrite=self._overwrite)
            if part.is_reused:  # a file that an earlier run has finished
                for batch in split_batches(np.arange(part.num_samples), plan.sample_nbytes):
                    self._statistics.add(part.store.gather(batch))
            elif not part.is_finished:
                try:
                    self._fill(part)
                    if is_builder:
                        self._statistics.join(part.filling.statistics())
                except KeyboardInterrupt as error:
                    raise part.filling.interruption(overwrite=self._overwrite) from error
            store = part.finish()
            self._num_committed += part.num_committed
        if is_builder:
            return self.packed(part, store)
        store.close()  # waited for, or the next file would seem to have no builder
        return wait_for_store(part.path, part.config_hash, is_packed=plan.codec != "none")

    def _fill(self, build: Build) -> None:
        """Commit this process's share; its machine's builder then also what the others haven't come to."""
        rank, missing, watcher = build.rank, build.missing(), self._watcher
        share = rank.share(missing, build.num_samples)
        if not rank.is_builder:
            watcher.stage(f"{build.title}: samples of rank {rank.local_rank}", len(share), unit="samples")
            build.fill()
            return
        num_there = build.num_samples - len(missing)
        watcher.stage(f"{build.title}: samples", build.num_samples, unit="samples")
        if num_there:
            watcher.note(f"{build.path}: {num_there} of {build.num_samples} samples are there, continuing")
        watcher.advance(num_there)
        filling = build.filling
        filling.batch_size = self._batch_size or filling.batch_size
        if self._readers.is_tuned and self._tuning is None and len(share):
            options: dict[str, Any] = {"clock": build.clock, "note": watcher.note}
            self._tuning = tune(filling, self._readers, share, is_alone=rank.num_local == 1, **options)
            self._batch_size = filling.batch_size
            share = filling.left_of(share)
        filling.fill(share)
        filling.fill_rest()
        filling.check_complete()

    def packed(self, build: Build, store: AnyStore) -> AnyStore:
        """Pack or unpack every file of a finished store in its own place, as configured; opens it again.

        What is interrupted goes on with the next file, or the same, when this is called again.
        """
        codec, place = build.plan.codec, store.path
        if not build.rank.is_builder:
            return store
        for part in parts_of(store):
            remove_dead(part.path, codec=codec)
        others = [part for part in parts_of(store) if (part.codec == "none") != (codec == "none")]
        if not others:
            return store
        from ups_store.packed.pack import pack

        doing = "unpacking" if codec == "none" else f"packing by {codec}"
        self._watcher.stage(f"{build.title}: {doing}", sum(map(payload_of, others)), unit="bytes")
        for part in others:
            with build.clock.timed("pack"):
                pack(part.path, part.path, codec, force=self._overwrite, progress=self._watcher.advance)
        store.close()
        return open_any(place)

    def result(self, store: AnyStore) -> BuildResult:
        """Say what became of the store, which is finished."""
        build, plan = self._build, self._build.plan
        paths = [part.path for part in parts_of(store)]
        return BuildResult(
            path=plan.path if store.path == plan.path.absolute() else store.path,  # as it is configured
            task=plan.task.name,
            split=plan.split,
            config_hash=store.config_hash,
            reused=build.is_reused,
            num_samples=len(store),
            num_committed=self._num_committed,
            source_sample_nbytes=plan.source_sample_nbytes,
            nbytes=store.nbytes,
            age_s=round(max(0.0, time.time() - max(map(files.modified_s, paths))), 1),
            codec=store.codec,
            num_files=len(paths),
            mapped_nbytes=mapped_nbytes(store),
            seconds=build.clock.to_json(),
            statistics=self._statistics.to_json(),
            tuning=self._tuning.to_json() if self._tuning else None,
        )


def remove_replaced(build: Build, count: int, watcher: Watcher) -> None:
    """Remove files of an earlier store that is in another number of them: they would be found first."""
    counts = [other for other in partition_counts(build.path) if other != count]
    earlier = [partition_path(build.path, number, other) for other in counts for number in range(other)]
    name = build.path.name if count == 1 else partitions_pattern(build.path, count).name
    for path in earlier if count == 1 else [build.path, *earlier]:
        if hash_at(path) is not None:
            files.remove(path)
            watcher.note(f"{path} is removed: {name} replaces it")
