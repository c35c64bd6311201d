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

from ups_store.errors import DiskFullError, FormatError, RemoteError
from ups_store.remote.client import PreconditionFailed, is_there
from ups_store.remote.signing import Signer, encoded_query
from ups_store.sources.download import Progress
from ups_store.system import files, locks
from ups_store.system.parallel import for_each
from ups_store.system.replacement import replace_text
from ups_store.system.urls import Url

PART_BYTES = 16 << 20
PARTS_IN_FLIGHT = 4
_MAX_PARTS = 10_000  # of an upload, as S3 has it
_ATTEMPTS, _FIRST_PAUSE_S = 5, 0.2
_TRANSIENT = (408, 409, 425, 429, 500, 502, 503, 504)  # 409: the key is being written or removed this moment
_TAKEN = 412
_KINDS = {401: "not_allowed", 403: "not_allowed", 404: "gone"}  # of errors, by status; else "refused"
_HINTS = {"not_allowed": "check AWS_ACCESS_KEY_ID and the like", "gone": "check the bucket"}


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
            RemoteError: Kind "gone", if the server knows no such upload or bucket; "not_allowed",
                "refused" or "unreachable".
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
            if status == _TAKEN or code == "PreconditionFailed":
                raise PreconditionFailed
            if status not in (200, *_TRANSIENT):
                raise self.error(failure, _KINDS.get(status, "refused"))
        raise self.error(f"no answer after {_ATTEMPTS} attempts ({failure})", "unreachable")

    def ask_document(
        self, method: str, query: Mapping[str, str], *, part: str, **options: Any
    ) -> ElementTree.Element:
        """As `ask`, for a document that has something in an element of this name; else kind "refused"."""
        answer, _ = self.ask(method, query, **options)
        with contextlib.suppress(ElementTree.ParseError):
            tree = ElementTree.fromstring(answer)
            if any(_is(each, part) and (len(each) or each.text) for each in tree.iter()):
                return tree
        raise self.error(f"the server's answer has no {part}, as S3's has", "refused")

    def _once(
        self, method: str, path: str, query: Mapping[str, str], body: bytes, extra: Mapping[str, str]
    ) -> tuple[int, bytes, Mapping[str, str]]:
        headers = self._signer.headers(method, self._host, path, query, body=body, extra=extra)
        kind = http.client.HTTPConnection if self._is_plain else http.client.HTTPSConnection
        with contextlib.closing(kind(self._host, timeout=self._stall_s)) as connection:
            connection.request(method, f"{path}?{encoded_query(query)}", body, headers)
            answer = connection.getresponse()
            return answer.status, answer.read(), dict(answer.headers)

    def error(self, problem: str, kind: str) -> RemoteError:
        """An error about the object."""
        hint = _HINTS.get(kind, "push it again to go on")
        return RemoteError(problem, kind=kind, path=self.url.path, hint=hint)


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
        try:
            return _Uploading(api, fd, path, record, digest, progress).run(replace=replace)
        except RemoteError as error:
            if error.kind in ("gone", "refused") and record is not None:  # going on would fail again
                files.remove(record)
            if error.kind != "gone":
                raise
        if not replace and is_there(url, deadline_s=stall_s):  # made by us, though the answer was lost
            return False
        return _Uploading(api, fd, path, record, digest, progress).run(replace=replace)


class Begun(NamedTuple):
    """An upload that was begun: its key below the root, the server's id, when, in seconds since the epoch."""

    key: str
    id: str
    begun_s: float


def unfinished_uploads(root: Url, signer: Signer, *, stall_s: float) -> list[Begun]:
    """Uploads below a prefix that were neither completed nor ended; raises as `S3Api.ask`."""
    api = S3Api(root, signer, stall_s=stall_s)
    prefix = f"{root.key.strip('/')}/" if root.key.strip("/") else ""
    found: list[Begun] = []
    marker: dict[str, str] = {}
    while True:
        query = {"uploads": "", "prefix": prefix, **marker}
        tree = api.ask_document("GET", query, part="ListMultipartUploadsResult", of_bucket=True)
        for each in tree.iter():
            if _is(each, "Upload"):
                key = _text(each, "Key").removeprefix(prefix)
                found.append(Begun(key, _text(each, "UploadId"), _seconds(_text(each, "Initiated"))))
        markers = _text(tree, "NextKeyMarker"), _text(tree, "NextUploadIdMarker")
        following = dict(zip(("key-marker", "upload-id-marker"), markers, strict=True))
        if _text(tree, "IsTruncated") != "true" or not markers[0] or following == marker:
            return found
        marker = following


def _seconds(text: str) -> float:
    """Seconds since the epoch; now, which is never old, if the server doesn't say when."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return time.time()


def end_upload(url: Url, signer: Signer, upload_id: str, *, stall_s: float) -> None:
    """End an upload; its parts go. Nothing happens if it is gone already."""
    try:
        S3Api(url, signer, stall_s=stall_s).ask("DELETE", {"uploadId": upload_id})
    except RemoteError as error:
        if error.kind != "gone":
            raise


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
        if known is None or (known.url, known.state) != (str(api.url.path), state):
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
        extra = {"x-amz-meta-sha256": self._digest}
        answer = self._api.ask_document("POST", {"uploads": ""}, part="UploadId", extra=extra)
        self._upload.id = _text(answer, "UploadId")
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
            with contextlib.suppress(RemoteError):  # `gc --remote` ends it
                self._api.ask("DELETE", query)
            return False
        return True

    def _save(self) -> None:
        if self._record is not None:
            with contextlib.suppress(OSError, DiskFullError):  # then a killed upload begins again
                replace_text(self._record, json.dumps(asdict(self._upload)))


@contextlib.contextmanager
def _record(path: Path, url: Url) -> Iterator[Path | None]:
    """Where the record of an upload lies, beside the file; None if another process uploads it to the same."""
    from hashlib import sha256

    key = sha256(str(url.path).encode()).hexdigest()[:12]
    record = path.with_name(f".{path.name}.{key}.push")
    lock = record.with_name(f"{record.name}.lock")
    try:
        fd = files.open_or_create(lock)
    except (OSError, FormatError):  # a folder that can't be written to, or something else in its place
        yield None
        return
    try:
        if not _is_locked_by_us(fd, lock):
            yield None
            return
        try:
            yield record
        finally:
            files.remove(lock)
    finally:
        files.close(fd)


def _is_locked_by_us(fd: int, path: Path) -> bool:
    try:
        return locks.try_lock(fd, 0) and files.is_file_at(fd, path)
    except OSError:  # a file system without locks
        return False


def _read_record(path: Path | None) -> _Upload | None:
    """What a record says; None if it is absent or damaged: the upload begins again."""
    if path is None:
        return None
    try:
        values: Any = json.loads(path.read_bytes())
        nbytes, written = values["state"]
        known = _Upload(
            str(values["url"]),
            str(values["id"]),
            (int(nbytes), int(written)),
            int(values["part_nbytes"]),
            {str(number): str(tag) for number, tag in values["tags"].items()},
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    return known if known.part_nbytes > 0 else None


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
