"""Other Zarr readers find every bit of what we write: whole arrays, and the last sample alone."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from peers import PEERS, TENSORSTORE, Answer, Peer, Request
from reference_store import build_reference, reference_arrays
from small_stores import Values, build

pytestmark = pytest.mark.interop

EXPECTED = reference_arrays()
HANG_TIMEOUT_S = 20  # the same read takes milliseconds where it ends at all


@pytest.fixture(params=PEERS, ids=lambda peer: peer.name, scope="module")
def peer(request: pytest.FixtureRequest) -> Peer:
    found: Peer = request.param
    if reason := found.missing():
        pytest.skip(reason)
    return found


@pytest.fixture(scope="module")
def answers(peer: Peer, tmp_path_factory: pytest.TempPathFactory) -> dict[Request, Answer]:
    folder = tmp_path_factory.mktemp("reference")
    return ask_all(peer, build_reference(folder / "reference.zarr.zip"), EXPECTED)


def ask_all(peer: Peer, store: Path, values: Values) -> dict[Request, Answer]:
    requests = [request for name, value in values.items() for request in requests_for(name, len_of(value))]
    return dict(zip(requests, peer.ask(store, requests, store.with_suffix(".out")), strict=True))


def requests_for(name: str, length: int) -> Iterator[Request]:
    yield Request(name)
    if length:
        yield Request(name, first=length - 1)


def len_of(value: npt.NDArray[Any]) -> int:
    return value.shape[0] if value.ndim else 0


def check(peer: Peer, request: Request, answer: Answer, values: Values) -> str | None:
    """Assert that the answer is right; returns the reason of a refusal that is known."""
    value = values[request.array]
    expected = value if request.first is None else value[request.first :]
    if answer.error is not None and (reason := peer.refusal(value)):
        return reason
    assert answer.error is None, (request, answer.error)
    assert answer.shape == expected.shape, request
    assert answer.payload == expected.tobytes(), request
    return None


@pytest.mark.parametrize("name", EXPECTED)
def test_peer_reads_array_bit_by_bit(peer: Peer, answers: dict[Request, Answer], name: str) -> None:
    """Whole, and from the last row on."""
    for request in requests_for(name, len_of(EXPECTED[name])):
        if reason := check(peer, request, answers[request], EXPECTED):
            pytest.xfail(reason)


@pytest.mark.parametrize("num_samples", [0, 1])
def test_peer_reads_store_of_few_samples(peer: Peer, num_samples: int, tmp_path: Path) -> None:
    values = reference_arrays(num_samples)
    store = build_reference(tmp_path / "reference.zarr.zip", num_samples)
    for request, answer in ask_all(peer, store, values).items():
        check(peer, request, answer, values)


@pytest.mark.parametrize("shape", [(9, 300, 256), (3, 1100, 256)], ids=["64 byte slots", "page slots"])
def test_peer_reads_late_sample_of_entry_over_2_mib(
    peer: Peer, shape: tuple[int, ...], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if peer is TENSORSTORE and peer.version() >= (0, 1, 85):
        reason = "tensorstore 0.1.85 and 0.1.86 hang on partial reads of entries over 2 MiB"
        request.applymarker(pytest.mark.xfail(reason=reason, raises=subprocess.TimeoutExpired, strict=True))
    value = np.random.default_rng(0).standard_normal(shape, np.float32)
    store = build(tmp_path / "large.zarr.zip", {"u": value}, dims={})
    last = Request("u", first=len(value) - 1)
    (answer,) = peer.ask(store, [last], tmp_path / "out", timeout_s=HANG_TIMEOUT_S)
    check(peer, last, answer, {"u": value})
