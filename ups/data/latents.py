"""Latents that an operator trains on, as `training.cache_mode` says; docs/guides/latents.md is about them.

`make_latents` builds what is missing before the first step; `open_latent_windows` opens it, or what encodes
fields in each step.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.distributed import DistError
from torch.distributed.rendezvous import rendezvous

import ups_store
from ups.data.batches import TrainingData, WindowSource, window_data
from ups.data.splits import open_fields, open_split
from ups.data.stores import Store, encoder_of, latent_build, latent_folder, open_latents, place_of, store_path
from ups.data.windows import EncodedWindows, Windows
from ups.errors import ConfigError, UpsError
from ups.log import logger
from ups.output import check_writable
from ups.trained.checkpoint import read_document
from ups.trained.encode_loop import make_encoder
from ups.trained.specs import AUTOENCODER, parse_spec
from ups_store.build import (
    Build,
    BuildConfig,
    BuildRank,
    DigestCache,
    Readers,
    Watcher,
    build_all,
)
from ups_store.errors import BuildLockedError, SourceError, StoreError

if TYPE_CHECKING:
    from ups.config import RunConfig


_NOTE_S = 5.0  # between two lines about one store
_POLL_S = 1.0  # from one look at a store that another process builds to the next
_MEETING_S = 300.0  # that a rank waits for the first one of its machine to begin a store in memory


def make_latents(
    config: RunConfig,
    *,
    autoencoder_path: Path,
    device: str,
    split: str = "train",
    check_data: Callable[[Mapping[str, Any]], None] | None = None,
) -> dict[str, Store]:
    """Build the stores that a stage will read and that aren't there, before its first step.

    Under `torchrun` the ranks of a machine build them together; every one calls it, before they join in a
    process group. Every machine makes whole stores: training takes windows from all of a split.

    Args:
        autoencoder_path: The checkpoint whose latents are wanted.
        device: Where latents are made.
        check_data: Given the hashes of the stores by task before any is begun or replaced; raises if it was
            to be another one.

    Returns:
        Stores in memory by task; none where they lie in files, or nothing is stored.
    """
    mode, tasks = config.training.cache_mode, config.data.tasks
    paths = [store_path(latent_folder(config), task, split) for task in tasks]
    may_build = config.training.latent_cache_dir is not None and not any(map(_is_of_unknown_encoder, paths))
    if mode in ("store", "none") or (mode == "auto" and not may_build):
        return {}
    build = latent_build(config, autoencoder_path=autoencoder_path, device=device)
    build = build.model_copy(update={"data": build.data.model_copy(update={"split": (split,)})})
    rank = dataclasses.replace(BuildRank.from_environment(), num_machines=1)
    watcher = _Progress() if rank.is_builder else Watcher()
    if mode == "auto":
        check_writable(build.cache.dir)
    try:
        with Readers(build.reading, note=watcher.note) as readers:
            digests = DigestCache(build.cache.dir, readers=readers, save=mode == "auto")
            builds = {
                task: open_split(
                    build, task, split, digests=digests, readers=readers, watcher=watcher, rank=rank
                )
                for task in tasks
            }
            hashes = {task: wanted.config_hash for task, wanted in builds.items()}
            if mode == "auto" and build.data.limit is not None and _are_whole(build, split):
                return {}  # which are compared once they are open
            if check_data is not None:
                check_data(hashes)
            if mode == "memory":
                return {task: _built_in_memory(wanted, rank) for task, wanted in builds.items()}
    except SourceError as error:
        if mode == "memory" or error.kind == "empty_split" or not all(map(place_of, paths)):
            raise
        logger.info(f"the sources can't be compared with the stores: {error}")
        return {}
    is_waiting = False
    while True:
        try:
            build_all(build, watcher=watcher, rank=rank)
            return {}
        except BuildLockedError as error:  # another run of the same; should it end, this one goes on
            if not is_waiting:
                logger.info(f"{error.found} builds {error.path}, too: waiting for it")
            is_waiting = True
            time.sleep(_POLL_S)


def open_latent_windows(
    config: RunConfig,
    split: str,
    *,
    autoencoder_path: Path,
    global_batch_size: int,
    horizon: int,
    seed: int,
    device: str,
    made: Mapping[str, Store] | None = None,
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
        made: What `make_latents` gave; by default it is called here.
        check_data: As for `make_latents`.

    Raises:
        ConfigError: As `open_latents`, `open_fields`, `Windows`; kind "empty_split".
        CheckpointError: If the checkpoint is missing or damaged.
        SourceError: If sources are needed and can't be read.
        StoreError: If a store can't be read or built.
    """
    training, limit = config.training, config.data.limit
    parameters = parse_spec(read_document(autoencoder_path, kind=AUTOENCODER), autoencoder_path).parameters
    windows: dict[str, Windows] = {}
    if made is None:
        made = make_latents(
            config, autoencoder_path=autoencoder_path, device=device, split=split, check_data=check_data
        )
    for task in config.data.tasks:
        taken: dict[str, Any] = {"horizon": horizon, "stride": training.stride}
        if training.cache_mode == "none":
            fields = open_fields(config.build, task, split, source=training.field_source)
            build = latent_build(config, autoencoder_path=autoencoder_path, device=device)
            windows[task] = EncodedWindows(fields, _encoder(build, task), **taken)
            logger.info(f"{task} {split}: encoded in each step, fields of {fields.origin}")
            continue
        store = made[task] if task in made else _opened(config, task, split, autoencoder_path)
        windows[task] = Windows(store, limit=limit, **taken)
        why = windows[task].preload(training.preload, device=device)
        place = "in memory" if task in made else str(store.path)
        logger.info(f"{task} {split}: latents {store.config_hash[:12]}, {place}, {why}")
    return window_data(windows, global_batch_size=global_batch_size, seed=seed, parameters=parameters)


