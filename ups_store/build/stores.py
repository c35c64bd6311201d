"""All stores of a configuration, one after the other."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ups_store.build.config import BuildConfig
from ups_store.build.digests import DigestCache
from ups_store.build.plan import StorePlan, partition_of, plan_store
from ups_store.build.progress import Stopwatch, Watcher
from ups_store.build.ranks import ALONE, Builders
from ups_store.build.read import UnreadSamplesError
from ups_store.build.readers import Choice, Readers
from ups_store.build.result import BuildResult, Startup
from ups_store.build.run import build_store
from ups_store.console import counted
from ups_store.errors import ConfigError, SourceError
from ups_store.read.recovery import building_path
from ups_store.sources.source_files import SPLITS, split_range
from ups_store.system import files
from ups_store.system.files import make_folder, replace_text

_MAX_MANIFEST_BYTES = 64 << 20  # a store takes a few kB


@dataclass(frozen=True)
class BuildReport:
    """What became of every store.

    Attributes:
        stores: Results in the order of tasks and splits.
        skipped: Stores that have no sample, with the reason, by "task split".
        readers: How many readers there were, and why.
        startup: Seconds by phase and throughput of the whole run.
    """

    stores: tuple[BuildResult, ...]
    skipped: dict[str, str]
    readers: Choice
    startup: Startup

    def to_json(self) -> dict[str, Any]:
        """The manifest."""
        return {
            "stores": [result.to_json() for result in self.stores],
            "skipped": self.skipped,
            "readers": vars(self.readers),
            "startup": self.startup.to_json(),
        }


def build_all(
    config: BuildConfig,
    *,
    watcher: Watcher,
    overwrite: bool = False,
    rehash: bool = False,
    clock: Stopwatch | None = None,
) -> BuildReport:
    """Build every task and split of a configuration.

    A split without samples is skipped with a note when others were asked for too.

    Args:
        config: What to build.
        watcher: Told about progress.
        overwrite: Whether to build anew whatever is there.
        rehash: Whether known digests aren't believed.
        clock: Has counted "imports" already, where those belong to the run.
    Raises:
        SourceError: If nothing is left to build, or a source is unusable.
        StoreError: As `build_store` says.
    """
    clock = clock or Stopwatch()
    skipped: dict[str, str] = {}
    ranks = Builders.from_environment()
    with Readers(config.reading, note=watcher.note) as readers:
        watcher.watch(readers.pool)
        with clock.timed("plan"):
            plans = list(plan_all(config, skipped, watcher, readers=readers, ranks=ranks))
        if not overwrite:
            _check_room(plans)
        digests = DigestCache(config.cache.dir, rehash=rehash, readers=readers)
        results: list[BuildResult] = []
        unread = []
        for plan in plans:
            try:
                result = build_store(
                    plan,
                    digests=digests,
                    readers=readers,
                    watcher=watcher,
                    overwrite=overwrite,
                    on_nan=config.data.on_nan,
                    ranks=ranks,
                )
                results.append(result)
                for line in _kept(result):
                    watcher.note(line)
            except UnreadSamplesError as error:  # the other stores needn't wait for that one's sources
                unread.append(error)
                watcher.note(str(error))
        if unread:
            raise unread[0]
    return BuildReport(tuple(results), skipped, readers.choice, Startup.of(results, clock))


def _kept(result: BuildResult) -> Iterator[str]:
    """A line for each array that was written with values that aren't finite."""
    for name, found in result.statistics.items():
        if found["num_nan"] or found["num_inf"]:
            counts = f"{found['num_nan']:,} NaN and {found['num_inf']:,} Inf"
            yield f"{result.path}: array {name!r} holds {counts}"


def _check_room(plans: Sequence[StorePlan]) -> None:
    """Refuse before the sources are digested what the disk has no room for; `create` reserves it for good."""
    new = [
        plan for plan in plans if not files.exists(plan.path) and not files.exists(building_path(plan.path))
    ]
    needed = sum(plan.num_samples * plan.sample_nbytes for plan in new)
    for folder in {plan.path.parent for plan in new if os.path.isdir(plan.path.parent)}:
        if needed > files.free_bytes(folder):
            with files.disk_full_as_error(folder / new[0].path.name, needed):
                raise OSError(errno.ENOSPC, "no room for all stores")


