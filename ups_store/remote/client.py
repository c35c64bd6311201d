"""Objects behind URLs: the one client of this process (`obstore`), its deadlines, and what its errors mean.

Keys, regions and endpoints are those of the environment: AWS_ACCESS_KEY_ID, AWS_REGION, AWS_ENDPOINT_URL;
GOOGLE_SERVICE_ACCOUNT; AZURE_STORAGE_ACCOUNT_NAME; and so on. AWS_SKIP_SIGNATURE=true reads public buckets.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit, urlunsplit

from ups_store.errors import RemoteError, StoreNotFoundError, StoreReplacedError, needs
from ups_store.system import files
from ups_store.system.paths import Url

DEADLINE_S = 60.0  # of one request with all its attempts
MAX_REQUESTS = 32  # of the process under way at once
PUT_BYTES = 16 << 20  # the most that is sent in one request
_STALL_S = 10.0  # without a byte, until an attempt is given up
_CONNECT_S = 5.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0  # between attempts
_BODY_BYTES = 8 << 20  # of a body at a time: what a batch asks for at once
_WRONG_ANSWERS = 3  # until a server that answers with something else is believed to do so for good
_MAX_PARTS = 10_000  # of an upload, as S3 has it
_SENT_BYTES = 1 << 20
_TRUE = ("1", "true")

Result = TypeVar("Result")


@dataclass(frozen=True)
class Version:
    """What tells one content of an object, or of a file, from another."""

    nbytes: int  # its length
    # "etag" and a strong ETag, which a request may have as a condition; else a weak one, the time of the last
    # write, or "" where nothing is known.
    tag: str
    name: str = field(default="", compare=False)  # what the file is called, if that is known
    # When it was written, seconds since the epoch; 0 where that isn't known.
    modified_s: float = field(default=0.0, compare=False)

    @classmethod
    def of(cls, meta: Any, name: str = "") -> Version:
        """The version of `obstore`'s metadata."""
        modified, etag = meta["last_modified"], meta.get("e_tag") or ""
        date = f"modified {modified.isoformat()}" if modified.timestamp() else ""
        tag = (
            date if not etag else f"weak {etag} {date}".rstrip() if etag.startswith("W/") else f"etag {etag}"
        )
        return cls(meta["size"], tag, name, modified.timestamp())

    @property
    def condition(self) -> str | None:
        """The ETag that a request may ask for, if there is one."""
        kind, _, etag = self.tag.partition(" ")
        return etag if kind == "etag" else None


class RemoteObject:
    """An object that is read by ranges, all of them of the version that the first one found.

    Safe to read from several threads. After a fork a child makes a client of its own, which works only if
    its parent had none: `obstore` doesn't survive a fork, so what would hang is a `RemoteError` instead.
    Requests, with all their attempts, end by the deadline; `num_requests` and `num_bytes` count answers.
    """

    def __init__(self, url: Url, *, deadline_s: float = DEADLINE_S, version: Version | None = None) -> None:
        self.url, self.deadline_s = url, deadline_s
        self.num_requests = self.num_bytes = 0
        self._version = version
        self._lock = threading.Lock()

    @property
    def version(self) -> Version:
        """The version that is read; asks for it if nothing was read yet."""
        if self._version is None:
            self._pin(self._ask(self._head))
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
        return self._ask(lambda: self._get((offset, offset + nbytes), nbytes))

    def read_end(self, nbytes: int) -> memoryview:
        """The last bytes of the object, all of it where it is shorter; errors as of `read`."""
        if self.url.scheme == "az" or self._version is not None:  # Azure has no ranges counted from the end
            num = min(nbytes, self.version.nbytes)
            return self.read(self.version.nbytes - num, num)
        try:
            return self._ask(lambda: self._get({"suffix": nbytes}, nbytes))
        except RemoteError as error:
            if not _is_of_nothing(error) or self.version.nbytes:
                raise
            return memoryview(b"")

    def stream(self) -> Iterator[memoryview]:
        """All bytes in order, by one request, for servers that know no ranges; errors as of `read`."""
        answer = self._ask(lambda: self._open({}))
        chunks = iter(answer.stream(min_chunk_size=_SENT_BYTES))
        while chunk := self._ask(lambda: next(chunks, None)):
            yield memoryview(chunk)

    def _head(self) -> Version:
        import obstore

        if not self.url.is_http:
            return Version.of(obstore.head(client_of(self.url, self.deadline_s), self.url.key))
        from obstore import exceptions

        try:  # many web servers, and all signed URLs, refuse HEAD
            answer = self._open({"range": (0, 1)})
        except exceptions.BaseError as error:
            if not _is_of_nothing(error) and not _is_without_ranges(error):
                raise
            answer = self._open({})
        from email.message import Message

        headers = Message()
        headers["Content-Disposition"] = answer.attributes.get("Content-Disposition", "")
        return Version.of(answer.meta, headers.get_filename() or "")

    def _open(self, options: Any) -> Any:
        import obstore

        if self._version is not None and self._version.condition:
            options = {**options, "if_match": self._version.condition}
        return obstore.get(client_of(self.url, self.deadline_s), self.url.key, options=options)

    def _get(self, range_: Any, nbytes: int) -> memoryview:
        answer = self._open({"range": range_})
        version, (first, end) = Version.of(answer.meta), answer.range
        is_end = isinstance(range_, dict)
        expected = (max(0, version.nbytes - nbytes), version.nbytes) if is_end else range_
        self._pin(version)
        if (first, end) != expected:
            raise _WrongAnswerError(f"bytes {first}..{end} for {expected[0]}..{expected[1]}")
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
        if pinned != version:
            raise self._replaced(
                f"{pinned.nbytes:,} bytes, {pinned.tag}", f"{version.nbytes:,} bytes, {version.tag}"
            )

    def _replaced(self, expected: str, found: str | None) -> StoreReplacedError:
        return StoreReplacedError(
            "the object was replaced since it was opened",
            path=self.url.path,
            expected=expected,
            found=found,
            hint="open it again",
        )

    def _ask(self, work: Callable[[], Result]) -> Result:
        try:
            return ask(work, url=self.url, deadline_s=self.deadline_s)
        except PreconditionFailed:
            assert self._version is not None
            raise self._replaced(self._version.tag, None) from None


