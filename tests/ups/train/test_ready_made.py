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
from ups.stages import CORRECTOR
from ups_store.build import shipped_configs

pytestmark = pytest.mark.timeout(900)

SHARE = 4  # published points along an axis, over those here
NUM_STEPS = 2  # that every trajectory has room for
# Stages of generative models, and the rows of reports that are theirs.
ROW_OF = {"corrector": "corrected", "student": "student", "prior": "prior"}
# Of these: few evaluations of networks that know nothing, exported whatever gates say of them.
SHORT = {
    "diffusion.num_sampler_steps": 2,
    "training.distill_num_pairs": 32,
    "diffusion.export_anyway": "true",
}
READY_MADE = [name for name in shipped_configs() if name.startswith(("pdebench/", "the_well/"))]


def write_sources(config: RunConfig, task: str) -> Path:
    """Files of the task below `data`; returns one that has samples of test."""
    published = PUBLISHED[task]
    frames = 1 + NUM_STEPS * config.training.stride * config.data.reduce_time
    size = Size(
        40 if config.trains(CORRECTOR) else 5, frames, tuple(num // SHARE for num in published.points)
    )
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


def marks_of(name: str) -> list[pytest.MarkDecorator]:
    """Those with generative stages always run, as few other tests train all stages and report on them."""
    has_ensembles = load_config(name).evaluation.members is not None
    return [] if has_ensembles else [pytest.mark.slow]


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks_of(name)) for name in READY_MADE])
def test_ready_made_configuration_trains_reports_and_predicts(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ups.pipeline.training.run_process", build_here)
    config = load_config(name)
    (task,) = config.data.tasks
    source = write_sources(config, task)
    generative = [name for name in ROW_OF if name in config.stages]
    num_tokens = config.latent.tokens // SHARE ** len(PUBLISHED[task].points)
    done = run_ups(
        "train",
        *("--config", name, "--json", "data.root=data", "data.split_fractions=[0.4,0.4,0.2]"),
        *(f"latent.tokens={num_tokens}", "operator.width=16"),
        *("training.batch_size=2", "training.device=cpu", "reading.num_workers=0"),
        *(f"stages.{stage}.{key}" for stage in config.stages for key in ("epochs=1", "steps_per_epoch=3")),
        *((f"{key}={value}" for key, value in SHORT.items()) if generative else ()),
    )
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    is_latent = config.operator.state == "latent"
    trained = ["operator", *generative]
    assert list(report["stages"]) == (["autoencoder", *trained] if is_latent else trained)
    assert [report["stages"][stage]["steps"] for stage in trained] == [3] * len(trained)
    rows = json.loads(Path(report["evaluation"]["json"]).read_text())["rows"]
    assert math.isfinite(rows["operator"]["nrmse"]["mean"])
    assert ("autoencoder_floor" in rows) is is_latent
    assert {ROW_OF[stage] for stage in generative} <= rows.keys()

    is_steady = PUBLISHED[task].frames == 1
    steps = 1 if is_steady else NUM_STEPS
    checkpoint = config.checkpoint.dir / "operator.safetensors"
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
