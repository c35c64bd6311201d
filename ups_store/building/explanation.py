"""`build --dry-run`: what a build would do with each store, and why; nothing is written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ups_store.building.config import BuildConfig
from ups_store.building.digests import DigestCache
from ups_store.building.forms import count_files, num_finished
from ups_store.building.place import (
    OTHER_PLACE,
    builder_at,
    check_plan_replaceable,
    find_partitions,
    is_damaged,
)
from ups_store.building.plan import StorePlan
from ups_store.building.progress import Watcher
from ups_store.building.ranks import BuildRank
from ups_store.building.readers import Readers
from ups_store.building.staging import Sources
from ups_store.building.store_build import Build
from ups_store.building.stores import describe_plan, open_builds
from ups_store.console import format_nbytes
from ups_store.errors import StoreError, StoreNotFoundError
from ups_store.format.root import describe_differences, differences
from ups_store.printable import counted
from ups_store.read.base import AnyStore
from ups_store.read.open import open_any, open_store
from ups_store.read.recovery import building_path
from ups_store.system import files
from ups_store.system.paths import partition_counts
from ups_store.system.replacement import check_not_read_only, real_place

Action = Literal["reuse", "repack", "build", "continue", "rebuild", "refuse"]
Document = Mapping[str, Any]
_Verdict = tuple[Action, str, dict[str, tuple[Any, Any]]]  # with the reason and the differences


@dataclass(frozen=True)
class Explanation:
    """What would become of one store.

    Attributes:
        task: Its task.
        split: Its split.
        action: "reuse", "repack" (or unpack, which reads no source), "build", "continue", "rebuild", or
            "refuse": the build would stop with an error.
        reason: Why, for people.
        plan: The store as JSON values: path, num_samples, nbytes (length of the file, mapped), codec, arrays,
            constants, sources.
        differences: Keys of the identity that differ from what is there, with `(found, wanted)`.
    """

    task: str
    split: str
    action: Action
    reason: str
    plan: dict[str, Any]
    differences: dict[str, tuple[Any, Any]] = field(default_factory=dict)

    def __str__(self) -> str:
        size = f"{counted(self.plan['num_samples'], 'sample')}, {format_nbytes(self.plan['nbytes'])}"
        text = f"{self.task} {self.split}: {self.action}: {self.reason}, {size}, {self.plan['path']}"
        if not self.differences:
            return text
        return f"{text}\nfound -> wanted:\n{describe_differences(self.differences)}"

    def to_json(self) -> dict[str, Any]:
        """The same as JSON values, those of the plan beside the others."""
        values = dict(vars(self))
        return {**values, **values.pop("plan")}


def explain(build: Build, *, overwrite: bool = False) -> Explanation:
    """Say what a build would do with its store, and why; nothing is written.

    Where something is there to compare with, sources whose digests aren't known are read.

    Args:
        build: The build, which wasn't begun.
        overwrite: Whether it would build from scratch whatever is there.
    Raises:
        SourceError: If sources can't be read.
    """
    action, reason, differing = _verdict(build, overwrite)
    plan = build.plan
    if action not in ("reuse", "refuse") and (obstacle := _obstacle(plan, action, overwrite)):
        action, reason = "refuse", obstacle
    return Explanation(plan.task.name, plan.split, action, reason, describe_plan(plan), differing)


def explain_all(
    config: BuildConfig,
    *,
    watcher: Watcher,
    rehash: bool = False,
    overwrite: bool = False,
    skip_missing: bool = False,
) -> list[Explanation]:
    """Explain every store that this machine would build; of its ranks the first one does.

    Args:
        config: What would be built.
        watcher: Hears how it goes.
        rehash: Whether known digests aren't believed.
        overwrite: As in `explain`.
        skip_missing: As in `build_all`.
    Raises:
        SourceError: As `build_all` says.
    """
    if not BuildRank.from_environment().is_builder:
        return []
    with Readers(config.reading, note=watcher.note) as readers:
        watcher.watch(readers.pool)
        digests = DigestCache(config.cache.dir, rehash=rehash, save=False, readers=readers)
        sources = Sources(config, watcher=watcher, is_dry=True)
        builds = open_builds(
            config, {}, watcher, readers=readers, digests=digests, sources=sources, skip_missing=skip_missing
        )
        return [explain(build, overwrite=overwrite) for build in builds]


def _obstacle(plan: StorePlan, action: Action, overwrite: bool) -> str:
    """Why a build can't make the store, replace what is there, or make the folder; empty if it can."""
    try:
        place = real_place(plan.path)
        if not overwrite:
            if action != "repack":
                check_plan_replaceable(plan)
            check_not_read_only(place, hint="--overwrite replaces it")
    except StoreError as error:
        return f"{error.problem}; {error.hint}"
    there = next(folder for folder in place.parents if files.exists(folder))
    if not there.is_dir():
        return f"{there} is no folder; {OTHER_PLACE}"
    return "" if files.may_write_into(there) else f"can't write into {there}; {OTHER_PLACE}"


