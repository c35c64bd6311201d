"""`PackedStore.gather` against `Store.gather`: windows, outputs, conversion, refusals."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_stores import assert_same_bits, build, mixed_constants, mixed_values

import ups_store
from ups_store.errors import StoreClosedError
from ups_store.packed.pack import pack_store
from ups_store.system import files

Stores = tuple[ups_store.Store, ups_store.PackedStore]


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stores]:
    folder = tmp_path_factory.mktemp("packed")
    path = build(folder / "a.zarr.zip", mixed_values(7), constants=mixed_constants())
    with ups_store.open(path) as store:
        packed = pack_store(store, folder / "a.packed.zarr.zip").path
        with ups_store.open(packed) as opened:
            yield store, opened


@pytest.mark.parametrize("indices", [[5, 0, 6, 2], [3, 3, 0, 3], []])
@pytest.mark.parametrize(
    "window",
    [
        {},
        {"start": 1, "length": 2, "stride": 2},
        {"start": "each"},
    ],
)
def test_packed_gather_is_that_of_the_mapped_form(stores: Stores, indices: list[int], window: Any) -> None:
    store, packed = stores
    if window.get("start") == "each":
        window = {"start": np.arange(len(indices)) % 3, "length": 2}
    expected = store.gather(indices, **window)
    assert_same_bits(packed.gather(indices, **window), expected)
    for order in "CF":
        out = {name: np.empty_like(value, order=order) for name, value in expected.items()}
        batch = packed.gather(indices, out=out, **window)
        assert all(batch[name] is out[name] for name in out)
        assert_same_bits(batch, expected)


def test_packed_store_closed_amid_a_read_reads_its_own_file(
    stores: Stores, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed, other = ups_store.open(stores[1].path), tmp_path / "other"
    other.write_bytes(bytes(1 << 20))
    opened: list[int] = []
    real = files.read_at

    def close_and_read(fd: int, offset: int, nbytes: int) -> bytes:
        packed.close()
        opened.append(files.open_existing(other))  # takes the lowest number that is free
        return real(fd, offset, nbytes)

    packed.gather([0], ["fields"])  # the index of its chunks is known then
    expected = stores[1].gather([3], ["fields"])
    monkeypatch.setattr(files, "read_at", close_and_read)
    assert_same_bits(packed.gather([3], ["fields"]), expected)
    for fd in opened:
        files.close(fd)
    with pytest.raises(StoreClosedError):
        packed.gather([3], ["fields"])
