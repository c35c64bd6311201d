"""Points 26 and 67: several sample numbers where one is usual; both give what a slice gives."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, ConcatDataset, DataLoader, SequentialSampler, Subset

import ups_store
from ups_store.torch import Batch, StoreDataset, make_loader


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "texts.zarr.zip"
    ups_store.write(path, [{"caption": "x" * i, "a": np.float32(i)} for i in range(8)])
    return path


def test_ragged_array_gives_several_samples(path: Path) -> None:
    with ups_store.open(path) as store:
        captions = store["caption"]
        assert captions[[1, 4]] == captions[np.array([1, -4])] == ["x", "xxxx"]
        assert captions[np.int64(2)] == "xx"
        assert captions[1:3] == ["x", "xx"]
        for wrong, kind in (([9], "index"), ([0.5], "index"), (np.ones(8, bool), "index")):
            with pytest.raises((ups_store.SpecError, ups_store.SampleIndexError)) as caught:
                captions[wrong]
            assert caught.value.kind == kind


def test_dataset_gives_a_batch_of_several_items(path: Path) -> None:
    dataset = StoreDataset(path)
    for items in ([4, 1], np.array([4, 1]), torch.tensor([4, 1]), (4, -7)):
        batch = dataset[items]
        assert isinstance(batch, Batch)
        assert batch["a"].tolist() == [4, 1]
        assert batch["caption"] == ["xxxx", "x"]


def test_loader_of_a_subset_says_what_takes_one(path: Path) -> None:
    for part in (Subset(StoreDataset(path), [1, 2]), ConcatDataset([StoreDataset(path)])):
        with pytest.raises(ups_store.ConfigError, match="torch's DataLoader takes") as caught:
            make_loader(part, batch_size=2)  # type: ignore[arg-type]
        assert caught.value.kind == "dataset"


@pytest.mark.parametrize("num_workers", [0, 1])
def test_data_loader_without_batch_size_takes_batches_of_a_sampler(path: Path, num_workers: int) -> None:
    dataset = StoreDataset(path)
    sampler = BatchSampler(SequentialSampler(dataset), 3, drop_last=False)
    loader = DataLoader(dataset, sampler=sampler, batch_size=None, num_workers=num_workers)
    assert [batch["a"].tolist() for batch in loader] == [[0, 1, 2], [3, 4, 5], [6, 7]]
