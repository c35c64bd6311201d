"""The errors of stores, for those outside `ups.data` who tell people about them."""

from collections.abc import Iterator
from contextlib import contextmanager

from ups_store.errors import CorruptChunkError, FormatError, StoreNotFoundError
from ups_store.errors import StoreError as StoreError

UNREADABLE = (CorruptChunkError, FormatError, StoreNotFoundError)  # a store that is read, as a source can be

# Flags of `python -m ups_store.build` in its hints, and what a run's configuration has in their place.
_KEYS = {
    "--on-nan keep": "data.on_nan=keep",
    "--cache-dtype": "cache.dtype",
    "--num-workers 0": "reading.num_workers=0",
    "--num-workers": "reading.num_workers",
    "--open-timeout": "reading.open_timeout_s",
    "--timeout": "reading.timeout_s",
}


@contextmanager
def hints_in_keys() -> Iterator[None]:
    """Make the hint of a store's error one that somebody who trains or evaluates can follow."""
    try:
        yield
    except StoreError as error:
        for flag, key in _KEYS.items():
            error.hint = error.hint and error.hint.replace(flag, key)
        raise
