"""Stores of declared layouts and of The Well, built as any other: values, identity, splits, readers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import yaml
from build_helpers import Recorder, build
from declared_files import FOURIER, ONE_STATE, RUNS, N, write_fourier, write_one_state, write_runs
from pdebench_files import T, X, Y
from well_files import CHANNELS_2D, read_well_2d, write_well_2d

import ups_store
from ups_store.building.config import BuildConfig, load_config
from ups_store.building.progress import BuildReport
from ups_store.errors import ConfigError, SourceError
from ups_store.sources.reader_pool import ReaderPool


def configure(folder: Path, tasks: dict[str, Any] | None = None, **data: Any) -> BuildConfig:
    """Build `folder`/source into `folder`/cache; the tasks are those declared unless `data` names others."""
    document = {
        "data": {"task": list(tasks or ()), "root": str(folder / "source"), **data},
        "cache": {"dir": str(folder / "cache")},
        "tasks": tasks or {},
    }
    path = folder / "build.yaml"
    path.write_text(yaml.safe_dump(document))
    return load_config(path)


def store_of(folder: Path, name: str) -> ups_store.Store:
    return ups_store.open(folder / "cache" / f"{name}.zarr.zip")


def reused(report: BuildReport) -> list[bool]:
    return [result.reused for result in report.stores]


# --- declared layouts ---------------------------------------------------------------------------------


def test_declared_store_holds_what_h5py_reads(tmp_path: Path) -> None:
    path = write_fourier(tmp_path / "source" / "flow_train.h5")
    task = {"boundary": {"x": "periodic", "y": "wall"}, "layout": FOURIER.layout}
    build(configure(tmp_path, {"flow": task}, split="train"))
    with h5py.File(path) as file:
        expected = FOURIER.read(file)
    with store_of(tmp_path, "flow_train") as store:
        for name, array in expected.items():
            np.testing.assert_array_equal(store[name], array, err_msg=name)
        assert store["re"].dtype == store["tags"].dtype == store["nu"].dtype == np.float64
        assert store["fields"].dtype == store["coefficient"].dtype == np.float32
        assert store["nu"].tolist() == [0.25] * N
        assert store.attrs["boundary"] == {"x": "periodic", "y": "wall"}
        assert store.attrs["channels"] == ["vorticity"]
        np.testing.assert_array_equal(store.constants["t"], 1.0 + 0.5 * np.arange(T))


def test_parameters_keep_their_precision_whatever_the_fields_have(tmp_path: Path) -> None:
    write_fourier(tmp_path / "source" / "flow_train.h5")
    config = configure(tmp_path, {"flow": {"layout": FOURIER.layout}}, split="train")
    config = config.model_copy(update={"cache": config.cache.model_copy(update={"dtype": "float16"})})
    build(config)
    with store_of(tmp_path, "flow_train") as store:
        assert store["fields"].dtype == np.float16
        assert store["re"].tolist() == [100.0, 200.0, 300.0, 400.0]


def test_declared_shards_are_joined_cut_and_reduced_like_others(tmp_path: Path) -> None:
    for i in range(3):
        write_runs(tmp_path / "source" / f"part_{i}.h5")
    task = {"files": "part_*.h5", "layout": RUNS.layout}
    config = configure(
        tmp_path, {"flow": task}, reduce_space=2, reduce_time=3, split_fractions=[0.5, 0.25, 0.25]
    )
    report = build(config)
    with h5py.File(tmp_path / "source" / "part_0.h5") as file:
        expected = RUNS.read(file)
    with store_of(tmp_path, "flow_train") as train, store_of(tmp_path, "flow_test") as test:
        assert (len(train), len(test)) == (6, 3)
        np.testing.assert_array_equal(
            train["fields"], np.tile(expected["fields"][:2, ::3, ::2], (3, 1, 1, 1))
        )
        np.testing.assert_array_equal(test["seed"], np.tile(expected["seed"][3:], 3))
    assert reused(build(config)) == [True] * len(report.stores)


def test_file_per_sample_makes_one_store(tmp_path: Path) -> None:
    for i in range(12):
        write_one_state(tmp_path / "source" / f"state_{i}.h5")
    task = {"files": {"train": "state_*.h5"}, "layout": ONE_STATE.layout}
    build(configure(tmp_path, {"rock": task}, split="train"))
    with store_of(tmp_path, "rock_train") as store, h5py.File(tmp_path / "source" / "state_10.h5") as file:
        assert len(store) == 12
        np.testing.assert_array_equal(store["fields"][10], ONE_STATE.read(file)["fields"][0])


@pytest.mark.parametrize(
    ("change", "key"),
    [
        (lambda task: task["layout"]["fields"][0].update(channels=["omega"]), "layout.fields"),
        (lambda task: task["layout"]["coordinates"].update(t={"step": 2.0}), "layout.coordinates"),
        (lambda task: task["layout"]["arrays"].pop("tags"), "layout.arrays"),
        (lambda task: task.update(boundary={"x": "wall"}), "layout.boundary"),
    ],
)
def test_changed_declaration_rebuilds_and_names_the_key(change: Any, key: str, tmp_path: Path) -> None:
    write_fourier(tmp_path / "source" / "flow_train.h5")
    task: dict[str, Any] = {"layout": copy.deepcopy(FOURIER.layout)}
    build(configure(tmp_path, {"flow": task}, split="train"))
    change(task)
    watcher = Recorder()
    assert reused(build(configure(tmp_path, {"flow": task}, split="train"), watcher)) == [False]
    assert any(key in note for note in watcher.notes)


def test_other_spelling_of_the_same_declaration_reuses_the_store(tmp_path: Path) -> None:
    write_fourier(tmp_path / "source" / "flow_train.h5")
    task: dict[str, Any] = {"layout": copy.deepcopy(FOURIER.layout)}
    build(configure(tmp_path, {"flow": task}, split="train"))
    task["layout"]["fields"][0]["axes"] = "(sample, x, y, time)"
    task["layout"]["coordinates"]["x"] = {"dataset": "mesh/x"}
    assert reused(build(configure(tmp_path, {"flow": task}, split="train"))) == [True]


def test_files_of_one_declaration_have_to_share_their_grid(tmp_path: Path) -> None:
    for name in ("a.h5", "b.h5"):
        write_fourier(tmp_path / "source" / name)
    with h5py.File(tmp_path / "source" / "b.h5", "r+") as file:
        file["mesh/x"][0] = 9.0
    config = configure(tmp_path, {"flow": {"files": "*.h5", "layout": FOURIER.layout}})
    with pytest.raises(SourceError, match="coordinate 'x' isn't") as caught:
        build(config)
    assert caught.value.kind == "grids_differ"


def test_task_of_a_plan_has_to_be_declared(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        configure(tmp_path, {"flow": {"ndim": 1}}, task="flows")
    assert caught.value.kind == "unknown_task"


# --- The Well -----------------------------------------------------------------------------------------


def test_set_of_the_well_makes_a_store_per_folder(tmp_path: Path) -> None:
    folder = tmp_path / "source" / "datasets" / "active_matter" / "data"
    for split, alphas in (("train", (1.0, 2.0)), ("valid", (3.0,)), ("test", (4.0,))):
        for alpha in alphas:
            write_well_2d(folder / split / f"alpha_{alpha}.hdf5", seed=f"{alpha}", parameters={"Nu": alpha})
    config = configure(tmp_path, task="active_matter")
    assert reused(build(config)) == [False] * 3
    with store_of(tmp_path, "active_matter_train") as store:
        assert store["fields"].shape == (6, T, Y, X, len(CHANNELS_2D))
        assert store["Nu"].tolist() == [1.0] * 3 + [2.0] * 3
        assert store["gain"].dtype == np.float64
        assert store.attrs["boundary"] == {"x": "periodic", "y": "wall_open"}
        assert store.attrs["axis_names"] == {"x": "x", "y": "y"}
        assert store.attrs["grid_type"] == "cartesian"
        for i, alpha in enumerate((1.0, 2.0)):
            with h5py.File(folder / "train" / f"alpha_{alpha}.hdf5") as file:
                for name, array in read_well_2d(file).items():
                    np.testing.assert_array_equal(store[name][3 * i : 3 * i + 3], array, err_msg=name)
    assert reused(build(config)) == [True] * 3


@pytest.mark.multi_process
def test_several_tasks_and_splits_share_the_readers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = []

    class Counted(ReaderPool.process_class):
        def start(self, *arguments: int) -> Any:
            started.append(self)
            return super().start(*arguments)

    monkeypatch.setattr(ReaderPool, "process_class", Counted)
    write_fourier(tmp_path / "source" / "flow_train.h5")
    write_runs(tmp_path / "source" / "runs_train.h5")
    write_well_2d(tmp_path / "source" / "active_matter_test.h5")
    tasks = {"flow": {"layout": FOURIER.layout}, "runs": {"layout": RUNS.layout}}
    config = configure(tmp_path, tasks, task=["flow", "runs", "active_matter"], split=["train", "test"])
    config = config.model_copy(update={"reading": config.reading.model_copy(update={"num_workers": 1})})
    report = build(config)
    assert len(started) == 1
    assert [(r.task, r.split) for r in report.stores] == [
        ("flow", "train"),
        ("runs", "train"),
        ("active_matter", "test"),
    ]
