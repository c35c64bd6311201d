"""Running a plan: compare with what is there, read, commit, finish.

A process that builds beside the builder: it joins the file, makes its share, and waits for the store.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

import ups_store
from ups_store.build.digests import DigestCache, FileSignature
from ups_store.build.fill import Filling
from ups_store.build.plan import StorePlan
from ups_store.build.progress import Stopwatch, Watcher
from ups_store.build.ranks import ALONE, Builders
from ups_store.build.readers import Readers
from ups_store.build.result import BuildResult
from ups_store.build.tuning import Tuner, Tuning
from ups_store.check.statistics import Statistics
from ups_store.errors import (
    ConfigError,
    FormatError,
    IdentityMismatchError,
    StoreError,
    StoreNotFoundError,
    StoreReplacedError,
)
from ups_store.format.build_tail import BUILDER_LOCK
from ups_store.format.identity import config_hash, describe_differences, differences
from ups_store.read.open import open_store
from ups_store.read.recovery import building_path
from ups_store.read.store import Store
from ups_store.sources.source_files import changed
from ups_store.system import files, locks
from ups_store.system.files import make_folder
from ups_store.write.create import join
from ups_store.write.writer import Committer, StoreWriter


def build_store(
    plan: StorePlan,
    *,
    digests: DigestCache,
    readers: Readers,
    watcher: Watcher,
    overwrite: bool = False,
    on_nan: str = "fail",
    ranks: Builders = ALONE,
) -> BuildResult:
    """Build one store, continue it, or find that it is valid.

    Args:
        plan: What to build; at least one sample.
        digests: Known digests of the sources.
        readers: Who reads the sources.
        watcher: Told about progress.
        overwrite: Whether to build anew whatever is there.
        on_nan: "fail" or "keep" NaN and Inf.
        ranks: Place of this process among those of its machine that build the store together.
    Raises:
        SourceError: If a source is unreadable, changed, or holds NaN or Inf that aren't to be kept.
        UnreadSamplesError: If samples were skipped; the others are committed.
        IdentityMismatchError: If an unfinished file of another identity holds samples.
        FormatError: If a file that isn't a store, or a damaged one, is in its place.
        ConfigError: If there can't be a store in its place.
        StoreError: As `ups_store.create` and the writer say.
    """
    clock = Stopwatch(watcher.waits)
    _prepare_place(plan.path, watcher)
    watcher.stage(f"{plan.title}: sources", plan.source_nbytes, unit="bytes")
    with clock.timed("digest"):
        content = plan.identity(digests, watcher.advance)
    document = plan.document(content)
    wanted = config_hash(document)
    with clock.timed("open"):
        valid = None if overwrite else _reusable(plan, document, watcher)
    if valid is not None:
        with valid:
            return _result(plan, valid, clock)

    def filling_of(committer: Committer) -> Filling:
        return Filling(plan, committer, readers, watcher=watcher, clock=clock, on_nan=on_nan)

    if not ranks.is_builder:
        committer = join_builder(plan.path, content, wanted)
        num_committed = help_builder(committer, filling_of, ranks, watcher) if committer else 0
        with clock.timed("finish"):
            store = wait_for_store(plan.path, wanted)
        with store:
            return _result(plan, store, clock, num_committed=num_committed, statistics=Statistics())
    with clock.timed("open"):
        writer = open_writer(plan, content, overwrite=overwrite)
    with writer:
        filling = filling_of(writer)
        tuner = Tuner(filling, readers, clock=clock, note=watcher.note) if readers.is_tuned else None
        try:
            tuning = _fill(filling, plan, writer.missing(), watcher, ranks, tuner)
        except KeyboardInterrupt as error:
            raise filling.interruption(overwrite=overwrite) from error
        check_sources(plan)
        statistics = filling.statistics()
        with clock.timed("finish"):
            writer.finish()
    with open_store(plan.path) as store:
        result = _result(plan, store, clock, num_committed=filling.num_committed, statistics=statistics)
        return replace(result, tuning=tuning.to_json() if tuning else None)


def _fill(
    filling: Filling,
    plan: StorePlan,
    missing: npt.NDArray[np.int64],
    watcher: Watcher,
    ranks: Builders,
    tuner: Tuner | None,
) -> Tuning | None:
    """Commit all that is missing: this process's share, and then what the others haven't come to."""
    num_there = plan.num_samples - len(missing)
    watcher.stage(f"{plan.title}: samples", plan.num_samples, unit="samples")
    if num_there:
        watcher.note(f"{plan.path}: {num_there} of {plan.num_samples} samples are there, continuing")
    watcher.advance(num_there)
    share = ranks.share(missing, plan.num_samples)
    tuning = tuner.tune(share, is_alone=ranks.num_local == 1) if tuner and len(share) else None
    filling.fill(filling.left_of(share) if tuning else share)
    filling.fill_rest()
    filling.check_complete()
    return tuning


def _reusable(plan: StorePlan, expected: Mapping[str, Any], watcher: Watcher) -> ups_store.Store | None:
    """The store that is there, if it was made from the same; tells what differs otherwise."""
    try:
        store = open_store(plan.path)
    except StoreNotFoundError:
        return None
    except FormatError as error:
        error.hint = "move it away, or replace it with --overwrite"
        raise
    if store.config_hash == config_hash(expected):
        return store
    with store:
        check_kind(plan, store)
        differing = describe_differences(differences(store.identity_document, expected))
    watcher.note(f"{plan.path} was made from something else, rebuilding (found -> wanted):\n{differing}")
    return None


def check_kind(plan: StorePlan, store: ups_store.Store) -> None:
    """Refuse to put latents in the place of fields, or the reverse: another folder is meant.

    Raises:
        ConfigError: Kind "other_kind".
    """
    held, wanted = (("fields" if "fields" in arrays else "latents") for arrays in (store.arrays, plan.arrays))
    if held != wanted:
        raise ConfigError(
            f"a store of {held} is there, and {wanted} would replace it",
            kind="other_kind",
            path=plan.path,
            hint="give one of them another folder (cache.dir, training.latent_cache_dir, --cache-dir), "
            "or replace it with --overwrite",
        )


def _prepare_place(path: Path, watcher: Watcher) -> None:
    """Make the store's folder, and refuse now what publishing would stumble over hours later."""
    hint = "check cache.dir or --cache-dir"
    make_folder(path.parent, hint=hint)
    if path.is_dir():  # a rename replaces anything else
        raise ConfigError("there is a folder in the store's place", path=path, hint=hint)
    if files.is_network(path.parent):
        watcher.note(
            f"{path.parent} lies on a network file system, whose locks, syncs and renames may not hold what "
            "a build relies on (docs/reliability.md): build on a local disk and copy the store"
        )


