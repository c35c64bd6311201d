"""`Request`: what `Store.preload` was asked for, and `Job`: the same, with the file it is about."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias, get_args

from ups_store.catalog import Catalog
from ups_store.errors import SpecError
from ups_store.store_file import StoreFile

Mode: TypeAlias = Literal["auto", "page-cache", "copy", "pinned", "device"]
Progress: TypeAlias = Callable[[int], object]

NUM_THREADS = 4  # reads in flight, which a disk needs more of than there may be processors
_USED_BY = {  # arguments that have an effect in some modes only
    "device": ("auto", "pinned", "device"),
    "samples": ("device",),
    "shared": ("auto", "copy"),
    "lock": ("auto", "page-cache", "copy"),
}


@dataclass(frozen=True)
class Request:
    """Arguments of `Store.preload`, which explains them."""

    mode: Mode = "auto"
    device: str | None = None
    samples: range | None = None
    shared: bool = False
    lock: bool = False
    margin: float = 0.1
    num_threads: int | None = None
    progress: Progress | None = None

    def check(self, num_samples: int, *, path: Path) -> None:
        """Refuse what has no meaning for a store of `num_samples`.

        Raises:
            SpecError: Names the argument.
        """
        if self.mode not in get_args(Mode):
            raise _wrong("mode", f"one of {', '.join(get_args(Mode))}", self.mode, path)
        for name, modes in _USED_BY.items():
            if getattr(self, name) and self.mode not in modes:
                raise _wrong(name, f"mode {' or '.join(modes)}, where it has an effect", self.mode, path)
        if not 0 <= self.margin < 1:
            raise _wrong("margin", "0 <= margin < 1", self.margin, path)
        if self.num_threads is not None and self.num_threads < 1:
            raise _wrong("num_threads", "at least 1", self.num_threads, path)
        part = self.samples
        if part is not None and (part.step != 1 or not 0 <= part.start < part.stop <= num_samples):
            raise _wrong("samples", f"a range of step 1 within 0..{num_samples}", part, path)


@dataclass(frozen=True)
class Job:
    """A request and what it is about.

    Attributes:
        file: The store's file.
        catalog: What it holds.
        fd: The same file, open for reading.
        request: What was asked for.
    """

    file: StoreFile
    catalog: Catalog
    fd: int
    request: Request

    @property
    def num_threads(self) -> int:
        """Threads that read."""
        return self.request.num_threads or NUM_THREADS

    def progress(self, nbytes: int) -> None:
        """Tell the caller that so many bytes more are there."""
        if self.request.progress is not None:
            self.request.progress(nbytes)


def _wrong(name: str, expected: str, found: object, path: Path) -> SpecError:
    return SpecError(f"preload argument {name!r}", kind=name, path=path, expected=expected, found=found)
