"""What is at the path that samples go to: the same store, another one, or what a kill left."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ups_store.errors import (
    FormatError,
    IdentityMismatchError,
    SpecError,
    StoreError,
    StoreNotFoundError,
)
from ups_store.format.build_tail import BUILDER_LOCK
from ups_store.format.canonical import plain_json
from ups_store.format.metadata import ArraySpec
from ups_store.format.root import constant_digest, describe_differences, differences, identity_of_array
from ups_store.read.base import AnyStore, spec_of
from ups_store.read.open import open_any
from ups_store.read.recovery import building_path, read_building_file
from ups_store.system import files, locks
from ups_store.write.create import identity_of
from ups_store.write.filling import HOW_TO_REPLACE, OnMismatch
from ups_store.write.sample_specs import SampleCheck
from ups_store.write.spool import remove_spool, spool_left

_PART = re.compile(r"[0-9]{5}\.zarr\.zip")  # of what versions before `Spool` collected


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


def check_no_parts(target: Path, *, on_mismatch: OnMismatch) -> None:
    """Refuse a path beside which an earlier version left samples, in parts, unless they may give way.

    Raises:
        IdentityMismatchError: If there are parts.
    """
    folder = target.with_name(target.name.removesuffix(".zarr.zip") + ".parts")
    parts = [name for name in files.names_in(folder) if _PART.fullmatch(name)]
    if parts and on_mismatch == "raise" and not files.exists(target):
        raise IdentityMismatchError(
            "an interrupted run of an earlier version of ups-store left samples here",
            path=folder,
            found=f"{len(parts)} stores, such as {parts[0]}",
            hint="`ups-store concat` makes one store of them; or move the folder away, or say "
            f"{HOW_TO_REPLACE} to leave it as it is",
        )


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
    path = building_path(target)
    try:
        with files.opened(path) as fd:
            yield path, read_building_file(fd, path).catalog.root.identity["content"]
    except StoreNotFoundError:
        return
    except FormatError:
        yield path, None


def remove_leftovers(target: Path, store: AnyStore) -> None:
    """Remove the spool that a kill between making the store and removing it left, as far as that is possible.

    It is of the store's identity, and holds the store's first samples.
    """
    left = spool_left(target)
    if left is None or left.identity != store.identity:
        return
    with contextlib.suppress(StoreError, OSError):
        with open_any(building_path(target), partial=True) as spool:
            ends = {0, len(spool) - 1} if len(spool) else set()
            is_beginning = len(spool) <= len(store) and all(_is_same(store[i], spool[i]) for i in ends)
        if is_beginning and spool.config_hash == store.config_hash:
            remove_spool(target)


def _is_same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return all(np.asarray(one[name]).tobytes() == np.asarray(other[name]).tobytes() for name in other)


def is_being_written(target: Path) -> bool:
    """Whether a process, this one included, writes the store."""
    return locks.is_held(building_path(target), BUILDER_LOCK)
