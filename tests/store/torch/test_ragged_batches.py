"""Ragged arrays in batches of torch: padded, nested, text; loaders, several stores, sets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ragged_stores import LENGTHS, TEXTS, build_ragged, ragged_values
from torch.utils.data import DataLoader

import ups_store
from ups_store.torch import StoreDataset, Window, gather_nested, make_loader

N = len(LENGTHS)
VALUES = ragged_values()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_ragged(tmp_path_factory.mktemp("ragged") / "a.zarr.zip", VALUES)


def _check(batch: Any, form: str, values: Any = VALUES) -> None:
    items = batch["index"].tolist()
    assert batch["text"] == [values["text"][i] for i in items]
    expected = [values["points"][i] for i in items]
    if form == "padded":
        lengths = batch["points.lengths"].tolist()
        assert lengths == list(map(len, expected))
        assert batch["points"].shape == (len(items), max(lengths), 3)
        found = [row[:length] for row, length in zip(batch["points"], lengths, strict=True)]
        assert not any(row[n:].any() for row, n in zip(batch["points"], lengths, strict=True))
    else:
        assert batch["points"].is_nested
        found = list(batch["points"].unbind())
    for got, wanted in zip(found, expected, strict=True):
        np.testing.assert_array_equal(got.float().numpy(), wanted)


@pytest.mark.parametrize("form", ["padded", "nested"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_loader_gives_ragged_arrays_as_asked(path: Path, form: Any, num_workers: int) -> None:
    dataset = StoreDataset(path, ragged=form)
    loader = make_loader(dataset, batch_size=2, shuffle=True, num_workers=num_workers)
    seen = []
    for batch in loader:
        _check(batch, form)
        seen += batch["index"].tolist()
    assert sorted(seen) == list(range(N))
    assert loader.report().nbytes >= sum(v.nbytes for v in VALUES["points"])


@pytest.mark.parametrize("form", ["padded", "nested"])
def test_item_of_a_dataset_has_its_rows_and_text(path: Path, form: Any) -> None:
    sample = StoreDataset(path, ragged=form)[4]
    np.testing.assert_array_equal(sample["points"].numpy(), VALUES["points"][4])
    assert sample["text"] == TEXTS[4]
    view = StoreDataset(path, ragged="padded", views=True)[3]
    np.testing.assert_array_equal(view["points"].numpy(), VALUES["points"][3])


@pytest.mark.parametrize("form", ["padded", "nested"])
def test_batch_from_several_stores_is_padded_to_the_longest_of_all(
    path: Path, tmp_path: Path, form: Any
) -> None:
    other = ragged_values((70, 2), seed=3)
    dataset = StoreDataset([path, build_ragged(tmp_path / "b.zarr.zip", other)], ragged=form)
    together = {name: [*VALUES[name], *other[name]] for name in VALUES}
    batch = dataset.batch([6, 0, 5, 4])
    _check(batch, form, together)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_data_loader_of_torch_collates_padded_batches(path: Path, num_workers: int) -> None:
    loader = DataLoader(StoreDataset(path, ragged="padded"), batch_size=3, num_workers=num_workers)
    for batch in loader:
        _check(batch, "padded")


@pytest.mark.parametrize(
    "options",
    [{}, {"names": ["points"]}, {"ragged": "other"}],
)
def test_dataset_refuses_ragged_arrays_that_it_has_no_form_for(path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ups_store.SpecError) as error:
        StoreDataset(path, **options)
    assert error.value.kind == "ragged"


def test_windows_leave_ragged_arrays_out_and_refuse_them_by_name(tmp_path: Path) -> None:
    arrays = {
        "fields": ups_store.ArraySpec((2, 4, 3), "float32", dims=("sample", "time", "x")),
        "points": ups_store.ArraySpec((2, None), "int8", dims=("sample", "time_of_point"), lengths=[1, 2]),
    }
    with ups_store.create(tmp_path / "a.zarr.zip", arrays, identity={}) as writer:
        writer.commit_many([0, 1], {"fields": np.zeros((2, 4, 3), np.float32), "points": [[1], [1, 2]]})
        path = writer.finish()
    window = Window(horizon=1)
    assert "points" not in StoreDataset(path, window=window)[0]
    for options in ({"names": ["points"]}, {"state": "points"}):
        with pytest.raises(ups_store.SpecError):
            StoreDataset(path, window=window, ragged="padded", **options)  # type: ignore[arg-type]


def test_gather_nested_gives_a_jagged_tensor(path: Path) -> None:
    with ups_store.open(path) as store:
        nested = gather_nested(store, [4, 1, 0], "points")
        assert nested.layout == torch.jagged
        assert [len(points) for points in nested.unbind()] == [40, 0, 3]
        np.testing.assert_array_equal(nested.unbind()[2].numpy(), VALUES["points"][0])
        for name in ("label", "text"):
            with pytest.raises(ups_store.SpecError) as error:
                gather_nested(store, [0], name)
            assert error.value.kind == "ragged"
        unknown: Any
        for unknown in ("pionts", ["points"]):
            with pytest.raises(ups_store.ArrayNotFoundError, match="one of fields, label, points, text"):
                gather_nested(store, [0], unknown)


def test_device_memory_is_refused_for_ragged_stores(path: Path) -> None:
    with ups_store.open(path) as store:
        with pytest.raises(ups_store.SpecError) as error:
            store.preload("device")
        assert error.value.kind == "ragged"
        store.preload("copy")
        np.testing.assert_array_equal(store.gather([3])["points"][0], VALUES["points"][3])
