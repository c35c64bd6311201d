"""The writing half of `object_server`: what S3 does with PUT, POST, DELETE, and with what is listed."""

from __future__ import annotations

import hashlib
import itertools
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from email.message import Message
from urllib.parse import unquote
from xml.sax.saxutils import escape, unescape

_COPIED, _ATTRIBUTE = "x-amz-copy-source", "x-amz-meta-"
_TAG = re.compile(r"<ETag>(.*?)</ETag>")
_KEY = re.compile(r"<Key>(.*?)</Key>")
_numbers = itertools.count(1)


@dataclass
class Answer:
    """What is sent: a status, a document, headers."""

    status: int = 200
    body: str = ""
    headers: dict[str, str] = field(default_factory=dict)


@dataclass
class Upload:
    """An upload in parts that was begun: of which object, its attributes, its parts by number."""

    path: str
    attributes: dict[str, str]
    parts: dict[int, bytes] = field(default_factory=dict)


@dataclass
class Bucket:
    """All that a server holds; safe to use from several threads.

    Attributes:
        objects: Content by path, `bucket/key`.
        attributes: Headers by path that went with an object, and come back with it.
        uploads: Those that were neither completed nor ended, by id.
        written: When every upload was begun, and every object written, as listings say it.
        page_size: How many objects, or uploads, a listing gives at once.
    """

    objects: dict[str, bytes] = field(default_factory=dict)
    attributes: dict[str, dict[str, str]] = field(default_factory=dict)
    uploads: dict[str, Upload] = field(default_factory=dict)
    written: str = "2020-01-01T10:00:00.000Z"
    page_size: int = 1000
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def answer(
        self, method: str, path: str, query: Mapping[str, str], headers: Message, body: bytes
    ) -> Answer:
        """Do what a request asks for, unless it reads an object."""
        with self._lock:
            if "uploadId" in query:
                return self._about_upload(method, path, query, headers, body)
            if "delete" in query:
                return self._delete(path, body.decode())
            if method == "POST":
                return self._begin(path, headers)
            if method == "PUT":
                return self._put(path, headers, body)
            return self._list_uploads(path, query) if "uploads" in query else self._list(path, query)

    def _put(self, path: str, headers: Message, body: bytes) -> Answer:
        if headers.get("If-None-Match") == "*" and path in self.objects:
            return refusal(412, "PreconditionFailed")
        source = _source(headers)
        self.objects[path] = body if source is None else self.objects[source]
        self.attributes[path] = _attributes(headers) if source is None else self.attributes.get(source, {})
        return _stored("CopyObjectResult", self.objects[path])

    def _begin(self, path: str, headers: Message) -> Answer:
        number = f"upload {next(_numbers)}"
        self.uploads[number] = Upload(path, _attributes(headers))
        return _document("InitiateMultipartUploadResult", _element("UploadId", number))

    def _about_upload(
        self, method: str, path: str, query: Mapping[str, str], headers: Message, body: bytes
    ) -> Answer:
        found = self.uploads.get(query["uploadId"])
        if found is None or found.path != path:
            return refusal(404, "NoSuchUpload")
        if method == "PUT":
            source = _source(headers)
            data = found.parts[int(query["partNumber"])] = body if source is None else self.objects[source]
            return _stored("CopyPartResult", data)
        if method == "POST":
            return self._complete(query["uploadId"], headers, body.decode())
        del self.uploads[query["uploadId"]]
        return Answer(204)

    def _complete(self, number: str, headers: Message, body: str) -> Answer:
        found = self.uploads[number]
        if headers.get("If-None-Match") == "*" and found.path in self.objects:
            return refusal(412, "PreconditionFailed")
        parts = [found.parts[part] for part in sorted(found.parts)]
        if [unescape(tag, {"&quot;": '"'}) for tag in _TAG.findall(body)] != [*map(tag_of, parts)]:
            return refusal(400, "InvalidPart")
        self.objects[found.path], self.attributes[found.path] = b"".join(parts), found.attributes
        del self.uploads[number]
        return _stored("CompleteMultipartUploadResult", self.objects[found.path])

    def _delete(self, bucket: str, body: str) -> Answer:
        """DeleteObjects; nothing is missed of what isn't there."""
        keys = [unescape(key) for key in _KEY.findall(body)]
        for key in keys:
            self.objects.pop(f"{bucket}/{key}", None)
        deleted = (f"<Deleted>{_element('Key', key)}</Deleted>" for key in keys)
        return _document("DeleteResult", *deleted)

    def _list(self, bucket: str, query: Mapping[str, str]) -> Answer:
        """ListObjectsV2; a token is the last key of the page before."""
        start = query.get("continuation-token", "")
        keys = [key for key in self._keys_of(bucket, query) if key > start]
        shown = keys[: self.page_size]
        each = [
            _element("Key", key)
            + _element("LastModified", self.written)
            + _element("ETag", tag_of(self.objects[f"{bucket}/{key}"]))
            + _element("Size", len(self.objects[f"{bucket}/{key}"]))
            for key in shown
        ]
        markers = {"NextContinuationToken": shown[-1]} if len(shown) < len(keys) else {}
        return _page("ListBucketResult", "Contents", each, markers)

    def _list_uploads(self, bucket: str, query: Mapping[str, str]) -> Answer:
        """ListMultipartUploads; markers name the last upload of the page before."""
        start = query.get("key-marker", ""), query.get("upload-id-marker", "")
        places = sorted(
            (each.path.removeprefix(f"{bucket}/"), number) for number, each in self.uploads.items()
        )
        wanted = [place for place in places if place > start and place[0].startswith(query["prefix"])]
        shown = wanted[: self.page_size]
        each = [
            _element("Key", key) + _element("UploadId", number) + _element("Initiated", self.written)
            for key, number in shown
        ]
        names = "NextKeyMarker", "NextUploadIdMarker"
        markers = dict(zip(names, shown[-1], strict=True)) if len(shown) < len(wanted) else {}
        return _page("ListMultipartUploadsResult", "Upload", each, markers)

    def _keys_of(self, bucket: str, query: Mapping[str, str]) -> list[str]:
        keys = (
            path.removeprefix(f"{bucket}/") for path in sorted(self.objects) if path.startswith(f"{bucket}/")
        )
        return [key for key in keys if key.startswith(query.get("prefix", ""))]


