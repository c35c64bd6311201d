"""Other loops: torchdata's `StatefulDataLoader`, PyTorch Lightning, Accelerate; each if it is installed."""

from __future__ import annotations

import importlib
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_stores import MakeStore

from ups_store.torch import StoreDataset, make_batch_sampler, make_loader

NUM_SAMPLES = 30
pytestmark = pytest.mark.filterwarnings("default")  # theirs are not errors of ours


def imported(name: str) -> Any:
    """A module, or the test is skipped; some warn while they are imported."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return importlib.import_module(name)
        except ImportError:
            pytest.skip(f"{name.partition('.')[0]} is not installed")


@pytest.fixture
def dataset(make_store: MakeStore) -> StoreDataset:
    return StoreDataset(make_store({"a": np.arange(NUM_SAMPLES)[:, None] + np.zeros(3)}), dtype=torch.float32)


def indices(batches: Any) -> list[list[int]]:
    return [batch["index"].tolist() for batch in batches]


@pytest.mark.multi_process
@pytest.mark.parametrize(("num_workers", "taken"), [(0, 4), (2, 1)])
def test_stateful_dataloader_goes_on_amid_an_epoch(
    dataset: StoreDataset, num_workers: int, taken: int
) -> None:
    stateful = imported("torchdata.stateful_dataloader").StatefulDataLoader

    def loader() -> Any:
        sampler = make_batch_sampler(dataset, batch_size=4, shuffle=True, seed=3)
        return stateful(dataset, batch_sampler=sampler, num_workers=num_workers)

    expected = make_batch_sampler(dataset, batch_size=4, shuffle=True, seed=3)
    epochs = [list(expected) for _ in range(3)]
    first = loader()
    assert indices(first) == epochs[0]
    batches = iter(first)
    for _ in range(taken):
        next(batches)
    resumed = loader()
    resumed.load_state_dict(first.state_dict())
    assert indices(resumed) == epochs[1][taken:]
    assert indices(resumed) == epochs[2]


def test_stateful_protocol_is_that_of_torchdata(dataset: StoreDataset) -> None:
    stateful = imported("torchdata.stateful_dataloader.stateful").Stateful
    assert isinstance(make_loader(dataset, batch_size=4), stateful)
    assert isinstance(make_batch_sampler(dataset, batch_size=4), stateful)


def test_lightning_trains_with_the_loader(dataset: StoreDataset, tmp_path: Path) -> None:
    lightning = imported("lightning.pytorch")
    seen: list[list[int]] = []

    class Line(lightning.LightningModule):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(3, 1)

        def training_step(self, batch: Any, number: int) -> torch.Tensor:
            seen.append(batch["index"].tolist())
            loss: torch.Tensor = self.layer(batch["a"]).square().mean()
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    trainer = lightning.Trainer(
        max_steps=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(Line(), make_loader(dataset, batch_size=4, shuffle=True))
    assert seen == indices(make_loader(dataset, batch_size=4, shuffle=True))[:2]


def test_accelerate_prepares_the_loader_and_a_dataloader_with_the_sampler(dataset: StoreDataset) -> None:
    accelerator = imported("accelerate").Accelerator(cpu=True)
    loader = make_loader(dataset, batch_size=4, shuffle=True)
    sampler = make_batch_sampler(dataset, batch_size=4, shuffle=True)
    expected = list(make_batch_sampler(dataset, batch_size=4, shuffle=True))
    plain = torch.utils.data.DataLoader(dataset, batch_sampler=sampler)
    for prepared in accelerator.prepare(loader, plain):
        assert indices(prepared) == expected
