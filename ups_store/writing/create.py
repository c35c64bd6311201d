"""`create` and `join`: from arguments to a building file that is ours to write.

A new building file is complete before anybody can see it (spec 6.1, 6.2, 6.6, 6.12). What resuming finds
isn't taken on trust (spec 6.9): metadata and constants follow from the arguments, so they are written again
where they differ, and samples are read back.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
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
    OWNER_OFFSET,
    SPOOL_MAGIC,
    SPOOL_OFFSET,
    Owner,
    TailHeader,
    parse_tail_header,
)
from ups_store.format.checksum import crc32c
from ups_store.format.layout import PAGE_BYTES, Layout
from ups_store.format.metadata import ArraySpec
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
from ups_store.writing.commit import LOCK_TIMEOUT_S, BuildingFile, become_builder_or_fail, failures_as_errors
from ups_store.writing.plan import Plan, plan_of
from ups_store.writing.target import create_locked, remove_begun
from ups_store.writing.writer import Committer, Note, StoreWriter, shown, warn

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
        words = f"durability={durability!r}, on_mismatch={on_mismatch!r}"
        raise SpecError("argument", expected="durable or lazy; raise or restart", found=words)
    plan = plan_of(
        arrays, identity=identity, constants=constants, dims=dims, attrs=attrs, partition=partition
    )
    is_lazy, restart, target = durability == "lazy", on_mismatch == "restart", store_path_of(path)
    if os.fspath(path) != IN_MEMORY:
        return _begin(target, plan, is_lazy=is_lazy, restart=restart, is_checked=check_on_resume, note=note)
    target = create_in_memory(plan.layout.building_nbytes)
    building = new_building(target, plan, is_lazy=is_lazy)
    try:  # opened again: closing it releases the locks, while the path stays
        building.fd = files.open_existing(target, writable=True)
        locks.try_lock(building.fd, BUILDER_LOCK)
        write_skeleton(building, plan)
        writer = StoreWriter(building)
        _note_owner(writer)
    except BaseException:
        building.close()
        raise
    return writer


def create_spool(
    path: Path, arrays: Mapping[str, ArraySpec], *, on_mismatch: Literal["raise", "restart"], **content: Any
) -> StoreWriter:
    """Start a spool, or continue the one at the path: a lazy building file of which N is only its room.

    Ragged arrays have room for the rows of the first sample; all else is as for `create`.
    """
    plan = plan_of(arrays, **content)
    return _begin(path, plan, is_lazy=True, restart=on_mismatch == "restart", is_spool=True)


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
    store_path = keeping(store_path_of(path))
    check_not_reserved(path)
    target = building_path(store_path)
    fd = files.open_existing(target, writable=True)
    try:
        file = read_building_file(fd, target)
        if file.header is None:
            raise StoreNotFoundError("the store is finished", path=target, hint="run its builder again")
        if read_is_spool(fd, file.catalog.layout):
            hint = "its samples come one after the other, from one process: give that all of them"
            raise SpecError("the number of samples isn't known yet", kind="spool", path=target, hint=hint)
        content = identity_document([], {}, identity)["content"]
        _check_identity(file.catalog.root.identity.get("content"), content, target)
        if not is_in_memory(store_path):
            nbytes = file.catalog.layout.building_nbytes
            with failures_as_errors(target, nbytes, "the build was not joined"):
                files.sync_folder(target.parent)  # its builder may not have come to that yet
        building = _building_file(store_path, fd, file, is_lazy=True)
    except BaseException:
        files.close(fd)
        raise
    building.fd = fd
    return Committer(building)


def store_path_of(path: str | os.PathLike[str]) -> Path:
    """Return where a store of this path is made: absolute, for the process may change its folder; no link."""
    target = path_of(real_place(path_of(path)), suffix_nbytes=_SUFFIX_BYTES)
    check_store_name(target)
    return target


def _begin(
    path: Path,
    plan: Plan,
    *,
    is_lazy: bool,
    restart: bool,
    is_checked: bool = True,
    note: Note = warn,
    is_spool: bool = False,
) -> StoreWriter:
    """Create the building file of a store or a spool, or take it up."""
    if not path.parent.is_dir():
        raise StoreNotFoundError("no such folder", path=path.parent, hint="create it first")
    _check_replaceable(path, force=restart)
    remove_begun(path)
    target, nbytes = building_path(path), 0 if is_spool else plan.layout.building_nbytes
    for _ in range(_MAX_ROUNDS):
        writer, fd = None, -1
        try:
            with failures_as_errors(path, nbytes, "the store was not begun", passing=_OVERTAKEN):
                fd = _open_locked(target)
                if fd >= 0:
                    try:
                        writer = _resume(
                            path,
                            fd,
                            plan,
                            is_lazy=is_lazy,
                            is_checked=is_checked,
                            note=note,
                            is_spool=is_spool,
                        )
                    except (FormatError, IdentityMismatchError, CorruptChunkError):
                        if not restart:
                            raise
                if writer is None:
                    building = create_building(
                        path, plan, is_lazy=is_lazy, is_spool=is_spool, replace=fd >= 0
                    )
                    if fd >= 0:
                        replaced, fd = fd, -1
                        files.close(replaced)
                    writer = StoreWriter(building)
                _note_owner(writer)
                return writer
        except BaseException as error:
            if writer is not None:  # whatever fails, the lock isn't kept
                writer.close()
            elif fd >= 0:
                files.close(fd)
            if not isinstance(error, (*_OVERTAKEN, StoreReplacedError)):
                raise
    raise StoreReplacedError("other processes keep replacing the building file", path=target)


def _open_locked(target: Path) -> int:
    """Open a building file with its builder lock and its gate; -1 where there is none."""
    try:
        fd = files.open_existing(target, writable=True)
    except StoreNotFoundError:
        return -1
    try:
        become_builder_or_fail(fd, target)
        locks.lock(fd, GATE_LOCK, timeout_s=LOCK_TIMEOUT_S, path=target)
        if not files.is_file_at(fd, target):
            raise StoreReplacedError("replaced while waiting for it", path=target)
    except BaseException:
        files.close(fd)
        raise
    return fd


def _check_replaceable(path: Path, *, force: bool) -> None:
    """Refuse to take the place of a folder, and unless forced of anything but a store, whole or damaged."""
    if is_in_memory(path):
        hint = "`join` it, or create another with path=':memory:'"
        raise FormatError("it names a file in memory", path=path, kind="not_a_file", hint=hint)
    for target in (path, building_path(path)):
        check_file_or_free(real_place(target))
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
        offset = writer.building.layout.tail_offset + OWNER_OFFSET
        files.write_at(writer.building.fd, offset, Owner(os.getpid(), socket.gethostname()).pack())


def _resume(
    path: Path, fd: int, plan: Plan, *, is_lazy: bool, is_checked: bool, note: Note, is_spool: bool
) -> StoreWriter:
    """Continue a building file whose builder lock and gate are held; the gate is released (spec 6.9)."""
    target = building_path(path)
    mended = _mend_metadata(fd, plan, target)
    unfinished = read_building_file(fd, target)
    layout = unfinished.catalog.layout
    _check_identity(unfinished.catalog.root.identity, plan.root.identity, target)
    is_of_spool, unknown = read_is_spool(fd, layout), "not known yet"
    _check_identity(  # it isn't in the identity (spec 8.4)
        {"num_samples": unknown if is_of_spool else layout.num_samples},
        {"num_samples": unknown if is_spool else plan.layout.num_samples},
        target,
    )
    if unfinished.state is State.RESUMABLE:
        mended += _mend_constants(fd, layout, plan, is_spool=is_spool)
    building = _building_file(path, fd, unfinished, is_lazy=is_lazy)
    try:
        building.fd = fd
        planned = {} if is_spool else plan.offsets
        for name, offsets in planned.items():  # the lengths of ragged samples aren't in it either
            if not np.array_equal(building.offsets[name], offsets):
                known, lengths = np.diff(building.offsets[name]), np.diff(offsets)
                sample = int(np.argmax(known != lengths))
                key = f"lengths of {name!r}[{sample}]"
                _check_identity({key: int(known[sample])}, {key: int(lengths[sample])}, target)
        files.sync_data(fd)  # a record in the page cache only must not count before it is durable
        # Nor must a commit, if the process that created the file died before its name was durable.
        files.sync_folder(target.parent)
        locks.unlock(fd, GATE_LOCK)
        writer = StoreWriter(building, is_finished=unfinished.state is State.FINISHED)
        if mended:
            problem = f"{shown(mended)} had changed since an earlier run, and was written again"
            note(f"{target}: {problem}; check the disk")
        if is_checked:
            writer.check_committed(note=note)
    except BaseException:
        building.fd = -1  # the caller closes it
        raise
    return writer


def _mend_metadata(fd: int, plan: Plan, path: Path) -> list[str]:
    """Write metadata entries again that differ from the plan's, if only damage can have made them differ.

    Of each entry the header, which has the document's checksum, or the document must be the plan's own, and
    the build tail must belong to them; else the file is left as it is. Returns the entries' names.
    """
    damaged, layout = [], plan.layout
    if files.size(fd) != layout.building_nbytes:
        return []
    for entry, document, crc in zip(layout.metadata, plan.documents, plan.crcs, strict=True):
        header = entry.pack_local_header(crc)
        raw = files.read_at(fd, entry.offset, len(header) + len(document))
        if raw == header + document:
            continue
        if raw[: len(header)] != header and raw[len(header) :] != document:
            return []
        damaged.append((entry, header + document))
    if damaged:
        parse_tail_header(files.read_at(fd, layout.tail_offset, PAGE_BYTES), layout, path=path)
    for entry, raw in damaged:
        files.write_at(fd, entry.offset, raw)
    return [entry.name for entry, _ in damaged]


def _mend_constants(fd: int, layout: Layout, plan: Plan, *, is_spool: bool) -> list[str]:
    """Write constants again, or their checksums, that differ from those of the plan.

    The file is of the same identity, which has their digests: those of the plan are right. The layout is the
    file's, as attributes may differ. Offsets of ragged arrays are in no identity: they are written if either
    they or their checksum are the plan's own, and not in a spool, where they grow.
    """
    damaged = []
    for name, payload in plan.constants.items():
        entry, checksum = layout.arrays[name].entry, struct.pack("<I", crc32c(payload))
        chunk = payload + checksum
        raw = files.read_at(fd, entry.data_offset, len(chunk)) if entry else chunk
        if entry is None or raw == chunk:
            continue
        is_constant = layout.arrays[name].meta.is_constant
        if not is_constant and (is_spool or (payload != raw[:-4] and checksum != raw[-4:])):
            continue
        files.write_at(fd, entry.data_offset, chunk)
        damaged.append(f"constant {name!r}")
    return damaged


def _check_identity(known: Any, expected: Any, path: Path) -> None:
    different = differences(known, expected)
    if different:
        raise mismatch("the unfinished file was made from something else", different, path=path)


def mismatch(
    problem: str, different: Mapping[str, tuple[Any, Any]], *, path: Path, hint: str | None = None
) -> IdentityMismatchError:
    """Make the error for what was made from something else, with the differences."""
    error = IdentityMismatchError(
        f"{problem} (found -> asked for):\n{describe_differences(different)}\n",
        path=path,
        hint=hint or f"finish it with what it was begun with, or say {HOW_TO_REPLACE}",
    )
    error.differences = dict(different)
    return error


def _building_file(path: Path, fd: int, file: Building, *, is_lazy: bool) -> BuildingFile:
    """Make it of an open file, whose descriptor stays the caller's."""
    layout, crcs = file.catalog.layout, file.catalog.crcs[: len(file.catalog.layout.metadata)]
    ids = {"build_id": bytes(16), "boot_id": bytes(16)}  # of a finished file, which has none
    header = file.header or TailHeader.for_layout(layout, **ids, is_lazy=False)
    is_spool = read_is_spool(fd, layout)
    read = read_offsets_of_spool if is_spool else read_offsets
    offsets = {name: read(fd, array, path=building_path(path)) for name, array in layout.ragged.items()}
    return BuildingFile(path, -1, layout, header, crcs, is_lazy and header.is_lazy, offsets, is_spool)


