"""The configurations of pdebench/ and the_well/, each in small: `ups train`, its report, `ups predict`.

Files have the layout and the name that the family is published with, a quarter of the published points along
each axis, and noise in them. Patches, reductions and everything else are the configuration's.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from command_line import run_ups
from operator_runs import build_here
from pdebench_files import FAMILIES, Size
from published_data import PUBLISHED
from well_files import write_well_set

import ups_store
from ups.config import RunConfig, load_config
from ups.data.solvers import make_dataset
from ups_store.build import shipped_configs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.usefixtures("unrendered")]

SHARE = 4  # published points along an axis, over those here
NUM_STEPS = 2  # that every trajectory has room for
READY_MADE = [name for name in shipped_configs() if name.startswith(("pdebench/", "the_well/"))]


def write_sources(config: RunConfig, task: str) -> Path:
    """Files of the task below `data`; returns one that has samples of test."""
    published = PUBLISHED[task]
    frames = 1 + NUM_STEPS * config.training.stride * config.data.reduce_time
    size = Size(5, frames, tuple(num // SHARE for num in published.points))
    if published.orders:
        boundary = dict(zip("xyz", published.boundary, strict=False))
        folder = Path("data", task, "data")
        for split in ("train", "valid", "test"):
            written = write_well_set(folder / split / "a.hdf5", published.orders, boundary, size)
        return written
    Path("data").mkdir()
    if task == "incompressible2d":
        return make_dataset(task, Path("data"), num_samples=5, points=size.space[0], frames=frames)
    family = next(each for each in FAMILIES if each.task == task)
    return family.write(Path("data", family.file_name), size)


@pytest.mark.parametrize("name", READY_MADE)
def test_ready_made_configuration_trains_reports_and_predicts(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ups.pipeline.training._build", build_here)
    config = load_config(name)
    (task,) = config.data.tasks
    source = write_sources(config, task)
    num_tokens = config.latent.tokens // SHARE ** len(PUBLISHED[task].points)
    done = run_ups(
        "train",
        *("--config", name, "--json", "data.root=data", "data.split_fractions=[0.4,0.4,0.2]"),
        *(f"latent.tokens={num_tokens}", "operator.pdet.hidden_dim=16"),
        *("training.batch_size=2", "stages.operator.epochs=1", "stages.operator.steps_per_epoch=3"),
        *("training.device=cpu", "reading.num_workers=0"),
    )
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    is_latent = config.operator.state == "latent"
    assert list(report["stages"]) == ["autoencoder", "operator"] if is_latent else ["operator"]
    assert report["stages"]["operator"]["steps"] == 3
    rows = json.loads(Path(report["evaluation"]["json"]).read_text())["rows"]
    assert math.isfinite(rows["operator"]["nrmse"]["mean"])
    assert ("autoencoder_floor" in rows) is is_latent

    is_steady = PUBLISHED[task].frames == 1
    steps = 1 if is_steady else NUM_STEPS
    checkpoint = Path("checkpoints", task, "operator.safetensors")
    predicted = run_ups(
        "predict", source, "--checkpoint", checkpoint, "--out", "out.zarr.zip", "--horizon", steps,
        *("--split", "test", "--device", "cpu"),
    )  # fmt: skip
    assert predicted.exit_code == 0, predicted.output
    reduces = max(config.data.reduce_space, config.data.reduce_time) > 1
    assert ("reduced as the training data were" in " ".join(predicted.stderr.split())) is reduces
    with ups_store.open("out.zarr.zip") as store, ups_store.open(f"cache/{task}_test.zarr.zip") as fields:
        assert store["fields"].shape[1] == (1 if is_steady else NUM_STEPS + 1)
        assert store["fields"].shape[2:] == fields["fields"].shape[2:]
        assert len(store) == len(fields)
