"""Checks of the stores of a run: there, of which hash, how old, matching; and the RAM and disk they take.

No source is read: their digests are taken from the store that is compared, their names and sizes aren't.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ups_store
from ups.config import RunConfig
from ups.data.splits import open_split
from ups.data.stores import UNREADABLE, Store, latent_build, latent_folder, place_of, store_path
from ups.errors import UpsError
from ups.output import check_writable
from ups.pipeline.report import Checks
from ups.pipeline.sources import TaskSources
from ups_store.build import BuildConfig, Readers, explain
from ups_store.console import format_nbytes
from ups_store.errors import DiskFullError, MemoryLimitError, StoreError

LATENTS, FIELD_STORES = "latent cache", "field stores"  # groups of checks
_NBYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
_UNKNOWN = "0" * 64


class StatedDigests:
    """Digests of sources as a store states them, so that none is read (`ups_store.build.Digests`)."""

    def __init__(self, store: Store) -> None:
        sources = store.identity.get("sources") or ()
        self._by_name = {str(each["name"]): str(each["digest"]) for each in _all_files(sources)}

    def digest(self, path: Path, kind: str, progress: Any) -> str:
        """What the store says of a file of this name."""
        return self._by_name.get(path.name, _UNKNOWN)


def _all_files(sources: Any) -> Iterator[Mapping[str, Any]]:
    for source in sources:
        yield source
        yield from source.get("external", ())


@dataclass(frozen=True)
class WantedStore:
    """A store that a run wants.

    Attributes:
        task: Its task.
        split: Its split.
        path: Where it lies, or would.
        nbytes: Its size, or an estimate of it; 0 where nothing says it.
        place: Where it is; None if there is none yet.
    """

    task: str
    split: str
    path: Path
    nbytes: int
    place: Path | None


def wanted_stores(config: RunConfig, tasks: Mapping[str, TaskSources]) -> list[WantedStore]:
    """The stores that the operator's stage reads: of latents, or of fields."""
    folder = latent_folder(config) if config.operator.state == "latent" else config.cache.dir
    found = []
    for name, task in tasks.items():
        for split in config.data.split:
            path = store_path(folder, name, split)
            place = place_of(path)
            if place is None and not task.num_samples(split):
                continue
            nbytes = path.stat().st_size if path.is_file() else _nbytes(config, task, split)
            found.append(WantedStore(name, split, path, nbytes, place))
    return found


def _nbytes(config: RunConfig, task: TaskSources, split: str) -> int:
    num_samples = task.num_samples(split)
    if config.operator.state == "fields":
        build = task.builds.get(split)
        return 0 if build is None else num_samples * build.plan.sample_nbytes
    of_frame = config.latent.tokens * config.latent.dim * _NBYTES[config.training.latent_cache_dtype]
    num_inputs = 0 if task.info is None else len(task.info.grid.arrays) - 1
    return num_samples * of_frame * (task.num_times + num_inputs)


def check_caches(
    config: RunConfig,
    tasks: Mapping[str, TaskSources],
    readers: Readers,
    checks: Checks,
    *,
    trains_encoder: bool,
) -> None:
    """Stores that are there and those that aren't, folder and disk for these, and the RAM for preloading.

    Args:
        tasks: What is known of its data.
        readers: Open the sources.
        checks: Takes the lines.
        trains_encoder: Whether the run trains the encoder of its latents.
    """
    mode, is_latent = config.training.cache_mode, config.operator.state == "latent"
    group = LATENTS if is_latent else FIELD_STORES
    if is_latent and mode in ("memory", "none"):
        checks.ok(group, f"none: training.cache_mode = {mode}")
        return
    stores = wanted_stores(config, tasks)
    for wanted in stores:
        task = tasks[wanted.task]
        _check_store(config, task, wanted, readers, checks, group=group, trains_encoder=trains_encoder)
    missing = [wanted for wanted in stores if wanted.place is None]
    if not missing or checks.passes(group, partial(check_writable, missing[0].path.parent)):
        _check_disk(missing, checks, group)
    _check_preload(config, [wanted for wanted in stores if wanted.split == "train"], checks)


