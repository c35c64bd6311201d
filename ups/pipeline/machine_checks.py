"""What a run takes of this machine, and what is there: GPUs, memory, stores and their disk.

No source is read to compare stores: digests are taken from the store, names and sizes from the sources.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ups_store
from ups.config import RunConfig
from ups.data.splits import open_split
from ups.data.stores import UNREADABLE, Store, latent_build, latent_folder, place_of, store_path
from ups.errors import ConfigError, UpsError
from ups.grid import GridSpec
from ups.output import check_writable
from ups.pipeline.memory_estimate import device_bytes, estimate_stages, host_bytes
from ups.pipeline.report import Checks
from ups.pipeline.sources import TaskSources
from ups_store.build import BuildConfig, Readers, explain
from ups_store.console import format_nbytes
from ups_store.errors import DiskFullError, MemoryLimitError, StoreError

LATENTS, FIELD_STORES = "latent cache", "field stores"  # groups of checks
_HARDWARE = "hardware"
_NBYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
_UNKNOWN = "0" * 64


# --- GPUs and memory ----------------------------------------------------------------------------------------


def check_machine(
    config: RunConfig, stages: tuple[str, ...], grids: Mapping[str, GridSpec], checks: Checks
) -> None:
    """Compare what stages take with what there is, of the least of the GPUs that several ranks would take."""
    import torch

    from ups.device import free_bytes

    name = config.training.device
    kind, _, number = name.partition(":")
    num_gpus, gpu = 0 if kind == "cpu" else torch.cuda.device_count(), None
    if kind not in ("auto", "cpu", "cuda") or (number and not number.isdecimal()):
        error = ConfigError("training.device", expected="auto, cpu, cuda or cuda:N", found=repr(name))
        checks.refuse(_HARDWARE, error)
    elif kind == "cpu" or (kind == "auto" and not num_gpus):
        checks.ok(_HARDWARE, f"training.device = {name}: the CPU")
    elif int(number or 0) >= num_gpus:
        text = f"training.device = {name}, but {num_gpus} GPUs are visible: the CPU would be used"
        checks.warn(_HARDWARE, text)
    else:
        ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
        num_ranks = max(1, int(ranks)) if ranks.isdecimal() else 1
        taken = [int(number)] if number else range(min(num_ranks, num_gpus))
        gpu = min((torch.device("cuda", index) for index in taken), key=free_bytes)
        kinds = ", ".join({torch.cuda.get_device_name(index) for index in range(num_gpus)})
        checks.ok(_HARDWARE, f"training.device = {name}: {num_gpus} GPUs, {kinds}")
    estimates = estimate_stages(config, stages, grids)
    if gpu is not None:
        for stage, estimate in estimates.items():
            title = f"stage {stage} on a {torch.cuda.get_device_name(gpu)}"
            _compare(title, estimate.states, device_bytes(estimate), free_bytes(gpu), checks)
    workers = config.training.num_workers
    num_workers = workers if isinstance(workers, int) else 4
    needed = host_bytes(estimates, has_gpu=gpu is not None, num_workers=num_workers)
    states = 0 if gpu is not None else max((each.states for each in estimates.values()), default=0)
    _compare("the run in RAM", states, needed, ups_store.available_memory_bytes(), checks)


def _compare(title: str, states: int, needed: int, available: int, checks: Checks) -> None:
    text = f"{title}: about {format_nbytes(needed)} of {format_nbytes(available)} that are free"
    if states > available:
        error = MemoryLimitError(
            f"{title}: weights, gradients and optimiser alone don't fit",
            needed_bytes=states,
            available_bytes=available,
            expected=f"{format_nbytes(states)}",
            found=f"{format_nbytes(available)} free",
            hint="take a smaller model, or a machine with more memory",
        )
        checks.refuse(_HARDWARE, error)
    elif needed > available:
        hint = "a smaller training.batch_size takes less, so does training.activation_checkpointing"
        checks.warn(_HARDWARE, f"{text}; {hint}, and `ups dry-run` measures it")
    else:
        checks.ok(_HARDWARE, text)


# --- stores -------------------------------------------------------------------------------------------------


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
    folder = latent_folder(config) if config.uses_encoder else config.cache.dir
    stores = []
    for name, task in tasks.items():
        for split in config.data.split:
            path, num_samples = store_path(folder, name, split), task.num_samples(split)
            place = place_of(path)
            if place is None and not num_samples:
                continue
            if path.is_file():
                nbytes = path.stat().st_size
            elif config.uses_encoder:
                of_frame = config.latent.tokens * config.latent.dim
                num_inputs = 0 if task.info is None else len(task.info.grid.arrays) - 1
                nbytes = num_samples * of_frame * (task.num_times + num_inputs)
                nbytes *= _NBYTES[config.training.latent_cache_dtype]
            else:
                build = task.builds.get(split)
                nbytes = 0 if build is None else num_samples * build.plan.sample_nbytes
            stores.append(WantedStore(name, split, path, nbytes, place))
    return stores


def check_caches(
    config: RunConfig, tasks: Mapping[str, TaskSources], readers: Readers, checks: Checks
) -> None:
    """Check stores that are there and that aren't, folder and disk for these, and RAM for preloading."""
    group, cache = LATENTS if config.uses_encoder else FIELD_STORES, config.training.cache_mode
    if config.uses_encoder and cache in ("memory", "none"):
        checks.ok(group, f"none: training.cache_mode = {cache}")
        return
    stores = wanted_stores(config, tasks)
    for wanted in stores:
        _check_store(config, tasks[wanted.task], wanted, readers, checks, group)
    missing = [wanted for wanted in stores if wanted.place is None]
    needed = sum(wanted.nbytes for wanted in missing)
    if missing and checks.passes(group, partial(check_writable, missing[0].path.parent)) and needed:
        folder = missing[0].path.absolute().parent
        there = next(path for path in (folder, *folder.parents) if path.exists())
        free = shutil.disk_usage(there).free
        if needed <= free:
            checks.ok(group, f"disk: {format_nbytes(needed)} of stores, {format_nbytes(free)} free")
        else:
            error = DiskFullError(
                "no room for the stores that would be built",
                path=folder,
                expected=format_nbytes(needed),
                found=f"{format_nbytes(free)} free",
                hint="free some space, or put them elsewhere (training.latent_cache_dir, cache.dir)",
            )
            checks.refuse(group, error)
    group, mode = "preloading", config.training.preload
    needed = sum(wanted.nbytes for wanted in stores if wanted.split == "train")
    free = ups_store.available_memory_bytes()
    text = f"training.preload = {mode}: {format_nbytes(needed)}, {format_nbytes(free)} of RAM free"
    if mode == "off":
        checks.ok(group, "training.preload = off: stores are read when they are used")
    elif mode == "device":
        checks.ok(group, f"{text}; on the device what fits there")
    else:
        with checks.collecting(group):
            if ups_store.forecast_preload(needed, mode)[0] == "mapped":
                checks.warn(group, f"{text}: what doesn't fit is read when it is used")
            else:
                checks.ok(group, text)


