"""What is at the path that samples go to: the same store, another one, or what a kill left."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ups_store.errors import (
    BuildLockedError,
    FormatError,
    IdentityMismatchError,
    SpecError,
)
from ups_store.format.build_tail import BUILDER_LOCK
from ups_store.format.canonical import plain_json
from ups_store.format.identity import describe_differences, differences
from ups_store.format.manifest import number_of_part
from ups_store.read.base import AnyStore
from ups_store.read.open import open_any
from ups_store.read.recovery import building_path
from ups_store.read.store_set import manifest_path, parts_folder
from ups_store.system import files, locks
from ups_store.write.encode import check_unmasked
from ups_store.write.filling import OnMismatch
from ups_store.write.part_files import LOCK_NAME, catalog_of, locked, unlock

_HOW_TO_REPLACE = "on_mismatch='restart'"


def unnamed_identity() -> dict[str, Any]:
    """The identity of samples that nothing is known of; equal to no other."""
    return {"unnamed": files.build_id().hex()}


def check_free(target: Path, *, on_mismatch: OnMismatch) -> None:
    """Refuse a path at which there is something, where nothing says what the samples are.

    Raises:
        SpecError: Kind "exists".
    """
    if on_mismatch == "raise" and files.exists(target):
        hint = f"say identity={{...}}, so that it can be told, or {_HOW_TO_REPLACE} to replace it"
        problem = "it exists, and nothing says whether it holds these samples"
        raise SpecError(problem, kind="exists", path=target, hint=hint)


def opened_if_same(
    target: Path,
    identity: Mapping[str, Any],
    num_samples: int | None,
    constants: Mapping[str, npt.ArrayLike],
    *,
    on_mismatch: OnMismatch,
) -> AnyStore | None:
    """The store that is there, if it was made from the same; None if there is none, or one to be replaced.

    Args:
        target: Where it may be.
        identity: As the caller gave it.
        num_samples: How many samples there should be, where that is known.
        constants: Arrays without a sample axis that it should have.
        on_mismatch: Whether a store of something else is an error.
    Raises:
        IdentityMismatchError: If it was made from something else, or has another number of samples.
        FormatError: If it is no store.
    """
    given: object = identity  # whatever the signature says
    if not isinstance(given, Mapping):
        found = type(identity).__name__
        raise SpecError("identity", kind="argument", expected="a mapping by name", found=found)
    wanted: dict[str, Any] = plain_json(dict(identity), what="identity")
    if not files.exists(target):
        return None
    try:
        store = open_any(target)
    except FormatError:
        if on_mismatch == "restart":
            return None
        raise
    differing = differences(store.identity, wanted)
    if not differing and num_samples is not None and len(store) != num_samples:
        differing = {"number of samples": (len(store), num_samples)}
    differing |= {} if differing else _other_constants(store, constants)
    if not differing:
        remove_leftovers(target, store.config_hash)
        return store
    store.close()
    if on_mismatch == "restart":
        return None
    error = IdentityMismatchError(
        f"the store was made from something else (found -> expected):\n{describe_differences(differing)}\n",
        path=target,
        hint=f"choose another path, or say {_HOW_TO_REPLACE} to replace it",
    )
    error.differences = differing
    raise error


def _other_constants(store: AnyStore, constants: Mapping[str, npt.ArrayLike]) -> dict[str, tuple[Any, Any]]:
    """Constants that aren't what they should be; as `differences`."""
    found = store.constants if constants else {}
    shown = {}
    for name, value in constants.items():
        check_unmasked(value, name)
        wanted = np.asarray(value)
        there = found.get(name)
        if there is None or there.shape != wanted.shape or there.tobytes() != wanted.tobytes():
            shown[f"constant {name}"] = ("none" if there is None else "other values", "these values")
    return shown


def remove_leftovers(target: Path, config_hash: str) -> None:
    """Remove the parts that a kill between merging them and removing them left; not those of a set."""
    folder = parts_folder(target)
    if not files.exists(folder) or files.exists(manifest_path(target)):
        return
    with contextlib.suppress(BuildLockedError):
        fd = locked(folder)
        try:
            for name in sorted(files.names_in(folder), reverse=True):
                if number_of_part(name) is not None and _hash_of(folder / name) == config_hash:
                    files.remove(folder / name)
        finally:
            unlock(fd, folder)


def is_being_written(target: Path) -> bool:
    """Whether a process, this one included, writes the store, itself or in parts."""
    places = (parts_folder(target) / LOCK_NAME, building_path(target))
    return any(locks.is_held(place, BUILDER_LOCK) for place in places)


def _hash_of(part: Path) -> str | None:
    with contextlib.suppress(FormatError):
        return catalog_of(part).root.config_hash
    return None
