"""Which kind of origin or folder a path, a URL or an rclone remote names, each imported where it is met."""

from __future__ import annotations

from pathlib import Path

from ups_store.errors import check_installed
from ups_store.sources.origins import (
    Folder,
    LocalOrigin,
    Origin,
    name_of,
    scheme_of,
    without_fragment,
)


def origin_of(text: str | Path) -> Origin:
    """The place that a path, a URL or an rclone remote names.

    What follows "#" in the last two isn't sent: `#sha256=...` or `#md5=...` says what the file has to be,
    `#name=...` what it is called.

    Raises:
        ConfigError: If it isn't one of these; kind "unknown_scheme", "bad_fragment".
        MissingExtraError: For S3, where obstore isn't installed.
    """
    if isinstance(text, Path):
        return LocalOrigin(text)
    place, digest, name = without_fragment(text)
    scheme = scheme_of(place)
    if scheme == "s3":
        check_installed("obstore", extra="s3")
        from ups_store.sources.origin_s3 import S3Origin

        return S3Origin(place, digest=digest, name=name or name_of(place))
    if scheme:
        from ups_store.sources.origin_https import HttpsOrigin

        return HttpsOrigin(place, digest=digest, name=name)
    from ups_store.sources.origin_rclone import RcloneOrigin

    return RcloneOrigin(place, digest=digest, name=name or name_of(place))


def folder_of(text: str) -> Folder | None:
    """The remote folder, if it is of a kind that can be listed: https isn't."""
    scheme = scheme_of(text)
    if scheme == "s3":
        check_installed("obstore", extra="s3")
        from ups_store.sources.origin_s3 import S3Folder

        return S3Folder(text)
    if scheme:
        return None
    from ups_store.sources.origin_rclone import RcloneFolder

    return RcloneFolder(text)
