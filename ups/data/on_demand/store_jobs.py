"""Stores that a background build fills, in a file or in memory."""

from __future__ import annotations

import time
from typing import Any

import torch.distributed as dist

import ups_store
from ups.data.fields import Store
from ups.data.on_demand.background import Progress
from ups.data.on_demand.order import Items
from ups.data.on_demand.plan import WantedStore
from ups.output import Note
from ups_store.build.fill import Filling
from ups_store.build.progress import Stopwatch
from ups_store.build.ranks import Ranks
from ups_store.build.readers import Readers
from ups_store.build.run import check_sources, join_builder, open_writer, wait_for_store
from ups_store.errors import (
    BuildLockedError,
    StoreNotFoundError,
    StoreReplacedError,
)
from ups_store.read.open import open_store
from ups_store.read.recovery import building_path
from ups_store.system import files
from ups_store.system.memory_file import IN_MEMORY, is_in_memory

_POLL_S = 0.1


class StoreJob:
    """A store that is filled in the background.

    Args:
        wanted: What it holds.
        committer: Its writer, or what `ups_store.join` gave where another process builds it.

    Attributes:
        title: Task and split.
        num_samples: N.
        store: What is there; from the end of the build on the finished store.
    """

    def __init__(self, wanted: WantedStore, committer: ups_store.Committer) -> None:
        self.title, self.num_samples = wanted.plan.title, wanted.plan.num_samples
        self._wanted, self._committer = wanted, committer
        self.store = open_store(building_path(committer.path), partial=True)
        self._is_there = self.store.committed

    def has(self, samples: Items) -> bool:
        """Whether samples are committed, by whomever."""
        if not self._is_there[samples].all():
            self._is_there = self.store.committed
        return bool(self._is_there[samples].all())

    def num_there(self) -> int:
        """How many samples are committed."""
        return int(self.store.committed.sum())

    def begin(self, readers: Readers, watcher: Progress) -> None:
        """See `Job.begin`."""
        self._watcher = watcher
        self._filling = filling_of(self._wanted, self._committer, readers, watcher)

    def make(self, samples: Items) -> None:
        """See `Job.make`; what is committed already isn't made again."""
        missing = samples[~self.store.committed[samples]]
        if not len(missing):
            return
        try:
            self._filling.fill(missing)
        except StoreReplacedError:  # the builder had done these too, and has published the store
            if not self.store.committed.all():
                raise
        self._filling.check_complete()

    def finish(self) -> None:
        """Publish the store, or wait until its builder has."""
        if isinstance(self._committer, ups_store.StoreWriter):
            self.store = self._publish(self._committer)
        elif is_in_memory(self._committer.path):
            self.store = wait_for_store(self._committer.path, self._wanted.config_hash)
        else:
            self.store = self._wait_or_take_over()
        self._watcher.note(f"{self.title}: all {self.num_samples} encoded, {self.store.path}")

    def _publish(self, writer: ups_store.StoreWriter) -> ups_store.Store:
        self._filling.fill_rest()
        self._filling.check_complete()
        check_sources(self._wanted.plan)
        return open_store(writer.finish())

    def _wait_or_take_over(self) -> ups_store.Store:
        """The store that another process builds; should that end before, this one finishes it."""
        while (store := _published(self._wanted)) is None:
            self._watcher.waits("builder")
            try:
                begun = _begin(self._wanted)
            except BuildLockedError:
                time.sleep(_POLL_S)
                continue
            if isinstance(begun, ups_store.Store):
                return begun
            with begun:
                return self._publish(begun)
        return store

    def close(self) -> None:
        """Leave the building file; what is committed stays."""
        self._committer.close()


def begin_store(wanted: WantedStore, *, ranks: Ranks, note: Note) -> StoreJob | Store:
    """Create the store's file, continue it, or join whoever builds it.

    Returns:
        The job; the store itself if another process has finished it meanwhile.
    Raises:
        IdentityMismatchError: If an unfinished store of another identity holds samples.
        StoreError: As `ups_store.create`; kind "no_builder" if local rank 0 never begins.
    """
    if ranks.is_builder:
        try:
            begun = _begin(wanted)
            return begun if isinstance(begun, ups_store.Store) else StoreJob(wanted, begun)
        except BuildLockedError as error:
            note(f"{wanted.plan.title}: {error.found} builds it too; helping")
    committer = join_builder(wanted.path, wanted.content, wanted.config_hash)
    if committer is None:
        return open_store(wanted.path)
    try:
        return StoreJob(wanted, committer)
    except StoreNotFoundError:  # it was published this moment
        committer.close()
        return open_store(wanted.path)


def begin_in_memory(wanted: WantedStore, *, ranks: Ranks) -> StoreJob:
    """Create the store in memory, one for all ranks of a machine; nothing is written to a disk.

    Raises:
        DiskFullError: Kind "memory_full".
    """
    writer = _create_in_memory(wanted) if ranks.is_builder or not dist.is_initialized() else None
    if ranks.num_local == 1 or not dist.is_initialized():
        assert writer is not None
        return StoreJob(wanted, writer)
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, None if writer is None else (ranks.machine, str(writer.path)))
    path = dict(filter(None, told))[ranks.machine]
    return StoreJob(wanted, writer or ups_store.join(path, identity=wanted.content))


def _create_in_memory(wanted: WantedStore) -> ups_store.StoreWriter:
    plan = wanted.plan
    return ups_store.create(
        IN_MEMORY,
        plan.arrays,
        constants=plan.constants,
        dims=plan.dims,
        identity=wanted.content,
        attrs=plan.attrs,
        durability="lazy",
    )


def _published(wanted: WantedStore) -> ups_store.Store | None:
    try:
        store = open_store(wanted.path)
    except StoreNotFoundError:
        return None
    if store.config_hash == wanted.config_hash:
        return store
    store.close()
    return None


def _begin(wanted: WantedStore) -> ups_store.StoreWriter | ups_store.Store:
    """Become the store's builder; the store itself if another process has published it just before.

    Raises:
        BuildLockedError: If somebody builds it.
    """
    writer = open_writer(wanted.plan, wanted.content)
    store = _published(wanted)
    if store is None:
        return writer
    with writer:  # while it is open nobody else builds in the file
        files.remove(building_path(wanted.path))
    return store


def filling_of(wanted: WantedStore, committer: Any, readers: Readers, watcher: Progress) -> Filling:
    """What fills a store stretch by stretch."""
    clock = Stopwatch(watcher.waits)
    return Filling(wanted.plan, committer, readers, watcher=watcher, clock=clock, on_nan=wanted.on_nan)
