"""The benchmarks: asv finds them, each operation runs with tiny inputs, targets have verdicts."""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness import report, run
from benchmarks.harness.report import Result
from benchmarks.harness.scale import Scale
from benchmarks.peers import table
from benchmarks.peers.figures import Figures
from benchmarks.peers.measure import PeerResult

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
    "loader.order": ("Order", ("full",)),
    "loader.loaders": ("Loop", (4096,)),
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


@pytest.mark.multi_process
@pytest.mark.parametrize("operation", run.OPERATIONS)
def test_operation_measures_itself(operation: str, tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its values are compared with what they should be by its `setup`."""
    name, values = TRIED[operation]
    benchmark = getattr(tiny(operation), name)
    if values:
        chosen = values if len(values) == 1 else tuple((value,) for value in values)
        monkeypatch.setattr(benchmark, "params", chosen)
    tracks = [track for track in vars(benchmark) if track.startswith("track_")]
    results = list(run._measure(benchmark, f"{operation}.{name}", tracks))
    assert len(results) == len(tracks) > 0
    for result in results:
        assert math.isfinite(result.value)
        assert result.value > 0
        assert len(result.cells) == 8


def test_every_file_of_operations_is_run() -> None:
    files = (REPO / "benchmarks").glob("[!p]*/*.py")
    has_tracks = {f"{path.parent.name}.{path.stem}" for path in files if "def track_" in path.read_text()}
    assert has_tracks == set(run.OPERATIONS) == set(TRIED)


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


def test_target_may_depend_on_the_first_parameter() -> None:
    assert report.limit_of({102_400: 1.25}, (102_400, "own")) == 1.25
    assert report.limit_of({102_400: 1.25}, (4096, "own")) is None
    assert report.limit_of(1.15, ("compressed",)) == 1.15


MACHINE = {
    "cpu": "A",
    "cores": 2,
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
