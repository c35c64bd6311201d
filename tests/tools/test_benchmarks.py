"""The benchmarks: asv finds them, each operation runs with tiny inputs, targets have verdicts."""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ups_store
from benchmarks.harness import report, run
from benchmarks.harness.elsewhere import missed_elsewhere
from benchmarks.harness.inputs import NAME, values_of
from benchmarks.harness.measure import UnavailableError, compare, timed, tracked
from benchmarks.harness.report import Result
from benchmarks.harness.scale import Scale
from benchmarks.peers import table
from benchmarks.peers.measure import Figures, PeerResult
from benchmarks.store import large
from benchmarks.train import earlier_step

REPO = Path(__file__).resolve().parents[2]
TINY = Scale(
    "tiny",
    store_mib=8,
    write_mib=16,
    read_pairs=3,
    write_pairs=1,
    process_pairs=1,
    method_sizes=(4096,),
    batch_mib=(4,),
)
TRIED: dict[str, tuple[str, tuple[Any, ...]]] = {  # by operation: a class, and values of its parameters
    "store.open_store": ("Open", (1000,)),
    "store.gather": ("Gather", (4096,)),
    "store.sweep": ("Sweep", (4096,)),
    "loader.order": ("Order", ("full",)),
    "loader.loaders": ("Loop", (4096,)),
    "loader.device": ("SimulatedDevice", (1.5,)),
    "store.resume": ("Resume", (102_400,)),
    "store.write": ("WriteLazy", (102_400, 4)),
    "store.ragged": ("GatherRagged", (4096,)),
    "store.verify": ("Verify", (102_400, 1)),
    "store.preload": ("PreloadCopy", ()),
    "build.ingest": ("Contiguous", ("made",)),
    "build.build": ("BuildAgain", ()),
    "build.encode": ("OverSequential", ("contiguous",)),
}


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Makes the inputs of an operation's module tiny, and gives the module."""
    monkeypatch.setenv("UPS_BENCH_DIR", str(tmp_path))

    def shrink(operation: str) -> Any:
        module = importlib.import_module(f"benchmarks.{operation}")
        monkeypatch.setattr(module, "SCALE", TINY)
        if operation == "store.preload":
            monkeypatch.setattr(module, "NUM_SAMPLES", 80)  # derived from SCALE
        return module

    return shrink


CHEAP = {"store.gather", "store.ragged", "loader.order"}  # the others take 3 to 12 s each


