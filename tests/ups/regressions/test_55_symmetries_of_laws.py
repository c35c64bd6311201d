"""How solutions may be changed to train on more of them, goes by the laws of a task, not by its name."""

from __future__ import annotations

import pytest
import torch

from ups.config import RunConfig, load_config
from ups.config.stage_keys import stage_keys
from ups.data.augment import Draws
from ups.data.batches import WindowBatch, augment_windows_of
from ups.grid import GridSpec
from ups.laws import Laws
from ups.trained.specs import SimulatedTask

TASK = "tasks.mine={channels: [u], axes: [x], parameters: [nu]}"


def changes(task: str, laws: Laws | None = None, *, arrays: tuple[str, ...] = ("fields",)) -> set[str]:
    """What is done to windows of a periodic task in 1D."""
    values = torch.arange(1.0, 9.0).reshape(1, 1, 8, 1).expand(64, 2, -1, -1)
    grid = GridSpec(points=(8,), periodic=(True,), channels=tuple((name, 1) for name in arrays))
    known = SimulatedTask(grid, ("periodic",), (8,), ("u",), False, 1.0, {"nu": (0.1, 0.1)}, {})
    draws = Draws.of_batch(64, seed=0)
    batch = WindowBatch(task, values, torch.zeros(64, 1), torch.ones(64), draws=draws)
    moved = augment_windows_of(known, batch, laws={} if laws is None else {task: laws}).states
    found = {"reflected"} if (moved < 0).any() else set()
    return found | ({"shifted"} if (moved[:, 0, 0, 0].abs() != 1).any() else set())


def test_task_of_ones_own_with_the_equation_is_changed_as_ours() -> None:
    assert changes("burgers1d") == {"shifted", "reflected"}
    assert changes("mine") == {"shifted"}
    assert changes("mine", Laws(equation="burgers1d")) == {"shifted", "reflected"}
    assert changes("burgers1d", Laws()) == {"shifted"}  # the configuration's word counts


def test_what_is_forced_is_not_moved() -> None:
    assert changes("burgers1d", Laws(equation="burgers1d", is_forced=True)) == set()
    assert changes("burgers1d", arrays=("fields", "force")) == set()


@pytest.mark.parametrize("stage", ["autoencoder", "operator", "fno"])
def test_law_that_changes_augmentation_belongs_to_a_training(stage: str) -> None:
    def configured(*words: str) -> RunConfig:
        return load_config(overrides=["data.tasks=burgers1d", *words])

    plain = stage_keys(configured("laws.burgers1d.equation=burgers1d"), stage)
    forced = configured("laws.burgers1d.equation=burgers1d", "laws.burgers1d.is_forced=true")
    assert stage_keys(forced, stage) != plain
