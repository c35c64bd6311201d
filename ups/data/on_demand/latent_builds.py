"""The builds of the latent stores that a run wants, which a thread fills while the run trains.

From what, and whether they are there already, `ups_store.build` knows; here is which stores a run's
configuration means, and in which order their samples are made.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch.distributed as dist

from ups.conditions import NUM_STEPS
from ups.data.on_demand.order import arrival_stretches
from ups.data.splits import open_split
from ups.data.stores import Store
from ups.data.windows import Items
from ups.errors import ConfigError
from ups.log import logger
from ups_store.build import (
    Build,
    BuildConfig,
    BuildRank,
    DigestCache,
    QuietWatcher,
    Readers,
    SharedStores,
)

_GROUPS_OF_BATCH = 2  # in groups that are encoded together; the encoder works at two batches at a time
_CHUNKS_OF_STRETCH = 4
_LEAST_STRETCHES = 16  # of a small split, so that they can be mixed
_LARGE_NBYTES = 1 << 30  # of sources whose digests take so long that a note is due
# In groups of samples that are encoded together:
_SPREAD_GROUPS = 16  # of the first stretch: statistics are measured on it before training
_GROUPS_OF_STRETCH = 64  # of the others: what is lost between two of them is little then


def open_latent_builds(
    config: BuildConfig, split: str, *, rank: BuildRank, saves_digests: bool = True
) -> dict[str, Build]:
    """Open the build of every task's store; reads sources whose digests aren't known yet.

    Args:
        config: As `latent_build` gives it.
        split: "train", "val" or "test".
        rank: Place of this process among those that build together.
        saves_digests: Whether digests are kept beside the stores.
    Returns:
        By task.
    Raises:
        SourceError: If sources are missing or unreadable.
        ConfigError: Kinds "empty_split", "uneven_times".
        CheckpointError: As the encoder.
    """
    watcher = _LookWatcher(logger.info) if config.data.source_digest == "full" else QuietWatcher(logger.info)
    with Readers(config.reading, note=logger.info) as readers:
        digests = DigestCache(config.cache.dir, readers=readers, save=saves_digests)
        builds = {
            task: open_split(
                config,
                task,
                split,
                readers=readers,
                digests=digests,
                watcher=watcher,
                rank=rank,
                groups_per_batch=_GROUPS_OF_BATCH,  # the first samples shall be there soon
            )
            for task in config.data.tasks
        }
        for build in builds.values():
            _check_one_length(build)
            build.identify()
    return builds


class _LookWatcher(QuietWatcher):
    """Notes when sources are so large that looking at them takes long."""

    def stage(self, name: str, total: int, *, unit: str) -> None:
        """See `ups_store.build.Watcher.stage`."""
        if unit == "bytes" and total > _LARGE_NBYTES:
            logger.info(f"{name}: looking at {total / 1e9:.1f} GB")


def arrivals_of(build: Build, *, seed: int) -> list[Items]:
    """Stretches of a store's samples in the order in which they are made."""
    plan = build.plan
    most_groups = -(-plan.num_samples // (_LEAST_STRETCHES * plan.group_size))
    length = min(_GROUPS_OF_STRETCH, most_groups) * plan.group_size
    # A chunk of the sources is decoded for every stretch that it has a part in.
    chunks = _CHUNKS_OF_STRETCH * max(info.samples_per_chunk for info in plan.infos)
    return arrival_stretches(
        plan.num_samples,
        group=plan.group_size,
        num_spread=min(_SPREAD_GROUPS, most_groups),
        length=max(length, chunks),
        seed=seed,
    )


def begin_store(build: Build, shared: SharedStores) -> Build | Store:
    """The finished store, if it is there or in the shared cache; else its build, begun, continued, or joined.

    Raises:
        StoreError: As `Build.begin`.
    """
    if not build.find():
        shared.pull(build)
    build.begin(helps=True)
    if build.is_finished:
        store = build.store
        logger.info(f"{build.title}: latents reused, {build.config_hash[:12]}, {store.path}")
        return store
    if (codec := build.plan.codec) != "none":
        later = "`ups-store build` packs the finished store"
        logger.info(f"{build.title}: cache.codec={codec} has no effect while training makes it: {later}")
    there = f"{build.num_there()} of {build.num_samples} there"
    logger.info(f"{build.title}: encoding on demand, {there}, {build.path}")
    return build


def push_stores(config: BuildConfig, builds: Collection[Build], check: Callable[[], None]) -> None:
    """Push stores that were made here to the shared cache.

    Args:
        config: Says where that is.
        builds: Finished ones.
        check: Called now and then; what it raises ends this.
    """
    with SharedStores(config, watcher=_PushWatcher(check)) as shared:
        for build in builds:
            shared.push(build, build.store)


class _PushWatcher(QuietWatcher):
    """Has a push end where training does."""

    def __init__(self, check: Callable[[], None]) -> None:
        super().__init__(logger.info)
        self._check = check

    def advance(self, num: int) -> None:
        """See `ups_store.build.Watcher.advance`."""
        self._check()

    def waits(self, what: str) -> None:
        """See `ups_store.build.Watcher.waits`."""
        self._check()


def begin_in_memory(build: Build) -> Build:
    """Begin the store in memory, one for all ranks of a machine; nothing is written to a disk.

    Raises:
        DiskFullError: Kind "memory_full".
    """
    rank = build.rank
    if rank.is_builder or not dist.is_initialized():
        build.begin_in_memory()
    if rank.num_local == 1 or not dist.is_initialized():
        return build
    path = build.path_in_memory
    begun: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(begun, None if path is None else (rank.machine, str(path)))
    if path is None:
        build.begin_in_memory(dict(filter(None, begun))[rank.machine])
    return build


def _check_one_length(build: Build) -> None:
    """Which windows there are has to be known before the samples are."""
    if NUM_STEPS in build.plan.arrays:
        raise ConfigError(
            f"the trajectories of {build.title} have numbers of time steps of their own",
            kind="uneven_times",
            expected="the same number for all, to encode them on demand",
            found=f"an array {NUM_STEPS!r}",
            hint="build the store (`ups-store build`) and set training.cache_mode=store",
        )
