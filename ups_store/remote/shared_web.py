"""A shared cache behind a web server: it lists nothing and takes nothing, but what is named can be pulled."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn
from urllib.parse import quote

from ups_store.errors import RemoteError, StoreNotFoundError
from ups_store.remote.client import RemoteObject
from ups_store.remote.pieces import ObjectOrigin
from ups_store.remote.shared_cache import SharedFile, Stray
from ups_store.sources.download import Progress
from ups_store.sources.origins import Origin, joined
from ups_store.system.urls import Url, shown_url


class WebCache:
    """See `SharedCache`.

    Args:
        url: Of its root; a query, such as a signature, goes with every request.
        deadline_s: For one request, with all its attempts.
    """

    is_read_only = True

    def __init__(self, url: str, deadline_s: float) -> None:
        self.location = shown_url(url)
        self._url, self._deadline_s = url, deadline_s

    def look(self, config_hash: str, names: Sequence[str]) -> list[SharedFile]:
        """See `SharedCache`; asks for each name."""
        found = []
        for name in names:
            entry = SharedFile(config_hash, name, 0, 0.0)
            try:
                version = RemoteObject(self._place(entry), deadline_s=self._deadline_s).version
            except StoreNotFoundError:
                continue
            found.append(SharedFile(config_hash, name, version.nbytes, version.modified_s))
        return found

    def entries(self) -> tuple[list[SharedFile], list[Stray]]:
        """Refuse: there are no listings by http."""
        raise RemoteError(
            "a web server lists nothing",
            kind="not_listed",
            path=self.location,
            hint="name a store by its hash and name, as `ups-store pull URL HASH/NAME`",
        )

    def origin(self, entry: SharedFile) -> Origin:
        """See `SharedCache`; the file itself has the checksums."""
        return ObjectOrigin(self._place(entry))

    def create(self, key: str, path: Path, *, replace: bool, progress: Progress) -> bool:
        """Refuse: it is read only."""
        self._refuse()

    def remove(self, key: str, upload_id: str = "") -> None:
        """Refuse: it is read only."""
        self._refuse()

    def _place(self, entry: SharedFile) -> Url:
        return Url(joined(self._url, quote(entry.key)))

    def _refuse(self) -> NoReturn:
        hint = "push to where the server has its files from"
        raise RemoteError("https is read only", kind="read_only", path=self.location, hint=hint)