@pytest.mark.multi_process
@pytest.mark.parametrize(
    "operation",
    [pytest.param(name, marks=() if name in CHEAP else pytest.mark.slow) for name in run.OPERATIONS],
)
def test_operation_measures_itself(operation: str, tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its values are compared with what they should be by its `setup`."""
    name, values = TRIED[operation]
    benchmark = getattr(tiny(operation), name)
    if values:
        chosen = values if len(values) == 1 else tuple((value,) for value in values)
        monkeypatch.setattr(benchmark, "params", chosen)
    tracks = [track for track in vars(benchmark) if track.startswith("track_")]
    results = list(run.measure(benchmark, f"{operation}.{name}", tracks))
    assert len(results) == len(tracks) > 0
    for result in results:
        assert math.isfinite(result.value)
        assert result.value > 0
        assert len(result.cells) == len(report.COLUMNS)


def test_every_file_of_operations_is_run() -> None:
    files = (REPO / "benchmarks").glob("[!p]*/*.py")
    has_tracks = {f"{path.parent.name}.{path.stem}" for path in files if "def track_" in path.read_text()}
    assert has_tracks == {*run.OPERATIONS, *run.OF_TRAINING}
    assert set(run.OPERATIONS) == set(TRIED)


def test_every_module_of_benchmarks_is_imported_and_its_parameters_have_names() -> None:
    """What `asv check`, below, finds wrong most often."""
    for operation in (*run.OPERATIONS, *run.OF_TRAINING):
        module = importlib.import_module(f"benchmarks.{operation}")
        for benchmark in vars(module).values():
            if isinstance(benchmark, type) and any(name.startswith("track_") for name in vars(benchmark)):
                names, params = getattr(benchmark, "param_names", ()), getattr(benchmark, "params", ())
                num = len(params) if params and isinstance(params[0], list | tuple) else int(bool(params))
                assert len(names) == num, benchmark


def test_sparse_store_has_all_its_samples_and_takes_the_room_of_the_real_ones(tmp_path: Path) -> None:
    path = tmp_path / "large.zarr.zip"
    large.make_sparse(path, 200_000, 4096)
    assert path.stat().st_blocks * 512 < path.stat().st_size / 10
    with ups_store.open(path, verify="touch") as store:
        assert len(store) == 200_000
        real = np.array([0, large.NUM_REAL - 1])
        assert np.array_equal(store.gather(real)[NAME], values_of(real, 4096))
        with pytest.raises(ups_store.CorruptChunkError):
            store.gather([199_999])
    with ups_store.open(path) as store:
        assert not store.gather([199_999])[NAME].any()


@pytest.mark.slow
@pytest.mark.multi_process
def test_step_is_measured_beside_that_of_the_earlier_commit(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tiny("train.earlier_step")
    for name, number in {"_PAIRS": 3, "_STEPS": 1, "_WARM_UP": 1}.items():
        monkeypatch.setattr(module, name, number)
    monkeypatch.setattr(module.EarlierStep, "params", ("demo of then",))
    rows = list(
        run.measure(module.EarlierStep, "train.earlier_step.EarlierStep", ["track_a_step", "track_loss"])
    )
    if rows[0].failure and rows[0].failure.startswith("not measured"):
        pytest.skip(rows[0].failure)
    assert [row.failure for row in rows] == [None, None]
    assert all(row.value and row.value > 0 for row in rows)


# --- failures -----------------------------------------------------------------------------------------


class Failing:
    """Some of it can't be measured: for one parameter nothing at all."""

    param_names = ("size",)
    params = ("good", "broken", "absent")

    def setup(self, size: str) -> None:
        if size == "broken":
            raise subprocess.CalledProcessError(1, ["build"], stderr="Traceback\nBuildError: a | b\n")
        if size == "absent":
            raise UnavailableError("the commit isn't here")

    def teardown(self, size: str) -> None:
        raise RuntimeError("after the numbers")

    @tracked("a pipe", "x time", at_most=1)
    def track_pipe(self, size: str) -> float:
        raise BrokenPipeError("nobody listens")  # which click takes for a closed terminal, and exits silently

    @tracked("a number", "x time", at_most=1)
    def track_number(self, size: str) -> float:
        return 0.5


def test_failure_is_a_row_and_the_others_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = list(run.measure(Failing, "a.Failing", ["track_pipe", "track_number"]))
    assert [row.value for row in rows] == [None, 0.5, None, None, None, None]
    cells = [(row.cells[2], row.cells[-1]) for row in rows]
    assert cells[:2] == [("failed: BrokenPipeError: nobody listens", ""), ("0.5 x time", "met")]
    assert cells[2] == cells[3] == ("failed: CalledProcessError: BuildError: a | b", "")
    assert cells[4] == cells[5] == ("not measured: the commit isn't here", "")
    about = {"date": "today", "mode": "quick", "machine": MACHINE | {"packages": {}, "copies": "code"}}
    table_rows = report.markdown(rows, about).splitlines()[4:]
    assert r"BuildError: a \| b" in table_rows[2]
    report.table(rows)


def test_dead_server_of_steps_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "server.py"
    script.write_text("import sys; sys.exit('FormatError: another format')")
    monkeypatch.setattr(earlier_step, "_SERVER", script)
    server = earlier_step.Server(tmp_path)
    try:
        with pytest.raises(earlier_step.ServerError, match="code 1: FormatError: another format"):
            server.train(1)
    finally:
        server.close()


def test_commit_that_a_clone_lacks_is_unavailable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(earlier_step, "COMMIT", "0" * 40)
    with pytest.raises(UnavailableError, match="needs a clone with its history"):
        earlier_step.check_out(tmp_path)


@pytest.mark.slow
@pytest.mark.multi_process
def test_asv_finds_the_benchmarks() -> None:
    if importlib.util.find_spec("asv") is None:
        pytest.skip("asv isn't installed: pip install --editable '.[bench]'")
    command = [sys.executable, "-m", "asv", "check", f"--environment=existing:{sys.executable}"]
    checked = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=150, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "No problems found" in checked.stdout


# --- verdicts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "value", "texts"),
    [
        ({"at_most": 1.15}, 1.15, ("≤ 1.15", "met")),
        ({"at_most": 1.15}, 1.41, ("≤ 1.15", "missed")),
        ({"at_least": 0.9}, 0.89, ("≥ 0.9", "missed")),
        ({"at_least": 0.9}, 0.91, ("≥ 0.9", "met")),
        ({}, 5.0, ("", "")),
    ],
)
def test_row_tells_its_target_and_whether_it_is_met(
    limits: dict[str, float], value: float, texts: tuple[str, str]
) -> None:
    assert Result("a.A.track_a", "a", {}, value, "x time", **limits).cells[-2:] == texts


