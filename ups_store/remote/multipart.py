"""Uploads to S3 in parts that are sent side by side, continued after a kill, and never overwrite an object.

`obstore` creates objects only in one request, whose body it holds in memory, and its uploads in parts replace
what is there. So these five requests are made here, where the keys are in the environment.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import threading
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, urlsplit

from ups_store.errors import DiskFullError, RemoteError, StoreNotFoundError
from ups_store.remote.client import PreconditionFailed, RemoteObject
from ups_store.remote.signing import Signer, encoded_query
from ups_store.remote.urls import Url
from ups_store.sources.download import Progress
from ups_store.system import files, locks
from ups_store.system.parallel import for_each
from ups_store.system.replacement import replace_text

PART_BYTES = 16 << 20
PARTS_IN_FLIGHT = 4
_MAX_PARTS = 10_000  # of an upload, as S3 has it
_ATTEMPTS, _FIRST_PAUSE_S = 5, 0.2
_TRANSIENT = (408, 425, 429, 500, 502, 503, 504)
_TAKEN = (409, 412)  # another upload of the key was completed, or is being completed
_GONE = (404,)  # an upload that was ended, by a rule of the bucket for instance


class S3Api:
    """Signed requests about one object.

    Args:
        url: The object, `s3://bucket/key`.
        signer: Signs.
        stall_s: Without a byte, until an attempt is given up.
    """

    def __init__(self, url: Url, signer: Signer, *, stall_s: float) -> None:
        self.url, self._signer, self._stall_s = url, signer, stall_s
        endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        parts = urlsplit(endpoint or f"https://s3.{signer.region}.amazonaws.com")
        self._is_plain, self._host = parts.scheme == "http", parts.netloc
        self._bucket = f"{parts.path.rstrip('/')}/{quote(url.bucket)}"
        self._path = f"{self._bucket}/{quote(url.key, safe='/-_.~')}"

    def ask(
        self,
        method: str,
        query: Mapping[str, str],
        *,
        body: bytes = b"",
        extra: Mapping[str, str] | None = None,
        of_bucket: bool = False,
    ) -> tuple[bytes, Mapping[str, str]]:
        """Make a request, again where that may help; returns body and headers of the answer.

        Raises:
            PreconditionFailed: If the key is taken.
            _GoneError: If the upload isn't known any more.
            RemoteError: Kind "not_allowed", "refused" or "unreachable".
        """
        failure = ""
        for attempt in range(_ATTEMPTS):
            if attempt:
                time.sleep(_FIRST_PAUSE_S * 2**attempt)
            try:
                path = self._bucket if of_bucket else self._path
                status, answer, headers = self._once(method, path, query, body, extra or {})
            except (OSError, http.client.HTTPException) as error:
                failure = str(error) or type(error).__name__
                continue
            code = _error_code(answer) if status == 200 else ""  # completing may fail with status 200
            if status // 100 == 2 and not code:
                return answer, headers
            failure = f"the server answered {status} {code or _error_code(answer)}".strip()
            if status in _TAKEN or code == "PreconditionFailed":
                raise PreconditionFailed
            if status in _GONE:
                raise _GoneError(failure)
            if status not in (200, *_TRANSIENT):
                raise self._error(failure, "not_allowed" if status in (401, 403) else "refused")
        raise self._error(f"no answer after {_ATTEMPTS} attempts ({failure})", "unreachable")

    def _once(
        self, method: str, path: str, query: Mapping[str, str], body: bytes, extra: Mapping[str, str]
    ) -> tuple[int, bytes, Mapping[str, str]]:
        headers = self._signer.headers(method, self._host, path, query, body=body, extra=extra)
        kind = http.client.HTTPConnection if self._is_plain else http.client.HTTPSConnection
        with contextlib.closing(kind(self._host, timeout=self._stall_s)) as connection:
            connection.request(method, f"{path}?{encoded_query(query)}", body, headers)
            answer = connection.getresponse()
            return answer.status, answer.read(), dict(answer.headers)

    def _error(self, problem: str, kind: str) -> RemoteError:
        hint = "check AWS_ACCESS_KEY_ID and the like" if kind == "not_allowed" else "push it again to go on"
        return RemoteError(problem, kind=kind, path=self.url.path, hint=hint)


class _GoneError(Exception):
    """The server doesn't know the upload, or the bucket."""


