"""Fields of a task's splits: of a field store, or read straight from HDF5 into one in memory."""

from __future__ import annotations

import contextlib
import itertools
import logging
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

import ups_store
from ups.config import RunConfig
from ups.data.fields import Fields, FieldsInfo, info_of
from ups.data.origins import identity_of_sources
from ups.data.stores import (
    UNREADABLE,
    Store,
    StoreError,
    differing_selection,
    latent_folder,
    open_latents,
    place_of,
    store_path,
)
from ups.errors import ConfigError, UpsError
from ups.grid import FIELDS, LATENT
from ups.log import logger
from ups_store.build import Build, BuildConfig, DataConfig, DigestCache, Readers, open_build

_log = logging.getLogger(__name__)


Split = Literal["dev", "val", "test", "train"]


SPLITS: tuple[Split, ...] = get_args(Split)


_MEMORY_SHARE = 0.5  # of what is free, for one split


def stored_split(split: str) -> str:
    """The split of the stores that a split of trainings is part of: "dev" is cut from "val"."""
    return "val" if split == "dev" else split


def part_of_split(fields: Fields, split: str) -> Fields:
    """What a split has of the fields of its `stored_split`.

    Trainings choose weights by the even samples of validation, "val"; "dev" has the odd ones, so what is
    reported on them wasn't chosen by them. Samples lie file by file, so both have their share of every file
    with several.
    """
    if split not in ("val", "dev"):
        return fields
    chosen = np.arange(int(split == "dev"), len(fields.num_steps), 2)
    if split == "dev":
        check_has_dev(len(fields.num_steps), fields.info.task, origin=fields.origin)
    return fields.chosen(chosen, called="every second sample")


def check_has_dev(num: int, task: str, *, origin: object) -> None:
    """Refuse one sample of validation where some are wanted for development."""
    if num == 1:
        raise ConfigError(
            f"the development split of {task} is empty",
            kind="empty_split",
            path=origin,
            expected="at least 2 samples of validation, of which every second one is of development",
            found="1",
            hint="change data.split_fractions, or bring more samples",
        )


def open_fields(
    config: BuildConfig,
    task: str,
    split: str,
    *,
    source: Literal["auto", "store", "hdf5"] = "auto",
) -> Fields:
    """Open the fields of a task and split.

    Args:
        config: Which samples of which files, and where field stores lie.
        split: "train", "val", "dev" or "test"; "val" and "dev" as in `part_of_split`.
        source: "store", "hdf5", or "auto": the store if there is one of this configuration.
    """
    return part_of_split(_open_stored(config, task, stored_split(split), source), split)


def _open_stored(
    config: BuildConfig, task: str, split: str, source: Literal["auto", "store", "hdf5"]
) -> Fields:
    """All fields of a split of the stores."""
    path = store_path(config.cache.dir, task, split)
    store, problem = open_suitable(path, config.data) if source != "hdf5" else (None, "")
    if store is not None:
        if store.codec != "none":  # or every frame would take decoding its trajectory
            report = store.preload()
            _log.info("%s: packed by %s, decoded: %s", store.path, store.codec, report.why)
        return Fields(store, limit=config.data.limit)
    if source == "store":
        command = "`ups-store build --config ... latent.encoder=none`"
        hint = f"{command} builds it, or says if it has no samples; or say training.field_source=hdf5"
        problem = f"no field store of {task} {split} as configured ({problem})"
        raise ConfigError(problem, kind="no_store", path=path, hint=hint)
    return read_split(config, task, split)


def describe_fields(config: BuildConfig, task: str, split: str = "train") -> tuple[FieldsInfo, int]:
    """What the fields of a task are, by their store or the heads of the files; no sample is read.

    Args:
        config: Which samples of which files, and where field stores lie.

    Returns:
        What they are, and how many samples the split has.
    """
    store, _ = open_suitable(store_path(config.cache.dir, task, split), config.data)
    if store is not None:
        with store:
            return info_of(store), len(store)
    with Readers(config.reading, note=logger.info) as readers:
        build = open_split(config, task, split, readers=readers)
        return info_of(build.plan), build.num_samples


def open_suitable(path: Path, data: DataConfig) -> tuple[Store | None, str]:
    """The store of a path, or None and why it can't serve."""
    place = place_of(path)
    if place is None:
        return None, "there is none"
    try:
        store = ups_store.open(place)
    except UNREADABLE as error:  # a partition is missing, or one is damaged
        return None, str(error)
    with contextlib.ExitStack() as stack:
        stack.enter_context(store)
        problem = _problem_with(store, data)
        if problem:
            return None, problem
        stack.pop_all()
    return store, ""


