"""Baselines as models: their size, their forecasts, and the file that holds one."""

from __future__ import annotations

import re
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from small_simulators import configure, make_data
from torch import Tensor, nn
from trained_baselines import EFFORT, untrained

from ups.config import load_config
from ups.data.windows import open_trajectories
from ups.errors import CheckpointError, ConfigError, MissingExtraError
from ups.eval.baseline_model import (
    BASELINE,
    Baseline,
    check_kinds,
    load_baseline,
    make_spec,
    network_size,
    save_baseline,
)
from ups.eval.forecasters import Start, roll_out
from ups.grid import GridSpec
from ups.models.operators import States, Step
from ups.section import Section
from ups.trained.checkpoint import load_checkpoint, save_checkpoint


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("data"))


def sizes(*overrides: str) -> Any:
    return load_config(overrides=["data.tasks=burgers1d", *overrides]).baselines


def grid(*points: int) -> GridSpec:
    return GridSpec(points, (True,) * len(points), (("fields", 1),))


@pytest.mark.parametrize(
    ("kind", "points", "size"),
    [
        ("fno", (256,), {"width": 32, "modes": 16, "depth": 4}),
        ("fno", (16, 64), {"width": 32, "modes": 8, "depth": 4}),
        ("unet", (256,), {"width": 24, "levels": 4}),
        ("unet", (6, 4), {"width": 24, "levels": 2}),
        ("unet", (7,), {"width": 24, "levels": 1}),
    ],
)
def test_size_suits_the_grid(kind: Any, points: tuple[int, ...], size: dict[str, int]) -> None:
    assert network_size(kind, grid(*points), sizes()) == size


def test_size_is_as_configured_and_refused_where_the_grid_has_no_room() -> None:
    own = sizes("baselines.fno.modes=5", "baselines.fno.width=8", "baselines.unet.levels=3")
    assert network_size("fno", grid(32), own) == {"width": 8, "modes": 5, "depth": 4}
    assert network_size("unet", grid(32), own) == {"width": 24, "levels": 3}
    for kind, points, expected in (("fno", 8, "at most 4"), ("unet", 6, "at most 2")):
        with pytest.raises(ConfigError, match=rf"baselines\.{kind}\..* {expected}"):
            network_size(kind, grid(points), own)
    with pytest.raises(ConfigError, match="a multiple of 4"):
        network_size("unet", grid(32), sizes("baselines.unet.width=6"))


def test_untrained_baseline_is_persistence(root: Path) -> None:
    test = open_trajectories(configure(root).build, "burgers1d", "test")
    (batch,) = test.batches()
    start = Start("burgers1d", batch.given, batch.parameters, test.dt)
    torch.testing.assert_close(untrained(root).forecast(start, 2)[:, 1], batch.given)


def test_untrained_steady_baseline_is_the_mean_of_the_solution(root: Path) -> None:
    """A change would be from the coefficient to the pressure."""
    model = untrained(root, "unet", "darcy2d")
    test = open_trajectories(configure(root, "darcy2d").build, "darcy2d", "test")
    (batch,) = test.batches()
    found = model.forecast(Start("darcy2d", batch.given, batch.parameters, None), 1)
    mean = torch.tensor(model.spec.statistics["fields"]["mean"])
    torch.testing.assert_close(found, mean.expand_as(found))


def test_fno_predicts_the_same_on_a_finer_grid(root: Path) -> None:
    """Of a field without high wave numbers, at the points that both grids have."""
    model = untrained(root)
    torch.nn.init.normal_(model.network.get_parameter("out.2.weight"), std=0.1)
    points = model.spec.grid.points[0]
    place = torch.arange(2 * points) / points * torch.pi
    fine_BXC = (torch.sin(place) + torch.cos(2 * place))[None, :, None]
    parameters = {name: torch.ones(1) for name in model.spec.parameters}
    fine, coarse = (
        model.forecast(Start("burgers1d", given, parameters, None), 1)
        for given in (fine_BXC, fine_BXC[:, ::2])
    )
    assert not torch.allclose(coarse[:, 0], fine_BXC[:, ::2], atol=1e-3)
    # The layers' activations make high wave numbers, little here.
    torch.testing.assert_close(fine[:, :, ::2], coarse, atol=2e-3, rtol=0)


def test_baseline_of_a_square_with_walls_predicts_on_another_grid(root: Path) -> None:
    """Its coordinates are those of the grid that it is given."""
    model = untrained(root, "fno", "darcy2d")
    torch.nn.init.normal_(model.network.get_parameter("out.2.weight"), std=0.1)
    points = [2 * length for length in model.spec.grid.points]
    given = torch.ones(1, *points, 1)
    found = model.forecast(
        Start("darcy2d", given, {name: torch.ones(1) for name in model.spec.parameters}, None), 1
    )
    assert found.shape == (1, 1, *points, 1)
    assert found.std() > 1e-3


def test_baseline_of_another_time_step_is_refused(root: Path) -> None:
    test = open_trajectories(configure(root).build, "burgers1d", "test", stride=2)
    with pytest.raises(ConfigError, match="time step of FNO"):
        roll_out(untrained(root), test)


