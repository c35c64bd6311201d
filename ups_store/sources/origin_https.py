"""Sources by https: ranges, what tells versions apart, and names; with the standard library alone."""

from __future__ import annotations

import base64
import email.message
import hashlib
import http.client
import re
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

from ups_store.errors import SourceError
from ups_store.sources.origins import CHUNK_BYTES, Body, ChangedError, TransientError, Version, checked_name

_RANGE = re.compile(r"bytes (?:(\d+)-\d+|\*)/(\d+)")
_TRANSIENT = (408, 425, 429, 500, 502, 503, 504)
_NOT_ALLOWED = (401, 403)
_MISSING = (404, 410)
_OTHER_NOW = (412, 416)  # If-Range isn't known there, or the file has become shorter
_MAX_PAUSE_S = 60.0
_SUFFIXES = (".h5", ".hdf5")


@dataclass(frozen=True)
class HttpsOrigin:
    """A URL.

    Attributes:
        url: Without fragment.
        digest: See `Origin`.
        name: What the file is called; "": as the URL or the server says.
    """

    url: str
    digest: str = ""
    name: str = ""

    @property
    def location(self) -> str:
        """The URL without user, password and query, which may hold a key."""
        parts = urlsplit(self.url)
        return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))

    @property
    def key(self) -> str:
        """The digest that is expected, or one of the URL, whose query may hold a secret."""
        url = _without_user(self.url)[0]
        return self.digest or f"url {hashlib.sha256(url.encode()).hexdigest()}"

    def look(self, *, stall_s: float) -> Version | None:
        """Ask for the first byte: many servers, and all signed URLs, refuse HEAD."""
        try:
            with self._asked({"Range": "bytes=0-0"}, stall_s) as answer:
                return self._version(answer)
        except _RefusedError as refused:
            if refused.code in _MISSING:
                return None
            if refused.code in _OTHER_NOW and _RANGE.fullmatch(refused.range):  # of no bytes at all
                return Version(0, "", self._name(refused.headers))
            raise refused.error(self.location) from None

    @contextmanager
    def opened(self, start: int, version: Version, *, stall_s: float) -> Iterator[Body]:
        """Its bytes, from `start` on if the server gives ranges of this version, else from 0."""
        headers = {}
        if start:
            headers = {"Range": f"bytes={start}-", "If-Range": version.tag.partition(" ")[2]}
        try:
            with self._asked(headers, stall_s) as answer:
                found = self._version(answer)
                if found != version:
                    raise ChangedError
                yield Body(_start(answer), found, _chunks(answer))
        except _RefusedError as refused:
            if refused.code in _OTHER_NOW:
                raise ChangedError from None
            raise refused.error(self.location) from None

    @contextmanager
    def _asked(self, headers: dict[str, str], stall_s: float) -> Iterator[http.client.HTTPResponse]:
        url, authorization = _without_user(self.url)
        try:
            request = urllib.request.Request(url, headers={"User-Agent": "ups-store", **headers})
            if authorization:
                request.add_unredirected_header("Authorization", authorization)
            with _opener().open(request, timeout=stall_s) as answer:
                yield answer
        except urllib.error.HTTPError as error:
            with error:
                raise _RefusedError(error.code, error.reason, error.headers) from None
        except urllib.error.URLError as error:
            if isinstance(error.reason, ssl.SSLCertVerificationError):
                raise _not_trusted(self.location, error.reason) from error
            raise TransientError(f"can't be reached ({error.reason})") from error
        except (http.client.InvalidURL, ValueError) as error:
            raise SourceError("no URL", kind="bad_url", path=self.location, hint="check it") from error
        except http.client.HTTPException as error:  # its text is often empty
            raise TransientError(f"{type(error).__name__} {error}".strip()) from error

    def _version(self, answer: http.client.HTTPResponse) -> Version:
        headers = answer.headers
        size = _size(answer)
        coding = headers.get("Content-Encoding", "identity")
        if size is None or coding != "identity":
            raise SourceError(
                "the server doesn't say how long the file is",
                kind="no_length",
                path=self.location,
                expected="Content-Length or Content-Range, of bytes that aren't encoded",
                found=f"Content-Encoding {coding}" if coding != "identity" else None,
                hint="fetch it by another way, or give it as an rclone remote",
            )
        return Version(size, _tag(headers), self._name(headers))

    def _name(self, headers: email.message.Message) -> str:
        """As it was said, as the URL ends, or as the server calls it."""
        own = PurePosixPath(unquote(urlsplit(self.url).path)).name
        if self.name or own.endswith(_SUFFIXES):
            return self.name or own
        return checked_name(headers.get_filename() or own, location=self.location)


