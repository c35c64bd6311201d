"""A server of files with ranges, in a thread, that misbehaves as a test says; also as a bucket of S3."""

from __future__ import annotations

import contextlib
import hashlib
import re
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

RANGE = re.compile(r"bytes=(\d+)-(\d*)")


@dataclass
class Request:
    """What was asked for: path, first byte, and whether only a first byte was wanted."""

    path: str
    start: int
    is_look: bool


@dataclass
class FileServer:
    """Files by path; a test changes them, and what is wrong with the answers, while it runs.

    Attributes:
        url: Of its root.
        files: Content by path, without the first slash.
        asked: All requests, in order.
        statuses: Given instead of the next answers to requests for bytes, while there are any.
        look_statuses: The same, of requests for no more than what is there.
        headers: Sent with every answer.
        cut_at: The connection is closed after so many bytes of an answer; None: never.
        announced: How long files are said to be, where that isn't what they are.
        has_ranges: Whether ranges are known.
        has_tags: Whether answers have an ETag.
        after: Called when each answer with bytes is almost over: before its last byte, or before it is cut.
        authorizations: Headers of that name.
        hang: Answers stop, those of a whole file in the middle, until the event is set.
    """

    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    asked: list[Request] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)
    look_statuses: list[int] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)
    cut_at: int | None = None
    announced: int | None = None
    has_ranges: bool = True
    has_tags: bool = True
    after: Callable[[], None] = lambda: None
    hang: threading.Event | None = None
    authorizations: set[str] = field(default_factory=set)

    @property
    def starts(self) -> list[int]:
        """First bytes of the requests for content."""
        return [request.start for request in self.asked if not request.is_look]


class _Handler(BaseHTTPRequestHandler):
    state: FileServer

    def log_message(self, *arguments: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        if "list-type" in self.path:
            self._list()
        else:
            self._answer(with_body=True)

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self._refuse(403)

    def _answer(self, *, with_body: bool) -> None:
        state, path = self.state, unquote(urlsplit(self.path).path).lstrip("/")
        match = RANGE.match(self.headers.get("Range", "")) if state.has_ranges else None
        start, end = (int(match[1]), match[2]) if match else (0, "")
        is_look = not with_body or (start, end) == (0, "0")
        state.asked.append(Request(path, start, is_look))
        state.authorizations.update(self.headers.get_all("Authorization", []))
        if refusals := state.look_statuses if is_look else state.statuses:
            self._refuse(refusals.pop(0))
            return
        if path not in state.files:
            self._refuse(404)
            return
        data = state.files[path]
        tag = f'"{hashlib.md5(data).hexdigest()}"'
        said = self.headers.get("If-Range")
        if said is not None and said != tag:
            match, start = None, 0
        if self.headers.get("If-Match") not in (None, tag):
            self._refuse(412)
            return
        if match and start >= len(data):
            self._refuse(416)
            return
        size = state.announced or len(data)
        stop = int(end) + 1 if end and match else size
        self.send_response(206 if match else 200)
        if match:
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{size}")
        if state.has_tags:
            self.send_header("ETag", tag)
        self.send_header("Content-Length", str(stop - start))
        self.send_header("Last-Modified", "Mon, 23 Nov 2026 10:00:00 GMT") if state.has_tags else None
        for name, value in state.headers.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self._send(data[start:stop], is_look, is_whole=start == 0)

    def _send(self, body: bytes, is_look: bool, *, is_whole: bool) -> None:
        state = self.state
        if is_look:
            self.wfile.write(body)
            return
        if state.hang is not None:
            self.wfile.write(body[: len(body) // 2] if is_whole else b"")
            self.wfile.flush()
            state.hang.wait()
        if state.cut_at is not None and len(body) > state.cut_at:
            self.wfile.write(body[: state.cut_at])
            state.after()
            self.close_connection = True
            return
        with contextlib.suppress(OSError):  # a reader that has seen enough
            self.wfile.write(body[:-1])
            self.wfile.flush()
            state.after()  # before the reader can know that this was all
            self.wfile.write(body[-1:])

    def _refuse(self, status: int) -> None:
        self.send_response(status)
        for name, value in self.state.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _list(self) -> None:
        parts = urlsplit(self.path)
        bucket = parts.path.strip("/")
        prefix = parse_qs(parts.query).get("prefix", [""])[0]
        items = "".join(
            f"<Contents><Key>{path.removeprefix(f'{bucket}/')}</Key>"
            "<LastModified>2026-11-23T10:00:00.000Z</LastModified>"
            f"<ETag>&quot;{hashlib.md5(data).hexdigest()}&quot;</ETag><Size>{len(data)}</Size></Contents>"
            for path, data in self.state.files.items()
            if path.startswith(f"{bucket}/{prefix}")
        )
        answer = f"<ListBucketResult><IsTruncated>false</IsTruncated>{items}</ListBucketResult>".encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        pass  # a client that is killed


@contextlib.contextmanager
def serving() -> Iterator[FileServer]:
    """A server on a free port of this machine, for the duration of a block."""
    state = FileServer()
    handler = type("Handler", (_Handler,), {"state": state})
    with _Server(("127.0.0.1", 0), handler) as server:
        state.url = f"http://127.0.0.1:{server.server_address[1]}"
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        try:
            yield state
        finally:
            if state.hang is not None:
                state.hang.set()
            server.shutdown()


def use_as_s3(server: FileServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have `s3://bucket/key` mean the server's file `bucket/key`; skips the test without obstore."""
    pytest.importorskip("obstore", reason="the extra [s3]")
    from ups_store.remote import client

    client._client.cache_clear()  # those of an earlier server
    for name, value in {
        "AWS_ENDPOINT_URL": server.url,
        "AWS_ALLOW_HTTP": "true",
        "AWS_SKIP_SIGNATURE": "true",
        "AWS_REGION": "eu",
    }.items():
        monkeypatch.setenv(name, value)


def closed_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
    return port