@dataclass
class _Upload:
    """An upload that was begun, as the record of it says.

    Attributes:
        url: Of the object.
        id: The server's.
        state: Size and time of the last write of the file.
        part_nbytes: Of each part but the last.
        tags: ETags of the parts that are there, by number from 1.
    """

    url: str
    id: str
    state: tuple[int, int]
    part_nbytes: int
    tags: dict[str, str] = field(default_factory=dict)


def upload(
    path: Path, url: Url, signer: Signer, *, digest: str, replace: bool, stall_s: float, progress: Progress
) -> bool:
    """Upload a file in parts; one that was begun and killed goes on where it was.

    Args:
        path: The file.
        url: Where.
        signer: Signs.
        digest: SHA-256 of the file, which goes with the object.
        replace: Whether to replace what is there.
        stall_s: Without a byte, until an attempt is given up.
        progress: Hears of the bytes.
    Returns:
        Whether this made the object; False if another one was there first.
    Raises:
        RemoteError: As `S3Api.ask`.
    """
    api = S3Api(url, signer, stall_s=stall_s)
    with files.opened(path) as fd, _record(path, url) as record:
        for is_last in (False, True):
            try:
                return _Uploading(api, fd, path, record, digest, progress).run(replace=replace)
            except _GoneError as error:
                if record is not None:
                    files.remove(record)
                if not replace and _is_there(url, stall_s):  # made by us, though the answer was lost
                    return False
                if is_last:
                    hint = "check the bucket"
                    raise RemoteError(str(error), kind="refused", path=url.path, hint=hint) from error
    raise AssertionError("one of two attempts returns or raises")


def _is_there(url: Url, stall_s: float) -> bool:
    try:
        return RemoteObject(url, deadline_s=stall_s).version.nbytes >= 0
    except StoreNotFoundError:
        return False


class Begun(NamedTuple):
    """An upload that was begun: its key below the root, the server's id, when, in seconds since the epoch."""

    key: str
    id: str
    begun_s: float


def unfinished_uploads(root: Url, signer: Signer, *, stall_s: float) -> list[Begun]:
    """Uploads below a prefix that were neither completed nor ended."""
    api = S3Api(root, signer, stall_s=stall_s)
    prefix = f"{root.key.strip('/')}/" if root.key.strip("/") else ""
    found: list[Begun] = []
    marker: dict[str, str] = {}
    while True:
        answer, _ = api.ask("GET", {"uploads": "", "prefix": prefix, **marker}, of_bucket=True)
        tree = ElementTree.fromstring(answer)
        for each in tree.iter():
            if _is(each, "Upload"):
                began = datetime.fromisoformat(_text(each, "Initiated").replace("Z", "+00:00"))
                key = _text(each, "Key").removeprefix(prefix)
                found.append(Begun(key, _text(each, "UploadId"), began.timestamp()))
        if _text(tree, "IsTruncated") != "true":
            return found
        marker = {
            "key-marker": _text(tree, "NextKeyMarker"),
            "upload-id-marker": _text(tree, "NextUploadIdMarker"),
        }


def end_upload(url: Url, signer: Signer, upload_id: str, *, stall_s: float) -> None:
    """End an upload; its parts go. Nothing happens if it is gone already."""
    with contextlib.suppress(_GoneError):
        S3Api(url, signer, stall_s=stall_s).ask("DELETE", {"uploadId": upload_id})


