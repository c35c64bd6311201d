"""Objects by ranges: pinned to one version, within a deadline, by a client of this process (`obstore`).

Keys, regions and endpoints are those of the environment: AWS_ACCESS_KEY_ID, AWS_REGION, AWS_ENDPOINT_URL;
GOOGLE_SERVICE_ACCOUNT; AZURE_STORAGE_ACCOUNT_NAME; and so on. AWS_SKIP_SIGNATURE=true reads public buckets.
"""

from __future__ import annotations

import functools
import os
import random
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

from ups_store.errors import RemoteError, StoreNotFoundError, StoreReplacedError, needs
from ups_store.sources.origin_s3 import REDIRECTED, reaching_only_named_hosts
from ups_store.system.urls import Url

DEADLINE_S = 60.0  # of one request with all its attempts
MAX_REQUESTS = 32  # of the process under way at once
_STALL_S = 10.0  # without a byte, until an attempt is given up
_CONNECT_S = 5.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 5.0  # between attempts; up to half of it is left out by chance
_CHUNK_BYTES = 8 << 20  # of a body at a time: what a batch asks for at once
_ATTEMPTS_AT_RANGES = 3  # until a server that answers with the whole object knows no ranges
_STATUS = re.compile(r"status code: ([34]\d\d)")
_TRANSIENT_STATUSES = (408, 425, 429)  # of those below 500
_CONFLICT = "ConditionalRequestConflict"  # of S3: the key is being written or removed this moment
_DENIED = "(code: AccessDenied)"  # in an answer about several objects, whose own status is 200
_TRUE = ("1", "true")

Result = TypeVar("Result")


@dataclass(frozen=True)
class Version:
    """What tells one content of an object from another.

    Attributes:
        nbytes: Its length.
        tag: Its ETag; where there is none, when it was written.
        is_strong: Whether it is an ETag that a request may have as a condition.
        modified_s: When it was written, seconds since the epoch.
    """

    nbytes: int
    tag: str
    is_strong: bool
    modified_s: float

    @classmethod
    def of(cls, meta: Any) -> Version:
        """The version of `obstore`'s metadata."""
        modified, tag = meta["last_modified"], meta.get("e_tag")
        is_strong = bool(tag) and not tag.startswith("W/")
        return cls(meta["size"], tag or modified.isoformat(), is_strong, modified.timestamp())


class RemoteObject:
    """An object that is read by ranges, all of them of the version that the first one found.

    Safe to read from several threads. After a fork a child makes a client of its own, which works only if
    its parent had none: `obstore` doesn't survive a fork, so what would hang is a `RemoteError` instead.

    Args:
        url: Where it is.
        deadline_s: Seconds until a request, with all its attempts, is a `RemoteError`.
        version: The version to read; by default the one that the first request finds.

    Attributes:
        url: Where it is.
        deadline_s: See above.
        num_requests: Answers with bytes so far, for reports.
        num_bytes: Their bytes.
    """

    def __init__(self, url: Url, *, deadline_s: float = DEADLINE_S, version: Version | None = None) -> None:
        self.url, self.deadline_s = url, deadline_s
        self.num_requests = self.num_bytes = 0
        self._version = version
        self._lock = threading.Lock()

    @property
    def version(self) -> Version:
        """The version that is read; asks for it if nothing was read yet.

        Raises:
            StoreNotFoundError: If there is no such object; what else `read` raises.
        """
        if self._version is None:
            self._pin(self._persistently(self._look))
        assert self._version is not None
        return self._version

    def read(self, offset: int, nbytes: int) -> memoryview:
        """Bytes of the object; `offset` and `nbytes` must lie in it.

        Raises:
            StoreNotFoundError: If there is no such object; also a FileNotFoundError.
            StoreReplacedError: If it isn't the version that was read first.
            RemoteError: Kind "not_allowed"; "no_ranges" if the server gives none; "unreachable" if all
                attempts failed before the deadline; "forked" in a child of a process that had a client.
        """
        if not nbytes:
            return memoryview(b"")
        return self._persistently(lambda: self._get((offset, offset + nbytes), nbytes))

    def read_end(self, nbytes: int) -> memoryview:
        """The last bytes of the object, all of it where it is shorter; errors as of `read`."""
        if self.url.scheme == "az" or self._version is not None:  # Azure has no ranges counted from the end
            num = min(nbytes, self.version.nbytes)
            return self.read(self.version.nbytes - num, num)
        try:
            return self._persistently(lambda: self._get({"suffix": nbytes}, nbytes))
        except RemoteError as error:
            if "status code: 416" not in error.problem or self.version.nbytes:
                raise
            return memoryview(b"")  # no byte of an empty object is in any range

    def _look(self) -> Version:
        import obstore

        return Version.of(obstore.head(client_of(self.url, self.deadline_s), self.url.key))

    def _get(self, wanted: Any, nbytes: int) -> memoryview:
        import obstore

        options: Any = {"range": wanted}
        if self._version is not None and self._version.is_strong:
            options["if_match"] = self._version.tag
        answer = obstore.get(client_of(self.url, self.deadline_s), self.url.key, options=options)
        version, (first, end) = Version.of(answer.meta), answer.range
        is_end = isinstance(wanted, dict)
        expected = (max(0, version.nbytes - nbytes), version.nbytes) if is_end else wanted
        self._pin(version)
        if (first, end) != expected:
            raise _CutError(f"bytes {first}..{end} for {expected[0]}..{expected[1]}")
        body = _body_of(answer, end - first)
        with self._lock:
            self.num_requests += 1
            self.num_bytes += len(body)
        return body

    def _pin(self, version: Version) -> None:
        with self._lock:
            if self._version is None:
                self._version = version
            pinned = self._version
        if (pinned.tag, pinned.nbytes) != (version.tag, version.nbytes):
            raise self._replaced(
                f"{pinned.nbytes:,} bytes, {pinned.tag}", f"{version.nbytes:,}, {version.tag}"
            )

    def _replaced(self, expected: str, found: str | None) -> StoreReplacedError:
        return StoreReplacedError(
            "the object was replaced since it was opened",
            path=self.url.path,
            expected=expected,
            found=found,
            hint="open it again",
        )

    def _persistently(self, work: Callable[[], Result]) -> Result:
        try:
            return persistently(work, url=self.url, deadline_s=self.deadline_s)
        except PreconditionFailed:
            assert self._version is not None
            raise self._replaced(f"ETag {self._version.tag}", None) from None