class _RefusedError(Exception):
    """An answer that isn't 2xx."""

    def __init__(self, code: int, reason: str, headers: email.message.Message) -> None:
        super().__init__(code)
        self.code, self.reason, self.headers = code, reason, headers
        self.range = headers.get("Content-Range", "")

    def error(self, location: str) -> Exception:
        """What it means for those who wanted the file."""
        said = f"the server answered {self.code} {self.reason}"
        if self.code in _TRANSIENT:
            return TransientError(said, pause_s=_pause_s(self.headers.get("Retry-After")))
        if self.code in _NOT_ALLOWED:
            hint = "check the URL: signed ones expire"
            return SourceError(said, kind="not_allowed", path=location, hint=hint)
        return SourceError(said, kind="refused", path=location, hint="check the URL")


class _NoDowngrade(urllib.request.HTTPRedirectHandler):
    """Follows redirects, but none from https to what anybody may have changed on the way."""

    def redirect_request(
        self, request: urllib.request.Request, answer: Any, code: int, message: str, headers: Any, to: str
    ) -> urllib.request.Request | None:
        if request.full_url.lower().startswith("https:") and not to.lower().startswith("https:"):
            place = to.partition("?")[0]
            raise SourceError("a redirect leads away from https", kind="refused", path=place)
        return super().redirect_request(request, answer, code, message, headers, to)


def _without_user(url: str) -> tuple[str, str]:
    """The URL without user and password, and the header that says these; empty if there are none."""
    parts = urlsplit(url)
    user, at, host = parts.netloc.rpartition("@")
    if not at:
        return url, ""
    coded = base64.b64encode(unquote(user).encode()).decode()
    return urlunsplit(parts._replace(netloc=host)), f"Basic {coded}"


def _opener() -> urllib.request.OpenerDirector:
    return urllib.request.build_opener(_NoDowngrade)


def _chunks(answer: http.client.HTTPResponse) -> Iterator[bytes]:
    while chunk := answer.read1(CHUNK_BYTES):
        yield chunk


def _size(answer: http.client.HTTPResponse) -> int | None:
    """Bytes of the whole file."""
    if answer.status == 206:
        match = _RANGE.fullmatch(answer.headers.get("Content-Range", ""))
        return int(match[2]) if match else None
    length = answer.headers.get("Content-Length", "")
    return int(length) if length.isdecimal() else None


def _start(answer: http.client.HTTPResponse) -> int:
    match = _RANGE.fullmatch(answer.headers.get("Content-Range", "")) if answer.status == 206 else None
    return int(match[1]) if match and match[1] else 0


def _tag(headers: email.message.Message) -> str:
    """What If-Range takes: a strong ETag, or a date."""
    etag, modified = headers.get("ETag", ""), headers.get("Last-Modified", "")
    if etag and not etag.startswith("W/"):
        return f"etag {etag}"
    return f"modified {modified}" if modified else ""


def _pause_s(text: str | None) -> float:
    """Seconds of Retry-After, which may also be a date; at most a minute."""
    if not text:
        return 0.0
    try:
        from datetime import UTC, datetime

        pause_s = (
            float(text)
            if text.isdecimal()
            else (parsedate_to_datetime(text) - datetime.now(UTC)).total_seconds()
        )
    except (ValueError, TypeError):
        return 0.0
    return min(max(0.0, pause_s), _MAX_PAUSE_S)


def _not_trusted(location: str, reason: ssl.SSLCertVerificationError) -> SourceError:
    return SourceError(
        f"the server's certificate isn't valid ({reason.verify_message})",
        kind="not_trusted",
        path=location,
        hint="check the URL and the clock; SSL_CERT_FILE names other authorities",
    )
