"""Files of the solvers: PDEBench's layout, determinism, atomic appearance, and the command for them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
import yaml
from build_helpers import build
from command_line import run_ups

import ups_store
from ups.data.solvers import SOLVERS, make_dataset
from ups_store.building.config import load_config
from ups_store.errors import ConfigError
from ups_store.sources import get_task, open_source
from ups_store.sources.source_files import find_sources

REPO = Path(__file__).resolve().parents[3]
SCRIPT = REPO / "scripts" / "make_data.py"
REAL_FILES = REPO.parent / "shared" / "data" / "pdebench"

# Small data sets of each task: settings, file name.
TASKS = {
    "advection1d": ({"points": 32, "frames": 4, "beta": 0.7}, "1D_Advection_Sols_beta0.7.hdf5"),
    "burgers1d": ({"points": 32, "frames": 4, "nu": 0.1}, "1D_Burgers_Sols_Nu0.1.hdf5"),
    "darcy2d": ({"points": 16, "beta": 10}, "2D_DarcyFlow_beta10.0_Train.hdf5"),
    "diffreact2d": ({"points": 16, "frames": 3, "end_time": 0.5}, "2D_diff-react_NA_NA.h5"),
    "incompressible2d": ({"points": 16, "frames": 3, "nu": 0.01}, "2D_Vorticity_Nu0.01.hdf5"),
    "shallow_water2d": ({"points": 16, "frames": 3}, "2D_rdb_NA_NA.h5"),
}


def describe(path):
    """Return {name: everything about its storage} of each dataset and the attributes of root and groups."""
    found = {}

    def visit(name, node):
        found[f"{name} attributes"] = {key: node.attrs.get_id(key).dtype for key in node.attrs}
        if isinstance(node, h5py.Dataset):
            storage = (node.chunks, node.compression, node.shuffle, node.fletcher32, node.maxshape)
            found[name] = (node.shape, node.dtype, *storage)

    with h5py.File(path) as file:
        visit("/", file)
        file.visititems(visit)
    return found


def contents(path):
    """Return {name: values} of every dataset."""
    values = {}
    with h5py.File(path) as file:
        file.visititems(lambda name, node: values.update({name: node[()]} if hasattr(node, "shape") else {}))
    return values


def run(*arguments):
    return run_ups("make-data", *arguments)


# --- layout ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", sorted(TASKS))
def test_make_dataset_names_file_as_pdebench(task, tmp_path):
    settings, name = TASKS[task]
    assert make_dataset(task, tmp_path, num_samples=2, **settings) == tmp_path / name


def test_every_task_is_tested():
    assert TASKS.keys() == SOLVERS.keys()


@pytest.mark.parametrize(("task", "attr", "value"), [("advection1d", "beta", 0.7), ("burgers1d", "Nu", 0.1)])
def test_scalar1d_layout_is_one_tensor_with_one_time_too_many(task, attr, value, tmp_path):
    path = make_dataset(task, tmp_path, num_samples=3, **TASKS[task][0])
    with h5py.File(path) as file:
        assert {name: node.shape for name, node in file.items()} == {
            "tensor": (3, 4, 32),
            "x-coordinate": (32,),
            "t-coordinate": (5,),
        }
        assert all(node.dtype == "<f4" and node.chunks is None for node in file.values())
        assert dict(file.attrs) == {attr: value}
        assert file.attrs[attr].dtype == np.float64
        np.testing.assert_allclose(file["x-coordinate"], (np.arange(32) + 0.5) / 32, rtol=1e-6)
        np.testing.assert_allclose(file["t-coordinate"], np.arange(5) * 2 / 3, rtol=1e-6)
    # The published files are tensor + coordinates + 2048 bytes, to the byte.
    assert path.stat().st_size == 4 * (3 * 4 * 32 + 32 + 5) + 2048


def test_darcy_layout_has_a_coefficient_without_time_axis_and_ten_times(tmp_path):
    path = make_dataset("darcy2d", tmp_path, num_samples=3, **TASKS["darcy2d"][0])
    with h5py.File(path) as file:
        assert {name: node.shape for name, node in file.items()} == {
            "tensor": (3, 1, 16, 16),
            "nu": (3, 16, 16),
            "x-coordinate": (16,),
            "y-coordinate": (16,),
            "t-coordinate": (10,),
        }
        assert all(node.dtype == "<f4" and node.chunks is None for node in file.values())
        assert set(np.unique(file["nu"])) == {np.float32(0.1), np.float32(1.0)}
        assert dict(file.attrs) == {"beta": 10.0}


def test_diffreact_layout_is_a_compressed_group_per_sample_with_its_settings(tmp_path):
    path = make_dataset("diffreact2d", tmp_path, num_samples=2, **TASKS["diffreact2d"][0])
    with h5py.File(path) as file:
        assert list(file) == ["0000", "0001"]
        assert not file.attrs
        group = file["0001"]
        assert group["data"].shape == (3, 16, 16, 2)
        assert [group[f"grid/{axis}"].shape for axis in "xyt"] == [(16,), (16,), (3,)]
        assert {group[name].compression for name in ("data", "grid/x", "grid/y", "grid/t")} == {"lzf"}
        assert group["data"].dtype == "<f4"
        np.testing.assert_allclose(group["grid/t"], [0, 0.25, 0.5])
        assert group["grid/x"][0] == np.float32(-1 + 1 / 16)
        sim = yaml.safe_load(group.attrs["config"])["sim"]
    assert (sim["Du"], sim["Dv"], sim["k"], sim["tdim"], sim["xdim"], sim["seed"]) == (
        1e-3,
        5e-3,
        5e-3,
        3,
        16,
        1,
    )


@pytest.mark.skipif(not REAL_FILES.is_dir(), reason="no PDEBench files beside the checkout")
@pytest.mark.parametrize(
    ("task", "settings", "num_samples"),
    [
        ("advection1d", {"frames": 21}, 64),
        ("burgers1d", {"frames": 21}, 32),
        ("darcy2d", {}, 32),
        ("diffreact2d", {}, 4),
        ("shallow_water2d", {"frames": 11}, 8),
    ],
)
def test_layout_equals_real_file(task, settings, num_samples, tmp_path):
    problem = SOLVERS[task](**settings)
    solved = problem.sample([0], seed=0)
    path = tmp_path / problem.file_name
    problem.write(path, [solved] * num_samples, num_samples=num_samples)
    assert describe(path) == describe(REAL_FILES / problem.file_name)
    ours, theirs = contents(path), contents(REAL_FILES / problem.file_name)
    for name in ours:
        if name.endswith(("-coordinate", "grid/x", "grid/y", "grid/t")):
            np.testing.assert_allclose(ours[name], theirs[name], atol=1e-6, err_msg=name)


# --- determinism ----------------------------------------------------------------------------------


@pytest.mark.parametrize("task", sorted(TASKS))
def test_same_arguments_give_same_bytes_and_other_seed_other_values(task, tmp_path):
    settings = TASKS[task][0]
    first, second, other = (
        make_dataset(task, tmp_path / folder, num_samples=2, seed=seed, **settings)
        for folder, seed in (("a", 5), ("b", 5), ("c", 6))
    )
    assert first.read_bytes() == second.read_bytes()
    assert first.read_bytes() != other.read_bytes()


@pytest.mark.parametrize("task", sorted(TASKS))
def test_sample_is_the_same_however_many_are_made(task):
    problem = SOLVERS[task](**TASKS[task][0])
    many = problem.sample(range(problem.batch_size + 3), seed=2).fields
    np.testing.assert_array_equal(problem.sample([1], seed=2).fields[0], many[1])
    assert not np.array_equal(many[0], many[1])


# --- make_dataset: errors and atomic appearance ---------------------------------------------------


@pytest.mark.parametrize(
    ("task", "arguments", "kind"),
    [
        ("burgers", {}, "unknown_task"),
        ("burgers1d", {"beta": 1.0}, "unknown_setting"),
        ("burgers1d", {"nu": -0.01}, "setting_out_of_range"),
        ("burgers1d", {"nu": float("nan")}, "setting_out_of_range"),
        ("burgers1d", {"nu": 1e-6}, "unresolved"),
        ("burgers1d", {"frames": 1}, "setting_out_of_range"),
        ("burgers1d", {"num_samples": 0}, "setting_out_of_range"),
        ("burgers1d", {"seed": -1}, "setting_out_of_range"),
        ("advection1d", {"points": 16}, "setting_out_of_range"),
        ("burgers1d", {"mean": -0.1}, "setting_out_of_range"),
        ("burgers1d", {"amplitude": 0.0}, "setting_out_of_range"),
        ("burgers1d", {"split": "dev"}, "unknown_split"),
        ("incompressible2d", {"nu": 1e-6}, "unresolved"),
        ("shallow_water2d", {"max_radius": 0.1}, "setting_out_of_range"),
        ("shallow_water2d", {"shift": 2.0}, "setting_out_of_range"),
        ("diffreact2d", {"burn_in": -1.0}, "setting_out_of_range"),
        ("diffreact2d", {"num_samples": 10_001}, "setting_out_of_range"),
        ("diffreact2d", {"k": 1e9, "points": 8, "frames": 2}, "diverged"),
    ],
)
def test_make_dataset_rejects_and_leaves_nothing(task, arguments, kind, tmp_path):
    with pytest.raises(ConfigError) as caught:
        make_dataset(task, tmp_path, **{"num_samples": 1, **arguments})
    assert caught.value.kind == kind
    assert list(tmp_path.iterdir()) == []


def test_misspelled_task_names_the_nearest(tmp_path):
    with pytest.raises(ConfigError, match=r"found .burger1d.; did you mean burgers1d\?"):
        make_dataset("burger1d", tmp_path, num_samples=1)


@pytest.mark.parametrize("task", ["burgers1d", "incompressible2d"])
def test_suggested_viscosity_is_accepted(task):
    with pytest.raises(ConfigError) as caught:
        SOLVERS[task](nu=1e-6)
    SOLVERS[task](nu=float(caught.value.hint.split()[-1]))


def test_interrupted_make_dataset_leaves_old_file_and_no_partial(tmp_path):
    settings = TASKS["advection1d"][0]
    path = make_dataset("advection1d", tmp_path, num_samples=1, **settings)
    before = path.read_bytes()

    def interrupt(done):
        assert [*tmp_path.glob(".*.partial")], "it is being written beside the old one"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_dataset("advection1d", tmp_path, num_samples=20, overwrite=True, progress=interrupt, **settings)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_progress_is_told_the_samples_solved(tmp_path):
    told = []
    settings = TASKS["advection1d"][0]
    make_dataset("advection1d", tmp_path, num_samples=35, progress=told.append, **settings)
    assert told == [16, 32, 35]


# --- command --------------------------------------------------------------------------------------


def test_command_prints_path_and_size(tmp_path):
    arguments = (
        "burgers1d",
        "--out",
        tmp_path / "new",
        "--samples",
        2,
        "--points",
        32,
        "--frames",
        3,
        "--nu",
        0.1,
    )
    result = run(*arguments)
    assert result.exit_code == 0
    path = tmp_path / "new" / "1D_Burgers_Sols_Nu0.1.hdf5"
    assert result.stdout == f"{path}  3.0 kB\n"
    assert contents(path)["tensor"].shape == (2, 3, 32)


def test_command_makes_a_file_for_each_viscosity_and_a_build_reads_it_for_every_sample(tmp_path):
    words = ("burgers1d", "--out", tmp_path, "--samples", 10, "--points", 32, "--frames", 3)
    result = run(*words, "--nu", "0.01,0.1,0.03")
    assert result.exit_code == 0, result.stderr
    names = [f"1D_Burgers_Sols_Nu{nu}.hdf5" for nu in (0.01, 0.1, 0.03)]
    assert [Path(line.split()[0]).name for line in result.stdout.splitlines()] == names
    folders = {"data.root": str(tmp_path), "cache.dir": str(tmp_path)}
    build(load_config(flags={**folders, "data.tasks": ["burgers1d"], "data.split": ["train"]}))
    with ups_store.open(tmp_path / "burgers1d_train.zarr.zip") as store:
        assert store["nu"].tolist() == [0.01] * 8 + [0.03] * 8 + [0.1] * 8
        np.testing.assert_array_equal(store["fields"][0, 0], store["fields"][8, 0])  # one seed, one start


def test_command_refuses_several_values_that_share_a_name(tmp_path):
    result = run("burgers1d", "--out", tmp_path, "--nu", "0.1,0.1")
    assert (result.exit_code, list(tmp_path.iterdir())) == (2, [])
    assert "2 files would be called 1D_Burgers_Sols_Nu0.1.hdf5" in result.stderr
    assert run("burgers1d", "--out", tmp_path, "--nu", "0.1,thin").exit_code == 2


def test_file_of_a_split_is_of_it_as_a_whole(tmp_path):
    for split, nu in (("train", 0.1), ("test", 0.2)):
        make_dataset("burgers1d", tmp_path, num_samples=3, split=split, nu=nu, points=32, frames=3)
    found = [find_sources(tmp_path, task=get_task("burgers1d"), split=split) for split in ("train", "test")]
    assert [[(file.path.name, file.whole) for file in files] for files in found] == [
        [("burgers1d_train_1D_Burgers_Sols_Nu0.1.hdf5", True)],
        [("burgers1d_test_1D_Burgers_Sols_Nu0.2.hdf5", True)],
    ]


@pytest.mark.parametrize("task", ["incompressible2d", "shallow_water2d"])
def test_file_is_read_as_its_task(task, tmp_path):
    settings, _ = TASKS[task]
    path = make_dataset(task, tmp_path, num_samples=2, **settings)
    fields = SOLVERS[task](**settings).sample([0, 1], seed=0).fields
    is_converted = fields.ndim == 4  # PDEBench's shallow water is (x, y), and has a channel axis
    expected = fields[..., None] if is_converted else fields.swapaxes(2, 3)
    with open_source(path, task=get_task(task)) as source:
        assert source.info.parameters == ({"nu": 0.01} if "nu" in settings else {})
        np.testing.assert_allclose(source.read([0, 1])["fields"], expected, atol=1e-6)


def test_command_replaces_file_only_with_force(tmp_path):
    arguments = ("darcy2d", "--out", tmp_path, "--samples", 1, "--points", 8)
    assert run(*arguments).exit_code == 0
    (path,) = tmp_path.iterdir()
    before = path.read_bytes()
    refused = run(*arguments, "--seed", 1)
    assert refused.exit_code == 2
    assert str(path) in refused.stderr
    assert "--force" in refused.stderr
    assert path.read_bytes() == before
    assert run(*arguments, "--seed", 1, "--force").exit_code == 0
    assert path.read_bytes() != before


def test_command_names_settings_of_task_when_another_is_given(tmp_path):
    result = run("darcy2d", "--out", tmp_path, "--nu", 0.1)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr == "error: darcy2d has no setting 'nu': expected one of beta, points, modes\n"


def test_command_tells_what_is_wrong_with_folder(tmp_path):
    (tmp_path / "file").write_text("")
    result = run("darcy2d", "--out", tmp_path / "file", "--samples", 1)
    assert result.exit_code == 1
    assert result.stderr == f"error: {tmp_path / 'file'}: can't be written (file exists); check --out\n"


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (OSError("Unable to create file (name = 'x', errno = 13, flags = 13)"), 1, "permission denied"),
        (
            RuntimeError("Can't write (failed: errno = 28, buf = 0x1)"),
            6,
            "no space left on device",
        ),
        (OSError(28, "No space left on device"), 6, "no space left on device"),
        (OSError("Can't synchronously write data (odd)"), 1, "can't synchronously write data"),
    ],
)
def test_command_tells_what_libhdf5_says_in_one_line(error, code, message, tmp_path, monkeypatch):
    def fail(*arguments, **settings):
        raise error

    monkeypatch.setattr(SOLVERS["darcy2d"], "write", fail)
    result = run("darcy2d", "--out", tmp_path, "--samples", 1, "--points", 8)
    assert result.exit_code == code
    assert result.stderr.startswith(f"error: {tmp_path}: ")
    assert message in result.stderr
    assert ("errno" in result.stderr, result.stderr.count("\n")) == (False, 1)


def test_command_hides_no_bug(tmp_path, monkeypatch):
    def fail(*arguments, **settings):
        raise RuntimeError("a bug")

    monkeypatch.setattr(SOLVERS["darcy2d"], "sample", fail)
    result = run("darcy2d", "--out", tmp_path, "--samples", 1, "--points", 8)
    assert (result.exit_code, "RuntimeError: a bug; -vv shows" in result.stderr) == (1, True)


@pytest.mark.parametrize("task", ["burgers1d", "diffreact2d"])
def test_full_disk_is_one_line_and_leaves_nothing(small_disk, task):
    command = [sys.executable, str(SCRIPT), task, "--out", str(small_disk), "--samples", "40"]
    command += ["--points", "32", "--frames", "101"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (6, "")
    reason = "can't be written (no space left on device); free some space, or give --out another folder"
    assert done.stderr == f"error: {small_disk}: {reason}\n"
    assert list(small_disk.iterdir()) == []


@pytest.fixture
def small_disk(tmp_path):
    """A tmpfs of 256 KiB, where mounting is allowed (root)."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting a tmpfs isn't allowed here")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def test_interrupted_command_says_that_nothing_was_written(tmp_path, monkeypatch):
    def interrupt(*arguments, **settings):
        raise KeyboardInterrupt

    monkeypatch.setattr(SOLVERS["darcy2d"], "sample", interrupt)
    result = run("darcy2d", "--out", tmp_path, "--samples", 1)
    assert result.exit_code == 5
    assert result.stderr == "interrupted: nothing was written\n"
    assert list(tmp_path.iterdir()) == []


def test_command_runs_as_script_without_torch(tmp_path):
    code = (
        "import runpy, sys\n"
        "sys.argv = sys.argv[1:]\n"
        "try:\n    runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "finally:\n    assert 'torch' not in sys.modules\n"
    )
    command = [
        sys.executable,
        "-c",
        code,
        SCRIPT,
        "darcy2d",
        "--out",
        tmp_path,
        "--samples",
        "1",
        "--points",
        "8",
    ]
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(str(tmp_path / "2D_DarcyFlow_beta1.0_Train.hdf5"))