def _body_of(answer: Any, nbytes: int) -> memoryview:
    """Read the body of an answer, and no more of it than was asked for, whatever the server sends."""
    chunks: list[Any] = []
    num = 0
    for chunk in answer.stream(min_chunk_size=max(1, min(nbytes, _BODY_BYTES))):
        chunks.append(chunk)
        num += len(chunk)
        if num > nbytes:
            break
    if num != nbytes:
        raise _WrongAnswerError(f"{num:,} bytes for {nbytes:,}")
    return memoryview(chunks[0] if len(chunks) == 1 else b"".join(chunks))


def list_objects(
    folder: Url, prefix: str = "", *, deadline_s: float = DEADLINE_S
) -> list[tuple[str, Version]]:
    """List all objects below a folder by their names in it, those with a prefix if one is given."""
    import obstore

    root = folder.key.strip("/")
    root = f"{root}/" if root else ""

    def listed() -> list[Any]:
        pages = obstore.list(client_of(folder, deadline_s), prefix=f"{root}{prefix}" or None)
        return [entry for page in pages for entry in page]

    objects = ask(listed, url=folder, deadline_s=deadline_s)
    return [(entry["path"].removeprefix(root), Version.of(entry)) for entry in objects]


def put_file(
    path: Path,
    url: Url,
    *,
    replace: bool,
    deadline_s: float = DEADLINE_S,
    progress: Callable[[int], object] = lambda num: None,
) -> bool:
    """Put a file where there is no object yet, or in the place of one; False if it may not replace it.

    What takes one request is created by it. A larger one takes several, and then of two that are put there at
    the same time the last stays.
    """
    import obstore

    client = client_of(url, deadline_s)
    with files.opened(path) as fd:
        size = files.size(fd)

        def chunks() -> Iterator[bytes]:
            for offset in range(0, size, _SENT_BYTES):
                yield files.read_at(fd, offset, min(_SENT_BYTES, size - offset))
                progress(min(_SENT_BYTES, size - offset))

        def put() -> None:
            if size <= PUT_BYTES:
                mode: Any = "overwrite" if replace else "create"
                obstore.put(client, url.key, b"".join(chunks()), mode=mode, use_multipart=False)
            else:
                part_bytes = max(PUT_BYTES, -(-size // _MAX_PARTS))
                obstore.put(client, url.key, chunks(), chunk_size=part_bytes, max_concurrency=4)

        if size > PUT_BYTES and not replace:
            with contextlib.suppress(StoreNotFoundError):
                RemoteObject(url, deadline_s=deadline_s).version  # noqa: B018 (asks whether it is there)
                return False
        try:
            ask(put, url=url, deadline_s=deadline_s)
        except PreconditionFailed:
            return False
    return True


def remove_object(url: Url, *, deadline_s: float = DEADLINE_S) -> None:
    """Remove an object; nothing happens if there is none."""
    import obstore

    with contextlib.suppress(StoreNotFoundError):
        ask(lambda: obstore.delete(client_of(url, deadline_s), url.key), url=url, deadline_s=deadline_s)


class PreconditionFailed(Exception):  # noqa: N818 (a condition that a caller set, not an error yet)
    """The object isn't, or is, there in the version that a request named."""


class _WrongAnswerError(Exception):
    """Another part of the object came than was asked for."""


def ask(work: Callable[[], Result], *, url: Url, deadline_s: float = DEADLINE_S) -> Result:
    """Make a request, and raise our errors.

    The client itself makes a request again that fails in ways that may pass, by the options of `_client`;
    here is one made again whose answer isn't what was asked for. No attempt begins in the second half of
    the deadline, and one that takes half of it is given up, so an answer or an error is there in time.
    """
    with needs("s3"):
        import obstore  # noqa: F401
    begun = time.monotonic()
    for num_left in reversed(range(_WRONG_ANSWERS)):
        try:
            with _requests:
                return work()
        except Exception as error:
            failure = error
        # Not while it is handled: it says the whole URL, and as context of ours it may be pickled with it.
        took_s = time.monotonic() - begun
        if not _is_wrong_answer(failure) or not num_left or took_s > deadline_s / 2:
            raise _explained(failure, url, took_s, deadline_s)
        time.sleep(min(_FIRST_PAUSE_S, deadline_s / 100))
    raise AssertionError


def _is_wrong_answer(error: Exception) -> bool:
    """Say whether a server gave something else than was asked for, or a body that ended early."""
    text = str(error)
    return (
        isinstance(error, _WrongAnswerError)
        or _is_without_ranges(error)
        or "ConditionalRequestConflict" in text  # of S3: the key is being written or removed this moment
        or "response body error" in text
        or ("Requested " in text and ", got " in text)
    )


def _is_without_ranges(error: Exception) -> bool:
    return "non-partial response" in str(error) or "Range request not supported" in str(error)


def _is_of_nothing(error: Exception) -> bool:
    return "status code: 416" in str(error)  # no byte in the range, as of an object without bytes


def _explained(error: Exception, url: Url, took_s: float, deadline_s: float) -> Exception:
    """Make our error of a client's; any other one stays as it is."""
    from obstore import exceptions

    if isinstance(error, FileNotFoundError):  # that of Python itself, which obstore raises
        hint = "check the URL, and which bucket the environment means by it"
        return StoreNotFoundError("no such object", path=url.path, hint=hint)
    if not isinstance(error, exceptions.BaseError | _WrongAnswerError):
        return error
    text = str(error)
    problem, _, details = text.strip().partition("\n")
    conflicts = exceptions.PreconditionError | exceptions.AlreadyExistsError
    if isinstance(error, conflicts) and not _is_wrong_answer(error):
        return PreconditionFailed()
    denied = exceptions.PermissionDeniedError | exceptions.UnauthenticatedError
    status = re.search(r"status code: (4\d\d|30\d)", problem)
    expected = None
    if _REDIRECTED in text:
        problem, kind = "the server leads to another host, which would get the keys", "redirected"
        hint = "name that host instead"
    elif (
        isinstance(error, denied) or "(code: AccessDenied)" in problem
    ):  # which may stand in an answer of 200
        kind, hint = "not_allowed", _HINTS[url.scheme]
    elif _is_without_ranges(error):
        problem, kind = "the server gives no ranges", "no_ranges"
        hint = "copy the file here, or serve it by what answers `Range` with 206"
    elif certificate := re.search(r"InvalidCertificate\(\s*(\w+)", details):
        problem, kind = f"the server's certificate isn't valid ({certificate[1]})", "not_trusted"
        hint = "check the URL and the clock; SSL_CERT_FILE names other authorities"
    elif status and status[1] not in ("408", "409", "429"):
        kind, hint = "refused", "check the URL, the region and the endpoint"
    else:
        problem, kind = f"no answer in {took_s:.1f} s ({problem})", "unreachable"
        expected = f"bytes within {deadline_s:g} s, attempts beginning in the first half"
        hint = "check the network and the URL, and try again"
    return RemoteError(problem, kind=kind, path=url.path, expected=expected, hint=hint)


_HINTS = {
    "s3": "check AWS_ACCESS_KEY_ID and the like; AWS_SKIP_SIGNATURE=true for a public bucket",
    "gs": "check the GOOGLE_... variables of the environment",
    "az": "check the AZURE_... variables of the environment",
    **dict.fromkeys(("https", "http"), "check the URL: signed ones expire"),
}

_requests = threading.BoundedSemaphore(MAX_REQUESTS)
_pid: int | None = None  # of the process whose threads serve obstore's requests


def client_of(url: Url, deadline_s: float = DEADLINE_S) -> Any:
    """Give the client for the bucket of an object, an `obstore` store; one for all objects in it."""
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
    with needs("s3"):
        from obstore import store

    half = timedelta(seconds=deadline_s / 2)
    pause, longest = timedelta(seconds=_FIRST_PAUSE_S), timedelta(seconds=_LONGEST_PAUSE_S)
    client: Any = {
        **_reaching_only_named_hosts(scheme, bucket),
        "connect_timeout": min(timedelta(seconds=_CONNECT_S), half),
        "read_timeout": min(timedelta(seconds=_STALL_S), half),
        "timeout": half,
    }
    if scheme == "http" or os.environ.get("AWS_ALLOW_HTTP", "").lower() in _TRUE:  # else options hide it
        client["allow_http"] = True
    backoff = {"init_backoff": min(pause, half / 20), "max_backoff": min(longest, half / 4), "base": 2}
    retries = {"max_retries": 1000, "retry_timeout": half, "backoff": backoff}
    options: Any = {"client_options": client, "retry_config": retries}
    if scheme in ("https", "http"):
        parts = urlsplit(bucket)
        user, _, host = parts.netloc.rpartition("@")
        if user:  # which the client leaves out; reqwest sends it to no other host or port
            word = base64.b64encode(unquote(user).encode()).decode()
            client["default_headers"] = {"Authorization": f"Basic {word}"}
        return store.HTTPStore(urlunsplit(parts._replace(netloc=host)), **options)
    kinds = {"s3": store.S3Store, "gs": store.GCSStore, "az": store.AzureStore}
    return kinds[scheme](bucket, **options)


# obstore has no option against redirects, and reqwest, which follows them, drops `Authorization` for another
# host or port, but neither the session's token nor, in `Referer`, the query of a signed URL. So all hosts but
# the named ones are said to lie behind a proxy that can't be spoken to.
_REDIRECTED = "unsupported scheme socks5"
_NO_PROXY_AT_ALL = "socks5://127.0.0.1:0"
# Of Amazon, and of the machine's own services that give keys.
_KEY_GIVERS = ("amazonaws.com", "amazonaws.com.cn", "169.254.0.0/16", "fd00:ec2::/32")
_SIGNED = re.compile(r"(?i)(^|&)[^=&]*(sig|token|key|credential|secret|password)[^=&]*=")


def _reaching_only_named_hosts(scheme: str, bucket: str) -> dict[str, str]:
    """Make options of a client with keys, or of a signed URL, that follows no redirect to another host.

    Where the environment names a proxy, requests go through that, and redirects are up to it.
    """
    query = urlsplit(bucket).query if scheme in ("https", "http") else ""
    has_keys = scheme == "s3" and os.environ.get("AWS_SKIP_SIGNATURE", "").lower() not in _TRUE
    proxies = ("http_proxy", "https_proxy", "all_proxy")
    has_proxy = any(os.environ.get(name) or os.environ.get(name.upper()) for name in proxies)
    if not (has_keys or _SIGNED.search(query)) or has_proxy:
        return {}
    urls = [bucket] if query else [value for name, value in os.environ.items() if name.startswith("AWS_")]
    hosts = [host for url in urls if "://" in url and (host := urlsplit(url).hostname)]
    return {
        "proxy_url": _NO_PROXY_AT_ALL,
        "proxy_excludes": ",".join([*hosts, *(() if query else _KEY_GIVERS)]),
    }


def _renew() -> None:
    """In a forked child, where a thread that is gone may hold a place; no client is ended: that may hang."""
    global _requests
    _requests = threading.BoundedSemaphore(MAX_REQUESTS)


os.register_at_fork(after_in_child=_renew)
