"""Number 36: how much memory a client takes isn't the server's decision."""

from __future__ import annotations

import contextlib
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import numpy as np
import pytest
from hostile_server import give_range, serving

import ups_store
from ups_store.errors import FormatError, RemoteError
from ups_store.format.zip_records import Entry, pack_directory

pytest.importorskip("obstore")


@pytest.mark.parametrize("is_end", [True, False])
def test_body_that_goes_on_for_ever_is_given_up(tmp_path: Path, is_end: bool) -> None:
    path = tmp_path / "a.zarr.zip"
    ups_store.save(path, u=np.arange(20000.0))
    content, sent = path.read_bytes(), [0]

    def go_on(request: BaseHTTPRequestHandler) -> None:
        if not is_end and "bytes=-" in request.headers["Range"]:
            give_range(request, content)
            return
        with contextlib.suppress(OSError):
            give_range(request, content, Content_Length=str(1 << 50))
            for _ in range(256):
                sent[0] += request.wfile.write(bytes(1 << 20))

    with serving(go_on) as url, pytest.raises(RemoteError):
        ups_store.open(f"{url}/a.zarr.zip", deadline_s=0.4).gather([0])
    assert sent[0] < 128 << 20  # of several attempts; what lies in buffers of the system counts


def test_claim_of_huge_documents_is_refused_before_they_are_fetched() -> None:
    entries, at = [], 0
    for number in range(64):
        name = f"a{number:04d}/zarr.json" if number else "zarr.json"
        entries.append(Entry(name, at, 16 << 20))
        at = entries[-1].end
    end = pack_directory(entries, [0] * len(entries))
    asked: list[int] = []

    def claim(request: BaseHTTPRequestHandler) -> None:
        first, _, last = request.headers["Range"].removeprefix("bytes=").partition("-")
        start = int(first) if first else at + len(end) - int(last)
        asked.append((int(last) + 1 if first else at + len(end)) - start)
        give_range(request, Claimed(at, end))  # type: ignore[arg-type]

    with serving(claim) as url, pytest.raises(FormatError) as caught:
        ups_store.open(f"{url}/a.zarr.zip", deadline_s=5)
    assert caught.value.kind == "limits"
    assert sum(asked) < 1 << 20


class Claimed:
    """A file of zeros with something at its end."""

    def __init__(self, num_zeros: int, end: bytes) -> None:
        self._num_zeros, self._end = num_zeros, end

    def __len__(self) -> int:
        return self._num_zeros + len(self._end)

    def __getitem__(self, part: slice) -> bytes:
        zeros = bytes(max(0, min(part.stop, self._num_zeros) - part.start))
        return zeros + self._end[max(0, part.start - self._num_zeros) : max(0, part.stop - self._num_zeros)]
