"""Latents of fields that were shifted by points and reflected first, again in every pass."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from numbered_batches import batch_of
from on_demand_helpers import BURGERS, checkpoint, make_folder, make_steady_folder, open_windows
from ups.data.on_demand.augmented import AugmentingEncoder

from ups.data.batches import WindowBatch
from ups.laws import LAWS
from ups.trained.autoencoder import load_autoencoder

NONE = "training.cache_mode=none"
AUGMENTED = "training.augment=true"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_folder(tmp_path)


def passes(folder: Path, *overrides: str, num: int = 2) -> list[list[WindowBatch]]:
    windows = open_windows(folder, NONE, *overrides)
    try:
        steps = windows.order.num_steps
        return [[batch_of(windows, which * steps + step) for step in range(steps)] for which in range(num)]
    finally:
        windows.close()


def test_windows_are_latents_of_a_shifted_and_perhaps_reflected_trajectory(folder: Path) -> None:
    with h5py.File(folder / "data" / BURGERS) as file:
        fields = torch.from_numpy(file["tensor"][:].astype(np.float32))  # (N, T, X)
    model = load_autoencoder(checkpoint(folder))
    moved = torch.cat([fields, -fields.flip(2)]).unsqueeze(-1)  # every shift of these is allowed
    nu = torch.tensor([[torch.nan, 0.01]])
    with torch.no_grad():
        allowed = [
            model.encode(moved[:, 0].roll(shift, 1), nu.expand(len(moved), 2), task="burgers1d")
            for shift in range(fields.shape[2])
        ]
    allowed_SLD = torch.stack(allowed).flatten(0, 1)
    first = next(iter(passes(folder, AUGMENTED, num=1)))
    starts = torch.cat([batch.states for batch in first]).flatten(0, 1)
    # First frames of trajectories are among what comes; each is one of the allowed, few are the plain ones.
    apart = torch.cdist(starts.flatten(1), allowed_SLD.flatten(1)).min(1).values
    assert (apart < 1e-2).sum() >= 48
    plain = torch.cdist(starts.flatten(1), allowed[0][:60].flatten(1)).min(1).values
    assert (plain < 1e-2).sum() < 10


def test_passes_differ_and_repeat_with_the_seed(folder: Path) -> None:
    first, second = passes(folder, AUGMENTED)
    again = passes(folder, AUGMENTED)
    for one, other in zip((*first, *second), (*again[0], *again[1]), strict=True):
        assert torch.equal(one.states, other.states)

    def rows(batches: list[WindowBatch]) -> set[bytes]:
        return {row.numpy().tobytes() for batch in batches for row in batch.states}

    assert len(rows(first) & rows(second)) < 10
    plain = passes(folder)
    assert rows(plain[0]) == rows(plain[1])


def test_sample_is_augmented_alike_whatever_lies_beside_it() -> None:
    class Plain:
        def begin(self, batch: dict[str, np.ndarray], *, samples: np.ndarray) -> object:
            return lambda: batch

    encoder = AugmentingEncoder(Plain(), laws=LAWS["burgers1d"], periodic=(True,), seed=3)
    fields = np.random.default_rng(0).standard_normal((4, 3, 8, 1)).astype(np.float32)
    together = encoder.encode({"fields": fields}, samples=np.array([5, 2, 9, 7]))["fields"]
    alone = encoder.encode({"fields": fields[2:3]}, samples=np.array([9]))["fields"]
    np.testing.assert_array_equal(together[2:3], alone)
    assert sorted(np.abs(alone).ravel()) == sorted(np.abs(fields[2]).ravel())


def test_steady_task_is_not_augmented_as_its_input_would_have_to_move(tmp_path: Path) -> None:
    folder = make_steady_folder(tmp_path)
    for one, other in zip(passes(folder, num=1)[0], passes(folder, AUGMENTED, num=1)[0], strict=True):
        assert torch.equal(one.states, other.states)
