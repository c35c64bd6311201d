"""`ups validate data`: files that are missing, empty, no HDF5, not finite, or of another size."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import h5py
import numpy as np
import pytest
from command_line import run_ups

from ups.pipeline.data_checks import check_data
from ups_store.build import Watcher, build_all, load_config


def source() -> Path:
    (path,) = Path("data").glob("*.hdf5")
    return path


def test_values_of_the_first_time_steps_are_said(run: Path) -> None:
    report = check_data(run)
    assert report.exit_code == 0
    (values,) = report.checks[0].facts["values"]
    with h5py.File(source()) as file:
        stored = file["tensor"][:]
    looked_at = stored[np.unique(np.linspace(0, 19, 8).astype(int))][:, ::2]
    assert values["minimum"] == pytest.approx(float(looked_at.min()))
    assert values["std"] == pytest.approx(float(looked_at.std()), rel=1e-5)


def test_values_that_are_not_finite_are_a_problem_of_data(run: Path) -> None:
    with h5py.File(source(), "r+") as file:
        file["tensor"][0, 0, :2] = np.nan, np.inf
    report = check_data(run)
    assert [(check.kind, check.exit_code) for check in report.problems] == [("not_finite", 3)]
    assert "1 NaN, 1 Inf" in report.problems[0].text


@pytest.mark.parametrize(("content", "kind"), [(b"", "empty_file"), (b"no HDF5 at all", None)])
def test_each_file_that_does_not_open_is_named(run: Path, content: bytes, kind: str | None) -> None:
    source().write_bytes(content)
    report = check_data(run)
    assert report.exit_code == 3
    (problem,) = report.problems
    assert source().name in problem.text
    assert kind in (None, problem.kind)


def test_sizes_are_compared_with_the_configuration(run: Path) -> None:
    report = check_data(run, ["encoder.patch_size=5", "training.horizon=9"])
    assert {check.kind for check in report.problems} == {"patch_size", "horizon"}


def test_stores_stand_for_sources_that_are_gone(run: Path) -> None:
    build_all(load_config(run, overrides=["latent.encoder=none"]), watcher=Watcher())
    shutil.rmtree("data")
    report = check_data(run, ["data.split=[train,val]"])
    assert report.exit_code == 0, report
    assert sum(".zarr.zip" in check.text for check in report.checks) == 2


def test_the_verb_gives_json_and_the_exit_code(run: Path) -> None:
    done = run_ups("validate", "data", run, "data.root=nowhere", "--json")
    document = json.loads(done.stdout)
    assert (done.exit_code, document["exit_code"], document["problems"]) == (3, 3, 1)
    assert run_ups("validate", "data", "--config", run).exit_code == 0
