"""The watchers of one run of the command: the terminal, the stall watcher, and a log for programs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ups_store.build.config import BuildConfig
from ups_store.build.event_log import EventLog
from ups_store.build.stall import StallWatcher
from ups_store.build.watch import ConsoleWatcher
from ups_store.console import console, interruptible

if TYPE_CHECKING:
    from ups_store.build.watcher import Watcher
    from ups_store.sources.pool import ReaderPool


class Watchers:
    """Several watchers as one."""

    def __init__(self, watchers: Sequence[Watcher]) -> None:
        self._watchers = watchers

    def stage(self, name: str, total: int, *, unit: str) -> None:
        """Tell all of them."""
        for watcher in self._watchers:
            watcher.stage(name, total, unit=unit)

    def advance(self, num: int) -> None:
        """Tell all of them."""
        for watcher in self._watchers:
            watcher.advance(num)

    def note(self, message: str) -> None:
        """Tell all of them."""
        for watcher in self._watchers:
            watcher.note(message)

    def watch(self, pool: ReaderPool) -> None:
        """Tell all of them."""
        for watcher in self._watchers:
            watcher.watch(pool)

    def waits(self, what: str) -> None:
        """Tell all of them."""
        for watcher in self._watchers:
            watcher.waits(what)


class _Warnings(logging.Handler):
    """Notes the warnings of others, such as an encoder's, where everything else is told."""

    def __init__(self, note: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._note = note

    def emit(self, record: logging.LogRecord) -> None:
        self._note(f"{record.name}: {record.getMessage()}")


@contextmanager
def _noting_warnings(note: Callable[[str], None]) -> Iterator[None]:
    handler = _Warnings(note)
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)


@contextmanager
def watching(config: BuildConfig, *, log_json: Path | None = None) -> Iterator[Watchers]:
    """All watchers for the duration of a block, in which Ctrl-C and SIGTERM are `BuildInterruptedError`."""
    with ExitStack() as stack:
        log = stack.enter_context(EventLog(log_json)) if log_json else None
        stack.enter_context(interruptible())
        shown = stack.enter_context(ConsoleWatcher(console))

        def say(diagnosis: str) -> None:
            shown.note(diagnosis)
            if log:
                log.tell("stalled", message=diagnosis)

        stall = StallWatcher(config.reading.stall_warning_s, folder=config.cache.dir, say=say)
        stack.enter_context(stall)
        watchers = Watchers([shown, stall, *([log] if log else [])])
        stack.enter_context(_noting_warnings(watchers.note))
        yield watchers
