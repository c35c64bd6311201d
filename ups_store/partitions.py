"""Partitions of a split, one file a machine: their names, their samples, and how they are found (spec 2.4).

Machines share no locks, so each writes `NAME-00003-of-00016.zarr.zip`; the pattern `NAME-*-of-00016.zarr.zip`
opens them together. `ups-store concat` makes one file of them.
"""

from __future__ import annotations

import glob
import os
import re
from pathlib import Path

from ups_store.errors import SpecError, StoreNotFoundError

PARTITION_KEY = "partition"  # in the identity's content: [number, how many]

_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.zarr\.zip")


def partition_path(path: Path, number: int, count: int) -> Path:
    """Name of one partition of the store at `path`, `NAME.zarr.zip`."""
    stem = path.name.removesuffix(".zarr.zip")
    return path.with_name(f"{stem}-{number:05d}-of-{count:05d}.zarr.zip")


def partition_range(num_samples: int, number: int, count: int) -> range:
    """Samples of one partition: consecutive; sizes of partitions differ by one at most."""
    return range(num_samples * number // count, num_samples * (number + 1) // count)


def find_partitions(pattern: Path) -> list[Path]:
    """The files that a pattern such as `NAME-*-of-00016.zarr.zip` names, in order, all of them.

    Raises:
        StoreNotFoundError: If there are none, or some are missing; names these.
        SpecError: If the pattern matches other files, or partitions of several stores.
    """
    found = {Path(name): _NAME.fullmatch(os.path.basename(name)) for name in glob.glob(os.fspath(pattern))}
    if not found:
        raise StoreNotFoundError("no file matches", path=pattern, hint="check the path, or build it")
    named = {(match["stem"], int(match["count"])) for match in found.values() if match}
    if len(named) != 1 or None in found.values():
        raise SpecError(
            "the files are not the partitions of one store",
            path=pattern,
            kind="partitions",
            expected="NAME-00000-of-00016.zarr.zip and so on, of one NAME",
            found=", ".join(sorted(path.name for path in found)[:4]),
        )
    ((stem, count),) = named
    wanted = [pattern.with_name(f"{stem}-{number:05d}-of-{count:05d}.zarr.zip") for number in range(count)]
    missing = [path.name for path in wanted if path not in found]
    if missing:
        raise StoreNotFoundError(
            f"{len(missing)} of {count} partitions are missing, the first of them {missing[0]}",
            path=pattern,
            hint="run the build again on the machine that makes it, or copy it here",
        )
    return wanted
