"""Requests that misbehave on purpose; reader processes import them from here."""

from __future__ import annotations

import mmap
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ups_store.sources import regions
from ups_store.sources.contents import EVERYTHING
from ups_store.sources.reader_process import Call, Reader, ReadRequest
from ups_store.system import memory


@dataclass(frozen=True, eq=False)
class FakeRead(ReadRequest):
    """Reads nothing: after a pause its array "fields" holds the sample numbers."""

    pause_s: float = 0.0

    def run(self, reader: Reader) -> None:
        reader.doing("reading")
        time.sleep(self.pause_s)
        reader.place("fields", self.samples.shape, np.int64)[...] = self.samples


@dataclass(frozen=True, eq=False)
class SteadyRead(ReadRequest):
    """Takes 10 pauses, and says after each that it gets on."""

    pause_s: float = 0.0

    def run(self, reader: Reader) -> None:
        for _ in range(10):
            time.sleep(self.pause_s)
            reader.progressed()


@dataclass(frozen=True, eq=False)
class CrashingRead(ReadRequest):
    """Ends its process by a signal: on the first attempt only, if there is a file to be deleted."""

    number: int = signal.SIGKILL
    unless_gone: Path | None = None

    def run(self, reader: Reader) -> None:
        if self.unless_gone is None or self.unless_gone.exists():
            if self.unless_gone:
                self.unless_gone.unlink()
            os.kill(os.getpid(), self.number)
            time.sleep(60)
        reader.place("fields", self.samples.shape, np.int64)[...] = self.samples


@dataclass(frozen=True, eq=False)
class CutAmidRead(ReadRequest):
    """Has the file cut off as soon as a part of it is mapped."""

    def run(self, reader: Reader) -> object:
        real = memory.map_read_only

        def cut(fd: int, nbytes: int, *, first: int = 0) -> mmap.mmap:
            mapping = real(fd, nbytes, first=first)
            os.truncate(self.path, 1)
            return mapping

        memory.map_read_only = cut
        regions._MAPPED_FROM = 1
        return super().run(reader)


@dataclass(frozen=True, eq=False)
class FaultyRead(ReadRequest):
    """Raises what no request should."""

    error: type[Exception] = LookupError

    def run(self, reader: Reader) -> None:
        raise self.error("a defect")


def modules(reader: Reader) -> set[str]:
    """Tells which modules the process has imported."""
    return set(sys.modules)


def core_limit(reader: Reader) -> tuple[int, int]:
    """Tells how large a core file the process may leave."""
    return resource.getrlimit(resource.RLIMIT_CORE)


def call(function: Callable[[Reader], object]) -> Call:
    """Call one of these."""
    return Call(function, (), "none", "this")


def fake(cls: type[ReadRequest], first: int, count: int = 1, **options: object) -> ReadRequest:
    """A request for samples `first .. first + count` of a file that isn't there."""
    samples = np.arange(first, first + count)
    return cls(Path("fake.h5"), None, EVERYTHING, samples, samples, {}, **options)