def refusal(status: int, code: str) -> Answer:
    """An error, as S3 says it."""
    return Answer(status, f"<Error>{_element('Code', code)}</Error>" if code else "")


def tag_of(data: bytes) -> str:
    """The ETag of a content."""
    return f'"{hashlib.md5(data).hexdigest()}"'


def _element(name: str, value: object) -> str:
    return f"<{name}>{escape(str(value))}</{name}>"


def _document(name: str, *elements: str) -> Answer:
    return Answer(200, f"<{name}>{''.join(elements)}</{name}>")


def _stored(name: str, data: bytes) -> Answer:
    """The answer where a content was taken."""
    answer = _document(name, _element("ETag", tag_of(data)))
    answer.headers["ETag"] = tag_of(data)
    return answer


def _page(name: str, kind: str, each: list[str], markers: Mapping[str, str]) -> Answer:
    """A part of a listing; markers ask for the next one, if there is one."""
    is_truncated = _element("IsTruncated", str(bool(markers)).lower())
    listed = (f"<{kind}>{one}</{kind}>" for one in each)
    return _document(name, is_truncated, *(_element(*marker) for marker in markers.items()), *listed)


def _attributes(headers: Message) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items() if name.lower().startswith(_ATTRIBUTE)}


def _source(headers: Message) -> str | None:
    """What is copied; None where the body is the content."""
    found = headers.get(_COPIED)
    return None if found is None else unquote(found).lstrip("/")