def _opened(config: RunConfig, task: str, split: str, autoencoder_path: Path) -> Store:
    """Open the finished store of a task, whatever made it."""
    allowed = config.training.allow_unknown_encoder
    try:
        return open_latents(
            config, task, split, autoencoder_path=autoencoder_path, allow_unknown_encoder=allowed
        )
    except ConfigError as error:
        if error.kind == "no_store" and config.training.latent_cache_dir is None:
            error.hint = f"{error.hint}; or set training.latent_cache_dir, and training builds it first"
        raise


def _encoder(build: BuildConfig, task: str) -> Any:
    latent = build.latent
    assert latent is not None
    if latent.encoder != "ups":
        raise ConfigError(
            "training.cache_mode = none",
            kind="other_encoder",
            expected="latent.encoder=ups, whose frames can be encoded one by one",
            found=f"latent.encoder = {latent.encoder}",
            hint="say training.cache_mode=auto or memory",
        )
    return make_encoder(
        latent.checkpoint,
        task=task,
        device=latent.device,
        compute_dtype=latent.compute_dtype,
        latent_dtype=build.cache.dtype,
        micro_batch=latent.micro_batch,
        pin_memory=latent.pin_memory,
        compile=latent.compile,
    )


def _is_of_unknown_encoder(path: Path) -> bool:
    """Tell whether a store couldn't be made again, so that it must not be replaced."""
    try:
        with ups_store.open(place_of(path) or path) as store:
            return encoder_of(store) is None
    except StoreError:  # not there; or damaged, which is an error when it is opened to be used
        return False


def _are_whole(build: BuildConfig, split: str) -> bool:
    """Tell whether the stores hold the whole split, so that `data.limit` takes their first samples."""
    whole = build.model_copy(update={"data": build.data.model_copy(update={"limit": None})})
    for task in build.data.tasks:
        wanted = open_split(whole, task, split)
        try:
            with ups_store.open(place_of(wanted.path) or wanted.path) as store:
                if store.config_hash != wanted.config_hash:
                    return False
        except StoreError:
            return False
    return True


class _Progress(Watcher):
    """Logs what a build notes, and every few seconds how far it is."""

    def __init__(self) -> None:
        super().__init__(logger.info)
        self._logged_s = time.monotonic()

    def stage(self, name: str, total: int, *, unit: str) -> None:
        super().stage(name, total, unit=unit)
        self._logged_s = time.monotonic()

    def advance(self, num: int) -> None:  # called in the thread that commits
        super().advance(num)
        if time.monotonic() > self._logged_s + _NOTE_S:
            self._logged_s = time.monotonic()
            logger.info(f"{self.name}: {self.done:,} of {self.total:,}")


def _built_in_memory(build: Build, rank: BuildRank) -> Store:
    """Build a store in memory, one for all ranks of a machine; nothing is written to a disk."""
    # The same on every rank of a machine: each builds the same stores in the same order.
    key = f"ups/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}/{rank.machine}/{next(_numbers)}"
    with build:
        if rank.num_local == 1:
            build.begin_in_memory()
        elif rank.is_builder:
            build.begin_in_memory()
            _meeting().set(key, str(build.path_in_memory))
        else:
            try:
                build.begin_in_memory(_meeting().get(key).decode())
            except DistError as error:
                problem = "the first rank of this machine didn't begin to build the latents"
                hint = "its own message says why"
                raise UpsError(problem, kind="rank_lost", hint=hint) from error
        build.fill()
        return build.finish()


_numbers = itertools.count()  # of the stores in memory that this process has built


@cache
def _meeting() -> Any:
    """Where ranks leave word before they join; kept as long as the process, which may serve it to others."""
    store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=_MEETING_S)))
    return store
