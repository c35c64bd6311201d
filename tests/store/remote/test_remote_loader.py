"""Training from a URL: the loader's batches, windows and resume are those of the local file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from object_server import Asked, Fault, ObjectServer
from remote_stores import DIMS, KEY, URL, some_values, upload

import ups_store

torch = pytest.importorskip("torch", reason="the extra [torch]")

from ups_store.torch import StoreDataset, Window, make_loader  # noqa: E402

OPTIONS: dict[str, Any] = {"batch_size": 6, "shuffle": True, "seed": 5}


def batches(loader: Any) -> list[dict[str, Any]]:
    return [
        {name: batch[name].clone() for name in batch if name not in ("task", "params")} for batch in loader
    ]


def assert_same(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in other)


def test_epochs_are_those_of_the_file_and_the_second_is_local(
    server: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UPS_STORE_CACHE_DIR", str(tmp_path / "slots"))
    values = {"u": np.random.default_rng(0).standard_normal((40, 8, 4096)).astype(np.float32)}
    path = upload(server, tmp_path, values)
    # Else samples of the next epoch may be asked for while this one still fetches them.
    loader = make_loader(URL, num_workers=2, across_epochs=False, **OPTIONS)
    local = make_loader(path, num_workers=0, **OPTIONS)
    assert_same(batches(loader), batches(local))
    assert server.num_bytes < 1.05 * len(server.objects[KEY])
    assert len(server.asked) <= 2 + 40
    server.forget()
    assert_same(batches(loader), batches(local))
    assert server.asked == []
    assert loader.report().access == "remote"
    loader.close()


def test_windows(server: ObjectServer, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    values = {"fields": rng.standard_normal((9, 8, 256)).astype(np.float32), "nu": rng.random(9)}
    path = upload(server, tmp_path, values, dims={"fields": DIMS["u"]})
    window = Window(horizon=2)
    found, local = (StoreDataset(place, window=window) for place in (URL, path))
    assert_same(
        batches(make_loader(found, num_workers=0, **OPTIONS)),
        batches(make_loader(local, num_workers=0, **OPTIONS)),
    )
    assert server.num_bytes < 3 * len(server.objects[KEY])  # not once a window


def test_resume_within_an_epoch(server: ObjectServer, tmp_path: Path) -> None:
    path = upload(server, tmp_path, some_values())
    loader = make_loader(URL, num_workers=2, **OPTIONS)
    there = iter(loader)
    for _ in range(3):
        next(there)
    state = loader.state_dict()
    loader.close()
    resumed = make_loader(URL, num_workers=2, **OPTIONS)
    resumed.load_state_dict(state)
    assert_same(batches(resumed), batches(make_loader(path, num_workers=0, **OPTIONS))[3:])
    resumed.close()


def test_batches_survive_a_server_that_fails_now_and_then(server: ObjectServer, tmp_path: Path) -> None:
    path = upload(server, tmp_path, some_values())
    faults = [Fault(status=503), None, Fault(cut=100), None, Fault(shift=8), None, Fault(flip=True), None]
    flipped: list[tuple[int, int]] = []

    def fault(asked: Asked) -> Fault | None:
        found = faults[len(server.asked) % len(faults)]
        if found is None or not found.flip:
            return found
        if any(first <= asked.range[0] < end for first, end in flipped):
            return None  # twice the same chunk would be damage
        flipped.append(asked.range)
        return found

    server.fault = fault
    loader = make_loader(URL, num_workers=2, **OPTIONS)
    assert_same(batches(loader), batches(make_loader(path, num_workers=0, **OPTIONS)))
    loader.close()


def test_shuffle_of_a_remote_store_is_by_blocks(server: ObjectServer, tmp_path: Path) -> None:
    upload(server, tmp_path, some_values())
    with ups_store.open(URL) as store:
        loader = make_loader(store, batch_size=6, num_workers=0, shuffle="auto")
        assert loader.order.shuffle == "block"