def check_sources(plan: StorePlan) -> None:
    """Fail with `SourceError` if a source isn't the file that it was when the plan was made."""
    for part, signature in zip(plan.parts, plan.signatures, strict=True):
        if FileSignature.of(part.path) != signature:
            raise changed(part.path)


def _result(
    plan: StorePlan,
    store: ups_store.Store,
    clock: Stopwatch,
    *,
    num_committed: int | None = None,
    statistics: Statistics | None = None,
) -> BuildResult:
    return BuildResult(
        path=plan.path,
        task=plan.task.name,
        split=plan.split,
        config_hash=store.config_hash,
        reused=statistics is None,
        num_samples=len(store),
        num_committed=num_committed or 0,
        source_sample_nbytes=plan.source_sample_nbytes,
        nbytes=store.nbytes,
        age_s=round(max(0.0, time.time() - files.modified_s(plan.path)), 1),
        seconds=clock.to_json(),
        statistics=statistics.to_json() if statistics else {},
    )


def open_writer(plan: StorePlan, content: Mapping[str, Any], *, overwrite: bool = False) -> StoreWriter:
    """The store's writer; an unfinished file of another identity is replaced if nothing would be lost.

    Args:
        plan: What is built, and where.
        content: What `ups_store.create` takes as identity.
        overwrite: Whether to begin anew whatever is there.
    Raises:
        IdentityMismatchError: If an unfinished file of another identity holds samples.
        BuildLockedError: If somebody builds it.
        StoreError: As `ups_store.create`.
    """

    def create(on_mismatch: Literal["raise", "restart"]) -> StoreWriter:
        return ups_store.create(
            plan.path,
            plan.arrays,
            constants=plan.constants,
            dims=plan.dims,
            identity=content,
            attrs=plan.attrs,
            on_mismatch=on_mismatch,
        )

    if overwrite:
        writer = create("restart")
        if len(writer.missing()) == plan.num_samples:
            return writer
        with writer:  # its samples aren't trusted; while it is open nobody else builds it
            files.remove(building_path(plan.path))
        return create("raise")
    try:
        return create("raise")
    except IdentityMismatchError:
        with open_store(building_path(plan.path), partial=True) as unfinished:
            if unfinished.committed.any():
                raise
        return create("restart")


