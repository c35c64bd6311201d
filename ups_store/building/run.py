"""One store from end to end, as `python -m ups_store.build` makes it, and what became of it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np

from ups_store.building.forms import count_files, give_form, place_of, remove_dead, remove_replaced
from ups_store.building.place import wait_for_store
from ups_store.building.progress import Watcher
from ups_store.building.read import UnreadSamplesError, split_batches
from ups_store.building.readers import Readers
from ups_store.building.result import BuildResult
from ups_store.building.shared import SharedStores
from ups_store.building.store_build import Build
from ups_store.building.tuning import Tuner, Tuning
from ups_store.check.info import mapped_nbytes
from ups_store.check.statistics import Statistics
from ups_store.read.open import open_any
from ups_store.read.several import parts_of
from ups_store.system import files


def build_store(
    build: Build,
    *,
    readers: Readers,
    watcher: Watcher,
    overwrite: bool = False,
    shared: SharedStores | None = None,
) -> BuildResult:
    """Build one store, continue it, or find that it is valid; in the end it is packed as configured.

    A valid store that is packed otherwise is repacked, or unpacked: no sample is read or encoded for that.

    Args:
        build: Its build, of at least one sample; closed afterwards.
        readers: Read the sources.
        watcher: Hears how it goes.
        overwrite: Whether to build from scratch whatever is there.
        shared: Where the store is pulled from if it isn't here, and pushed to; what fails there is a note.
    Raises:
        SourceError: If a source is unreadable, changed, or holds NaN or Inf that aren't to be kept.
        UnreadSamplesError: If samples were skipped; the others are committed.
        BuildInterruptedError: On Ctrl-C; what is committed stays.
        StoreError: As `Build.begin` and `Build.finish`.
    """
    with build:
        making = _Making(build, readers, watcher, overwrite=overwrite)
        is_here = build.find(overwrite=overwrite)
        is_pulled = bool(shared and not is_here and not overwrite and shared.pull(build))
        if is_here or is_pulled:
            place = build.store.path
            build.store.close()
            making.give_form(place)
        else:
            place = making.make()
        result = making.result(place)
    result.pulled = is_pulled
    if shared and not is_pulled:
        with open_any(place) as store:
            result.pushed = shared.push(build, store)
    return result


class _Making:
    """Makes the files of a store, one after the other."""

    def __init__(self, build: Build, readers: Readers, watcher: Watcher, *, overwrite: bool) -> None:
        self._build, self._readers, self._watcher = build, readers, watcher
        self._overwrite = overwrite
        self._statistics = Statistics()
        self._tuning: Tuning | None = None
        self._batch_size: int | None = None
        self._num_committed = 0

    def make(self) -> Path:
        """Build all files of the store; returns what opens them."""
        build = self._build
        count = count_files(build)
        unread = []
        for number in range(count):
            part = build if count == 1 else build.part(number, count)
            try:
                self._make_file(part)
            except UnreadSamplesError as error:  # the other files needn't wait for this one's sources
                unread.append(error)
        if unread:
            raise unread[0]
        if build.rank.is_builder and not build.plan.is_partition:
            remove_replaced(build, count, self._watcher.note)
        return place_of(build, count)

    def _make_file(self, part: Build) -> None:
        if part.rank.is_builder:
            remove_dead(part.path, codec=part.plan.codec)
        with part:
            part.begin(overwrite=self._overwrite)
            if part.is_reused:
                self._add_statistics(part)
            elif not part.is_finished:
                try:
                    self._fill(part)
                    if part.rank.is_builder:
                        self._statistics.join(part.filling.statistics())
                except KeyboardInterrupt as error:
                    raise part.filling.interruption(overwrite=self._overwrite) from error
            part.finish().close()
            self._num_committed += part.num_committed
        self.give_form(part.path)
        if not part.rank.is_builder:  # else the next file would seem to have no builder
            wait_for_store(part.path, part.config_hash, codec=part.plan.codec).close()

    def give_form(self, place: Path) -> None:
        """Pack or unpack files as configured."""
        build = self._build
        if build.rank.is_builder:
            codec = build.plan.codec
            options: dict[str, Any] = {"title": build.title, "watcher": self._watcher, "clock": build.clock}
            give_form(place, codec, force=self._overwrite, **options)

    def _add_statistics(self, part: Build) -> None:
        """Those of a file that an earlier run finished."""
        for batch in split_batches(np.arange(part.num_samples), part.plan.sample_nbytes):
            self._statistics.add(part.store.gather(batch))

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
            tuner = Tuner(filling, self._readers, clock=build.clock, note=watcher.note)
            self._tuning = tuner.tune(share, is_alone=rank.num_local == 1)
            self._batch_size = filling.batch_size
            share = filling.left_of(share)
        filling.fill(share)
        filling.fill_rest()
        filling.check_complete()

    def result(self, place: Path) -> BuildResult:
        """What became of the store, which is finished."""
        build, plan = self._build, self._build.plan
        with open_any(place) as store:
            paths = [part.path for part in parts_of(store)]
            return BuildResult(
                path=plan.path if place == plan.path.absolute() else place,  # as the configuration says it
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
