"""What resuming doesn't take on trust: metadata, constants and samples that an earlier run has written.

They are published only if they are what was written then (spec 6.9). Metadata and constants follow from the
arguments, so they are written again where they differ; the commits of samples that differ are taken back.
"""

from __future__ import annotations

import struct
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from ups_store.format.build_tail import HOW_TO_REPLACE, parse_tail_header
from ups_store.format.checksum import crc32, crc32c
from ups_store.format.layout import PAGE_BYTES, Layout
from ups_store.read.gather import Samples
from ups_store.read.recovery import intact_parts, is_read_to_count, read_commits
from ups_store.read.verify import verify_file
from ups_store.system import files
from ups_store.system.files import Progress
from ups_store.system.memory import num_cores
from ups_store.write.blueprint import Blueprint
from ups_store.write.building import BuildingFile
from ups_store.write.commit import take_back

Note = Callable[[str], object]  # takes one sentence

_MAX_SHOWN = 8


def warn(sentence: str) -> None:
    """A `Note` that warns."""
    warnings.warn(sentence, RuntimeWarning, stacklevel=2)


def mend_metadata(fd: int, blueprint: Blueprint, path: Path) -> list[str]:
    """Write metadata entries again that differ from the arguments', if only damage can have made them differ.

    Of each entry the header, which has the document's checksum, or the document must be the arguments' own,
    and the build tail must belong to them; else the file is left as it is.

    Args:
        fd: A building file whose gate is held.
        blueprint: Of the arguments.
        path: The file's name, for messages.
    Returns:
        Names of the entries that were written.
    Raises:
        FormatError: If the build tail is damaged, too.
    """
    damaged, layout = [], blueprint.layout
    if files.size(fd) != layout.building_nbytes:
        return []
    for entry, document in zip(layout.metadata, blueprint.documents, strict=True):
        header = entry.pack_local_header(crc32(document))
        found = files.read_at(fd, entry.offset, len(header) + len(document))
        if found == header + document:
            continue
        if found[: len(header)] != header and found[len(header) :] != document:
            return []
        damaged.append((entry, header + document))
    if damaged:
        parse_tail_header(files.read_at(fd, layout.tail_offset, PAGE_BYTES), layout, path=path)
    for entry, text in damaged:
        files.write_at(fd, entry.offset, text)
    return [entry.name for entry, _ in damaged]


def mend_constants(fd: int, layout: Layout, blueprint: Blueprint, *, is_spool: bool) -> list[str]:
    """Write constants again, or their checksums, that differ from those of the arguments.

    Offsets of ragged arrays, too, if either they or their checksum are the arguments' own; not those of a
    spool, which grow.

    Args:
        fd: A resumable file of the same identity, which has their digests: those of the arguments are right.
        layout: Its geometry; attributes of the arguments may be other ones.
        blueprint: Of the arguments.
        is_spool: Whether the file is one.
    Returns:
        Names of the constants that were written.
    """
    damaged = []
    for name, payload in blueprint.constants.items():
        place, checksum = layout.arrays[name].entry, struct.pack("<I", crc32c(payload))
        chunk = payload + checksum
        found = files.read_at(fd, place.data_offset, len(chunk)) if place else chunk
        if place is None or found == chunk:
            continue
        if not layout.arrays[name].meta.is_constant and is_spool:
            continue
        if not layout.arrays[name].meta.is_constant and payload != found[:-4] and checksum != found[-4:]:
            continue  # offsets of ragged samples, of other lengths: no identity has them
        files.write_at(fd, place.data_offset, chunk)
        damaged.append(f"constant {name!r}")
    return damaged


def take_back_damaged(building: BuildingFile, progress: Progress) -> Samples:
    """Read every committed sample and take back the commits of those that aren't what was committed.

    Nothing needs to be locked while they are read: committed samples are never written again.

    Args:
        building: The builder's file.
        progress: Called with the number of payload bytes that were read since the last call.
    Returns:
        Numbers of the samples that aren't committed any more.
    """
    layout = building.layout
    if is_read_to_count(building.header):
        return np.zeros(0, np.int64)  # no commit counts whose sample doesn't check
    with building.reading():
        committed, crcs = read_commits(building.fd, layout, building.header)
        samples, num_threads = np.flatnonzero(committed), num_cores()
        parts = intact_parts(
            building.fd, layout, samples, crcs[committed], num_threads=num_threads, progress=progress
        )
    damaged = samples[~parts.all(axis=1)]
    if len(damaged):
        take_back(building, damaged)
    return damaged


def check_finished(building: BuildingFile, progress: Progress) -> None:
    """Check every byte of a file that was finished and not published; its commit records are gone.

    Raises:
        CorruptChunkError: Names the first damaged array and sample.
    """

    found = verify_file(building.building_path, progress=progress)
    found.check("damaged since it was finished", hint=f"build it again with {HOW_TO_REPLACE}")


def describe_mended(building: BuildingFile, names: Sequence[str]) -> str:
    """A sentence about metadata and constants that were written again."""
    what = f"{_shown(names)} had changed since an earlier run"
    return f"{building.building_path}: {what}, and was written again; check the disk"


def describe_taken_back(building: BuildingFile, samples: Samples) -> str:
    """A sentence about samples whose commits were taken back."""
    numbers = _shown([str(sample) for sample in samples.tolist()])
    which = f"sample {numbers}" if len(samples) == 1 else f"{len(samples):,} samples ({numbers})"
    what = f"{which} had changed since an earlier run's commit"
    return f"{building.building_path}: {what}, and will be written again; check the disk"


def _shown(words: Sequence[str]) -> str:
    more = len(words) - _MAX_SHOWN
    return ", ".join(words[:_MAX_SHOWN]) + (f" and {more:,} more" if more > 0 else "")