BUILDER_S = 60.0  # for the builder to begin, or to be started again

_POLL_S = 0.1


def join_builder(path: Path, content: Mapping[str, Any], config_hash: str) -> Committer | None:
    """Join the file that the builder makes, as soon as it is there; None if the store is finished already.

    Raises:
        StoreError: Kind "no_builder", if nobody begins to build.
        IdentityMismatchError: If somebody builds a store of other content there, and goes on doing so.
    """
    deadline = time.monotonic() + BUILDER_S
    while True:
        try:
            return join(path, identity=content)
        except (StoreNotFoundError, StoreReplacedError):  # not begun yet, or finished
            if _is_finished(path, config_hash):
                return None
            if time.monotonic() > deadline:
                raise _no_builder(path) from None
        except IdentityMismatchError:  # an old file, which the builder may be about to replace
            if time.monotonic() > deadline:
                raise
        time.sleep(_POLL_S)


def help_builder(
    committer: Committer, filling_of: Callable[[Committer], Filling], ranks: Builders, watcher: Watcher
) -> int:
    """Make this process's share of the samples; returns how many it committed.

    Raises:
        BuildInterruptedError: On Ctrl-C; what is committed stays.
        StoreError: As `Filling.fill`.
    """
    with committer:
        filling = filling_of(committer)
        try:
            with contextlib.suppress(StoreReplacedError):  # the builder has made the rest, and published
                plan = filling.plan
                share = ranks.share(committer.missing(), plan.num_samples)
                watcher.stage(f"{plan.title}: samples of rank {ranks.local_rank}", len(share), unit="samples")
                filling.fill(share)
        except KeyboardInterrupt as error:
            raise filling.interruption() from error
        return filling.num_committed


def wait_for_store(path: Path, config_hash: str) -> Store:
    """The finished store, as soon as the builder has published it.

    Raises:
        StoreError: Kind "no_builder", if the builder ended without finishing; what is committed stays.
    """
    gone_since = None
    while not _is_finished(path, config_hash):
        if _is_being_built(path):
            gone_since = None
        else:
            gone_since = gone_since or time.monotonic()
            if time.monotonic() > gone_since + BUILDER_S:
                raise _no_builder(path)
        time.sleep(_POLL_S)
    return open_store(path)


def _is_finished(path: Path, config_hash: str) -> bool:
    try:
        with open_store(path) as store:
            return store.config_hash == config_hash
    except StoreError:  # not there, or a file that the builder replaces
        return False


def _is_being_built(path: Path) -> bool:
    try:
        fd = files.open_existing(building_path(path), writable=True)
    except StoreNotFoundError:
        return False
    try:
        return locks.is_locked(fd, BUILDER_LOCK)
    finally:
        files.close(fd)


def _no_builder(path: Path) -> StoreError:
    return StoreError(
        f"nobody has been building it for {BUILDER_S:.0f} s",
        kind="no_builder",
        path=path,
        hint="look at the output of local rank 0, and run all ranks again: what is committed stays",
    )
