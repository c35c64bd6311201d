"""The configurations that come along: they load, for run and build, and their sizes fit the grids."""

from __future__ import annotations

import math
import warnings
from pathlib import Path

import pytest
import torch

from ups.config import RunConfig, load_config
from ups.errors import ConfigWarning
from ups.grid import PERIODIC, UNKNOWN_BOUNDARY, GridSpec, cut_grid
from ups.models.latent_operator import LatentOperator
from ups.models.operator_size import token_axes
from ups.nn.layers import Condition
from ups.train.operator_spec import operator_size
from ups_store.build.config import load_config as load_build_config

CONFIGS = sorted((Path(__file__).resolve().parents[3] / "ups" / "configs").glob("*.yaml"))
# Points and periodicity of the files that PDEBench publishes.
LINE, PLANE = (1024,), (128, 128)
GRIDS = {
    "advection1d": (LINE, True),
    "burgers1d": (LINE, True),
    "cfd2d": (PLANE, True),
    "darcy2d": (PLANE, False),
    "diffreact2d": (PLANE, False),
    "shallow_water2d": (PLANE, False),
}


def load(path: Path) -> RunConfig:
    with warnings.catch_warnings():
        warnings.simplefilter("error", ConfigWarning)
        return load_config(path)


def test_all_that_are_wanted_are_there() -> None:
    wanted = {"demo", "train_burgers_32dim", "train_advection_32dim", "two_tasks", "full_size"}
    assert wanted <= {path.stem for path in CONFIGS}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_run_and_build_read_the_same_configuration(path: Path) -> None:
    config, build = load(path), load_build_config(path)
    assert build.data.tasks == config.data.tasks
    assert build.cache.dir == config.training.latent_cache_dir
    assert build.latent is not None
    assert build.latent.checkpoint == config.checkpoint.dir / "autoencoder.safetensors"
    assert {"autoencoder", "operator"} <= config.stages.keys()


def token_grid(config: RunConfig, task: str) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    """Tokens along each axis of a published task, and whether each is periodic."""
    points, is_periodic = GRIDS[task]
    reduced = tuple(num // config.data.reduce_space for num in points)
    grid = GridSpec(reduced, (is_periodic,) * len(points), (("fields", 1),))
    assert config.latent.tokens * config.latent.dim < math.prod(reduced)  # it compresses
    cut = cut_grid(grid, patch_size=config.encoder.patch_size, num_tokens=config.latent.tokens)
    return cut.tokens, grid.periodic


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_operator_advances_the_tokens_of_every_task(path: Path) -> None:
    config = load(path)
    grids = [token_grid(config, task) for task in config.data.tasks]
    with torch.device("meta"):
        operator = LatentOperator(
            config.latent.dim,
            num_tasks=1,
            ranges=[(0.01, 0.1)],
            size=operator_size(config.operator),
            axes=token_axes(grids),
        )
        for tokens, periodic in grids:
            latent = torch.zeros(2, config.latent.tokens, config.latent.dim)
            condition = Condition(torch.zeros(2, dtype=torch.int64), torch.zeros(2, 1))
            boundary = tuple(PERIODIC if wraps else UNKNOWN_BOUNDARY for wraps in periodic)
            advanced = operator(
                latent, dt_B=torch.ones(2), condition=condition, grid=tokens, boundary=boundary
            )
            assert advanced.shape == latent.shape