def are_there(config: RunConfig, *, latents: bool) -> bool:
    """Whether all stores of training and validation are there, of latents or of fields, as configured."""
    for task, split in itertools.product(config.data.tasks, ("train", "val")):
        try:
            if latents:
                options = {"allow_unknown_encoder": config.training.allow_unknown_encoder}
                open_latents(config, task, split, autoencoder_path=config.autoencoder_path, **options).close()
                continue
            store, _ = open_suitable(store_path(config.cache.dir, task, split), config.data)
        except (UpsError, StoreError):
            return False
        if store is None:
            return False
        store.close()
    return True


def _problem_with(store: Store, data: DataConfig) -> str:
    """Why a store can't serve; empty if it can."""
    if FIELDS not in store:
        return "it holds no fields"
    differing = differing_selection(store, data)
    return ", ".join(f"its {key} is {found}, not {wanted}" for key, (found, wanted) in differing.items())


def read_split(config: BuildConfig, task: str, split: str) -> Fields:
    """Read all samples of a split into a store in memory, in float32.

    Args:
        config: Which samples of which files; `data.on_nan` decides about NaN and Inf.
        split: "train", "val" or "test".
    """
    config = config.model_copy(
        update={
            "cache": config.cache.model_copy(update={"dtype": "float32", "codec": "none"}),
            # Nothing goes on without a sample; and nothing is kept that a digest of all bytes would be for.
            "reading": config.reading.model_copy(update={"on_error": "fail"}),
            "data": config.data.model_copy(update={"source_digest": "sampled"}),
        }
    )
    with Readers(config.reading, note=logger.info) as readers:
        digests = DigestCache(config.cache.dir, readers=readers, save=False)
        build = open_split(config, task, split, readers=readers, digests=digests)
        check_room(build)
        with build:
            build.begin_in_memory()
            build.fill()
            store = build.finish()
    sources = [part.path for part in build.plan.parts]
    origin = ", ".join(dict.fromkeys(path.name for path in sources))
    return Fields(store, origin=origin, identity=identity_of_sources(sources))


def check_room(build: Build) -> None:
    """Fail if a split's fields don't fit into memory: ConfigError, kind "too_large"."""
    needed, free = build.num_samples * build.plan.sample_nbytes, ups_store.available_memory_bytes()
    if needed > _MEMORY_SHARE * free:
        raise ConfigError(
            f"{build.title} doesn't fit into memory",
            kind="too_large",
            expected=f"at most {_MEMORY_SHARE * free / 2**20:.0f} MiB, {_MEMORY_SHARE:.0%} of what is free",
            found=f"{needed / 2**20:.0f} MiB",
            hint="build a field store with `ups-store build`, use data.limit, or raise the limit of"
            " the container",
        )


def open_split(config: BuildConfig, task: str, split: str, **options: Any) -> Build:
    """Open the build of a split's store, which has samples.

    Args:
        config: Which samples of which files.
        split: "train", "val" or "test".
        **options: Those of `ups_store.build.open_build`.
    """
    build = open_build(config, task, split, **options)
    if build.num_samples == 0:
        raise ConfigError(
            f"{build.title} would be empty",
            kind="empty_split",
            path=config.data.root,
            expected="at least 1 sample",
            hint="change data.split_fractions, or bring more samples",
        )
    return build


def open_latent_fields(config: RunConfig, task: str, split: str) -> Fields:
    """Open latents of which nothing says what encoded them, such as those imported from `.pt` files.

    They can't be decoded, only compared: their tokens stand for points, so metrics mean over tokens.

    Args:
        split: "train", "val", "dev" or "test".
    """
    path = store_path(latent_folder(config), task, stored_split(split))
    place = place_of(path)
    if place is None:
        raise ConfigError(
            f"no latent store of {task} {stored_split(split)}",
            kind="no_store",
            path=path,
            hint="latents of an unknown encoder can't be made from fields: import those of this split, too",
        )
    store = ups_store.open(place)
    if LATENT not in store or len(store) == 0:
        found = ", ".join(store.arrays)
        problem = f"{task} {split} has no latents to evaluate"
        raise ConfigError(problem, kind="empty_split", path=path, found=found)
    return part_of_split(Fields(store, info=info_of(store, task=task), limit=config.data.limit), split)
