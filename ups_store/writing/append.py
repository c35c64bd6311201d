"""`append`: the next store of a pattern, such as `days-00007.zarr.zip` of `days-*.zarr.zip`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ups_store.errors import FormatError, IdentityMismatchError, SpecError, StoreNotFoundError
from ups_store.format.canonical import plain_json
from ups_store.format.root import differences
from ups_store.read.base import AnyStore
from ups_store.read.open import open_any
from ups_store.read.recovery import building_path
from ups_store.system import files
from ups_store.system.paths import check_no_manifest, numbered_paths, partition_counts, path_of
from ups_store.writing.create import mismatch
from ups_store.writing.described import Described
from ups_store.writing.existing import other_arguments, remove_leftovers
from ups_store.writing.filling import HOW_TO_REPLACE
from ups_store.writing.spool import remove_spool
from ups_store.writing.wait_for_maker import MakerTurn
from ups_store.writing.write import Alike, warn_skipped, write

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
            something else; of the latter, samples of another key are something else.
        BuildLockedError: If another process that appends is stopped.
    """
    path = path_of(pattern)
    check_no_manifest(path)
    if path.name.count("*") != 1 or not path.name.endswith(".zarr.zip"):
        raise SpecError("pattern", kind="path", path=pattern, expected="one such as days-*.zarr.zip")
    if not path.parent.is_dir():
        raise StoreNotFoundError("no such folder", path=path.parent, hint="create it first")
    with MakerTurn(path, is_shown=options.get("progress")):
        stores = numbered_paths(path)
        if not stores and partition_counts(path.with_name(path.name.replace("-*", ""))):
            problem = "it names partitions of a store"
            hint = "choose another name: opened by the pattern, new stores would hide them"
            raise SpecError(problem, kind="partitions", path=pattern, expected="none", hint=hint)
        for made in stores.values():
            if files.exists(building_path(made)):
                with open_any(made) as store:
                    remove_leftovers(made, store)
        for made in reversed(stores.values()) if key is not None else ():
            store = open_any(made)
            if store.attrs.get(KEY) == key:
                warn_skipped(store)
                return store
            store.close()
        number = max(stores, default=-1) + 1
        if number > MAX_NUMBER:
            hint, limit = "join them by `ups-store concat`, and begin another pattern", MAX_NUMBER + 1
            raise SpecError("too many stores", kind="limits", path=pattern, expected=limit, hint=hint)
        target = path.with_name(path.name.replace("*", f"{number:05d}"))
        _check_unfinished(target, key, options)
        if key is not None:
            options["attrs"] = {**(options.get("attrs") or {}), KEY: key}
        if not stores:
            return write(target, samples, identity=identity, **options)
        with open_any(stores[min(stores)]) as first:
            different = other_arguments(
                first,
                **{name: options[name] for name in ("constants", "dims", "ragged") if options.get(name)},
            )
            if identity is not None:
                different |= differences(first.identity, plain_json(dict(identity), what="identity"))
            if different:
                problem = "the first store of the pattern was made from something else"
                hint = "append what was made from the same, or begin another pattern"
                raise mismatch(problem, different, path=first.path, hint=hint)
            constants = {
                name: Described(value, first.metas[name].attrs) for name, value in first.constants.items()
            }
            dims = {name: first.dims[name] for name in constants}
            options |= {"identity": first.identity, "constants": constants, "dims": dims, "ragged": ()}
            return write(target, Alike(samples, first), **options)


def _check_unfinished(target: Path, key: str | None, options: dict[str, Any]) -> None:
    """Refuse to continue what an interrupted call left of other samples; "restart" removes that.

    What holds no sample gives way to those of any key.
    """
    unfinished = building_path(target)
    if not files.exists(unfinished):
        return
    try:
        with open_any(unfinished, partial=True) as store:
            known, is_empty = repr(store.attrs.get(KEY)), not store.committed.any()
    except FormatError:
        known, is_empty = "a damaged file", False
    if is_empty:
        options["on_mismatch"] = "restart"
    # Without a key samples are compared with those that are there, but not those of a function.
    if known == repr(key) and (key is not None or options.get("map") is None):
        return
    if options.get("on_mismatch") == "restart":
        remove_spool(target)
        return
    problem = "an interrupted call left samples of another key"
    hint = f"append those again, by their key, or say {HOW_TO_REPLACE}"
    raise IdentityMismatchError(problem, path=unfinished, expected=repr(key), found=known, hint=hint)
