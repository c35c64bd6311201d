"""Which latent stores a run wants, from what, and which of them are there already."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ups_store
from ups.config.shared import BuildConfig, CacheConfig, ReadingConfig
from ups.data.errors import hints_in_keys
from ups.data.fields import NUM_STEPS, Store
from ups.data.on_demand.order import Items, arrival_stretches
from ups.data.split_plan import plan_split
from ups.data.store_places import place_of
from ups.errors import ConfigError
from ups.output import Note
from ups_store.build.config import LatentConfig
from ups_store.build.config_file import take_build_keys
from ups_store.build.digests import DigestCache
from ups_store.build.plan import StorePlan
from ups_store.build.readers import Readers
from ups_store.console import format_nbytes
from ups_store.errors import FormatError, StoreNotFoundError
from ups_store.format.identity import config_hash, describe_differences, differences

if TYPE_CHECKING:
    from ups.config import RunConfig

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


def wanted_stores(
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
        plans = [plan_split(build, task, split, readers=readers) for task in build.data.task]
        for plan in plans:
            _expect_one_length(plan)
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
        differing = describe_differences(differences(store.identity, wanted.identity))
    note(f"{store.path} was made from something else (found -> wanted):\n{differing}")
    return None


def _wanted(plan: StorePlan, build: BuildConfig, digests: DigestCache) -> WantedStore:
    document = plan.document(plan.identity(digests, lambda nbytes: None))
    # The first samples shall be there soon, so they are read and committed in small batches.
    small = replace(plan, batch_size=plan.batch_size or _GROUPS_OF_BATCH * plan.group_size)
    return WantedStore(small, document, build.data.on_nan)


def _expect_one_length(plan: StorePlan) -> None:
    """Which windows there are has to be known before the samples are."""
    if NUM_STEPS in plan.arrays:
        raise ConfigError(
            f"the trajectories of {plan.title} have numbers of time steps of their own",
            kind="uneven_times",
            expected="the same number for all, to encode them on demand",
            found=f"an array {NUM_STEPS!r}",
            hint="build the store (python -m ups_store.build) and set training.cache_mode=store",
        )
