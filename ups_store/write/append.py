"""`append`: the next store of a pattern, such as `days-00007.zarr.zip` of `days-*.zarr.zip`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ups_store.errors import FormatError, IdentityMismatchError, SpecError, StoreNotFoundError
from ups_store.format.canonical import plain_json
from ups_store.format.root import describe_differences, differences
from ups_store.read.base import AnyStore
from ups_store.read.open import open_any
from ups_store.read.recovery import building_path
from ups_store.system import files
from ups_store.system.paths import check_no_manifest, numbered_paths, partition_counts, path_of
from ups_store.write.described import Described
from ups_store.write.filling import HOW_TO_REPLACE
from ups_store.write.found_store import other_arguments, remove_leftovers
from ups_store.write.from_iterable import warn_skipped, write_like
from ups_store.write.spool import remove_spool
from ups_store.write.turn import Turn

KEY = "append_key"  # attribute of a store that `append` made
MAX_NUMBER = 99_999


def append(
    pattern: str | os.PathLike[str],
    samples: Any = None,
    *,
    key: str | None = None,
    identity: Mapping[str, Any] | None = None,
    **options: Any,
) -> AnyStore:
    """Write samples as the next store of a pattern, and open that; all of them open as one by the pattern.

    The store appears by one rename, as that of `write` does: who opens the pattern meanwhile sees it whole
    or not at all. Processes that append at the same time take turns. What a kill leaves, the same call
    continues.

    ```python
    ups_store.append("days-*.zarr.zip", samples_of("monday"), identity={"v": 1}, key="monday")
    ups_store.append("days-*.zarr.zip", samples_of("tuesday"), key="tuesday")
    store = ups_store.open("days-*.zarr.zip")
    ```

    Args:
        pattern: Path with one star, for which a number of five digits stands in the files' names; those that
            `write` made under such names belong to it.
        samples: As for `write`; the arrays, constants and identity of the first store have to be theirs.
        key: Names these samples: if there is a store of this key, that is given back, and nothing happens.
        identity: As for `write`; by default that of the stores that are there.
        options: As for `write`.
    Returns:
        The new store, open.
    Raises:
        SpecError: For a path that is no such pattern, kind "path"; if the samples have other arrays.
        IdentityMismatchError: If the stores that are there, or what an interrupted call left, were made from
            something else; of `left`, samples of another key are something else.
        BuildLockedError: If another process that appends is stopped.
    """
    place = path_of(pattern)
    check_no_manifest(place)
    if place.name.count("*") != 1 or not place.name.endswith(".zarr.zip"):
        raise SpecError("pattern", kind="path", path=pattern, expected="one such as days-*.zarr.zip")
    if not place.parent.is_dir():
        raise StoreNotFoundError("no such folder", path=place.parent, hint="create it first")
    with Turn(place, is_shown=options.get("progress")):
        there = numbered_paths(place)
        if not there and partition_counts(place.with_name(place.name.replace("-*", ""))):
            hint = "choose another name: opened by the pattern, new stores would hide them"
            raise SpecError(
                "it names partitions of a store", kind="partitions", path=pattern, expected="none", hint=hint
            )
        for path in filter(_is_beside_leftovers, there.values()):
            with open_any(path) as store:
                remove_leftovers(path, store)
        for path in reversed(there.values()) if key is not None else ():
            store = open_any(path)
            if store.attrs.get(KEY) == key:
                warn_skipped(store)
                return store
            store.close()
        number = max(there, default=-1) + 1
        if number > MAX_NUMBER:
            hint = "join them by `ups-store concat`, and begin another pattern"
            raise SpecError(
                "too many stores", kind="limits", path=pattern, expected=MAX_NUMBER + 1, hint=hint
            )
        target = place.with_name(place.name.replace("*", f"{number:05d}"))
        if _left_nothing(target):
            options["on_mismatch"] = "restart"
        _check_key_of_left(target, key, options)
        if key is not None:
            options["attrs"] = {**(options.get("attrs") or {}), KEY: key}
        if not there:
            return write_like(target, samples, None, identity=identity, **options)
        with open_any(there[min(there)]) as first:
            return write_like(target, samples, first, **_as_in(first, identity, options))


def _as_in(first: AnyStore, identity: Mapping[str, Any] | None, options: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `write` for a store like the first one; what contradicts that is refused."""
    asked: dict[str, Any] = {
        name: options.get(name) for name in ("constants", "dims", "ragged") if options.get(name)
    }
    different = other_arguments(first, **asked)
    if identity is not None:
        different |= differences(first.identity, plain_json(dict(identity), what="identity"))
    if different:
        error = IdentityMismatchError(
            "the first store of the pattern was made from something else (found -> expected):\n"
            f"{describe_differences(different)}\n",
            path=first.path,
            hint="append what was made from the same, or begin another pattern",
        )
        error.differences = different
        raise error
    constants = {name: Described(value, first.metas[name].attrs) for name, value in first.constants.items()}
    dims = {name: first.dims[name] for name in constants}
    return {**options, "identity": first.identity, "constants": constants, "dims": dims, "ragged": ()}


def _left_nothing(target: Path) -> bool:
    """Whether an interrupted call committed no sample, so that those of any key may come."""
    if not files.exists(building_path(target)):
        return False
    try:
        with open_any(building_path(target), partial=True) as left:
            return not left.committed.any()
    except FormatError:
        return False  # nothing can be said of a damaged file


def _is_beside_leftovers(path: Path) -> bool:
    return files.exists(building_path(path))


def _check_key_of_left(target: Path, key: str | None, options: Mapping[str, Any]) -> None:
    """Refuse to continue what an interrupted call left of other samples; "restart" removes that."""
    left = building_path(target)
    if not files.exists(left):
        return
    try:
        with open_any(left, partial=True) as store:
            found = repr(store.attrs.get(KEY))
    except FormatError:
        found = "a damaged file"
    # Without a key samples are compared with those that are left, but not those of a function.
    if found == repr(key) and (key is not None or options.get("map") is None):
        return
    if options.get("on_mismatch") == "restart":
        remove_spool(target)
        return
    raise IdentityMismatchError(
        "an interrupted call left samples of another key",
        path=left,
        expected=repr(key),
        found=found,
        hint=f"append those again, by their key, or say {HOW_TO_REPLACE}",
    )
