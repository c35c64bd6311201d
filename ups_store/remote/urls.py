"""URLs of objects: which of them are meant by a path, how they are shown, and what lies beside them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import PosixPath
from urllib.parse import SplitResult, unquote, urlsplit, urlunsplit

from ups_store.errors import SpecError
from ups_store.system.paths import shown_url, url_of

SCHEMES = ("s3", "gs", "az", "https", "http")


class UrlPath(PosixPath):
    """A URL as the path of a store: names and suffixes as of any path, and `str` gives the URL again."""

    def __str__(self) -> str:
        scheme, _, rest = super().__str__().partition(":/")
        return f"{scheme}://{rest}"

    def __fspath__(self) -> str:
        return str(self)


@dataclass(frozen=True)
class Url:
    """The URL of an object.

    Attributes:
        text: As it was given; of https it may hold a password or a signature.
    """

    text: str

    @classmethod
    def of(cls, path: str | os.PathLike[str]) -> Url:
        """The URL that a path is.

        Raises:
            SpecError: Kind "url", if it is none, of another scheme, or names no object.
        """
        text = url_of(path)
        expected = "s3://BUCKET/KEY, gs://BUCKET/KEY, az://CONTAINER/KEY or https://HOST/PATH"
        if text is None:
            raise SpecError("no URL", kind="url", path=os.fspath(path), expected=expected)
        parts = urlsplit(text)
        if parts.scheme not in SCHEMES or not parts.netloc or not parts.path.strip("/"):
            raise SpecError("URL of a store", kind="url", path=shown_url(text), expected=expected)
        return cls(text)

    def __repr__(self) -> str:
        return f"Url({shown_url(self.text)!r})"

    @cached_property
    def _parts(self) -> SplitResult:
        return urlsplit(self.text)

    @property
    def scheme(self) -> str:
        """One of `SCHEMES`."""
        return self._parts.scheme

    @property
    def bucket(self) -> str:
        """Bucket or container; of https all but the path: the query is the same for every object."""
        if not self.is_http:
            return self._parts.netloc
        return urlunsplit((self.scheme, self._parts.netloc, "", self._parts.query, ""))

    @property
    def key(self) -> str:
        """Name of the object in its bucket."""
        return unquote(self._parts.path).lstrip("/")

    @property
    def is_http(self) -> bool:
        """Whether it is a file of a web server."""
        return self.scheme in ("https", "http")

    @property
    def path(self) -> UrlPath:
        """The same for messages and names, without what is secret."""
        return UrlPath(shown_url(self.text))

    def beside(self, *names: str) -> Url:
        """The object of another name, or of a name in a folder, beside this one."""
        folder = self._parts.path.rpartition("/")[0]
        return Url(urlunsplit(self._parts._replace(path="/".join((folder, *names)))))
