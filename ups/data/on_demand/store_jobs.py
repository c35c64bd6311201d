"""Stores that a background build fills, in a file or in memory.

Which latent stores a run wants, from what, and which of them are there already.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

import ups_store
from ups.config.shared import BuildConfig, CacheConfig, ReadingConfig
from ups.data.fields import NUM_STEPS, plan_split
from ups.data.on_demand.background import Progress
from ups.data.on_demand.order import Items, arrival_stretches
from ups.data.stores import Store, hints_in_keys, place_of
from ups.errors import ConfigError
from ups.output import Note
from ups_store.build.config import LatentConfig
from ups_store.build.config_file import take_build_keys
from ups_store.build.digests import DigestCache
from ups_store.build.fill import Filling
from ups_store.build.plan import StorePlan
from ups_store.build.progress import Stopwatch
from ups_store.build.ranks import Builders
from ups_store.build.readers import Readers
from ups_store.build.run import check_sources, join_builder, open_writer, wait_for_store
from ups_store.console import format_nbytes
from ups_store.errors import (
    BuildLockedError,
    FormatError,
    StoreNotFoundError,
    StoreReplacedError,
)
from ups_store.format.identity import config_hash, describe_differences, differences
from ups_store.read.open import open_store
from ups_store.read.recovery import building_path
from ups_store.system import files
from ups_store.system.memory_file import IN_MEMORY, is_in_memory

if TYPE_CHECKING:
    from ups.config import RunConfig


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


def begin_store(wanted: WantedStore, *, ranks: Builders, note: Note) -> StoreJob | Store:
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


def begin_in_memory(wanted: WantedStore, *, ranks: Builders) -> StoreJob:
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


# In groups of samples that are encoded together:
_SPREAD_GROUPS = 16  # of the first stretch: statistics are measured on it before training

_GROUPS_OF_STRETCH = 64  # of the others: what is lost between two of them is little then

_GROUPS_OF_BATCH = 2  # the encoder works at two batches at a time

_LEAST_STRETCHES = 16  # of a small split, so that they can be mixed

_CHUNKS_OF_STRETCH = 4

_LARGE_NBYTES = 1 << 30  # of sources whose digests take long enough to be told of


@dataclass(frozen=True, eq=False)
class WantedStore:
    """A latent store as the run's configuration, sources and encoder make it.

    Attributes:
        plan: What is read, and what becomes of it.
        identity: The whole identity document.
        on_nan: "fail" or "keep" NaN and Inf of the sources.
    """

    plan: StorePlan
    identity: Mapping[str, Any]
    on_nan: str

    @property
    def task(self) -> str:
        """Name of the task."""
        return self.plan.task.name

    @property
    def path(self) -> Path:
        """Where the store goes."""
        return self.plan.path

    @property
    def content(self) -> Mapping[str, Any]:
        """What `ups_store.create` takes as identity."""
        content: Mapping[str, Any] = self.identity["content"]
        return content

    @property
    def config_hash(self) -> str:
        """Hash of the identity."""
        return config_hash(self.identity)

    def arrivals(self, *, seed: int) -> list[Items]:
        """Stretches of its samples in the order in which they are made."""
        num, group = self.plan.num_samples, self.plan.group_size
        most_groups = -(-num // (_LEAST_STRETCHES * group))
        length = min(_GROUPS_OF_STRETCH, most_groups) * group
        # A chunk of the sources is decoded for every stretch that it has a part in.
        chunks = _CHUNKS_OF_STRETCH * max(info.samples_per_chunk for info in self.plan.infos)
        return arrival_stretches(
            num,
            group=group,
            num_spread=min(_SPREAD_GROUPS, most_groups),
            length=max(length, chunks),
            seed=seed,
        )


def latent_build(config: RunConfig, *, autoencoder_path: Path, device: str) -> BuildConfig:
    """The configuration of `python -m ups_store.build` that makes the stores of a run.

    Args:
        config: Configuration of the run.
        autoencoder_path: The encoder's checkpoint.
        device: Where to encode.
    Raises:
        ConfigError: If the run's stores hold fields.
    """
    sections = {"training", "checkpoint", "cache", "reading", "latent"}
    said = take_build_keys({"latent": {}} | config.model_dump(include=sections, exclude_unset=True))
    if "latent" not in said:
        hint = "leave latent.encoder out"
        raise ConfigError("latent.encoder", expected="an encoder", found="none: stores of fields", hint=hint)
    latent = LatentConfig(**{**said["latent"], "checkpoint": autoencoder_path, "device": device})
    cache, reading = CacheConfig(**said["cache"]), ReadingConfig(**said.get("reading", {}))
    return config.build.model_copy(update={"cache": cache, "latent": latent, "reading": reading})


def configured_stores(
    build: BuildConfig, split: str, *, note: Note, saves_digests: bool = True
) -> list[WantedStore]:
    """Plan the store of every task; reads sources whose digests aren't known yet.

    Args:
        build: As `latent_build` gives it.
        split: "train", "val" or "test".
        note: Told when that takes long.
        saves_digests: Whether digests are kept beside the stores.
    Raises:
        SourceError: If sources are missing or unreadable.
        ConfigError: Kinds "empty_split", "uneven_times".
        CheckpointError: As the encoder.
    """
    with hints_in_keys(), Readers(build.reading, note=note) as readers:
        plans = [plan_split(build, task, split, readers=readers) for task in build.data.tasks]
        for plan in plans:
            _check_one_length(plan)
            if plan.source_nbytes > _LARGE_NBYTES and build.data.source_digest == "full":
                note(f"{plan.title}: looking at {format_nbytes(plan.source_nbytes)} of sources")
        digests = DigestCache(build.cache.dir, readers=readers, save=saves_digests)
        return [_wanted(plan, build, digests) for plan in plans]


def open_valid(wanted: WantedStore, *, note: Note) -> Store | None:
    """The finished store, if it was made from what is wanted; tells what differs otherwise.

    Raises:
        FormatError: If something that isn't a store, or a damaged one, is in its place.
    """
    try:
        store = ups_store.open(place_of(wanted.path) or wanted.path)
    except StoreNotFoundError:  # or a partition is missing
        return None
    except FormatError as error:
        error.hint = "move it away, or replace it: python -m ups_store.build --overwrite"
        raise
    if store.config_hash == wanted.config_hash:
        return store
    with store:
        differing = describe_differences(differences(store.identity_document, wanted.identity))
    note(f"{store.path} was made from something else (found -> wanted):\n{differing}")
    return None


def _wanted(plan: StorePlan, build: BuildConfig, digests: DigestCache) -> WantedStore:
    document = plan.document(plan.identity(digests, lambda nbytes: None))
    # The first samples shall be there soon, so they are read and committed in small batches.
    small = replace(plan, batch_size=plan.batch_size or _GROUPS_OF_BATCH * plan.group_size)
    return WantedStore(small, document, build.data.on_nan)


def _check_one_length(plan: StorePlan) -> None:
    """Which windows there are has to be known before the samples are."""
    if NUM_STEPS in plan.arrays:
        raise ConfigError(
            f"the trajectories of {plan.title} have numbers of time steps of their own",
            kind="uneven_times",
            expected="the same number for all, to encode them on demand",
            found=f"an array {NUM_STEPS!r}",
            hint="build the store (python -m ups_store.build) and set training.cache_mode=store",
        )
