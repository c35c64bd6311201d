"""Copies of sources on a disk that loses its power, or whose process dies, and what must hold then."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

from lossy_disk import Disk, PowerLoss, installed

from ups_store.errors import DownloadError
from ups_store.sources import download
from ups_store.sources.attempts import Attempts
from ups_store.sources.copies import find_copy
from ups_store.sources.download import fetch
from ups_store.sources.origins import Body, Version
from ups_store.sources.reader import Reader
from ups_store.system import files

_CHUNK_BYTES, _SYNC_BYTES = 1000, 2000
_NAME = "burgers1d_train.h5"
_NAMES = (_NAME, f"{_NAME}.part", "part.json", "staged.json")  # all but those of small files in the making
DATA, OTHER = (random.Random(seed).randbytes(nbytes) for seed, nbytes in enumerate((6500, 5200)))
ONCE = Attempts(retries=0, backoff_s=0.0)


@dataclass
class MemoryOrigin:
    """A source in memory that may break off.

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

    def look(self, *, stall_s: float) -> Version:
        return self.version

    @contextlib.contextmanager
    def opened(self, start: int, version: Version, *, stall_s: float) -> Iterator[Body]:
        first = start if self.has_ranges else 0
        end = first + self.cuts.pop(0) if self.cuts else len(self.data)
        given = self.data[first:end]
        yield Body(first, version, (given[i : i + _CHUNK_BYTES] for i in range(0, len(given), _CHUNK_BYTES)))


def copy(origin: MemoryOrigin, folder: Path, attempts: Attempts = ONCE) -> int:
    return fetch(origin, origin.version, folder, attempts=attempts, reader=Reader())


def cut_and_resumed(folder: Path) -> None:
    with contextlib.suppress(DownloadError):
        copy(MemoryOrigin(cuts=[3300, 0]), folder)
    copy(MemoryOrigin(), folder)


def begun_again_by_the_server(folder: Path) -> None:
    copy(MemoryOrigin(cuts=[4100], has_ranges=False), folder, Attempts(retries=1, backoff_s=0.0))


def of_another_version_than_before(folder: Path) -> None:
    copy(MemoryOrigin(OTHER), folder)
    with contextlib.suppress(DownloadError):
        copy(MemoryOrigin(OTHER[::-1], cuts=[4100, 0]), folder)
    copy(MemoryOrigin(), folder)


WORKLOADS = (cut_and_resumed, begun_again_by_the_server, of_another_version_than_before)


def check_copying(folder: Path, disk_type: Callable[..., Disk] = Disk, *, stride: int = 1) -> int:
    """Lose the power before every operation of each workload, or only the process.

    Returns:
        The number of images that differ.
    """
    seen = set()
    with mock.patch.object(download, "_SYNC_BYTES", _SYNC_BYTES):
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
        found = find_copy(folder, MemoryOrigin(), MemoryOrigin().version)
        assert found is not None or not is_made
        assert found is None or disk.read(found) == DATA
        copy(MemoryOrigin(), folder)
        assert disk.read(folder / _NAME) == DATA
        assert not {folder / name for name in _NAMES[1:3]}.intersection(disk.names())
