"""Latents for training, wherever they are: finished stores, stores that are still being made, or none.

`training.cache_mode` says what is wanted; docs/guides/on-demand.md says what comes of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ups_store
from ups.data.batches import TrainingData
from ups.data.on_demand.latent_builds import (
    begin_in_memory,
    begin_store,
    open_latent_builds,
    push_stores,
)
from ups.data.on_demand.sources import FilledStores, UnkeptWindows, WindowSettings
from ups.data.stores import Store, encoder_of, latent_build, latent_folder, open_latents, place_of, store_path
from ups.data.windows import TaskWindows, WindowSource, window_data
from ups.errors import ConfigError
from ups.log import logger
from ups.output import check_writable
from ups.trained.checkpoint import read_document
from ups.trained.specs import AUTOENCODER, parse_spec
from ups_store.build import Build, BuildConfig, BuildRank, QuietWatcher, SharedStores
from ups_store.errors import SourceError, StoreError

if TYPE_CHECKING:
    from ups.config import RunConfig


def open_training_windows(
    config: RunConfig,
    split: str,
    *,
    autoencoder_path: Path,
    global_batch_size: int,
    horizon: int,
    seed: int,
    device: str,
    check_data: Callable[[Mapping[str, Any]], None] | None = None,
) -> TrainingData[WindowSource]:
    """Open the latents of all tasks as batches of windows, as `training.cache_mode` says.

    Args:
        split: "train", usually.
        autoencoder_path: The checkpoint whose latents are wanted.
        global_batch_size: Most windows of a batch, over all ranks.
        horizon: Steps of a window.
        seed: Seed of the order.
        device: Where latents are made, and used.
        check_data: Given the hashes of the stores by task before any is begun or replaced; raises if it was
            to be another one.
    Raises:
        ConfigError: As `open_latents`, `TaskWindows`; kind "empty_split".
        CheckpointError: If the checkpoint is missing or damaged.
        SourceError: If sources are needed and can't be read.
        StoreError: If a store can't be read, or begun: no room, another identity.
    """
    mode = config.training.cache_mode
    logger.info(f"latents of {', '.join(config.data.tasks)} ({split}): {_plan_in_words(config, mode)}")
    training = config.training
    settings = WindowSettings(
        global_batch_size=global_batch_size,
        horizon=horizon,
        stride=training.stride,
        seed=seed,
        parameters=parse_spec(read_document(autoencoder_path, kind=AUTOENCODER), autoencoder_path).parameters,
        preload=training.preload,
        device=device,
        augment=training.augment,
        laws=config.own_laws,
    )
    if mode == "store" or (mode == "auto" and not _may_be_made(config, split)):
        return _finished(config, split, settings, autoencoder_path=autoencoder_path)
    build = latent_build(config, autoencoder_path=autoencoder_path, device=device)
    if mode == "auto":
        check_writable(build.cache.dir)
    # Every machine makes whole stores: training takes windows from all of a split.
    rank = dataclasses.replace(BuildRank.from_environment(), num_machines=1)
    try:
        wanted = open_latent_builds(build, split, rank=rank, saves_digests=mode == "auto")
        is_part = mode == "auto" and build.data.limit is not None and _are_whole(build, split, rank)
    except SourceError as error:
        if mode != "auto" or not _all_there(config, split):
            raise
        logger.info(f"the sources can't be compared with the stores: {error}")
        is_part = True
    if is_part:
        return _finished(config, split, settings, autoencoder_path=autoencoder_path)
    if check_data is not None:
        check_data({task: some.config_hash for task, some in wanted.items()})
    return _live(mode, wanted, settings, rank, build)


def _live(
    mode: str,
    wanted: Mapping[str, Build],
    settings: WindowSettings,
    rank: BuildRank,
    build: BuildConfig,
) -> TrainingData[WindowSource]:
    if mode == "none":
        return UnkeptWindows(wanted, settings, reading=build.reading).data()
    with ExitStack() as stack, SharedStores(build, watcher=QuietWatcher(logger.info)) as shared:
        opened: dict[str, Build | Store] = {}
        for task, some in wanted.items():
            is_kept = mode != "memory"
            opened[task] = begin_store(some, shared) if is_kept else begin_in_memory(some)
            stack.callback(opened[task].close)
        finished = partial(push_stores, build) if mode == "auto" and build.cache.remote else None
        options: dict[str, Any] = {"reading": build.reading, "finished": finished}
        source = FilledStores(wanted, opened, settings, ranks=rank, **options)
        stack.pop_all()
    return source.data()


def _finished(
    config: RunConfig,
    split: str,
    settings: WindowSettings,
    *,
    autoencoder_path: Path,
) -> TrainingData[WindowSource]:
    """Windows of finished stores, whatever made them."""
    windows = {}
    for task in config.data.tasks:
        try:
            store = open_latents(
                config,
                task,
                split,
                autoencoder_path=autoencoder_path,
                allow_unknown_encoder=config.training.allow_unknown_encoder,
            )
        except ConfigError as error:
            if error.kind == "no_store":
                error.hint = f"{error.hint}; or set training.latent_cache_dir, and it is built while training"
            raise
        stride, limit = settings.stride, config.data.limit
        windows[task] = TaskWindows(store, horizon=settings.horizon, stride=stride, limit=limit)
        why = windows[task].preload(settings.preload, device=settings.device)
        logger.info(f"{task} {split}: latents reused, {store.config_hash[:12]}, {store.path}, {why}")
    return window_data(
        windows,
        global_batch_size=settings.global_batch_size,
        seed=settings.seed,
        parameters=settings.parameters,
    )


def _may_be_made(config: RunConfig, split: str) -> bool:
    """Whether "auto" may build: there is a folder for it, without stores that it couldn't make again."""
    if config.training.latent_cache_dir is None:
        return False
    return not any(_is_of_unknown_encoder(path) for path in _paths(config, split))


def _hash_of(path: Path) -> str | None:
    """Hash of the store that is there, if there is one."""
    try:
        with ups_store.open(place_of(path) or path) as store:
            return store.config_hash
    except StoreError:
        return None


def _is_of_unknown_encoder(path: Path) -> bool:
    try:
        with ups_store.open(place_of(path) or path) as store:
            return encoder_of(store) is None
    except StoreError:  # not there; or damaged, which is an error when it is opened to be used
        return False


def _are_whole(
    build: BuildConfig,
    split: str,
    rank: BuildRank,
) -> bool:
    """Whether the finished stores hold the whole split, of which `data.limit` wants the first samples."""
    data = build.data.model_copy(update={"limit": None})
    whole = build.model_copy(update={"data": data})
    wanted = open_latent_builds(whole, split, rank=rank)
    return all(_hash_of(some.path) == some.config_hash for some in wanted.values())


def _all_there(config: RunConfig, split: str) -> bool:
    return all(place_of(path) is not None for path in _paths(config, split))


def _paths(config: RunConfig, split: str) -> list[Path]:
    return [store_path(latent_folder(config), task, split) for task in config.data.tasks]


def _plan_in_words(config: RunConfig, mode: str) -> str:
    folder = latent_folder(config)
    return {
        "auto": f"looking into {folder}",
        "store": f"finished stores in {folder}",
        "memory": "encoded into memory",
        "none": "encoded in every pass",
    }[mode]
