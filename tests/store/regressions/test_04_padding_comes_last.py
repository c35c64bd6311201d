"""Point 4: padding comes last. A sample is the same whatever else is in its batch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Subset

import ups_store
from ups_store.torch import MixedDataset, StoreDataset, make_loader

ROWS = [5, 1, 3, 2]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("clouds") / "clouds.zarr.zip"
    clouds = [np.full((rows, 2), rows, np.float32) for rows in ROWS]
    ups_store.write(path, [{"pos": cloud, "label": np.int64(i)} for i, cloud in enumerate(clouds)])
    return path


def _loaders(dataset: StoreDataset, **options: Any) -> Iterator[Any]:
    yield make_loader(dataset, batch_size=3, **options)
    yield make_loader(dataset, batch_size=1, num_workers=0, **options)
    yield DataLoader(dataset, batch_size=3, **options)
    yield DataLoader(Subset(dataset, range(len(ROWS))), batch_size=2, **options)


def test_transform_of_a_padded_dataset_sees_the_sample_alone(path: Path) -> None:
    seen = StoreDataset(
        path, ragged="padded", transform=lambda s: torch.tensor([len(s["pos"]), s["pos"].mean()])
    )
    expected = [[rows, rows] for rows in ROWS]
    assert [seen[i].tolist() for i in range(len(ROWS))] == expected
    for loader in (*_loaders(seen), DataLoader(seen, batch_size=4, num_workers=1)):
        assert [item for batch in loader for item in batch.tolist()] == expected
    mixed = MixedDataset(
        [StoreDataset(path, ragged="padded")] * 2, transform=lambda s: torch.tensor(len(s["pos"]))
    )
    lengths = [length for batch in make_loader(mixed, batch_size=4) for length in batch.tolist()]
    assert sorted(lengths) == sorted(ROWS * 2)


def test_collate_fn_of_a_padded_dataset_gets_samples_alone(path: Path) -> None:
    for loader in _loaders(
        StoreDataset(path, ragged="padded"), collate_fn=lambda rows: [len(s["pos"]) for s in rows]
    ):
        assert [rows for batch in loader for rows in batch] == ROWS


@pytest.mark.parametrize("as_dict", [False, True])
def test_dictionaries_of_a_transform_are_padded_as_they_are_then(path: Path, as_dict: bool) -> None:
    def double(sample: Any) -> Any:
        values = {"pos": sample["pos"].repeat(2, 1), "pos.lengths": 2 * sample["pos.lengths"]}
        if as_dict:
            return {**values, "label": sample["label"]}
        sample.update(values)
        return sample

    dataset = StoreDataset(path, ragged="padded", transform=double)
    loaders = [*_loaders(dataset), *([] if as_dict else [DataLoader(ConcatDataset([dataset]), batch_size=4)])]
    for loader in loaders:
        for batch in loader:
            rows = [2 * ROWS[i] for i in batch["label"].tolist()]
            assert batch["pos.lengths"].tolist() == rows
            assert batch["pos"].shape == (len(rows), max(rows), 2)
            assert batch["pos"].sum((1, 2)).tolist() == [rows * rows for rows in rows]


def test_transform_that_changes_rows_without_their_number_is_an_error(path: Path) -> None:
    dataset = StoreDataset(path, ragged="padded", transform=lambda s: {**s, "pos": s["pos"][:1]})
    with pytest.raises(ups_store.SpecError, match=r"'pos.lengths' disagree") as caught:
        list(make_loader(dataset, batch_size=4))
    assert caught.value.kind == "ragged"


def test_arrays_that_only_look_padded_stay_whole(tmp_path: Path) -> None:
    path = tmp_path / "own.zarr.zip"
    arrays: Any = {"pos": np.ones((4, 5, 2), np.float32), "pos.lengths": np.array(ROWS)}
    ups_store.save(path, **arrays)
    batch = next(iter(make_loader(StoreDataset(path, transform=dict), batch_size=4)))
    assert batch["pos"].shape == (4, 5, 2)
