"""A process that builds beside the builder: it joins the file, makes its share, and waits for the store."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ups_store.build.fill import Filling
from ups_store.build.ranks import Ranks
from ups_store.build.watcher import Watcher
from ups_store.errors import IdentityMismatchError, StoreError, StoreNotFoundError, StoreReplacedError
from ups_store.format.build_tail import BUILDER_LOCK
from ups_store.read.open import open_store
from ups_store.read.recovery import building_path
from ups_store.read.store import Store
from ups_store.system import files, locks
from ups_store.write.create import join
from ups_store.write.writer import Committer

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
    committer: Committer, filling_of: Callable[[Committer], Filling], ranks: Ranks, watcher: Watcher
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
