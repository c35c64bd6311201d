"""Copies of sources on a disk that loses its power, or whose process dies, and what must hold then."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

from lossy_disk import Disk, PowerLoss, installed

from ups_store.errors import SourceError
from ups_store.remote import fetch as fetching
from ups_store.remote.client import Version
from ups_store.remote.fetch import Body, fetch, find_copy
from ups_store.sources.reader_process import Reader
from ups_store.system import files

_CHUNK_BYTES, _SYNC_BYTES = 1000, 2000
_NAME = "burgers1d_train.h5"
_NAMES = (_NAME, f"{_NAME}.part", "part.json", "staged.json")  # all but those of small files in the making
DATA, OTHER = (random.Random(seed).randbytes(nbytes) for seed, nbytes in enumerate((6500, 5200)))


@dataclass
class InMemory:
    """An original in memory that may break off.

    Attributes:
        data: Its bytes.
        cuts: After so many bytes each of the next answers ends.
        has_ranges: Whether bytes are given from any place on.
    """

    data: bytes = DATA
    cuts: list[int] = field(default_factory=list)
    has_ranges: bool = True
    location = key = "memory"
    digest = ""

    @property
    def version(self) -> Version:
        return Version(len(self.data), f"tag {hash(self.data)}", _NAME)

    def look(self) -> Version:
        return self.version

    def read(self, start: int, version: Version) -> Body:
        first = start if self.has_ranges else 0
        end = first + self.cuts.pop(0) if self.cuts else len(self.data)
        given = self.data[first:end]
        return first, (given[i : i + _CHUNK_BYTES] for i in range(0, len(given), _CHUNK_BYTES))


def copy(original: InMemory, folder: Path, *, retries: int = 0) -> int:
    with mock.patch.object(fetching, "_FIRST_PAUSE_S", 0.0):
        return fetch(Reader(), original, original.version, folder, retries)


def cut_and_resumed(folder: Path) -> None:
    with contextlib.suppress(SourceError):
        copy(InMemory(cuts=[3300, 0]), folder)
    copy(InMemory(), folder)


def begun_again_by_the_server(folder: Path) -> None:
    copy(InMemory(cuts=[4100], has_ranges=False), folder, retries=1)


def of_another_version_than_before(folder: Path) -> None:
    copy(InMemory(OTHER), folder)
    with contextlib.suppress(SourceError):
        copy(InMemory(OTHER[::-1], cuts=[4100, 0]), folder)
    copy(InMemory(), folder)


def whose_bytes_went(folder: Path) -> None:
    """What is removed by hand: the record that is left vouches for more than there is."""
    with contextlib.suppress(SourceError):
        copy(InMemory(cuts=[4100, 0]), folder)
    files.remove(folder / f"{_NAME}.part")
    files.sync_folder(folder)
    copy(InMemory(), folder)


WORKLOADS = (cut_and_resumed, begun_again_by_the_server, of_another_version_than_before, whose_bytes_went)


def check_copying(folder: Path, disk_type: Callable[..., Disk] = Disk, *, stride: int = 1) -> int:
    """Lose the power before every operation of each workload, or only the process.

    Returns:
        The number of images that differ.
    """
    seen = set()
    with mock.patch.object(fetching, "_SYNC_BYTES", _SYNC_BYTES):
        for workload in WORKLOADS:
            undisturbed = disk_type()
            with installed(undisturbed):
                workload(folder)
            assert undisturbed.read(folder / _NAME) == DATA
            for at in [*range(0, undisturbed.num_changes, stride), undisturbed.num_changes]:
                disk = disk_type(lose_power_at=at)
                with installed(disk), contextlib.suppress(PowerLoss):
                    workload(folder)
                for names in disk.after_power_loss(seed=at):
                    image = (workload, disk.is_off, *(names.get(folder / name) for name in _NAMES))
                    if image not in seen:
                        _check_after_boot(folder, names, is_made=not disk.is_off)
                    seen.add(image)
                _check_going_on(folder, disk)
    return len(seen)


def _check_after_boot(folder: Path, names: dict[Path, bytes], *, is_made: bool) -> None:
    assert names.get(folder / _NAME) in ((DATA,) if is_made else (None, OTHER, DATA))
    with mock.patch.object(files, "boot_id", return_value=b"\1" * 16):
        _check_going_on(folder, Disk(names), is_made=is_made)


def _check_going_on(folder: Path, disk: Disk, *, is_made: bool = False) -> None:
    disk.go_on()
    with installed(disk):
        found = find_copy(folder, InMemory(), InMemory().version)
        assert found is not None or not is_made
        assert found is None or disk.read(found) == DATA
        copy(InMemory(), folder)
        assert disk.read(folder / _NAME) == DATA
        assert not {folder / name for name in _NAMES[1:3]}.intersection(disk.names())
