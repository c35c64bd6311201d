"""Where a shared cache is, as people write it: a URL or a folder; and what reads it there."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import unquote, urlsplit

from ups_store.errors import SpecError, check_installed
from ups_store.remote.shared_cache import SharedCache
from ups_store.system.paths import path_of
from ups_store.system.urls import shown_url, url_of

DEADLINE_S = 60.0  # without progress
EXPECTED = "s3://BUCKET/PREFIX, gs://..., az://..., https://... (read only), or a folder"


def open_shared(place: str | Path, *, deadline_s: float = DEADLINE_S) -> SharedCache:
    """The shared cache at a URL or in a folder; nothing is asked yet.

    Args:
        place: See `EXPECTED`.
        deadline_s: For one request to a server, with all its attempts.
    Raises:
        SpecError: For another kind of URL.
        MissingExtraError: For an object store, where obstore isn't installed.
    """
    scheme = _scheme(place)
    if not scheme:
        from ups_store.remote.shared_folder import FolderCache

        return FolderCache(_folder(place))
    check_installed("obstore", extra="s3")
    url = str(url_of(place))  # of a `Path`, too, which has made one slash of two
    if scheme in ("https", "http"):
        from ups_store.remote.shared_web import WebCache

        return WebCache(url, deadline_s)
    from ups_store.remote.shared_bucket import BucketCache

    return BucketCache(url, deadline_s)


def check_place(place: str) -> str:
    """Check that it can name a shared cache, without importing what reads it; returns it, a folder absolute.

    Raises:
        SpecError: Kind "url".
    """
    return place if _scheme(place) else str(_folder(place))


def name_of_place(place: str) -> str:
    """What a shared cache is called in messages, without secrets."""
    return shown_url(place) if _scheme(place) else str(_folder(place))


def is_read_only(place: str) -> bool:
    """Whether nothing can be pushed there: to a web server."""
    return _scheme(place) in ("https", "http")


def needs_client(place: str) -> bool:
    """Whether it takes `obstore`: anything but a folder."""
    return bool(_scheme(place))


def _scheme(place: str | Path) -> str:
    """The scheme of a URL; "" of a folder, also of one that is given as file:///..."""
    url = url_of(place)
    scheme = urlsplit(url).scheme.lower() if url else ""
    is_known = scheme in ("", "file", "s3", "gs", "az", "https", "http")
    if not is_known or (url and scheme != "file" and not urlsplit(url).netloc):
        raise SpecError("shared cache", kind="url", path=shown_url(place), expected=EXPECTED)
    return "" if scheme == "file" else scheme


def _folder(place: str | Path) -> Path:
    text = os.fspath(place)
    if text.lower().startswith("file:"):
        text = unquote(urlsplit(text).path)
    return path_of(os.path.expanduser(text))
