"""Compare what is at the path that samples go to: the same store, another one, or what a kill left."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ups_store.errors import FormatError, IdentityMismatchError, SpecError, StoreError, StoreNotFoundError
from ups_store.format.canonical import plain_json
from ups_store.format.metadata import ArraySpec
from ups_store.format.root import constant_digest, differences, identity_of_array
from ups_store.read.base import AnyStore, spec_of
from ups_store.read.open import open_any
from ups_store.read.recovery import building_path, read_building_file
from ups_store.system import files
from ups_store.writing.create import mismatch
from ups_store.writing.filling import HOW_TO_REPLACE, OnMismatch
from ups_store.writing.plan import identity_of
from ups_store.writing.samples import SampleCheck
from ups_store.writing.spool import remove_spool, spool_left

Differences = dict[str, tuple[Any, Any]]  # what is there and what was asked for, as `differences` gives them

_PART = re.compile(r"[0-9]{5}\.zarr\.zip")  # of what versions before `Spool` collected


def opened_if_same(
    target: Path,
    identity: Mapping[str, Any],
    *,
    on_mismatch: OnMismatch,
    differing: Callable[[AnyStore], Differences] = lambda store: {},
) -> AnyStore | None:
    """Open the store that is there, if it was made from the same; None if there is none, or it gives way.

    `differing` names what else isn't as the caller asked for.
    """
    argument: object = identity  # whatever the signature says
    if not isinstance(argument, Mapping):
        kind = type(identity).__name__
        raise SpecError("identity", kind="argument", expected="a mapping by name", found=kind)
    content: dict[str, Any] = plain_json(dict(identity), what="identity")
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
        different = differences(store.identity, content) or differing(store)
        if not different:
            remove_leftovers(target, store)
            failing.pop_all()
            return store
    if on_mismatch == "restart":
        return None
    hint = f"choose another path, or say {HOW_TO_REPLACE} to replace it"
    raise mismatch("the store was made from something else", different, path=target, hint=hint)


def other_arguments(
    store: AnyStore,
    *,
    constants: Mapping[str, npt.ArrayLike] | None = None,
    dims: Mapping[str, Sequence[str]] | None = None,
    attrs: Mapping[str, Any] | None = None,
    ragged: Collection[str] = (),
    names: Collection[str] | None = None,
    **more: Any,
) -> Differences:
    """Name arguments of `write` that would have made another store; what isn't given isn't compared."""
    metas = {meta.name: meta for meta in store.metas.values() if not meta.is_companion}
    constants, dims, different = constants or {}, dims or {}, Differences()
    constant_dims = {name: dims[name] for name in constants if name in dims}
    document = identity_of({}, constants=constants, dims=constant_dims, identity={})
    values = store.constants if constants else {}
    for name, array in document["arrays"].items():
        known = identity_of_array(metas[name]) if name in metas else None
        if known != array:
            different[f"constant {name}"] = (known, array)
        elif constant_digest(values[name].tobytes()) != document["constants"][name]:
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


def other_specs(store: AnyStore, specs: Mapping[str, ArraySpec]) -> Differences:
    """Name arrays that aren't as these specs have them."""
    metas = [meta for meta in store.metas.values() if not (meta.is_companion or meta.is_constant)]
    known = {meta.name: identity_of_array(meta) for meta in metas}
    arrays = identity_of(specs, identity={})["arrays"]
    names = sorted({*known, *arrays})
    return {
        f"array {name}": (known.get(name), arrays.get(name))
        for name in names
        if known.get(name) != arrays.get(name)
    }


def other_sample(store: AnyStore, sample: Mapping[str, Any]) -> Differences:
    """Name an array that isn't as this sample has it."""
    metas = [meta for meta in store.metas.values() if not (meta.is_companion or meta.is_constant)]
    try:
        SampleCheck({meta.name: spec_of(meta, None) for meta in metas}, num_seen=0)(sample, 0)
    except SpecError as error:
        return {f"array {error.array}" if error.array else "arrays": (error.expected, error.found)}
    return {}


def check_no_parts(target: Path, *, on_mismatch: OnMismatch) -> None:
    """Refuse a path beside which an earlier version left samples, in parts, unless they may give way."""
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

    `gives_way` tells whether what was left of an identity may be.
    """
    for path, content in _contents_left(target):
        if content is None or (content != identity and not gives_way(content)):
            problem = "an interrupted run of something else committed samples here"
            known = "a damaged file" if content is None else content
            raise IdentityMismatchError(problem, path=path, expected=identity, found=known, hint=hint)


def is_unnamed(content: Mapping[str, Any]) -> bool:
    """Tell whether an identity is one that no other call can have."""
    return content.keys() == {"unnamed"}


def is_of_values(content: Mapping[str, Any]) -> bool:
    """Tell whether an identity is a digest of values that lay in memory."""
    return str(content.get("content", "")).startswith("blake2b:")


def left_gives_way(target: Path) -> bool:
    """Tell whether interrupted runs left something at the path, and no call can continue any of it."""
    contents = [content for _, content in _contents_left(target)]
    return bool(contents) and all(content is not None and is_unnamed(content) for content in contents)


def _contents_left(target: Path) -> Iterator[tuple[Path, Mapping[str, Any] | None]]:
    """Give what interrupted runs left at the path, and what it was made from; None if that can't be read."""
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
    unfinished = spool_left(target)
    if unfinished is None or unfinished.identity != store.identity:
        return

    def is_same(number: int) -> bool:
        one, other = store[number], spool[number]
        return all(np.asarray(one[name]).tobytes() == np.asarray(other[name]).tobytes() for name in other)

    with contextlib.suppress(StoreError, OSError):
        with open_any(building_path(target), partial=True) as spool:
            ends = {0, len(spool) - 1} if len(spool) else set()
            is_beginning = len(spool) <= len(store) and all(map(is_same, ends))
        if is_beginning and spool.config_hash == store.config_hash:
            remove_spool(target)
