"""Small data sets and untrained simulators of them: an operator whose output is zero changes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tiny_autoencoders import SIZES

from ups.config import RunConfig, load_config
from ups.data.fields import Fields, parameter_names
from ups.data.solvers import make_dataset
from ups.data.splits import open_fields
from ups.data.statistics import measure_statistics
from ups.data.windows import open_trajectories
from ups.grid import boundary_types
from ups.models.operator_size import OperatorSize
from ups.trained.autoencoder import Autoencoder
from ups.trained.simulator import Simulator
from ups.trained.specs import AutoencoderSpec, SimulatedTask, SimulatorSpec, TaskSpec

OPERATOR = OperatorSize(width=8, depths=(1,), modes=4).to_json()
LATENT_DIM, NUM_TOKENS, PATCH = 4, 8, 4


def make_data(folder: Path) -> Path:
    """Burgers: 20 trajectories of 6 frames, 32 points. Darcy: 20 samples, 16 x 16 points."""
    folder.mkdir(exist_ok=True)
    make_dataset("burgers1d", folder, num_samples=20, points=32, frames=6, nu=0.1)
    make_dataset("darcy2d", folder, num_samples=20, points=16)
    return folder


def configure(root: Path, *tasks: str, **options: Any) -> RunConfig:
    overrides = [f"{name}={value}" for name, value in options.items()]
    named = ",".join(tasks or ("burgers1d",))
    own = [f"data.tasks=[{named}]", f"data.root={root}", f"cache.dir={root / 'cache'}"]
    own += [f"checkpoint.dir={root / 'checkpoints'}", "reading.num_workers=0"]
    return load_config(overrides=[*own, *overrides])


def make_autoencoder(config: RunConfig) -> Autoencoder:
    train = {task: open_fields(config.build, task, "train") for task in config.data.tasks}
    spec = AutoencoderSpec(
        tasks={
            task: TaskSpec(fields.info.grid, fields.info.channels, fields.info.steady, _statistics(fields))
            for task, fields in train.items()
        },
        parameters=parameter_names(train),
        latent_dim=LATENT_DIM,
        num_tokens=NUM_TOKENS,
        patch_size=PATCH,
        encoder=SIZES,
        decoder={**SIZES, "radius": 1},
    )
    return Autoencoder(spec).eval()


def make_simulator(
    config: RunConfig,
    autoencoder: Autoencoder | None = None,
    *,
    stride: int = 1,
    is_encoder_known: bool = True,
) -> Simulator:
    """On patches of the fields, or on the latents of an autoencoder, or of nobody knows what."""
    train = {task: open_fields(config.build, task, "train") for task in config.data.tasks}
    tasks = {task: _task(config, fields, autoencoder, stride) for task, fields in train.items()}
    ndim = max(fields.info.grid.ndim for fields in train.values())
    spec = SimulatorSpec(
        states="latent" if autoencoder else "fields",
        tasks=tasks,
        parameters=parameter_names(train),
        state_dim=LATENT_DIM if autoencoder else PATCH**ndim,
        patch_size=None if autoencoder else PATCH,
        stride=stride,
        operator=OPERATOR,
        autoencoder_sha256="0" * 64 if autoencoder and is_encoder_known else None,
        is_encoder_known=is_encoder_known,
    )
    return Simulator(spec, autoencoder).eval()


def _task(config: RunConfig, fields: Fields, autoencoder: Autoencoder | None, stride: int) -> SimulatedTask:
    info = fields.info
    wanted = info.grid.arrays if info.steady else ("fields",)
    plain = {"mean": [0.0] * LATENT_DIM, "std": [1.0] * LATENT_DIM}
    points_per_token = [points // PATCH for points in info.grid.points]
    tokens = (NUM_TOKENS,) if info.grid.ndim == 1 else (2, NUM_TOKENS // 2)
    dt = open_trajectories(config.build, info.task, "train", stride=stride).dt
    names = info.parameters
    return SimulatedTask(
        grid=info.grid,
        boundary=boundary_types(info.boundary, ndim=info.grid.ndim),
        tokens=tokens if autoencoder else tuple(points_per_token),
        channels=info.channels,
        steady=info.steady,
        dt=dt or 1.0,
        parameters={name: (0.1, 0.1) if name == "nu" else (1.0, 1.0) for name in names},
        statistics={name: plain if autoencoder else _statistics(fields)[name] for name in wanted},
    )


def _statistics(fields: Fields) -> dict[str, dict[str, list[float]]]:
    return {name: values.to_json() for name, values in measure_statistics(fields).items()}
