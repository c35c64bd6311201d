"""A web server in a thread that answers as a test says, also with what no honest server would."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Answer = Callable[[BaseHTTPRequestHandler], None]


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        pass  # a client that gave up


@contextlib.contextmanager
def serving(answer: Answer) -> Iterator[str]:
    """A server on a free port of 127.0.0.1 for the duration of a block; gives its URL."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *arguments: object) -> None:
            pass

        def do_GET(self) -> None:
            answer(self)

        do_HEAD = do_PUT = do_GET

    with _Server(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()


def give(request: BaseHTTPRequestHandler, status: int, body: bytes = b"", **headers: str) -> None:
    """Send an answer; of a header's name "_" stands for "-"."""
    request.send_response(status)
    for name, value in {"Content_Length": str(len(body)), **headers}.items():
        request.send_header(name.replace("_", "-"), value)
    request.end_headers()
    if request.command != "HEAD":
        request.wfile.write(body)


def give_range(request: BaseHTTPRequestHandler, content: bytes, **headers: str) -> None:
    """Send the part of a file that was asked for, as an honest server does."""
    first, _, last = request.headers["Range"].removeprefix("bytes=").partition("-")
    start = int(first) if first else max(0, len(content) - int(last))
    end = min(len(content), int(last) + 1) if first and last else len(content)
    said = {"Content_Range": f"bytes {start}-{end - 1}/{len(content)}", "ETag": '"1"'}
    said["Last_Modified"] = "Mon, 23 Nov 2026 10:00:00 GMT"
    give(request, 206, content[start:end], **said, **headers)