def _body_of(answer: Any, nbytes: int) -> memoryview:
    """Read the body of an answer, and no more of it than was asked for, whatever the server sends."""
    chunks: list[Any] = []
    num = 0
    for chunk in answer.stream(min_chunk_size=max(1, min(nbytes, _CHUNK_BYTES))):
        chunks.append(chunk)
        num += len(chunk)
        if num > nbytes:
            break
    if num != nbytes:
        raise _CutError(f"{num:,} bytes for {nbytes:,}")
    return memoryview(chunks[0] if len(chunks) == 1 else b"".join(chunks))


def is_there(url: Url, *, deadline_s: float = DEADLINE_S) -> bool:
    """Whether there is such an object; raises what else `RemoteObject.read` raises."""
    try:
        return RemoteObject(url, deadline_s=deadline_s).version.nbytes >= 0
    except StoreNotFoundError:
        return False


class PreconditionFailed(Exception):  # noqa: N818 (a condition that a caller set, not an error yet)
    """The object isn't, or is, there in the version that a request named."""


class _CutError(Exception):
    """Another part of the object came than was asked for."""


def persistently(work: Callable[[], Result], *, url: Url, deadline_s: float = DEADLINE_S) -> Result:
    """What `work`, a request, returns; tried again while it fails in ways that may pass.

    No attempt begins in the second half of the deadline, and the client gives up one that takes half of it,
    so an answer or an error is there in time.

    Args:
        work: Makes one attempt, by the client of `client_of` with the same deadline.
        url: For messages.
        deadline_s: Seconds for all attempts.
    Raises:
        PreconditionFailed: If the condition of a request isn't met.
        StoreNotFoundError: If there is no such object.
        RemoteError: If it isn't allowed, or failed until the deadline.
    """
    with needs("s3"):
        import obstore  # noqa: F401
    begun, num_failed = time.monotonic(), 0
    while True:
        try:
            with _slots:
                return work()
        except Exception as error:
            failure = error
        num_failed += 1
        # Not while it is handled: it says the whole URL, and as context of ours it may be pickled with it.
        _raise_unless_transient(failure, url, num_failed)
        pause_s = min(_FIRST_PAUSE_S * 2**num_failed, _LONGEST_PAUSE_S) * random.uniform(0.5, 1.0)
        if time.monotonic() + pause_s - begun > deadline_s / 2:
            took_s = time.monotonic() - begun
            raise RemoteError(
                f"no answer after {num_failed} attempts in {took_s:.1f} s ({_first_line(failure)})",
                kind="unreachable",
                path=url.path,
                expected=f"bytes within {deadline_s:g} s",
                hint="check the network and the place, and try again",
            )
        time.sleep(pause_s)


