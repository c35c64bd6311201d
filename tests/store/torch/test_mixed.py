"""`MixedDataset`: batches with samples of several datasets, in a loader like any other."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ragged_stores import LENGTHS, build_ragged, ragged_values
from small_stores import MakeStore

from ups_store.errors import ConfigError, SpecError
from ups_store.torch import (
    MixedDataset,
    Sample,
    StoreDataset,
    Window,
    make_batch_sampler,
    make_loader,
    new_tensor,
)

SIZES = {"a": 40, "b": 9}


@pytest.fixture
def paths(make_store: MakeStore) -> list[Path]:
    """Two stores of one shape; every value says of which store and sample it is."""
    return [
        make_store(
            {"u": 1000.0 * number + np.repeat(np.arange(size), 6).reshape(size, 6), "k": np.arange(size)},
            name=f"{name}.zarr.zip",
            identity={"task": name},
            dims={},
        )
        for number, (name, size) in enumerate(SIZES.items())
    ]


def rows_of(loader: Any, epochs: int = 1) -> list[list[tuple[int, int]]]:
    batches = [batch for _ in range(epochs) for batch in loader]
    return [list(zip(batch["source"].tolist(), batch["index"].tolist(), strict=True)) for batch in batches]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_hold_samples_of_all_in_their_shares_and_say_whose(
    paths: list[Path], num_workers: int
) -> None:
    mixed = MixedDataset(paths, weights=[3, 1], epoch_size=160)
    loader = make_loader(mixed, batch_size=8, shuffle=True, num_workers=num_workers)
    assert len(loader) == 20
    num = 0
    for batch in loader:
        expected = 1000.0 * batch["source"] + batch["index"]
        assert torch.equal(batch["u"], expected[:, None].expand(8, 6).to(torch.float64))
        assert torch.equal(batch["k"], batch["index"])
        assert batch["source"].bincount().tolist() == [6, 2]
        assert batch["task"] == [("a", "b")[source] for source in batch["source"]]
        num += 1
    assert num == 20
    loader.close()


def test_batches_are_the_same_for_any_ranks_workers_and_groups(paths: list[Path]) -> None:
    options: dict[str, Any] = {"global_batch_size": 8, "shuffle": True, "seed": 3}
    mixed = MixedDataset(paths, weights=[3, 1], epoch_size=800)
    with_threads = make_loader(mixed, **options)
    whole = rows_of(with_threads, 2)
    with_threads.close()
    ranks = [
        rows_of(make_loader(mixed, rank=rank, world_size=2, num_workers=0, **options), 2) for rank in (0, 1)
    ]
    assert [first + second for first, second in zip(*ranks, strict=True)] == whole
    loader = make_loader(mixed, num_workers=0, collate_fn=lambda rows: rows.batch, **options)  # one by one
    batches = list(loader)
    assert [batch["task"] for batch in batches] == [batch["task"] for batch in make_loader(mixed, **options)]


def test_loader_goes_on_in_the_middle_of_an_epoch(paths: list[Path]) -> None:
    mixed = MixedDataset(dict(zip("ab", paths, strict=True)), weights=[1, 1], epoch_size=64)
    options: dict[str, Any] = {"batch_size": 8, "shuffle": True, "num_workers": 0}
    expected = rows_of(make_loader(mixed, **options), 2)
    loader = make_loader(mixed, **options)
    list(loader)
    for _, _ in zip(range(3), loader, strict=False):
        pass
    state = loader.state_dict()
    copy = pickle.loads(pickle.dumps(mixed))
    assert copy.names == ("a", "b")
    other = make_loader(copy, **options)
    other.load_state_dict(state)
    assert rows_of(other) == expected[11:]
    with pytest.raises(ConfigError, match="weights"):
        make_loader(MixedDataset(paths, epoch_size=64), **options).load_state_dict(state)


def test_windows_ragged_arrays_and_text_are_mixed(make_store: MakeStore, tmp_path: Path) -> None:
    dims = {"fields": ("sample", "time", "x")}
    values = [{"fields": np.full((n, 5, 4), float(n)), "nu": np.full(n, float(n))} for n in (3, 4)]
    stores = [make_store(v, name=f"{i}.zarr.zip", dims=dims) for i, v in enumerate(values)]
    mixed = MixedDataset([StoreDataset(path, window=Window(horizon=2)) for path in stores])
    batch = next(iter(make_loader(mixed, batch_size=21, num_workers=0)))
    expected = torch.tensor([3.0, 4.0])[batch["source"]]
    assert torch.equal(batch["params"]["nu"], expected)
    assert torch.equal(
        batch["z1"].double(), expected.double()[:, None, None, None].expand(21, 2, 4, 1)[..., 0]
    )
    assert batch["source"].bincount().tolist() == [9, 12]

    clouds = [build_ragged(tmp_path / f"r{i}.zarr.zip", ragged_values(seed=i)) for i in range(2)]
    names = ["points", "text"]
    ragged = MixedDataset([StoreDataset(path, names=names, ragged="padded") for path in clouds])
    batch = next(iter(make_loader(ragged, batch_size=2 * len(LENGTHS), num_workers=0)))
    for row, (source, index) in enumerate(
        zip(batch["source"].tolist(), batch["index"].tolist(), strict=True)
    ):
        wanted = ragged_values(seed=source)
        assert batch["text"][row] == wanted["text"][index]
        assert batch["points.lengths"][row] == LENGTHS[index]
        np.testing.assert_array_equal(batch["points"][row, : LENGTHS[index]], wanted["points"][index])


def test_a_dataset_of_several_stores_is_one_source_and_a_batch_of_one_store_is_not_copied_twice(
    paths: list[Path],
) -> None:
    mixed = MixedDataset([paths, paths[1]], weights=[1, 1])
    assert mixed.sizes == [49, 9]
    assert len(mixed.stores) == len(mixed.sources) == 3
    batch = mixed.fetch(0, np.array([45, 42]), epoch=0, allocate=new_tensor)
    assert (batch["index"].tolist(), batch["source"].tolist(), batch["task"]) == ([45, 42], [0, 0], "b")
    assert batch["k"].tolist() == [5, 2]
    batch = mixed.fetch(0, np.array([50, 3]), epoch=0, allocate=new_tensor)
    assert (batch["index"].tolist(), batch["source"].tolist()) == ([1, 3], [1, 0])


def test_transform_of_the_mix_knows_the_source(paths: list[Path]) -> None:
    def named(sample: Sample) -> dict[str, Any]:
        return {"where": int(sample["source"]), "u": sample["u"] * 2}

    mixed = MixedDataset(paths, weights=[1, 1], transform=named)
    batch = next(iter(make_loader(mixed, batch_size=4, num_workers=0)))
    assert sorted(batch["where"].tolist()) == [0, 0, 1, 1]
    assert batch["u"].max() >= 2000


def test_what_has_no_meaning_for_a_mix_is_refused(paths: list[Path], make_store: MakeStore) -> None:
    other = make_store({"u": np.zeros((3, 5))}, name="other.zarr.zip", dims={})
    taken = make_store({"source": np.zeros((3, 5))}, name="taken.zarr.zip", dims={})
    for datasets, kind in (
        ([], "stores"),
        ([paths[0], other], "mixed"),
        ([StoreDataset(paths[0], transform=dict)], "transform"),
        ([taken], "names"),
    ):
        with pytest.raises(SpecError) as caught:
            MixedDataset(datasets)
        assert caught.value.kind == kind
    mixed = MixedDataset(paths)
    for options, kind in (({"weights": [1, 1]}, "weights"), ({"pad_last": True}, "pad_last")):
        with pytest.raises(ConfigError) as refused:
            make_loader(mixed, batch_size=4, **options)
        assert refused.value.kind == kind
    with pytest.raises(ConfigError):
        make_batch_sampler(mixed, batch_size=4)  # type: ignore[arg-type]
