"""The configurations that come along: they load, for run and build, and fit the published grids."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from noted import noted
from published_data import PUBLISHED

from ups.config import RunConfig, load_config
from ups.config.operator_size import operator_size
from ups.data.patch_basis import MAX_CELL_VALUES
from ups.grid import PERIODIC, UNKNOWN_BOUNDARY, GridSpec, TokenGrid, cut_grid
from ups.models.latent_operator import LatentOperator
from ups.models.operator_size import token_axes
from ups.nn.layers import Condition
from ups_store.building.config import load_config as load_build_config
from ups_store.sources.tasks import TASKS, WELL_TASKS

REPOSITORY = Path(__file__).resolve().parents[3]
FOLDER = REPOSITORY / "ups" / "configs"
READY_MADE = sorted(path for name in ("pdebench", "the_well") for path in (FOLDER / name).glob("*.yaml"))
CONFIGS = [*sorted(FOLDER.glob("*.yaml")), *READY_MADE]
# With stages that the configuration of their task doesn't have.
VARIANTS = {"pdebench/burgers1d_generative": "burgers1d", "pdebench/darcy2d_observed": "darcy2d"}


def name_of(path: Path) -> str:
    return path.relative_to(FOLDER).with_suffix("").as_posix()


def load(path: Path) -> RunConfig:
    with noted() as notes:
        config = load_config(path)
    assert notes == []
    return config


def grid_of(config: RunConfig, task: str) -> GridSpec:
    """Of the fields of a published task, as the configuration reduces them."""
    published, step = PUBLISHED[task], config.data.reduce_space
    assert all(num % step == 0 for num in published.points)
    points = tuple(num // step for num in published.points)[::-1]  # stores have x last
    return GridSpec(points, published.periodic(task)[::-1], (("fields", published.num_channels(task)),))


def cut_of(config: RunConfig, grid: GridSpec) -> TokenGrid:
    is_latent = config.operator.state == "latent"
    num_tokens = config.latent.tokens if is_latent else None
    return cut_grid(grid, patch_size=config.encoder.patch_size, num_tokens=num_tokens)


def test_all_that_are_wanted_are_there() -> None:
    wanted = {"demo", "train_burgers_32dim", "train_advection_32dim", "two_tasks", "full_size"}
    assert wanted <= {path.stem for path in CONFIGS}
    pdebench = {name_of(path) for path in READY_MADE if path.parent.name == "pdebench"}
    assert pdebench - VARIANTS.keys() == {f"pdebench/{task}" for task in TASKS}
    assert VARIANTS.keys() <= pdebench
    assert {path.stem for path in READY_MADE if path.parent.name == "the_well"} < set(WELL_TASKS)


@pytest.mark.parametrize("path", CONFIGS, ids=name_of)
def test_run_and_build_read_the_same_configuration(path: Path) -> None:
    config, build = load(path), load_build_config(path)
    assert build.data.tasks == config.data.tasks
    assert build.cache.dir == config.training.latent_cache_dir
    assert build.latent is not None
    assert build.latent.checkpoint == config.checkpoint.dir / "autoencoder.safetensors"
    assert {"autoencoder", "operator"} <= config.stages.keys()


@pytest.mark.parametrize("path", CONFIGS, ids=name_of)
def test_operator_advances_the_tokens_of_every_task(path: Path) -> None:
    config = load(path)
    grids = [grid_of(config, task) for task in config.data.tasks]
    cuts = [(cut_of(config, grid).tokens, grid.periodic) for grid in grids]
    dim = config.latent.dim if config.operator.state == "latent" else max(map(_cell_values(config), grids))
    with torch.device("meta"):
        operator = LatentOperator(
            dim,
            num_tasks=1,
            ranges=[(0.01, 0.1)],
            size=operator_size(config.operator),
            axes=token_axes(cuts),
        )
        for tokens, periodic in cuts:
            state = torch.zeros(2, math.prod(tokens), dim)
            condition = Condition(torch.zeros(2, dtype=torch.int64), torch.zeros(2, 1))
            boundary = tuple(PERIODIC if wraps else UNKNOWN_BOUNDARY for wraps in periodic)
            advanced = operator(
                state, dt_B=torch.ones(2), condition=condition, grid=tokens, boundary=boundary
            )
            assert advanced.shape == state.shape


def _cell_values(config: RunConfig):
    """Values of the cell of a token, by grid."""
    return lambda grid: math.prod(cut_of(config, grid).points_per_token) * dict(grid.channels)["fields"]


@pytest.mark.parametrize("path", CONFIGS, ids=name_of)
def test_latents_are_smaller_than_the_fields_and_their_basis_can_be_measured(path: Path) -> None:
    config = load(path)
    for task in config.data.tasks if config.operator.state == "latent" else ():
        values = _cell_values(config)(grid_of(config, task))
        assert config.latent.dim < values <= MAX_CELL_VALUES


@pytest.mark.parametrize("path", READY_MADE, ids=name_of)
def test_ready_made_configuration_keeps_its_files_apart_and_stands_in_the_guide(path: Path) -> None:
    config = load(path)
    (task,) = config.data.tasks
    name = name_of(path)
    assert task == VARIANTS.get(name, path.stem)
    assert config.checkpoint.dir == Path("checkpoints", path.stem)
    assert config.cache.dir != config.training.latent_cache_dir
    guide, text = ("generative", f"`{name}`") if name in VARIANTS else ("train", _row(path, config, task))
    assert text in (REPOSITORY / "docs" / "guides" / f"{guide}.md").read_text()


def _row(path: Path, config: RunConfig, task: str) -> str:
    """Of the table in docs/guides/train.md."""
    grid, frames = grid_of(config, task), math.ceil(PUBLISHED[task].frames / config.data.reduce_time)
    cut, values = cut_of(config, grid), _cell_values(config)(grid)
    points, tokens = (" x ".join(map(str, numbers)) for numbers in (grid.points, cut.tokens))
    kept = f"{config.latent.dim} of {values} numbers"
    if config.operator.state == "fields":
        kept = f"patches of the fields, {values} numbers"
    return f"| `{name_of(path)}` | {points} | {frames} | {tokens} | {kept} |"
