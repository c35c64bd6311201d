"""`create` and `join`: from arguments to a building file that is ours to write.

A new building file is complete before anybody can see it (spec 6.1, 6.2, 6.6, 6.12).
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ups_store.errors import (
    CorruptChunkError,
    FormatError,
    IdentityMismatchError,
    SpecError,
    StoreNotFoundError,
    StoreReplacedError,
)
from ups_store.format.build_tail import (
    BUILDER_LOCK,
    GATE_LOCK,
    HOW_TO_REPLACE,
    SPOOL_MAGIC,
    SPOOL_OFFSET,
    Owner,
    TailHeader,
)
from ups_store.format.checksum import crc32, crc32c
from ups_store.format.layout import Layout, RaggedLayout
from ups_store.format.metadata import ArraySpec
from ups_store.format.ragged import Offsets
from ups_store.format.root import describe_differences, differences, identity_document
from ups_store.read.ragged import read_offsets
from ups_store.read.recovery import (
    BUILDING_SUFFIX,
    Building,
    State,
    building_path,
    read_building_file,
    read_is_spool,
)
from ups_store.read.store import read_offsets_of_spool
from ups_store.read.store_file import looks_like_store
from ups_store.system import files, locks
from ups_store.system.files import TAKEN, check_file_or_free, check_not_read_only, is_in_memory, real_place
from ups_store.system.memory import IN_MEMORY, check_not_reserved, create_in_memory, keeping
from ups_store.system.paths import check_store_name, path_of
from ups_store.write.blueprint import Blueprint, blueprint_of
from ups_store.write.building import (
    LOCK_TIMEOUT_S,
    BuildingFile,
    failures_as_errors,
    take_builder_lock,
    write_owner,
)
from ups_store.write.recheck import Note, describe_mended, mend_constants, mend_metadata, warn
from ups_store.write.target import create_locked, remove_begun
from ups_store.write.writer import Committer, StoreWriter

_MAX_ROUNDS = 8  # each is lost only to another process that created, published or removed the file
_SUFFIX_BYTES = len(f"{BUILDING_SUFFIX}.") + 16  # of a building file before it can be seen (spec 6.6)
_OVERTAKEN = (FileExistsError, FileNotFoundError)


def create(
    path: str | os.PathLike[str],
    arrays: Mapping[str, ArraySpec],
    *,
    constants: Mapping[str, npt.ArrayLike] | None = None,
    dims: Mapping[str, Sequence[str]] | None = None,
    identity: Mapping[str, Any],
    attrs: Mapping[str, Any] | None = None,
    partition: tuple[int, int] | None = None,
    durability: Literal["durable", "lazy"] = "durable",
    on_mismatch: Literal["raise", "restart"] = "raise",
    check_on_resume: bool = True,
    note: Note = warn,
) -> StoreWriter:
    """Start a store, or continue the unfinished one at the path if its identity is the same.

    The room for the whole store is reserved here. Nothing is visible at `path` before `finish`. A finished
    store that is there already, of whatever identity, stays as it is until then and is replaced: to reuse
    one, compare `ups_store.open(path).identity` first, as `ups-store build` does. The new store has
    its mode, and its owner where the system allows that. A file that is no store, and a store without a write
    bit, is replaced with `on_mismatch="restart"` only. A symbolic link at the path stays: what it points to
    is replaced, and built beside that.

    The path ":memory:" makes a store in memory, for streaming: nothing is written to a disk, and the kernel
    frees it whatever becomes of the process. `writer.path`, which `finish` returns too, is a path that every
    process of this user can open, or `join` while it is built. **The memory belongs to that path object**: it
    lives as long as the object, a store that this process opened by it, or a mapping in any process does.

    Args:
        path: Where the store will be published, usually `<task>_<split>.zarr.zip`; or ":memory:".
        arrays: Arrays with a sample axis, all of the same N.
        constants: Arrays without a sample axis, such as coordinates; copied.
        dims: Dimension names of constants; a 1-D constant is named after itself where not given.
        identity: Everything that decides the bytes, JSON values; kept and compared. `store.identity` gives it
            back: tuples as lists, NumPy's numbers as Python's.
        attrs: Attributes of the root group; not part of the identity, so that an unfinished store keeps those
            that it was begun with.
        partition: Number of this partition, and of partitions, where the store is one of several files that
            make up a split; part of the identity. See `ups_store.open` for how such files are named.
        durability: "durable" syncs every commit; "lazy" leaves that to the system: a killed process loses
            nothing, and after a power loss every recorded sample is checked before it counts.
        on_mismatch: What to do with an unfinished file of another identity or a damaged one.
        check_on_resume: Whether to read back the committed samples of an unfinished file, see
            `StoreWriter.check_committed`; those that have changed meanwhile aren't committed any more.
        note: Given a sentence about what had changed: samples, or metadata and constants, which are written
            again from these arguments; by default a RuntimeWarning.
    Raises:
        SpecError: If no store can be made from these arguments, or under this name, kind "path".
        IdentityMismatchError: If an unfinished file was made from something else.
        BuildLockedError: If it is being built already, by another process or this one.
        FormatError: If there is a folder or another program's file at the path.
        AccessError: If the store that is there has no write bit; kind "read_only".
        StoreNotFoundError: If there is no such folder, or the path is a link to nothing ("dangling_link").
        DiskFullError: If there is no room for the whole store.
        CommitError: If the file system fails, or doesn't let this user write.
        CorruptChunkError: If a file that only waits to be published has changed.
        StoreError: For ":memory:" if the system isn't Linux.
    """
    if durability not in ("durable", "lazy") or on_mismatch not in ("raise", "restart"):
        found = f"durability={durability!r}, on_mismatch={on_mismatch!r}"
        raise SpecError("argument", expected="durable or lazy; raise or restart", found=found)
    blueprint = blueprint_of(arrays, constants or {}, dims or {}, identity, attrs or {}, partition)
    is_lazy, restart = durability == "lazy", on_mismatch == "restart"
    resuming = _Resuming(restart, check_on_resume, note)
    # The process may change its folder meanwhile.
    target = path_of(real_place(path_of(path)), suffix_nbytes=_SUFFIX_BYTES)
    check_store_name(target)
    if os.fspath(path) == IN_MEMORY:
        in_memory = StoreWriter(create_building_in_memory(blueprint, is_lazy=is_lazy))
        try:
            _note_owner(in_memory)
        except BaseException:
            in_memory.close()
            raise
        return in_memory
    return _begin(target, blueprint, is_lazy, resuming)


def create_spool(
    path: Path, arrays: Mapping[str, ArraySpec], *, on_mismatch: Literal["raise", "restart"], **content: Any
) -> StoreWriter:
    """Start a spool, or continue the one at the path: a lazy building file of which N is only its room.

    Args:
        path: Where the store will be, no link.
        arrays: With room for N samples; of ragged arrays for the rows of the first one.
        on_mismatch: As for `create`, whose other arguments and errors are the same.
        content: Constants, dims, identity and attrs, all four.
    """
    blueprint = blueprint_of(arrays, **content)
    return _begin(path, blueprint, True, _Resuming(on_mismatch == "restart", True, warn), is_spool=True)


def _begin(
    target: Path, blueprint: Blueprint, is_lazy: bool, resuming: _Resuming, *, is_spool: bool = False
) -> StoreWriter:
    """Create the building file of a store or a spool, or take it up."""
    if not target.parent.is_dir():
        raise StoreNotFoundError("no such folder", path=target.parent, hint="create it first")
    check_replaceable(target, force=resuming.restart)
    remove_begun(target)
    nbytes = 0 if is_spool else blueprint.layout.building_nbytes
    for _ in range(_MAX_ROUNDS):
        writer = None
        try:
            with failures_as_errors(target, nbytes, "the store was not begun", passing=_OVERTAKEN):
                writer = _create_or_resume(target, blueprint, is_lazy, resuming, is_spool)
                _note_owner(writer)
        except BaseException as error:
            if writer is not None:  # whatever fails, the lock isn't kept
                writer.close()
            if not isinstance(error, (*_OVERTAKEN, StoreReplacedError)):
                raise
        else:
            return writer
    raise StoreReplacedError("other processes keep replacing the building file", path=building_path(target))


def join(path: str | os.PathLike[str], *, identity: Mapping[str, Any]) -> Committer:
    """Attach another committing process of the same machine to an unfinished store.

    Args:
        path: As given to `create`; of a store in memory what its writer calls `path`.
        identity: As given to `create`; compared with the file's.
    Raises:
        StoreNotFoundError: If nothing is being built there.
        IdentityMismatchError: If it is made from something else.
        CommitError: If the file system fails.
    """
    store_path = keeping(path_of(real_place(path_of(path)), suffix_nbytes=_SUFFIX_BYTES))
    check_not_reserved(path)
    target = building_path(store_path)
    fd = files.open_existing(target, writable=True)
    try:
        found = read_building_file(fd, target)
        if found.header is None:
            raise StoreNotFoundError("the store is finished", path=target, hint="run its builder again")
        if read_is_spool(fd, found.catalog.layout):
            hint = "its samples come one after the other, from one process: give that all of them"
            raise SpecError("the number of samples isn't known yet", kind="spool", path=target, hint=hint)
        content = identity_document([], {}, identity)["content"]
        _check_same(found.catalog.root.identity.get("content"), content, target)
        if not is_in_memory(store_path):
            with failures_as_errors(target, found.catalog.layout.building_nbytes, "the build was not joined"):
                files.sync_folder(target.parent)  # its builder may not have come to that yet
    except BaseException:
        files.close(fd)
        raise
    return Committer(_building_file(store_path, fd, found, is_lazy=True))


def identity_of(
    arrays: Mapping[str, ArraySpec],
    *,
    constants: Mapping[str, npt.ArrayLike] | None = None,
    dims: Mapping[str, Sequence[str]] | None = None,
    identity: Mapping[str, Any],
    partition: tuple[int, int] | None = None,
) -> dict[str, Any]:
    """The identity document that `create` would give a store; nothing is written (spec 8.1)."""
    return blueprint_of(arrays, constants or {}, dims or {}, identity, {}, partition).root.identity


def check_replaceable(path: Path, *, force: bool) -> None:
    """Refuse to take the place of a folder, and unless forced of anything but a store, whole or damaged."""
    if is_in_memory(path):
        hint = "`join` it, or create another with path=':memory:'"
        raise FormatError("it names a file in memory", path=path, kind="not_a_file", hint=hint)
    for place in (path, building_path(path)):
        check_file_or_free(real_place(place))
    if force or not path.exists():
        return
    check_not_read_only(path, hint=f"make it writable with chmod u+w, or say {HOW_TO_REPLACE}")
    with files.opened(path) as fd:
        is_store, start = looks_like_store(fd), files.read_at(fd, 0, 8)
    if not is_store:
        raise FormatError(
            "there is another program's file",
            path=path,
            kind="foreign",
            clause="2.2",
            found=start.hex(" ") or "an empty file",
            hint=f"{TAKEN}, or say {HOW_TO_REPLACE}",
        )


def _note_owner(writer: StoreWriter) -> None:
    """Note in the file which process builds it; a finished one has no place for that and keeps its length."""
    if not writer.is_finished:
        write_owner(writer.building, Owner(os.getpid(), socket.gethostname()))


@dataclass(frozen=True)
class _Resuming:
    """How an unfinished file is taken up; see `create`."""

    restart: bool
    check: bool
    note: Note


def _create_or_resume(
    path: Path, blueprint: Blueprint, is_lazy: bool, resuming: _Resuming, is_spool: bool
) -> StoreWriter:
    target = building_path(path)
    try:
        fd = files.open_existing(target, writable=True)
    except StoreNotFoundError:
        return StoreWriter(create_building(path, blueprint, is_lazy=is_lazy, is_spool=is_spool))
    try:
        take_builder_lock(fd, target)
        locks.lock(fd, GATE_LOCK, timeout_s=LOCK_TIMEOUT_S, path=target)
        if not files.is_file_at(fd, target):
            raise StoreReplacedError("replaced while waiting for it", path=target)
        try:
            return _resume(path, fd, blueprint, is_lazy, resuming, is_spool)
        except (FormatError, IdentityMismatchError, CorruptChunkError):
            if not resuming.restart:
                raise
        replacing = create_building(path, blueprint, is_lazy=is_lazy, replace=True, is_spool=is_spool)
        files.close(fd)
        return StoreWriter(replacing)
    except BaseException:
        files.close(fd)
        raise


def _resume(
    path: Path, fd: int, blueprint: Blueprint, is_lazy: bool, resuming: _Resuming, is_spool: bool
) -> StoreWriter:
    """Continue a building file whose builder lock and gate are held; the gate is released (spec 6.9)."""
    target = building_path(path)
    mended = mend_metadata(fd, blueprint, target)
    found = read_building_file(fd, target)
    _check_same(found.catalog.root.identity, blueprint.root.identity, target)
    kinds = read_is_spool(fd, found.catalog.layout), is_spool
    sizes = [
        {"num_samples": "not known yet" if of_spool else layout.num_samples}
        for layout, of_spool in zip((found.catalog.layout, blueprint.layout), kinds, strict=True)
    ]
    _check_same(sizes[0], sizes[1], target)  # they aren't in the identity (spec 8.4)
    if found.state is State.RESUMABLE:
        mended += mend_constants(fd, found.catalog.layout, blueprint, is_spool=is_spool)
    building = _building_file(path, fd, found, is_lazy=is_lazy)
    try:
        if not is_spool:
            _check_same_lengths(building, blueprint)
        files.sync_data(fd)  # a record in the page cache only must not count before it is durable
        # Nor must a commit, if the process that created the file died before its name was durable.
        files.sync_folder(target.parent)
        locks.unlock(fd, GATE_LOCK)
        writer = StoreWriter(building, is_finished=found.state is State.FINISHED)
        if mended:
            resuming.note(describe_mended(building, mended))
        if resuming.check:
            writer.check_committed(note=resuming.note)
    except BaseException:
        building.fd = -1  # the caller closes it
        raise
    return writer


def _building_file(path: Path, fd: int, found: Building, *, is_lazy: bool) -> BuildingFile:
    layout, crcs = found.catalog.layout, found.catalog.crcs[: len(found.catalog.layout.metadata)]
    header = found.header or TailHeader.for_layout(
        layout, build_id=bytes(16), boot_id=bytes(16), is_lazy=False
    )
    where, is_spool = building_path(path), read_is_spool(fd, layout)
    read = read_offsets_of_spool if is_spool else read_offsets
    offsets = {name: read(fd, array, path=where) for name, array in layout.ragged.items()}
    return BuildingFile(path, fd, layout, header, crcs, is_lazy and header.is_lazy, offsets, is_spool)


def _check_same_lengths(building: BuildingFile, blueprint: Blueprint) -> None:
    """Refuse to continue a file whose ragged samples have other lengths: the identity doesn't hold them."""
    for name, array in building.layout.ragged.items():
        found, wanted = building.offsets[name], _offsets_in(blueprint, array)
        if np.array_equal(found, wanted):
            continue
        lengths = np.diff(found), np.diff(wanted)
        where = int(np.argmax(lengths[0] != lengths[1]))
        shown = [int(values[where]) for values in lengths]
        _check_same(
            {f"lengths of {name!r}[{where}]": shown[0]},
            {f"lengths of {name!r}[{where}]": shown[1]},
            building.building_path,
        )