def create_building(
    path: Path,
    plan: Plan,
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
    target = building_path(path)
    building = new_building(path, plan, is_lazy=is_lazy, is_spool=is_spool)
    building.fd, temporary = create_locked(path)
    try:
        reserve = files.truncate if is_spool else files.allocate
        reserve(building.fd, plan.layout.building_nbytes)  # 1
        write_skeleton(building, plan)  # 2
        fill(building)
        files.sync(building.fd)  # 3
        files.sync_folder(target.parent)
        (files.rename if replace else files.link)(temporary, target)  # 4: from here on it can be seen
        files.remove(temporary)
        files.sync_folder(target.parent)  # 5: before the first commit
    except BaseException:
        building.close()
        files.remove(temporary)
        raise
    return building


def new_building(path: Path, plan: Plan, *, is_lazy: bool, is_spool: bool = False) -> BuildingFile:
    """Make the building file of a plan, of which nothing is written yet; it closes the `fd` that it is given.

    None is given here: at an interrupt in between the descriptor would be closed twice.
    """
    ids = {"build_id": files.build_id(), "boot_id": files.boot_id()}
    header = TailHeader.for_layout(plan.layout, **ids, is_lazy=is_lazy)
    return BuildingFile(path, -1, plan.layout, header, plan.crcs, is_lazy, plan.offsets, is_spool)


def write_skeleton(building: BuildingFile, plan: Plan, *, has_tail: bool = True) -> None:
    """Write what a building file has beside samples; without the tail of one that is finished next."""
    fd, layout = building.fd, building.layout
    for entry, document, crc in zip(layout.metadata, plan.documents, plan.crcs, strict=True):
        files.write_at(fd, entry.offset, entry.pack_local_header(crc) + document)
    for name, payload in plan.constants.items():
        chunk = layout.arrays[name].entry
        if chunk:
            files.write_at(fd, chunk.data_offset, payload + struct.pack("<I", crc32c(payload)))
    if has_tail:
        files.write_at(fd, layout.tail_offset, building.header.pack())
    if has_tail and building.is_spool:
        files.write_at(fd, layout.tail_offset + SPOOL_OFFSET, SPOOL_MAGIC)
