"""An evaluation says where its models weren't trained on the training split that there is now."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_simulators import configure, make_data, make_simulator

import ups
from ups.data.solvers import make_dataset
from ups.data.splits import open_fields
from ups.eval.evaluate import evaluate
from ups.eval.runs import Run
from ups.trained.simulator import save_simulator


@pytest.mark.parametrize("is_rebuilt", [False, True])
def test_operator_of_other_training_data_is_named_in_warning_and_report(
    tmp_path: Path, is_rebuilt: bool, notes: list[str]
) -> None:
    config = configure(make_data(tmp_path / "data"))
    trained_on = open_fields(config.build, "burgers1d", "train").identity
    path = tmp_path / "operator.safetensors"
    save_simulator(path, make_simulator(config), config={}, report={}, data={"burgers1d": trained_on})
    if is_rebuilt:
        (tmp_path / "data" / Path(trained_on.split()[1]).name).unlink()
        make_dataset("burgers1d", tmp_path / "data", num_samples=20, points=32, frames=6, nu=0.1, seed=1)
    (task,) = evaluate(config, [Run(ups.load(path))]).tasks
    assert ("operator had other training data" in task.protocol) == is_rebuilt
    assert any(note.startswith("warning: burgers1d: operator had") for note in notes) == is_rebuilt