def plan_all(
    config: BuildConfig,
    skipped: dict[str, str],
    watcher: Watcher,
    *,
    readers: Readers | None = None,
    ranks: Builders = ALONE,
) -> Iterator[StorePlan]:
    """Plan every store that has samples; the others go to `skipped` with the reason."""
    wanted = [(task, split) for task in config.data.tasks for split in config.data.split]
    for task, split in wanted:
        try:
            plan = plan_store(config, task, split, readers=readers)
            if plan.num_samples:
                yield partition_of(plan, ranks)
                continue
            error = _empty(plan, config)
        except SourceError as found:
            if found.kind != "no_source":
                raise
            error = found
        skipped[f"{task} {split}"] = str(error)
        if len(skipped) == len(wanted):
            raise error
        watcher.note(f"skipped {task} {split}: {error}")


def _empty(plan: StorePlan, config: BuildConfig) -> SourceError:
    return SourceError(
        f"{plan.task.name} {plan.split} would be empty",
        kind="empty_split",
        path=config.data.root,
        found=_shares(plan, config),
        hint="change --split-fractions, or give the split a file of its own: "
        f"{plan.task.name}_{plan.split}.h5",
    )


def _shares(plan: StorePlan, config: BuildConfig) -> str:
    """What the fractions made of the sources, in samples."""
    counts = [info.num_samples for info in plan.infos]
    shares = ", ".join(
        f"{sum(len(_share(count, split, plan, config)) for count in counts)} to {split}" for split in SPLITS
    )
    fractions = ", ".join(map(str, config.data.split_fractions))
    are = f"{counted(sum(counts), 'sample')} in {counted(len(counts), 'file')}"
    if not any(counts):
        return are
    return f"{are}, shared out {fractions}: {shares} (test and val rounded down in each file)"


def _share(count: int, split: str, plan: StorePlan, config: BuildConfig) -> range:
    return split_range(count, split=split, fractions=config.data.fractions, test_part=plan.task.test_part)


def describe_plan(plan: StorePlan) -> dict[str, Any]:
    """A plan as JSON values, for `--dry-run`."""
    return {
        "path": str(plan.path),
        "num_samples": plan.num_samples,
        "nbytes": plan.file_nbytes,
        "arrays": {
            name: {"shape": list(spec.shape), "dtype": str(spec.dtype), "dims": list(spec.dims or ())}
            for name, spec in plan.arrays.items()
        },
        "constants": {name: list(np.shape(values)) for name, values in plan.constants.items()},
        "sources": {str(part.path): [part.indices.start, part.indices.stop] for part in plan.parts},
    }


def write_manifest(path: Path, report: BuildReport) -> None:
    """Write the manifest, atomically."""
    replace_text(path, json.dumps(report.to_json(), indent=2) + "\n")


def prepare_manifest(path: Path) -> None:
    """Make the manifest's folder, and refuse to replace anything but an earlier manifest.

    Called before the hours of work that the manifest will tell of.

    Raises:
        ConfigError: If it couldn't be written, or something else is at the path.
    """
    make_folder(path.parent, hint="check --manifest")
    if not os.access(path.parent, os.W_OK):
        raise ConfigError("can't write into the folder", path=path.parent, hint="check --manifest")
    if path.exists() and not _is_manifest(path):
        raise ConfigError(
            "it isn't a manifest, so it isn't replaced", path=path, hint="give --manifest another name"
        )


def _is_manifest(path: Path) -> bool:
    """Whether a file is one, or empty."""
    if not path.is_file() or path.stat().st_size > _MAX_MANIFEST_BYTES:
        return False
    try:
        document = json.loads(path.read_bytes() or b'{"stores": []}')
    except (ValueError, RecursionError):
        return False
    return isinstance(document, dict) and isinstance(document.get("stores"), list)