def _offsets_in(blueprint: Blueprint, array: RaggedLayout) -> Offsets:
    return np.frombuffer(blueprint.constants[array.offsets.meta.name], "<i8")


def _check_same(found: Any, expected: Any, path: Path) -> None:
    differing = differences(found, expected)
    if not differing:
        return
    error = IdentityMismatchError(
        f"the unfinished file was made from something else (found -> asked for):\n"
        f"{describe_differences(differing)}\n",
        path=path,
        hint=f"finish it with what it was begun with, or say {HOW_TO_REPLACE}",
    )
    error.differences = differing
    raise error


def create_building(
    path: Path,
    blueprint: Blueprint,
    *,
    is_lazy: bool,
    replace: bool = False,
    is_spool: bool = False,
    fill: Callable[[BuildingFile], None] = lambda building: None,
) -> BuildingFile:
    """Create a building file, complete before anybody can see it; its builder lock is held (spec 6.6).

    With `replace` it takes the place of one whose locks the caller holds; else FileExistsError says that
    there is one. A spool is sparse, and `fill` may write samples into it. Nothing is left behind by an error.
    """
    target, header = building_path(path), _new_header(blueprint.layout, is_lazy=is_lazy)
    fd, temporary = create_locked(path)
    building = None
    try:
        building = _new_building(path, fd, blueprint, header, is_spool=is_spool)
        reserve = files.truncate if is_spool else files.allocate
        reserve(building.fd, building.layout.building_nbytes)  # 1
        _write_skeleton(building, blueprint)  # 2
        fill(building)
        files.sync(building.fd)  # 3
        files.sync_folder(target.parent)
        (files.rename if replace else files.link)(temporary, target)  # 4: from here on it can be seen
        files.remove(temporary)
        files.sync_folder(target.parent)  # 5: before the first commit
    except BaseException:
        building.close() if building else files.close(fd)
        files.remove(temporary)
        raise
    return building


