"""What is at the path that samples go to: the same store, another one, or what a kill left."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ups_store.errors import (
    BuildLockedError,
    CommitError,
    FormatError,
    IdentityMismatchError,
    SpecError,
    StoreNotFoundError,
)
from ups_store.format.build_tail import BUILDER_LOCK
from ups_store.format.canonical import plain_json
from ups_store.format.manifest import number_of_part, part_name
from ups_store.format.metadata import ArraySpec
from ups_store.format.root import constant_digest, describe_differences, differences, identity_of_array
from ups_store.read.base import AnyStore, spec_of
from ups_store.read.catalog import read_finished
from ups_store.read.open import open_any
from ups_store.read.recovery import building_path, read_building_file
from ups_store.read.store_set import manifest_path, parts_folder
from ups_store.system import files, locks
from ups_store.write.create import identity_of
from ups_store.write.filling import HOW_TO_REPLACE, OnMismatch
from ups_store.write.part_files import LOCK_NAME, locked, remove_begun_parts, unlock
from ups_store.write.sample_specs import SampleCheck


def unnamed_identity() -> dict[str, Any]:
    """The identity of samples that nothing is known of; equal to no other."""
    return {"unnamed": files.build_id().hex()}


def check_free(target: Path, *, on_mismatch: OnMismatch) -> None:
    """Refuse a path at which there is something, where nothing says what the samples are.

    Raises:
        SpecError: Kind "exists".
    """
    if on_mismatch == "raise" and files.exists(target):
        hint = f"say identity={{...}}, so that it can be told, or {HOW_TO_REPLACE} to replace it"
        problem = "it exists, and nothing says whether it holds these samples"
        raise SpecError(problem, kind="exists", path=target, hint=hint)


def opened_if_same(
    target: Path,
    identity: Mapping[str, Any],
    *,
    on_mismatch: OnMismatch,
    differing: Callable[[AnyStore], dict[str, tuple[Any, Any]]] = lambda store: {},
) -> AnyStore | None:
    """The store that is there, if it was made from the same; None if there is none, or one to be replaced.

    Args:
        target: Where it may be.
        identity: As the caller gave it.
        on_mismatch: Whether a store of something else is an error.
        differing: What else isn't as the caller asked for, as `differences`.
    Raises:
        IdentityMismatchError: If it was made from something else, or differs.
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
    with contextlib.ExitStack() as failing:
        failing.push(store)
        different = differences(store.identity, wanted) or differing(store)
        if not different:
            remove_leftovers(target, store)
            failing.pop_all()
            return store
    if on_mismatch == "restart":
        return None
    error = IdentityMismatchError(
        f"the store was made from something else (found -> expected):\n{describe_differences(different)}\n",
        path=target,
        hint=f"choose another path, or say {HOW_TO_REPLACE} to replace it",
    )
    error.differences = different
    raise error


def other_arguments(
    store: AnyStore,
    *,
    constants: Mapping[str, npt.ArrayLike] | None = None,
    dims: Mapping[str, Sequence[str]] | None = None,
    attrs: Mapping[str, Any] | None = None,
    ragged: Collection[str] = (),
    names: Collection[str] | None = None,
    **more: Any,
) -> dict[str, tuple[Any, Any]]:
    """Arguments of `write` that would have made another store; those that aren't given aren't compared."""
    metas = {meta.name: meta for meta in store.metas.values() if not meta.is_companion}
    constants, dims, different = constants or {}, dims or {}, dict[str, tuple[Any, Any]]()
    constant_dims = {name: dims[name] for name in constants if name in dims}
    wanted = identity_of({}, constants=constants, dims=constant_dims, identity={})
    values = store.constants if constants else {}
    for name, document in wanted["arrays"].items():
        there = metas.get(name)
        if there is None or identity_of_array(there) != document:
            different[f"constant {name}"] = (there and identity_of_array(there), document)
        elif constant_digest(values[name].tobytes()) != wanted["constants"][name]:
            different[f"constant {name}"] = ("other values", "these values")
    for name in dims.keys() - constants.keys():
        axes = list(metas[name].axes[1:]) if name in metas else None
        if axes != list(dims[name]):
            different[f"dims of {name}"] = (axes, list(dims[name]))
    for name, value in plain_json(dict(attrs or {}), what="attrs").items():
        if name not in store.attrs or store.attrs[name] != value:
            different[f"attribute {name}"] = (store.attrs.get(name), value)
    for name in sorted({*ragged} - {meta.name for meta in metas.values() if meta.is_ragged}):
        different[f"array {name}"] = ("not ragged" if name in metas else None, "ragged")
    arrays = sorted(meta.name for meta in metas.values() if not meta.is_constant)
    if names is not None and arrays != sorted(names):
        different["names"] = (arrays, sorted(names))
    return different


