"""Data that break the law of a physics prior: the residual of true frames is its floor, said and limited."""

from __future__ import annotations

from pathlib import Path

import h5py
import pytest
from small_simulators import make_simulator

from ups.config import RunConfig, load_config
from ups.data.solvers import make_dataset
from ups.errors import ConfigError
from ups.eval.evaluate import evaluate
from ups.eval.runs import Run
from ups.pipeline.data_checks import check_data
from ups.train.physics_priors import check_floors

GIVEN = [
    *("data.tasks=burgers1d", "data.root=data", "cache.dir=cache", "encoder.patch_size=4", "latent.tokens=8"),
    *("training.physics_priors.residual=0.1", "training.physics_priors.cell=1", "reading.num_workers=0"),
]


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    monkeypatch.chdir(tmp_path)
    make_dataset("burgers1d", Path("data"), num_samples=20, points=64, frames=11, nu=0.05)
    return load_config(overrides=GIVEN)


def double_the_domain() -> None:
    (path,) = Path("data").glob("*.hdf5")
    with h5py.File(path, "r+") as file:
        file["x-coordinate"][:] = 2 * file["x-coordinate"][:] - 1


def test_floor_of_right_data_is_said_by_the_check_by_training_and_by_the_report(
    config: RunConfig, notes: list[str]
) -> None:
    report = check_data(None, GIVEN)
    assert report.problems == ()
    check_floors(config, ["burgers1d"])
    (task,) = evaluate(config, [Run(make_simulator(config))]).tasks
    for text in (*(check.text for check in report.checks[-1:]), notes[0], task.protocol):
        assert "True frames miss the equation by" in text


def test_data_that_break_the_law_are_refused_by_the_check_and_by_training(config: RunConfig) -> None:
    double_the_domain()
    assert [check.kind for check in check_data(None, GIVEN).problems] == ["broken_law"]
    with pytest.raises(ConfigError) as caught:
        check_floors(config, ["burgers1d"])
    assert caught.value.kind == "broken_law"
