"""One line on stderr that says how far long work is; nothing where stderr is no terminal."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self

from ups_store.printable import one_line

_EVERY_S = 0.2
_ERASE = "\r\x1b[K"


class ProgressLine:
    """Counts samples and bytes; the line goes away at the end.

    Args:
        name: What is written.
        total: Samples in all; None where that isn't known.
        is_wanted: Whether to show anything; None: if stderr is a terminal.
    """

    def __init__(self, name: str, *, total: int | None = None, is_wanted: bool | None = None) -> None:
        self._name, self._total = one_line(name), total
        self._shows = sys.stderr.isatty() if is_wanted is None and sys.stderr else bool(is_wanted)
        self._began = self._last = time.monotonic()
        self._first = self._samples = self._nbytes = 0

    def begin_at(self, num_samples: int) -> None:
        """So many samples were there already: they don't count for the rate."""
        self._first = self._samples = num_samples

    def advance(self, num_samples: int, nbytes: int) -> None:
        """So many more were taken."""
        self._samples += num_samples
        self._nbytes += nbytes
        if self._shows and time.monotonic() - self._last >= _EVERY_S:
            self._write(self._line())

    def say(self, what: str) -> None:
        """Show something else, such as what happens at the end."""
        if self._shows:
            self._write(f"{self._name}: {one_line(what)}")

    def _line(self) -> str:
        rate = (self._samples - self._first) / max(1e-9, time.monotonic() - self._began)
        of = "" if self._total is None else f" of {self._total:,}"
        line = f"{self._name}: {self._samples:,}{of} samples, {self._nbytes / 1e6:,.0f} MB, {rate:,.0f}/s"
        if self._total is not None and rate > 0:
            left_s = round((self._total - self._samples) / rate)
            line += f", {left_s // 3600}:{left_s // 60 % 60:02}:{left_s % 60:02} left"
        return line

    def _write(self, line: str) -> None:
        self._last = time.monotonic()
        sys.stderr.write(f"{_ERASE}{line}")
        sys.stderr.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._shows:
            sys.stderr.write(_ERASE)
            sys.stderr.flush()