def _check_store(
    config: RunConfig, task: TaskSources, wanted: WantedStore, readers: Readers, checks: Checks, group: str
) -> None:
    title = f"{wanted.task} {wanted.split}"
    if wanted.place is None:
        size = f", about {format_nbytes(wanted.nbytes)}" if wanted.nbytes else ""
        checks.ok(group, f"{title}: none yet{size}, {wanted.path}")
        return
    try:
        store = ups_store.open(wanted.place)
    except StoreError as error:
        if isinstance(error, UNREADABLE) and wanted.split in task.builds:
            checks.warn(group, f"{title}: damaged, will be set aside and made again: {error.problem}")
        else:
            checks.refuse(group, error)
        return
    with store:
        age = _age(wanted.place if wanted.place.exists() else wanted.path.parent)
        text = f"{title}: {store.config_hash[:12]}, written {age} ago, {wanted.place}"
        facts = {"hash": store.config_hash, "path": str(wanted.place)}
        if wanted.split not in task.builds:
            checks.warn(group, f"{text}: taken as it is, there are no sources to compare it with", **facts)
            return
        try:
            build_config: BuildConfig = config.build
            if config.uses_encoder:
                build_config = latent_build(config, autoencoder_path=config.autoencoder_path, device="cpu")
            options: dict[str, Any] = {"readers": readers, "digests": _StatedDigests(store)}
            plan = explain(open_split(build_config, wanted.task, wanted.split, **options))
        except (UpsError, StoreError) as error:
            is_made = config.uses_encoder and config.trains_encoder
            verdict = "will be made again with its encoder" if is_made else "doesn't match, no encoder"
            checks.warn(group, f"{text}: {verdict}: {error}", **facts)
            return
    if plan.action in ("reuse", "repack"):
        checks.ok(group, f"{text}: matches (sources by name and size)", **facts)
    else:
        changed = f" ({', '.join(plan.differences)})" if plan.differences else ""
        checks.warn(group, f"{text}: doesn't match, {plan.action}: {plan.reason}{changed}", **facts)


class _StatedDigests:
    """Digests of sources as a store states them, so that none is read (`ups_store.build.Digests`)."""

    def __init__(self, store: Store) -> None:
        sources = store.identity.get("sources") or ()
        files = [file for source in sources for file in (source, *source.get("external", ()))]
        self._by_name = {str(file["name"]): str(file["digest"]) for file in files}

    def digest(self, path: Path, kind: str, progress: Any) -> str:
        """What the store says of a file of this name."""
        return self._by_name.get(path.name, _UNKNOWN)


def _age(path: Path) -> str:
    seconds = max(0.0, time.time() - path.stat().st_mtime)
    for size, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} seconds"
