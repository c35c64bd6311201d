"""Memory that the supervisor shares with one reader: a status record, then slots that arrays are read into.

It is a memfd, not a file: it has no name, so nothing of it stays behind however the two processes end, and
the size of /dev/shm doesn't limit it. Its pages are allocated at the start, so that lack of memory is an
error then and not a SIGBUS later.
"""

from __future__ import annotations

import errno
import math
import mmap
import os
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ups_store.errors import StoreError
from ups_store.format.metadata import dtype_name, dtype_of

ALIGN = 64  # an array starts on a cache line
_PAGE = mmap.PAGESIZE
_STATUS = struct.Struct("<q2d24s160sq")  # id of the request, progressed_s, since_s, doing, dataset, num_done


@dataclass(frozen=True)
class Activity:
    """What a reader does; written by the reader alone, and there even if it is stopped.

    Attributes:
        request_id: The request that it works on, or did last; -1 before the first.
        progressed_s: When it began the request, or last said that it got on with it, by `time.monotonic`,
            which is one clock for all processes of a machine.
        since_s: Since when it does what it does, likewise.
        doing: "starting", "idle", "beginning", "opening", "reading", "checking", "digesting", or what else a
            request says. HDF5 reads and decodes in one call, so "reading" is both.
        num_done: How much of the request it has done, in a unit of the request's.
        dataset: HDF5 path of what it reads; "" where no dataset is concerned.
    """

    request_id: int
    progressed_s: float
    since_s: float
    doing: str
    num_done: int = 0
    dataset: str = ""

    @property
    def activity(self) -> str:
        """What is done, and with what, such as "reading dataset 'tensor'"."""
        return f"{self.doing} dataset {self.dataset!r}" if self.dataset else self.doing


@dataclass(frozen=True)
class Placed:
    """An array in a slot: its dtype by name, and where it starts, in bytes from the start of the slot."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int


class SlotMemory:
    """The mapped memory; arrays that view it keep it mapped.

    Args:
        fd: The memfd. The caller owns it and may close it: the mapping has its own.
        num_slots: How many slots there are.
        slot_nbytes: Size of one, a multiple of the page size.
    """

    def __init__(self, fd: int, *, num_slots: int, slot_nbytes: int) -> None:
        assert slot_nbytes % _PAGE == 0, slot_nbytes
        self.num_slots = num_slots
        self.slot_nbytes = slot_nbytes
        self._map = mmap.mmap(fd, _PAGE + num_slots * slot_nbytes)

    @classmethod
    def create(cls, *, num_slots: int, slot_nbytes: int) -> tuple[SlotMemory, int]:
        """New memory and its descriptor, which the caller closes; slots get at least `slot_nbytes` bytes.

        Raises:
            StoreError: Kind "no_memory", if there isn't enough.
        """
        slot_nbytes = _round_up(max(1, slot_nbytes), _PAGE)
        nbytes = _PAGE + num_slots * slot_nbytes
        fd = os.memfd_create("ups_store slots")
        try:
            os.posix_fallocate(fd, 0, nbytes)
            memory = cls(fd, num_slots=num_slots, slot_nbytes=slot_nbytes)
        except (OSError, MemoryError) as error:
            os.close(fd)
            if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
                raise  # `mmap` keeps a descriptor of its own
            raise StoreError(
                f"no memory for {num_slots} slots of {slot_nbytes} bytes ({error})",
                kind="no_memory",
                hint="lower reading.num_workers",
            ) from error
        memory.write_status(Activity(-1, 0.0, 0.0, "starting"))
        return memory, fd

    def read_status(self) -> Activity:
        """The status as it is now."""
        record = self._map[: _STATUS.size]
        # The reader may be writing it: two equal looks are one whole record.
        while (again := self._map[: _STATUS.size]) != record:
            record = again
        request_id, progressed_s, since_s, doing, dataset, num_done = _STATUS.unpack(record)
        return Activity(request_id, progressed_s, since_s, _text(doing), num_done, _text(dataset))

    def write_status(self, status: Activity) -> None:
        """Change the status; `doing` is cut to 24 bytes, `dataset` to its last 160."""
        self._map[: _STATUS.size] = _STATUS.pack(
            status.request_id,
            status.progressed_s,
            status.since_s,
            status.doing.encode()[:24],
            status.dataset.encode()[-160:],
            status.num_done,
        )

    def view(self, slot: int, placed: Placed) -> npt.NDArray[Any]:
        """An array in a slot; a view that is valid until the slot is used again."""
        start = _PAGE + slot * self.slot_nbytes + placed.offset
        return np.ndarray(placed.shape, dtype_of(placed.dtype), buffer=self._map, offset=start)


class SlotFiller:
    """Places arrays one after the other in a slot."""

    def __init__(self, memory: SlotMemory, slot: int) -> None:
        self.placed: list[Placed] = []
        self._memory = memory
        self._slot = slot
        self._end = 0

    def place(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Room for an array, its content undefined; the caller of the pool made slots large enough."""
        placed = Placed(name, dtype_name(dtype), shape, self._end)
        nbytes = math.prod(shape) * dtype_of(placed.dtype).itemsize
        self._end += _round_up(nbytes, ALIGN)
        assert self._end <= self._memory.slot_nbytes, f"{self._end} bytes, slot of {self._memory.slot_nbytes}"
        self.placed.append(placed)
        return self._memory.view(self._slot, placed)


def _text(field: bytes) -> str:
    return field.rstrip(b"\0").decode("utf-8", "replace")


def _round_up(nbytes: int, multiple: int) -> int:
    return -(-nbytes // multiple) * multiple
