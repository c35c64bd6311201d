"""vast.ai's API as far as a launch needs it, on this machine, and a small client where vastai isn't there."""

from __future__ import annotations

import json
import operator
import sys
import threading
import types
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

KEY = "key-of-the-account"
_COMPARE = {"eq": operator.eq, "gte": operator.ge, "lte": operator.le}


def offer(number: int, price: float, **more: Any) -> dict[str, Any]:
    """An offer as the API lists it."""
    row = {"id": number, "gpu_name": "RTX 4090", "num_gpus": 1, "dph_total": price, "disk_space": 500.0}
    row |= {"reliability": 0.99, "cuda_max_good": 12.9, "verified": True, "external": False}
    return {**row, "rentable": True, "rented": False, "geolocation": "Norway, NO", **more}


@dataclass
class StandIn:
    """What the API knows, and how it is to misbehave.

    Attributes:
        url: Where it listens.
        offers: By number.
        instances: By number.
        gone: Offers that somebody else accepts first.
        states: What an instance is in turn; the last one stays.
        refusal: HTTP status and what is said, of every attempt to create an instance.
        drops: Accept an offer, and end the connection without an answer.
        log: Method, path and body of every request.
    """

    url: str = ""
    offers: dict[int, dict[str, Any]] = field(default_factory=dict)
    instances: dict[int, dict[str, Any]] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)
    states: list[str | None] = field(default_factory=lambda: [None, "loading", "running"])
    refusal: tuple[int, dict[str, Any]] | None = None
    drops: bool = False
    log: list[tuple[str, str, dict[str, Any]]] = field(default_factory=list)

    def sent(self, method: str, path: str) -> list[dict[str, Any]]:
        """Bodies of the requests of one kind."""
        return [body for verb, where, body in self.log if verb == method and where.startswith(path)]

    def answer(self, method: str, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """HTTP status and answer."""
        version, room, number = [*path.split("?")[0].strip("/").split("/"), "", ""][1:4]
        self.log.append((method, path, body))
        match method, room:
            case "POST", "bundles":
                return 200, {"offers": [row for row in self.offers.values() if _fits(row, body)]}
            case "PUT", "asks":
                return self._create(int(number), body)
            case "GET", "instances" if number:
                return 200, {"instances": self._advance(int(number))}
            case "GET", "instances":
                return 200, {"instances": list(self.instances.values()), "next_token": None}
            case "PUT", "instances":
                self.instances[int(number)]["intended_status"] = body["state"]
                return 200, {"success": True}
            case "DELETE", "instances":
                del self.instances[int(number)]
                return 200, {"success": True}
        return 404, {"error": "no_such_path", "msg": f"{method} {version}/{room}"}

    def _create(self, number: int, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if self.refusal is not None:
            return self.refusal
        if number in self.gone:
            return 404, {"success": False, "error": "no_such_ask", "msg": "no such ask"}
        made = 1000 + number
        row = {"id": made, "label": body["label"], "start_date": 0.0, "extra_env": []}
        self.instances[made] = {**row, "intended_status": "running", "status_msg": ""}
        return 200, {"success": True, "new_contract": made}

    def _advance(self, number: int) -> dict[str, Any] | None:
        row = self.instances.get(number)
        state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        return None if row is None else {**row, "actual_status": state}


def _fits(row: dict[str, Any], query: dict[str, Any]) -> bool:
    return all(
        _COMPARE[name](row[key], value)
        for key, wanted in query.items()
        if isinstance(wanted, dict)
        for name, value in wanted.items()
    )


@contextmanager
def serving() -> Iterator[StandIn]:
    """The API on a port of its own."""
    api = StandIn()

    class Handler(BaseHTTPRequestHandler):
        def _handle(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
            if self.headers.get("Authorization") != f"Bearer {KEY}":
                status, answer = 401, {"success": False, "error": "auth_error", "msg": "Invalid user key"}
            else:
                status, answer = api.answer(self.command, self.path, body)
            if api.drops and self.path.startswith("/api/v0/asks/"):
                return
            text = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        do_GET = do_PUT = do_POST = do_DELETE = _handle

        def log_message(self, *arguments: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    api.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield api
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class RequestException(OSError):  # noqa: N818
    """As that of requests."""


class HTTPError(RequestException):
    """As that of requests."""

    def __init__(self, response: Any) -> None:
        super().__init__("refused")
        self.response = response


class Client:
    """What a launch uses of `vastai.VastAI`, with its arguments and its requests."""

    def __init__(self, server_url: str | None = None, retry: int = 3) -> None:
        import os

        if not (key := os.environ.get("VAST_API_KEY")):
            raise RuntimeError("No API key found")
        self._url, self._key = server_url, key

    def _call(self, method: str, path: str, body: Any = None) -> Any:
        request = urllib.request.Request(f"{self._url}/api/v0{path}", method=method)
        request.add_header("Authorization", f"Bearer {self._key}")
        try:
            return json.load(urllib.request.urlopen(request, data=json.dumps(body or {}).encode(), timeout=5))
        except urllib.error.HTTPError as error:
            text = error.read()
            answer = types.SimpleNamespace(status_code=error.code, json=lambda: json.loads(text))
            raise HTTPError(answer) from error
        except OSError as error:
            raise RequestException(str(error)) from error

    def search_offers(self, query: dict[str, Any], order: str, limit: int, storage: float) -> Any:
        body = {"verified": {"eq": True}, "rentable": {"eq": True}, **query, "order": [[order, "asc"]]}
        return self._call("POST", "/bundles/", {**body, "allocated_storage": storage})["offers"]

    def create_instance(self, id: int, onstart_cmd: str, **arguments: Any) -> Any:
        return self._call("PUT", f"/asks/{id}/", {**arguments, "onstart": onstart_cmd})

    def show_instance(self, id: int) -> Any:
        return self._call("GET", f"/instances/{id}/")["instances"]

    def show_instances_v1(self, params: dict[str, Any]) -> Any:
        return self._call("GET", f"/instances/?limit={params['limit']}")

    def destroy_instance(self, id: int) -> Any:
        return self._call("DELETE", f"/instances/{id}/")


def install_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have `import vastai` and `import requests` give the client of this module."""
    from importlib.machinery import ModuleSpec

    for name, content in {
        "vastai": {"VastAI": Client},
        "requests": {"HTTPError": HTTPError, "RequestException": RequestException},
    }.items():
        module = types.ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