def _raise_unless_transient(error: Exception, url: Url, num_failed: int) -> None:
    """Raise ours for what another attempt doesn't change."""
    from obstore import exceptions

    if isinstance(error, exceptions.PreconditionError | exceptions.AlreadyExistsError):
        if _CONFLICT in str(error):
            return
        raise PreconditionFailed from None
    if isinstance(error, FileNotFoundError):  # that of Python itself
        hint = "check the URL, and which bucket the environment means by it"
        raise StoreNotFoundError("no such object", path=url.path, hint=hint) from None
    if not isinstance(error, exceptions.BaseError | _CutError):
        raise error
    text = _first_line(error)
    if REDIRECTED in str(error):
        problem, hint = "the server leads to another host, which would get the keys", "name that host instead"
        raise RemoteError(problem, kind="redirected", path=url.path, hint=hint) from None
    denied = exceptions.PermissionDeniedError | exceptions.UnauthenticatedError
    if isinstance(error, denied) or _DENIED in text:
        raise RemoteError(text, kind="not_allowed", path=url.path, hint=_how_to_be_allowed(url)) from None
    if "non-partial response" in text and num_failed >= _ATTEMPTS_AT_RANGES:
        hint = "copy the file here, or serve it by what answers `Range` with 206"
        raise RemoteError("the server gives no ranges", kind="no_ranges", path=url.path, hint=hint) from None
    status = _STATUS.search(text)
    if status and int(status[1]) not in _TRANSIENT_STATUSES and "RequestTimeout" not in str(error):
        hint = "check the URL, the region and the endpoint"
        raise RemoteError(text, kind="refused", path=url.path, hint=hint) from None


def _how_to_be_allowed(url: Url) -> str:
    if url.is_http:
        return "check the URL: signed ones expire"
    if url.scheme == "s3":
        return "check AWS_ACCESS_KEY_ID and the like; AWS_SKIP_SIGNATURE=true for a public bucket"
    return f"check the {'GOOGLE' if url.scheme == 'gs' else 'AZURE'}_... variables of the environment"


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


_slots = threading.BoundedSemaphore(MAX_REQUESTS)
_pid: int | None = None  # of the process whose threads serve obstore's requests


def client_of(url: Url, deadline_s: float = DEADLINE_S) -> Any:
    """The client for the bucket of an object, an `obstore` store; one for all objects in it.

    Raises:
        RemoteError: Kind "forked", if this process was forked from one that had a client.
        MissingExtraError: Without obstore.
    """
    global _pid
    if _pid is None:
        _pid = os.getpid()
    if _pid != os.getpid():
        raise RemoteError(
            "this process was forked from one that had read from object stores, whose client can't follow",
            kind="forked",
            path=url.path,
            hint='start workers by "spawn" or "forkserver", or use the threads of `make_loader`',
        )
    return _client(url.scheme, url.bucket, deadline_s)


@functools.lru_cache(maxsize=64)
def _client(scheme: str, bucket: str, deadline_s: float) -> Any:
    from obstore import store

    half = timedelta(seconds=deadline_s / 2)
    client: Any = {
        **reaching_only_named_hosts(scheme, bucket),
        "connect_timeout": min(timedelta(seconds=_CONNECT_S), half),
        "read_timeout": min(timedelta(seconds=_STALL_S), half),
        "timeout": half,
    }
    if scheme == "http" or os.environ.get("AWS_ALLOW_HTTP", "").lower() in _TRUE:  # else options hide it
        client["allow_http"] = True
    options: Any = {"client_options": client, "retry_config": {"max_retries": 0, "retry_timeout": half}}
    if scheme in ("https", "http"):
        return store.HTTPStore(bucket, **options)
    if scheme == "s3" and "AWS_COPY_IF_NOT_EXISTS" not in os.environ:
        options["copy_if_not_exists"] = "multipart"  # else a copy would replace what is there
    kinds = {"s3": store.S3Store, "gs": store.GCSStore, "az": store.AzureStore}
    return kinds[scheme](bucket, **options)


def _renew() -> None:
    """In a forked child, where a thread that is gone may hold a place; no client is ended: that may hang."""
    global _slots
    _slots = threading.BoundedSemaphore(MAX_REQUESTS)


os.register_at_fork(after_in_child=_renew)