def test_target_is_met_only_where_the_latest_result_of_every_machine_meets_it(tmp_path: Path) -> None:
    rows = [
        Result("a.A.track_a", "gather", {"sample_bytes": 4096}, 1.0, "x time", at_most=1.25),
        Result("a.A.track_b", "open", {}, 2.0, "ms", at_most=1.0),
    ]
    machine = {"cpu": "B", "cores": 2, "file_system": "e"}
    for date, cpu, values in (
        ("2026-01-01", "A", (9.0, 9.0)),  # older than the next
        ("2026-01-02", "A", (1.5, 0.5)),
        ("2026-01-03", "B", (9.0, 9.0)),  # this machine's own
    ):
        found = [asdict(replace(row, value=value)) for row, value in zip(rows, values, strict=True)]
        report.write_results(
            tmp_path / f"{date}-{cpu}.json", found, {"date": date, "machine": {**machine, "cpu": cpu}}
        )
    elsewhere = missed_elsewhere(rows, tmp_path, machine)
    assert {place: list(map(str, each)) for place, each in elsewhere.items()} == {
        0: ["missed on A: 1.5 (2026-01-02)"]
    }
    about = {"date": "today", "mode": "quick", "machine": {**MACHINE, "packages": {}, "copies": "NumPy"}}
    gather, opened = report.markdown(rows, about, elsewhere).splitlines()[-2:]
    assert gather.endswith("| met here; missed on A: 1.5 (2026-01-02) |")
    assert opened.endswith("| missed |")


def test_processor_time_stands_beside_wall_time() -> None:
    numbers = np.arange(2_000_000)
    found = compare(timed(lambda i: numbers.sum()), timed(lambda i: numbers.sum()), pairs=3)
    assert found.processor_ratio is not None
    assert found.processor_ratio > 0
    row = Result("a.A.track_a", "a", {}, 1.0, "x rate", comparison=replace(found, processor_ratio=0.5))
    assert row.cells[4] == "2"
    slept = compare(timed(lambda i: time.sleep(1e-3)), timed(lambda i: None), pairs=3)
    assert slept.processor_ratio is None


def test_target_may_depend_on_the_first_parameter() -> None:
    assert report.limit_of({102_400: 1.25}, (102_400, "own")) == 1.25
    assert report.limit_of({102_400: 1.25}, (4096, "own")) is None
    assert report.limit_of(1.15, ("compressed",)) == 1.15


MACHINE = {
    "cpu": "A",
    "cores": 2,
    "caches": "L1 32K",
    "memory_gib": 1,
    "kernel": "L",
    "file_system": "e",
    "load": 0,
    "python": "3",
}


def peers_table(size: str, **epochs: float | None) -> list[list[str]]:
    """Cells of the rows, the heading first, of peers that were measured in two ways."""
    results = [
        PeerResult(name, size, "", None if value is None else Figures(epoch=value, epoch_2_workers=value / 2))
        for name, value in epochs.items()
    ]
    text = table.markdown(results, {"date": "today", "mode": "quick", "machine": MACHINE})
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def test_table_of_peers_says_which_targets_are_met() -> None:
    given = {"np.memmap": 100.0, "ups_store": 90.0, "folder of .pt": 4.0, "HDF5": 20.0, "Zarr folder": 1.0}
    heading, *rows = peers_table("100 KB", **given, LitData=None)
    assert heading[-2:] == ["ours / it, epoch", "ours / it, 2 workers"]
    assert {row[0].strip("*"): row[-2:] for row in rows} == {
        "np.memmap": ["0.9, missed (≥ 0.95)", "0.9, missed (≥ 1)"],
        "ups_store": ["", ""],
        "folder of .pt": ["22.5, met (≥ 20)", ""],
        "HDF5": ["4.5, missed (≥ 5)", ""],
        "Zarr folder": ["", ""],
        "LitData": ["–", ""],
    }


def test_table_of_peers_at_other_sizes_or_without_ours_has_no_verdicts() -> None:
    assert peers_table("4 KB", ups_store=90.0, HDF5=20.0)[0][-1] == "2 workers, samples/s"
    assert peers_table("100 KB", HDF5=20.0)[0][-1] == "2 workers, samples/s"


@pytest.mark.parametrize(
    "results", [[], [{"value": 1.5, "comparison": {"quartiles": [1, 2]}}, {"value": None}]]
)
def test_results_are_json_with_a_line_each(tmp_path: Path, results: list[dict[str, Any]]) -> None:
    path, about = tmp_path / "results" / "today.json", {"date": "2026-11-22", "machine": {"cores": 2}}
    report.write_results(path, results, about)
    text = path.read_text()
    assert json.loads(text) == {**about, "results": results}
    assert sum('"value"' in line for line in text.splitlines()) == len(results)
