"""A new building file: complete before anybody can see it (spec 6.1, 6.2, 6.6, 6.12)."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

from ups_store.building import BuildingFile
from ups_store.format.build_tail import BUILDER_LOCK, TailHeader
from ups_store.format.checksum import crc32, crc32c
from ups_store.format.layout import Layout
from ups_store.read.recovery import building_path
from ups_store.system import files, locks
from ups_store.system.memory_file import create_in_memory


def create_building(
    path: Path,
    layout: Layout,
    *,
    documents: Sequence[bytes],
    constants: Mapping[str, bytes],
    is_lazy: bool,
    replace: bool = False,
) -> BuildingFile:
    """Create a building file, complete before anybody can see it; its builder lock is held (spec 6.6).

    Args:
        path: Where the store will be published.
        layout: Geometry.
        documents: The `zarr.json` documents in file order.
        constants: C-order little-endian bytes of every constant, by name.
        is_lazy: Whether commits go unsynced.
        replace: Whether to take the place of an existing building file, whose locks the caller holds.
    Raises:
        FileExistsError: If a building file appeared meanwhile.
        OSError: As the file system says, also that it can't hold the whole store; nothing is left behind.
    """
    target, header = building_path(path), _new_header(layout, is_lazy=is_lazy)
    temporary = target.with_name(f"{target.name}.{header.build_id.hex()[:16]}")
    building = BuildingFile(
        path, files.create_new(temporary), layout, header, tuple(map(crc32, documents)), is_lazy
    )
    try:
        locks.try_lock(building.fd, BUILDER_LOCK)
        files.allocate(building.fd, layout.building_nbytes)  # 1
        _write_skeleton(building, documents, constants)  # 2
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


def create_building_in_memory(
    layout: Layout, *, documents: Sequence[bytes], constants: Mapping[str, bytes], is_lazy: bool
) -> BuildingFile:
    """Create a building file in memory; its builder lock is held (spec 6.12). As for `create_building`.

    Raises:
        DiskFullError: If so much memory isn't free.
        StoreError: If the system has no files in memory.
    """
    path, header = create_in_memory(layout.building_nbytes), _new_header(layout, is_lazy=is_lazy)
    # Opened anew: closing it releases the locks, while the path stays.
    fd = files.open_existing(path, writable=True)
    building = BuildingFile(path, fd, layout, header, tuple(map(crc32, documents)), is_lazy)
    try:
        locks.try_lock(fd, BUILDER_LOCK)
        _write_skeleton(building, documents, constants)
    except BaseException:
        building.close()
        raise
    return building


def _new_header(layout: Layout, *, is_lazy: bool) -> TailHeader:
    ids = {"build_id": files.build_id(), "boot_id": files.boot_id()}
    return TailHeader.for_layout(layout, **ids, is_lazy=is_lazy)


def _write_skeleton(
    building: BuildingFile, documents: Sequence[bytes], constants: Mapping[str, bytes]
) -> None:
    layout = building.layout
    for entry, document, crc in zip(layout.metadata, documents, building.metadata_crcs, strict=True):
        files.write_at(building.fd, entry.offset, entry.pack_local_header(crc) + document)
    for name, payload in constants.items():
        place = layout.arrays[name].entry
        if place:
            files.write_at(building.fd, place.data_offset, payload + struct.pack("<I", crc32c(payload)))
    files.write_at(building.fd, layout.tail_offset, building.header.pack())
