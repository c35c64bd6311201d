"""What a run says through `ups.log.logger`, collected."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from ups.log import logger


class _Notes(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        prefix = "warning: " if record.levelno >= logging.WARNING else ""
        self.lines.append(f"{prefix}{record.getMessage()}")


@contextmanager
def noted() -> Iterator[list[str]]:
    """Give the list of the sentences that are said inside, as commands show them."""
    handler, level = _Notes(), logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield handler.lines
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)


def taken(notes: list[str]) -> str:
    """Take what was said so far, a line each."""
    text = "\n".join(notes)
    notes.clear()
    return text
