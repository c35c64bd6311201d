"""A server of objects in a thread, as S3 and as plain http, that counts requests and fails as a test says."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qsl, unquote, urlsplit

import pytest
from object_writes import Answer, Bucket, refusal, tag_of

_RANGE = re.compile(r"bytes=(\d*)-(\d*)")


@dataclass
class Asked:
    """One request: method, path, range `(first, past_last)` of the object, query, bytes that were sent."""

    method: str
    path: str
    range: tuple[int, int]
    query: dict[str, str] = field(default_factory=dict)
    nbytes: int = 0


@dataclass
class Fault:
    """What is wrong with one answer.

    Attributes:
        status: Sent instead of an answer; nothing is done, or read.
        code: Of the error that is the body then.
        body: Sent as the body of an answer to what writes or lists.
        cut: The connection is closed after so many bytes of the body; if nothing is read, what was asked for
            is done, and no answer comes.
        shift: Another range is sent, and said, than was asked for: by so many bytes further on.
        tag: Another ETag is said.
        delay_s: Before the answer begins.
        flip: One bit of the body is wrong.
        is_whole: The whole object is sent, with status 200.
    """

    status: int = 0
    code: str = ""
    body: str | None = None
    cut: int | None = None
    shift: int = 0
    tag: str = ""
    delay_s: float = 0.0
    flip: bool = False
    is_whole: bool = False


@dataclass
class ObjectServer(Bucket):
    """Objects by path, `bucket/key`; a test changes them, and the faults, while it runs.

    Attributes:
        url: Of its root.
        asked: All requests, in order.
        fault: Says what is wrong with the answer to a request, if anything.
        has_tags: Whether answers have an ETag, and If-Match is known.
    """

    url: str = ""
    asked: list[Asked] = field(default_factory=list)
    fault: Callable[[Asked], Fault | None] = lambda asked: None
    has_tags: bool = True

    @property
    def num_bytes(self) -> int:
        """Bytes of all bodies so far."""
        return sum(asked.nbytes for asked in self.asked)

    def forget(self) -> None:
        """Count from 0 again."""
        self.asked.clear()


class _Handler(BaseHTTPRequestHandler):
    state: ObjectServer
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *arguments: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._read()

    def do_GET(self) -> None:
        if "/" in urlsplit(self.path).path.strip("/"):
            self._read()
        else:
            self._answer()

    def do_PUT(self) -> None:
        self._answer()

    do_POST = do_DELETE = do_PUT

    def _answer(self) -> None:
        """Write, or list."""
        parts = urlsplit(self.path)
        path, query = unquote(parts.path).strip("/"), dict(parse_qsl(parts.query, keep_blank_values=True))
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        asked = Asked(self.command, path, (0, len(body)), query)
        self.state.asked.append(asked)
        fault = self.state.fault(asked) or Fault()
        time.sleep(fault.delay_s)
        if fault.status:
            refused = refusal(fault.status, fault.code)
            self._give(refused if fault.body is None else Answer(fault.status, fault.body))
            return
        answer = self.state.answer(self.command, path, query, self.headers, body)
        if fault.cut is not None:
            self.close_connection = True
        elif fault.body is not None:
            self._give(Answer(answer.status, fault.body))
        else:
            self._give(answer)

    def _read(self) -> None:
        state, path = self.state, unquote(urlsplit(self.path).path).lstrip("/")
        data = state.objects.get(path)
        size = 0 if data is None else len(data)
        asked = Asked(self.command, path, _range_of(self.headers.get("Range", ""), size))
        state.asked.append(asked)
        fault = state.fault(asked) or Fault()
        time.sleep(fault.delay_s)
        if fault.status or data is None:
            self._refuse(fault.status or 404)
            return
        tag = fault.tag or tag_of(data)
        if state.has_tags and not fault.tag and self.headers.get("If-Match") not in (None, tag):
            self._refuse(412)
            return
        is_part = "Range" in self.headers and not fault.is_whole
        if is_part and not size:
            self._refuse(416)  # as S3 does: no byte is in the range
            return
        first, end = asked.range if is_part else (0, size)
        first, end = first + fault.shift, min(size, end + fault.shift)
        self.send_response(206 if is_part else 200)
        if is_part:
            self.send_header("Content-Range", f"bytes {first}-{end - 1}/{size}")
        if state.has_tags:
            self.send_header("ETag", tag)
        for name, value in state.attributes.get(path, {}).items():
            self.send_header(name, value)
        self.send_header("Last-Modified", "Mon, 23 Nov 2026 10:00:00 GMT")
        self.send_header("Content-Length", str(end - first))
        self.end_headers()
        if self.command == "GET":
            self._send(bytearray(data[first:end]), fault, asked)

    def _send(self, body: bytearray, fault: Fault, asked: Asked) -> None:
        if fault.flip:
            body[len(body) // 2] ^= 1
        sent = body if fault.cut is None else body[: fault.cut]
        asked.nbytes = len(sent)
        with contextlib.suppress(OSError):  # a reader that gave up
            self.wfile.write(sent)
        self.close_connection = len(sent) < len(body)

    def _refuse(self, status: int) -> None:
        self._give(Answer(status))

    def _give(self, answer: Answer) -> None:
        body = answer.body.encode()
        self.send_response(answer.status)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _range_of(text: str, size: int) -> tuple[int, int]:
    match = _RANGE.match(text)
    if not match:
        return 0, size
    if not match[1]:
        return max(0, size - int(match[2])), size
    return int(match[1]), min(size, int(match[2]) + 1) if match[2] else size


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, request: object, client_address: object) -> None:
        pass  # a client that is killed


@contextlib.contextmanager
def serving_objects() -> Iterator[ObjectServer]:
    """A server on a free port of this machine, for the duration of a block."""
    state = ObjectServer()
    handler = type("Handler", (_Handler,), {"state": state})
    with _Server(("127.0.0.1", 0), handler) as server:
        state.url = f"http://127.0.0.1:{server.server_address[1]}"
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        try:
            yield state
        finally:
            server.shutdown()


def use_as_s3(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have `s3://bucket/key` mean the server's object `bucket/key`; skips the test without obstore."""
    pytest.importorskip("obstore", reason="the extra [s3]")
    from ups_store.remote import client

    client._client.cache_clear()  # those of an earlier server
    for name, value in s3_environment(url).items():
        monkeypatch.setenv(name, value)


def s3_environment(url: str) -> dict[str, str]:
    """Variables by which a process takes the server for S3."""
    return {
        "AWS_ENDPOINT_URL": url,
        "AWS_ALLOW_HTTP": "true",
        "AWS_SKIP_SIGNATURE": "true",
        "AWS_REGION": "eu",
    }
