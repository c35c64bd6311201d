"""The building file: created whole before anybody sees it, held under locks (spec 6.1 to 6.6)."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ups_store import files
from ups_store.build_tail import (
    BUILDER_LOCK,
    GATE_LOCK,
    OWNER_NBYTES,
    OWNER_OFFSET,
    SAMPLE_LOCK,
    Owner,
    TailHeader,
)
from ups_store.catalog import read_building
from ups_store.checksum import crc32, crc32c
from ups_store.errors import BuildLockedError, FormatError, StoreReplacedError
from ups_store.layout import Layout
from ups_store.recovery import building_path

LOCK_TIMEOUT_S = 60.0

Samples = npt.NDArray[np.int64]


@dataclass(eq=False)
class BuildingFile:
    """An open building file; whoever holds it with the builder lock is the builder.

    Attributes:
        path: Where the store will be published.
        fd: Descriptor, open for reading and writing; -1 after closing, and in forked children.
        layout: Geometry.
        header: Header of the build tail.
        metadata_crcs: CRC-32 of the metadata entries, in file order.
        is_lazy: Whether commits go unsynced; only ever where the header says so too, for its samples are
            checked after a power loss.
    """

    path: Path
    fd: int
    layout: Layout
    header: TailHeader
    metadata_crcs: tuple[int, ...]
    is_lazy: bool

    @property
    def building_path(self) -> Path:
        """The file's own name."""
        return building_path(self.path)

    def check_current(self) -> None:
        """Fail if the building name no longer means this file; call it after taking any lock (spec 6.3)."""
        if not files.is_file_at(self.fd, self.building_path):
            raise StoreReplacedError(
                "the building file was published, removed or restarted by another process",
                path=self.building_path,
                hint="nothing was written; open the store, or create it again",
            )

    @contextlib.contextmanager
    def gate(self, *, exclusive: bool) -> Iterator[None]:
        """Hold the gate: shared while committing, exclusive while finishing or recovering (spec 6.3)."""
        with self._locked(GATE_LOCK, 1, exclusive=exclusive):
            if not exclusive:
                self._check_has_tail()
            yield

    def _check_has_tail(self) -> None:
        """Fail if a builder died between cutting the tail off and publishing: a record would be garbage."""
        if files.size(self.fd) != self.layout.building_nbytes:
            raise StoreReplacedError(
                "the store is complete and only waits to be published",
                path=self.building_path,
                hint="nothing was written; run its builder again",
            )

    @contextlib.contextmanager
    def samples_locked(self, samples: Samples) -> Iterator[None]:
        """Hold the locks of the samples; `samples` is sorted, so two committers can't wait for each other."""
        with contextlib.ExitStack() as stack:
            for first, num in runs(samples):
                stack.enter_context(self._locked(SAMPLE_LOCK + first, num, exclusive=True))
            yield

    @contextlib.contextmanager
    def _locked(self, offset: int, length: int, *, exclusive: bool) -> Iterator[None]:
        where = self.building_path
        files.lock(self.fd, offset, length, exclusive=exclusive, timeout_s=LOCK_TIMEOUT_S, path=where)
        try:
            self.check_current()
            yield
        finally:
            if self.fd >= 0:
                files.unlock(self.fd, offset, length)

    def close(self) -> None:
        """Close the descriptor, which releases its locks."""
        if self.fd >= 0:
            files.close(self.fd)
            self.fd = -1


def runs(samples: Samples) -> list[tuple[int, int]]:
    """Consecutive stretches of sorted sample numbers, at least one, as `(first, num)`."""
    if samples[-1] - samples[0] == len(samples) - 1:
        return [(int(samples[0]), len(samples))]
    breaks = np.flatnonzero(np.diff(samples) != 1) + 1
    return [(int(part[0]), len(part)) for part in np.split(samples, breaks)]


def take_builder_lock(fd: int, path: Path) -> None:
    """Become the builder, or fail with `BuildLockedError` that names the one there is (spec 6.3)."""
    if files.try_lock(fd, BUILDER_LOCK):
        return
    owner = read_owner(fd, path)
    error = BuildLockedError(
        "another process is building it",
        path=path,
        found=f"pid {owner.pid} on {owner.host}" if owner else "an unknown process",
        hint="wait for it or end it; `ups_store.join` commits beside it",
    )
    error.pid, error.host = (owner.pid, owner.host) if owner else (None, None)
    raise error


def read_owner(fd: int, path: Path) -> Owner | None:
    """Who noted that they build the file; None where it can't be told."""
    try:
        layout = read_building(fd, path).layout
    except FormatError:
        return None
    return Owner.parse(files.read_at(fd, layout.tail_offset + OWNER_OFFSET, OWNER_NBYTES))


def write_owner(building: BuildingFile, owner: Owner) -> None:
    """Note who builds, for the messages of others."""
    files.write_at(building.fd, building.layout.tail_offset + OWNER_OFFSET, owner.pack())


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
        DiskFullError: If the file system can't hold the whole store; nothing is left behind.
    """
    target = building_path(path)
    header = TailHeader.for_layout(
        layout, build_id=files.build_id(), boot_id=files.boot_id(), is_lazy=is_lazy
    )
    temporary = target.with_name(f"{target.name}.{header.build_id.hex()[:16]}")
    building = BuildingFile(
        path, files.create_new(temporary), layout, header, tuple(map(crc32, documents)), is_lazy
    )
    try:
        files.try_lock(building.fd, BUILDER_LOCK)
        with files.disk_full_named(target, layout.building_nbytes):
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
