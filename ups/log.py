"""What a run says while it works: one logger, which commands show on stderr.

Sentences are plain text without a line break at their end. Users of the library see warnings, and
everything with a handler and `logging.getLogger("ups").setLevel(logging.INFO)`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

logger = logging.getLogger("ups")


@contextmanager
def quiet() -> Iterator[None]:
    """Inside, nothing is said: it was said before, or isn't about what the caller does."""
    with _filtered(lambda record: False):
        yield


@contextmanager
def once_each() -> Iterator[None]:
    """Inside, a sentence that several parts of a run find alike is said once."""
    seen: set[str] = set()

    def is_new(record: logging.LogRecord) -> bool:
        text = record.getMessage()
        return text not in seen and not seen.add(text)  # type: ignore[func-returns-value]

    with _filtered(is_new):
        yield


@contextmanager
def prefixed(prefix: str) -> Iterator[None]:
    """Inside, every sentence begins with a prefix, such as a seed."""

    def change(record: logging.LogRecord) -> bool:
        record.msg, record.args = f"{prefix}{record.getMessage()}", ()
        return True

    with _filtered(change):
        yield


@contextmanager
def _filtered(change: Callable[[logging.LogRecord], bool]) -> Iterator[None]:
    logger.addFilter(change)
    try:
        yield
    finally:
        logger.removeFilter(change)