def _check_store(
    config: RunConfig,
    task: TaskSources,
    wanted: WantedStore,
    readers: Readers,
    checks: Checks,
    *,
    group: str,
    trains_encoder: bool,
) -> None:
    title = f"{wanted.task} {wanted.split}"
    if wanted.place is None:
        size = f", about {format_nbytes(wanted.nbytes)}"
        checks.ok(group, f"{title}: none yet{size if wanted.nbytes else ''}, {wanted.path}")
        return
    try:
        store = ups_store.open(wanted.place)
    except UNREADABLE as error:
        if wanted.split not in task.builds:
            checks.refuse(group, error)
        else:
            checks.warn(group, f"{title}: damaged, will be set aside and made again: {error.problem}")
        return
    except StoreError as error:
        checks.refuse(group, error)
        return
    with store:
        age = _age(wanted.place if wanted.place.exists() else wanted.path.parent)
        text = f"{title}: {store.config_hash[:12]}, written {age} ago, {wanted.place}"
        facts = {"hash": store.config_hash, "path": str(wanted.place)}
        if wanted.split not in task.builds:
            checks.warn(group, f"{text}: taken as it is, there are no sources to compare it with", **facts)
            return
        verdict, reason = _compared(config, task, wanted, store, readers)
    if verdict in ("reuse", "repack"):
        checks.ok(group, f"{text}: matches (sources by name and size)", **facts)
    elif verdict == "no encoder" and trains_encoder:
        checks.warn(group, f"{text}: will be made again with its encoder: {reason}", **facts)
    else:
        checks.warn(group, f"{text}: doesn't match, {verdict}: {reason}", **facts)


def _compared(
    config: RunConfig, task: TaskSources, wanted: WantedStore, store: Store, readers: Readers
) -> tuple[str, str]:
    """What a build would do about a store, and why."""
    try:
        build_config: BuildConfig = config.build
        if config.operator.state == "latent":
            build_config = latent_build(config, autoencoder_path=config.autoencoder_path, device="cpu")
        digests = StatedDigests(store)
        build = open_split(build_config, wanted.task, wanted.split, readers=readers, digests=digests)
        found = explain(build)
    except (UpsError, StoreError) as error:
        return "no encoder", str(error)
    changed = ", ".join(found.differences)
    return found.action, f"{found.reason}{f' ({changed})' if changed else ''}"


def _age(path: Path) -> str:
    seconds = max(0.0, time.time() - path.stat().st_mtime)
    for size, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} seconds"


def _check_disk(missing: list[WantedStore], checks: Checks, group: str) -> None:
    """Whether the disk has room for the stores that aren't there."""
    needed = sum(wanted.nbytes for wanted in missing)
    if not needed:
        return
    folder = missing[0].path.absolute().parent
    there = next(place for place in (folder, *folder.parents) if place.exists())
    free = shutil.disk_usage(there).free
    text = f"{format_nbytes(needed)} of stores, {format_nbytes(free)} free"
    if needed <= free:
        checks.ok(group, f"disk: {text}")
        return
    error = DiskFullError(
        "no room for the stores that would be built",
        path=folder,
        expected=format_nbytes(needed),
        found=f"{format_nbytes(free)} free",
        hint="free some space, or put them elsewhere (training.latent_cache_dir, cache.dir)",
    )
    checks.refuse(group, error)


def _check_preload(config: RunConfig, stores: list[WantedStore], checks: Checks) -> None:
    """Whether the training stores fit into RAM, as `training.preload` wants them there."""
    group, mode = "preloading", config.training.preload
    needed, free = sum(store.nbytes for store in stores), ups_store.available_memory_bytes()
    text = f"training.preload = {mode}: {format_nbytes(needed)}, {format_nbytes(free)} of RAM free"
    if mode == "off":
        checks.ok(group, "training.preload = off: stores are read when they are used")
    elif mode == "device":
        checks.ok(group, f"{text}; on the device what fits there")
    else:
        try:
            outcome, _ = ups_store.plan_preload(needed, mode)
        except MemoryLimitError as error:
            checks.refuse(group, error)
        else:
            fits = outcome != "mapped"
            checks.ok(group, text) if fits else checks.warn(
                group, f"{text}: what doesn't fit is read when it is used"
            )