class _Uploading:
    """One upload on its way."""

    def __init__(
        self, api: S3Api, fd: int, path: Path, record: Path | None, digest: str, progress: Progress
    ) -> None:
        self._api, self._fd, self._record, self._digest = api, fd, record, digest
        self._progress, self._lock = progress, threading.Lock()
        state = files.last_write(path)
        assert state is not None, "it is open"
        self._size = state[0]
        known = _read_record(record)
        if known is None or (known.url, tuple(known.state)) != (str(api.url.path), state):
            part_nbytes = max(PART_BYTES, -(-self._size // _MAX_PARTS))
            known = _Upload(str(api.url.path), "", state, part_nbytes)
        self._upload = known

    def run(self, *, replace: bool) -> bool:
        """Begin or go on, send what is missing, and make the object of it, unless there is one."""
        self._progress.doing("uploading")
        if not self._upload.id:
            self._begin()
        num_parts = max(1, -(-self._size // self._upload.part_nbytes))
        missing = []
        for number in range(1, num_parts + 1):
            if str(number) in self._upload.tags:
                self._progress.progressed(self._range(number)[1])
            else:
                missing.append(number)
        for_each(self._send, missing, num_threads=PARTS_IN_FLIGHT)
        is_first = self._complete(num_parts, replace=replace)
        if self._record is not None:
            files.remove(self._record)
        return is_first

    def _begin(self) -> None:
        answer, _ = self._api.ask("POST", {"uploads": ""}, extra={"x-amz-meta-sha256": self._digest})
        found = _text(ElementTree.fromstring(answer), "UploadId")
        if not found:
            raise self._api._error("the server began no upload", "refused")
        self._upload.id = found
        self._save()

    def _range(self, number: int) -> tuple[int, int]:
        first = (number - 1) * self._upload.part_nbytes
        return first, min(self._upload.part_nbytes, self._size - first)

    def _send(self, number: int) -> None:
        offset, nbytes = self._range(number)
        query = {"partNumber": str(number), "uploadId": self._upload.id}
        _, headers = self._api.ask("PUT", query, body=files.read_at(self._fd, offset, nbytes))
        tag = next((value for name, value in headers.items() if name.lower() == "etag"), "")
        with self._lock:
            self._upload.tags[str(number)] = tag
            self._save()
            self._progress.progressed(nbytes)

    def _complete(self, num_parts: int, *, replace: bool) -> bool:
        parts = "".join(
            f"<Part><PartNumber>{number}</PartNumber><ETag>{self._upload.tags[str(number)]}</ETag></Part>"
            for number in range(1, num_parts + 1)
        )
        body = f"<CompleteMultipartUpload>{parts}</CompleteMultipartUpload>".encode()
        query = {"uploadId": self._upload.id}
        try:
            self._api.ask("POST", query, body=body, extra={} if replace else {"if-none-match": "*"})
        except PreconditionFailed:
            self._abort()
            return False
        return True

    def _abort(self) -> None:
        with contextlib.suppress(RemoteError, _GoneError, PreconditionFailed):
            self._api.ask("DELETE", {"uploadId": self._upload.id})

    def _save(self) -> None:
        if self._record is not None:
            with contextlib.suppress(OSError, DiskFullError):  # then a killed upload begins again
                replace_text(self._record, json.dumps(asdict(self._upload)))


@contextlib.contextmanager
def _record(path: Path, url: Url) -> Iterator[Path | None]:
    """Where the record of an upload lies, beside the file; None if another process uploads it to the same."""
    from hashlib import sha256

    key = sha256(str(url.path).encode()).hexdigest()[:12]
    lock = path.with_name(f".{path.name}.{key}.push.lock")
    try:
        fd = _opened_or_created(lock)
    except OSError:  # a folder that can't be written to
        yield None
        return
    try:
        if not (locks.try_lock(fd, 0) and files.is_file_at(fd, lock)):
            yield None
            return
        yield path.with_name(f".{path.name}.{key}.push")
        files.remove(lock)
    finally:
        files.close(fd)


def _opened_or_created(path: Path) -> int:
    try:
        return files.create_new(path)
    except FileExistsError:
        return files.open_existing(path, writable=True)


def _read_record(path: Path | None) -> _Upload | None:
    try:
        values: Any = json.loads(path.read_bytes()) if path else None
        return _Upload(**values)
    except (OSError, ValueError, TypeError):  # absent or damaged: the upload begins again
        return None


def _error_code(answer: bytes) -> str:
    """The code of an answer that is an error; "" of one that isn't."""
    if b"<Error" not in answer:
        return ""
    try:
        tree = ElementTree.fromstring(answer)
    except ElementTree.ParseError:
        return "Unknown"
    return next((each.text or "" for each in tree.iter() if _is(each, "Code")), "Unknown")


def _text(element: Any, name: str) -> str:
    """Text of the first element of a name; "" if there is none."""
    return next((each.text or "" for each in element.iter() if _is(each, name)), "")


def _is(element: Any, name: str) -> bool:
    return str(element.tag).rpartition("}")[2] == name