def _verdict(build: Build, overwrite: bool) -> _Verdict:
    """What the build does by what is there already."""
    plan = build.plan
    if plan.path.is_dir():
        return "refuse", f"there is a folder in its place; {OTHER_PLACE}", {}
    is_begun = files.exists(building_path(plan.path))
    is_there = is_begun or files.exists(plan.path)
    if not is_there and (plan.is_partition or not partition_counts(plan.path)):
        return "build", _absent(build), {}
    if overwrite:
        owner = builder_at(plan.path) if is_begun else ""
        return ("refuse", f"being built by {owner}", {}) if owner else ("rebuild", "--overwrite", {})
    found = find_partitions(plan, build.config_hash)
    if found is not None:
        with found:
            return _valid(plan, found)
    action, reason, differing = _published(plan, build.document)
    if is_begun and action in ("build", "rebuild"):
        return _unfinished(plan, build.document, action)
    count = count_files(build) if action == "build" else 1
    if count > 1:
        done = num_finished(build, count)
        return "continue" if done else "build", f"{done} of {count} files are finished", {}
    return action, reason, differing


def _absent(build: Build) -> str:
    count = count_files(build)
    number = f", to be built in {counted(count, 'file')}" if count > 1 else ""
    packed = "" if build.plan.codec == "none" else f", to be {_form(build.plan.codec)}"
    return f"there is none yet{number}{packed}"


def _valid(plan: StorePlan, store: AnyStore) -> _Verdict:
    if store.codec == plan.codec:
        return "reuse", "valid, made from the same sources and configuration", {}
    forms = f"{_form(store.codec)} instead of {_form(plan.codec)}"
    return "repack", f"valid, but {forms}: no source is read for that", {}


def _form(codec: str) -> str:
    return "mapped" if codec == "none" else f"packed by {codec}"


def _published(plan: StorePlan, wanted: Document) -> _Verdict:
    """What a build does about the finished store that is there, or isn't."""
    try:
        with open_any(plan.path) as store:
            differing = differences(store.identity_document, wanted)
            return ("rebuild", "made from something else", differing) if differing else _valid(plan, store)
    except StoreNotFoundError:
        return "build", "there is none yet", {}
    except StoreError as error:
        if is_damaged(plan.path, error):
            return "rebuild", f"damaged ({error.problem}), it is set aside", {}
        return "refuse", f"no store ({error.problem}), --overwrite replaces it", {}


def _unfinished(plan: StorePlan, wanted: Document, otherwise: Action) -> _Verdict:
    """What a build does about the building file that is there."""
    where = building_path(plan.path)
    try:
        with open_store(where, partial=True) as store:
            differing = differences(store.identity_document, wanted)
            num_committed = int(store.committed.sum())
    except StoreError as error:
        if is_damaged(where, error):
            return otherwise, f"what is unfinished there is damaged ({error.problem}), it is set aside", {}
        return "refuse", f"no unfinished store ({error.problem}), --overwrite replaces it", {}
    how_far = f"unfinished, {num_committed} of {plan.num_samples} samples committed"
    if owner := builder_at(plan.path):
        return "refuse", f"{how_far}, being built by {owner}", {}
    if not differing:
        return "continue", how_far, {}
    if num_committed:
        reason = "unfinished and made from something else, with samples; --overwrite replaces it"
        return "refuse", reason, differing
    return otherwise, "an unfinished store of something else holds no samples", differing