def create_building_in_memory(blueprint: Blueprint, *, is_lazy: bool) -> BuildingFile:
    """Create a building file in memory; its builder lock is held (spec 6.12). As for `create_building`."""
    layout = blueprint.layout
    path, header = create_in_memory(layout.building_nbytes), _new_header(layout, is_lazy=is_lazy)
    # Opened again: closing it releases the locks, while the path stays.
    fd = files.open_existing(path, writable=True)
    building = _new_building(path, fd, blueprint, header)
    try:
        locks.try_lock(fd, BUILDER_LOCK)
        _write_skeleton(building, blueprint)
    except BaseException:
        building.close()
        raise
    return building


def _new_header(layout: Layout, *, is_lazy: bool) -> TailHeader:
    ids = {"build_id": files.build_id(), "boot_id": files.boot_id()}
    return TailHeader.for_layout(layout, **ids, is_lazy=is_lazy)


def _new_building(
    path: Path, fd: int, blueprint: Blueprint, header: TailHeader, *, is_spool: bool = False
) -> BuildingFile:
    crcs = tuple(map(crc32, blueprint.documents))
    offsets = {name: _offsets_in(blueprint, array) for name, array in blueprint.layout.ragged.items()}
    return BuildingFile(path, fd, blueprint.layout, header, crcs, header.is_lazy, offsets, is_spool)


def write_skeleton(path: Path, fd: int, blueprint: Blueprint) -> BuildingFile:
    """Write what a store without a build tail has beside samples; gives where these go."""
    building = _new_building(path, fd, blueprint, _new_header(blueprint.layout, is_lazy=True))
    _write_documents(building, blueprint)
    return building


def _write_skeleton(building: BuildingFile, blueprint: Blueprint) -> None:
    layout = building.layout
    _write_documents(building, blueprint)
    files.write_at(building.fd, layout.tail_offset, building.header.pack())
    if building.is_spool:
        files.write_at(building.fd, layout.tail_offset + SPOOL_OFFSET, SPOOL_MAGIC)


def _write_documents(building: BuildingFile, blueprint: Blueprint) -> None:
    layout, crcs = building.layout, building.metadata_crcs
    for entry, document, crc in zip(layout.metadata, blueprint.documents, crcs, strict=True):
        files.write_at(building.fd, entry.offset, entry.pack_local_header(crc) + document)
    for name, payload in blueprint.constants.items():
        place = layout.arrays[name].entry
        if place:
            files.write_at(building.fd, place.data_offset, payload + struct.pack("<I", crc32c(payload)))
