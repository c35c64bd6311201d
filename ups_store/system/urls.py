"""URLs: whether a path is one, what it names, and how it is shown without what is secret of it."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import PosixPath
from urllib.parse import SplitResult, quote, unquote, urlsplit, urlunsplit

from ups_store.errors import SpecError

SCHEMES = ("s3", "gs", "az", "https", "http")
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.:-]+")  # two letters at least: "c:/" is none; "cache::s3" is one
# Two letters at least here, too; `:http:` and `name,option=value:` are what rclone takes.
_RCLONE = re.compile(r":?[\w.+@-][\w.+@ -]+(?:,[^:/]+)?:(?P<rest>.*)")


def url_of(path: str | os.PathLike[str]) -> str | None:
    """Give the URL that a path is, also where `pathlib` has made "s3:/bucket/a" of it; None if it is none."""
    text = os.fspath(path)
    scheme, colon, tail = text.partition(":/")
    if not colon or not _SCHEME.fullmatch(scheme):
        return None
    if not tail.startswith("/") and os.path.lexists(f"{scheme}:"):  # a folder of that name is meant
        return None
    slashes = "///" if scheme.lower() == "file" else "//"
    return f"{scheme}:{slashes}{tail.lstrip('/')}"


def is_remote(path: object) -> bool:
    """Say whether a path is a URL of what isn't a file of this machine."""
    if not isinstance(path, str | os.PathLike) or not isinstance(os.fspath(path), str):
        return False
    url = url_of(path)
    return url is not None and not url.lower().startswith("file:")


def shown_url(path: str | os.PathLike[str]) -> str:
    """Give a URL without user, password, query and fragment, which may hold keys."""
    parts = urlsplit(url_of(path) or os.fspath(path))
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def check_local(path: str | os.PathLike[str]) -> None:
    """Refuse a URL, of which `pathlib` would make a name here: "s3:/bucket/a" of "s3://bucket/a".

    Also one of "file://", whose path can be given itself.
    """
    url = url_of(path)
    if url is None:
        return
    is_file = url.lower().startswith("file:")
    hint = "copy the file here; stores can be read where they are, with `pip install 'ups-store[s3]'`"
    raise SpecError(
        "this is a URL",
        kind="url",
        path=url,
        expected="a path on this machine",
        hint=f"say /{url.partition(':///')[2]}" if is_file else hint,
    )


def instead_of_rclone(text: str, *, folder: str | os.PathLike[str] = "") -> str | None:
    """Say what to write instead of an rclone remote, `b2:BUCKET/FOLDER`; None if the text is none.

    A file that is there in the folder is meant, whatever its name looks like.
    """
    match = _RCLONE.fullmatch(text)
    if match is None or match["rest"].startswith("//"):
        return None
    if any(os.path.lexists(os.path.join(folder, name)) for name in (text, text.partition("/")[0])):
        return None
    bucket = match["rest"].strip("/") or "BUCKET/FOLDER"
    return f"say s3://{bucket}, and where that is by AWS_ENDPOINT_URL, as https://s3.REGION.backblazeb2.com"


class UrlPath(PosixPath):
    """A URL as the path of a store: names and suffixes as of any path, and `str` gives the URL again."""

    def __str__(self) -> str:
        scheme, _, tail = super().__str__().partition(":/")
        return f"{scheme}://{tail}"

    def __fspath__(self) -> str:
        return str(self)


@dataclass(frozen=True)
class Url:
    """The URL of an object, or of a folder of them."""

    text: str  # as it was given; of https it may hold a password or a signature

    @classmethod
    def of(cls, path: str | os.PathLike[str]) -> Url:
        """Parse the URL of an object, else `SpecError` of kind "url"."""
        text = url_of(path)
        expected = "s3://BUCKET/KEY, gs://BUCKET/KEY, az://CONTAINER/KEY or https://HOST/PATH"
        if text is None:
            raise SpecError("no URL", kind="url", path=os.fspath(path), expected=expected)
        url = cls(text)
        if url.scheme not in SCHEMES or not url._parts.netloc or not url.key.strip("/"):
            raise SpecError("URL of a store", kind="url", path=shown_url(text), expected=expected)
        return url

    def __repr__(self) -> str:
        return f"Url({shown_url(self.text)!r})"

    @cached_property
    def _parts(self) -> SplitResult:
        return urlsplit(self.text)

    @property
    def scheme(self) -> str:
        """One of `SCHEMES`, where it was checked."""
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

    def below(self, name: str) -> Url:
        """The object of a name, which may have slashes, in this folder."""
        return self._at(f"{self._parts.path.rstrip('/')}/{quote(name)}")

    def beside(self, *names: str) -> Url:
        """The object of another name, or of a name in a folder, beside this one."""
        return self._at("/".join((self._parts.path.rpartition("/")[0], *names)))

    def _at(self, path: str) -> Url:
        return Url(urlunsplit(self._parts._replace(path=path)))
