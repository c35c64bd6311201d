"""An object as a source of downloads: fetched by several ranges at a time, given in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

from ups_store.errors import StoreNotFoundError, StoreReplacedError
from ups_store.remote.client import RemoteObject
from ups_store.remote.client import Version as ObjectVersion
from ups_store.sources.origins import Body, ChangedError, Version
from ups_store.system.urls import Url

PIECE_BYTES = 4 << 20
PIECES_IN_FLIGHT = 8  # one connection gives a tenth of what a machine's network takes
_STRONG, _WEAK = "strong ", "weak "  # before tags: whether a request may have them as a condition


@dataclass(frozen=True)
class ObjectOrigin:
    """An object, for `ups_store.sources.download.fetch`.

    Attributes:
        url: Where it is.
        digest: What it has to be, "sha256:..."; "" if nothing says it.
    """

    url: Url
    digest: str = ""

    @property
    def location(self) -> str:
        """The URL without secrets."""
        return str(self.url.path)

    @property
    def key(self) -> str:
        """The URL without secrets."""
        return self.location

    def look(self, *, stall_s: float) -> Version | None:
        """Size and ETag."""
        try:
            found = RemoteObject(self.url, deadline_s=stall_s).version
        except StoreNotFoundError:
            return None
        return Version(found.nbytes, (_STRONG if found.is_strong else _WEAK) + found.tag, self.url.path.name)

    @contextmanager
    def opened(self, start: int, version: Version, *, stall_s: float) -> Iterator[Body]:
        """Its bytes from `start` on, if it still is that version."""
        is_strong = version.tag.startswith(_STRONG)
        tag = version.tag.removeprefix(_STRONG if is_strong else _WEAK)
        pinned = ObjectVersion(version.size, tag, is_strong, 0.0)
        pieces = _pieces(RemoteObject(self.url, deadline_s=stall_s, version=pinned), start)
        try:
            yield Body(start, version, pieces)
        except (StoreReplacedError, StoreNotFoundError):
            raise ChangedError from None
        finally:
            pieces.close()


def _pieces(source: RemoteObject, start: int) -> Generator[memoryview, None, None]:
    """Bytes to the end, a piece at a time, while the next ones are on their way."""
    size = source.version.nbytes
    ranges = iter([(at, min(PIECE_BYTES, size - at)) for at in range(start, size, PIECE_BYTES)])
    under_way: deque[Future[memoryview]] = deque()
    with ThreadPoolExecutor(PIECES_IN_FLIGHT, thread_name_prefix="ups_store pull") as pool:
        try:
            for wanted in ranges:
                under_way.append(pool.submit(source.read, *wanted))
                if len(under_way) == PIECES_IN_FLIGHT:
                    yield under_way.popleft().result()
            while under_way:
                yield under_way.popleft().result()
        finally:
            for future in under_way:
                future.cancel()
