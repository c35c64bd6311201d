"""Unsynced changes of a file, and which of them may have reached it after a power loss."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

_SECTOR_BYTES = 512
_NUM_SECTOR_VARIANTS = 2


@dataclass(frozen=True)
class Write:
    """Bytes at an offset."""

    offset: int
    data: bytes

    def on(self, content: bytearray) -> None:
        """Make the change in a file's content."""
        end = self.offset + len(self.data)
        content.extend(bytes(max(0, end - len(content))))
        content[self.offset : end] = self.data


@dataclass(frozen=True)
class Resize:
    """A new length: by truncation, or by allocation of zeros."""

    nbytes: int
    only_grow: bool

    def on(self, content: bytearray) -> None:
        """Make the change in a file's content."""
        if len(content) < self.nbytes:
            content.extend(bytes(self.nbytes - len(content)))
        elif not self.only_grow:
            del content[self.nbytes :]


Change = Write | Resize


def variants_of(pending: list[Change], chance: random.Random) -> Iterator[list[Change]]:
    """Which unsynced changes of a file may have reached it: prefixes, single ones, all but one, torn ones."""
    num = len(pending)
    for i in range(num + 1):
        yield pending[:i]
    for i in range(num if num > 1 else 0):
        yield [pending[i]]
        yield pending[:i] + pending[i + 1 :]
    for i, change in enumerate(pending):
        if isinstance(change, Write):
            for torn in _torn(change, chance):
                yield [*pending[:i], *torn]
                yield [*torn, *pending[i + 1 :]]


def _torn(write: Write, chance: random.Random) -> Iterator[list[Change]]:
    """A write of which a part arrived: the first or last half, or any of its sectors."""
    cut = (write.offset + len(write.data) // 2) // _SECTOR_BYTES * _SECTOR_BYTES - write.offset
    if 0 < cut < len(write.data):
        yield [Write(write.offset, write.data[:cut])]
        yield [Write(write.offset + cut, write.data[cut:])]
        for _ in range(_NUM_SECTOR_VARIANTS):
            yield [sector for sector in _sectors(write) if chance.random() < 0.5]


def _sectors(write: Write) -> Iterator[Write]:
    """The write cut at the sectors of the disk, which arrive whole or not at all (spec 6.10)."""
    end = write.offset + len(write.data)
    first = write.offset
    while first < end:
        past = min(end, (first // _SECTOR_BYTES + 1) * _SECTOR_BYTES)
        yield Write(first, write.data[first - write.offset : past - write.offset])
        first = past