def test_row_says_which_budget_it_had_and_what_that_came_to(root: Path) -> None:
    model = untrained(root)
    assert (model.name, model.label) == ("fno_samples", "FNO (32 samples)")
    assert "a budget of 32 samples: 1 steps, 32 samples, 1e+06 FLOP, 0.5 s of processor time" in model.note
    model.effort = replace(EFFORT, limit="seconds", allowed=61.25, step_ratio=0.5)
    assert (model.name, model.label) == ("fno", "FNO (61.25 s)")
    assert model.note.endswith("a step takes 0.5 times one of the operator's")
    model.effort = replace(EFFORT, limit="flops", allowed=1.5e12)
    assert (model.name, model.label) == ("fno_flops", "FNO (1.5e+12 FLOP)")


class Doubled(nn.Module):
    """An operator of one's own: the change is the state itself, the solution the input."""

    steps: ClassVar[list[Step]] = []

    def __init__(self, config: Section, states: States) -> None:
        super().__init__()
        self.weight, self.states = nn.Parameter(torch.ones(states.dim)), states

    def forward(self, state_BLD: Tensor, step: Step) -> Tensor:
        self.steps.append(step)
        return self.weight * state_BLD


@pytest.mark.parametrize(("task", "tokens"), [("burgers1d", (8,)), ("darcy2d", (4, 4))])
def test_operator_of_ones_own_works_on_patches_of_the_fields(
    root: Path, tmp_path: Path, task: str, tokens: tuple[int, ...]
) -> None:
    (kind,) = check_kinds([f"{__name__}:Doubled"])
    config = configure(root, task, **{"encoder.patch_size": 4})
    train, test = (open_trajectories(config.build, task, split) for split in ("train", "test"))
    model = Baseline(make_spec(kind, train, config), EFFORT).eval()
    states = model.network.operator.network.states
    assert (states.dim, dict(states.tokens)) == (4 ** len(tokens), {task: tokens})
    (batch,) = test.batches()
    start, steps = Start(task, batch.given, batch.parameters, test.dt), test.horizon
    found = model.forecast(start, steps)
    given = model.normalise(batch.given, array=model.spec.given_array)
    last = given * 2**steps if task == "burgers1d" else given
    expected = last * model.get_buffer("fields_std") + model.get_buffer("fields_mean")
    torch.testing.assert_close(found[:, -1], expected, rtol=1e-4, atol=1e-4)
    step = Doubled.steps[-1]
    assert (step.grid, step.task, step.steady) == (tokens, 0, task == "darcy2d")
    assert step.dt.tolist() == pytest.approx([model.spec.dt or 1.0] * len(batch.given))
    assert step.parameters.shape == (len(batch.given), len(model.spec.parameters))
    assert (model.name, model.label) == (f"{kind}_samples", f"{kind} (32 samples)")
    save_baseline(tmp_path / "own_baseline.safetensors", model, config={}, report={})
    assert torch.equal(load_baseline(tmp_path / "own_baseline.safetensors").forecast(start, steps), found)


# --- the file ------------------------------------------------------------------------------------------


def test_file_gives_the_same_forecast_and_effort(root: Path, tmp_path: Path) -> None:
    model = untrained(root)
    torch.nn.init.normal_(model.network.get_parameter("out.2.weight"), std=0.01)
    save_baseline(tmp_path / "fno.safetensors", model, config={"seed": 0}, report={})
    loaded = load_baseline(tmp_path / "fno.safetensors")
    test = open_trajectories(configure(root).build, "burgers1d", "test")
    assert torch.equal(roll_out(loaded, test).errors["nrmse"], roll_out(model, test).errors["nrmse"])
    assert (loaded.effort, loaded.spec) == (model.effort, model.spec)


def test_file_without_a_specification_is_refused(root: Path, tmp_path: Path) -> None:
    path = tmp_path / "fno.safetensors"
    save_baseline(path, untrained(root), config={}, report={})
    tensors, document = load_checkpoint(path, kind=BASELINE)
    save_checkpoint(path, tensors, kind=BASELINE, document={"effort": asdict(EFFORT)})
    with pytest.raises(CheckpointError, match="specification is incomplete"):
        load_baseline(path)
    tensors.popitem()
    save_checkpoint(path, tensors, kind=BASELINE, document=document)
    with pytest.raises(CheckpointError, match="weights aren't those"):
        load_baseline(path)


def test_baselines_of_a_package_that_is_missing_are_refused(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "neuralop", None)  # also where it is installed
    with pytest.raises(MissingExtraError, match=re.escape("pip install 'ups-store[neuraloperator]'")):
        check_kinds(["fno", "fno_neuraloperator"])
    path, model = tmp_path / "other.safetensors", untrained(root)
    model.spec = replace(model.spec, kind="fno_neuraloperator")
    with pytest.raises(MissingExtraError):
        Baseline(model.spec)
    save_baseline(path, model, config={}, report={})
    with pytest.raises(MissingExtraError) as refused:
        load_baseline(path)
    assert (refused.value.extra, refused.value.path) == ("neuraloperator", str(path))