def other_arrays(
    store: AnyStore, *, specs: Mapping[str, ArraySpec] | None, sample: Mapping[str, Any] | None
) -> dict[str, tuple[Any, Any]]:
    """Arrays that aren't as the samples now have them, by their specs or by the first of them, as known."""
    metas = [meta for meta in store.metas.values() if not (meta.is_companion or meta.is_constant)]
    different = dict[str, tuple[Any, Any]]()
    if specs is not None:
        there = {meta.name: identity_of_array(meta) for meta in metas}
        wanted = identity_of(specs, identity={})["arrays"]
        for name in sorted({*there, *wanted}):
            if there.get(name) != wanted.get(name):
                different[f"array {name}"] = (there.get(name), wanted.get(name))
    if sample is not None:
        try:
            SampleCheck({meta.name: spec_of(meta, None) for meta in metas}, num_seen=0)(sample, 0)
        except SpecError as error:
            name = f"array {error.array}" if error.array else "arrays"
            different[name] = (error.expected, error.found)
    return different


def check_left(
    target: Path,
    identity: Mapping[str, Any] | None,
    *,
    gives_way: Callable[[Mapping[str, Any]], bool],
    hint: str,
) -> None:
    """Refuse to begin where an interrupted run of something else committed samples that would be removed.

    Args:
        target: Where the store will be.
        identity: What the samples are made from, JSON values.
        gives_way: Whether what was left of an identity may be removed.
        hint: What to do.
    Raises:
        IdentityMismatchError: If there are such samples.
    """
    for path, content in _contents_left(target):
        if content is not None and (content == identity or gives_way(content)):
            continue
        problem = "an interrupted run of something else committed samples here"
        found = "a damaged file" if content is None else content
        raise IdentityMismatchError(problem, path=path, expected=identity, found=found, hint=hint)


def is_unnamed(content: Mapping[str, Any]) -> bool:
    """Whether an identity is one that no other call can have."""
    return content.keys() == {"unnamed"}


def is_of_values(content: Mapping[str, Any]) -> bool:
    """Whether an identity is a digest of values that lay in memory."""
    return str(content.get("content", "")).startswith("blake2b:")


def gives_way(target: Path) -> bool:
    """Whether interrupted runs left something at the path, and no call can continue any of it."""
    contents = [content for _, content in _contents_left(target)]
    return bool(contents) and all(content is not None and is_unnamed(content) for content in contents)


def _contents_left(target: Path) -> Iterator[tuple[Path, Mapping[str, Any] | None]]:
    """What interrupted runs left at the path, and what it was made from; None where that can't be read."""
    building, folder = building_path(target), parts_folder(target)
    is_set = files.exists(manifest_path(target))
    names = [] if is_set else [name for name in files.names_in(folder) if number_of_part(name) is not None]
    for path in (building, *(folder / name for name in names)):
        try:
            with files.opened(path) as fd:
                catalog = (
                    read_building_file(fd, path).catalog if path == building else read_finished(fd, path)
                )
                yield path, catalog.root.identity["content"]
        except StoreNotFoundError:
            continue
        except FormatError:
            yield path, None


def remove_leftovers(target: Path, store: AnyStore) -> None:
    """Remove the parts that a kill between merging them and removing them left, as far as that is possible.

    These begin with the first one, and their samples are the first of the store. Those of a set that isn't
    finished may have the same identity, and stay.
    """
    folder = parts_folder(target)
    if not files.exists(folder) or files.exists(manifest_path(target)):
        return
    with contextlib.suppress(BuildLockedError, CommitError, OSError):
        fd = locked(folder)
        try:
            remove_begun_parts(folder, manifest_path(target))
            names = [name for name in files.names_in(folder) if number_of_part(name) is not None]
            if names == [part_name(i) for i in range(len(names))] and _is_beginning(store, folder, names):
                for name in reversed(names):
                    files.remove(folder / name)
        finally:
            unlock(fd, folder)


def _is_beginning(store: AnyStore, folder: Path, names: Sequence[str]) -> bool:
    """Whether parts are of a store's identity, and hold its first samples: of each the first and the last."""
    first = 0
    for name in names:
        try:
            part = open_any(folder / name)
        except FormatError:
            return False
        with part:
            end = first + len(part)
            if part.config_hash != store.config_hash or end > len(store):
                return False
            for sample in (first, end - 1) if len(part) else ():
                here, there = store[sample], part[sample - first]
                if any(np.asarray(here[key]).tobytes() != np.asarray(there[key]).tobytes() for key in there):
                    return False
        first = end
    return True


def is_being_written(target: Path) -> bool:
    """Whether a process, this one included, writes the store, itself or in parts."""
    places = (parts_folder(target) / LOCK_NAME, building_path(target))
    return any(locks.is_held(place, BUILDER_LOCK) for place in places)
