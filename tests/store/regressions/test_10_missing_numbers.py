"""Issue 32, 10: `import-pt` of a folder with a missing number moves no sample up without a word."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from command_line import run_ups_store

import ups_store
from ups_store.convert.import_pt import import_pt
from ups_store.errors import SourceError


def write_files(folder: Path, names: Iterable[str]) -> Path:
    folder.mkdir()
    for number, name in enumerate(names):
        torch.save({"x": torch.full((3,), float(number))}, folder / name)
    return folder


@pytest.mark.parametrize(
    ("names", "missing"),
    [
        ([f"sample_{i:05}.pt" for i in range(10) if i != 4], "no sample_00004.pt"),
        ([f"sample_{i}.pt" for i in (0, 1, 9, 12)], "no sample_2.pt to sample_8.pt, and 1 more gap"),
        (["sample_0.pt", f"sample_{10**30}.pt"], f"no sample_1.pt to sample_{10**30 - 1}.pt"),
    ],
)
def test_folder_with_a_missing_number_is_refused_by_its_name(
    tmp_path: Path, names: list[str], missing: str
) -> None:
    folder, target = write_files(tmp_path / "old", names), tmp_path / "x.zarr.zip"
    with pytest.raises(SourceError, match=missing) as caught:
        import_pt(folder, target)
    assert caught.value.kind == "missing_files"
    assert [*tmp_path.iterdir()] == [folder]
    report = import_pt(folder, target, on_error="skip")
    assert {*report.refused.values()} == {"missing"}
    with ups_store.open(target) as store:
        assert store["x"][:, 0].tolist() == [*range(len(names))]


def test_command_refuses_it_and_skips_it_when_told(tmp_path: Path) -> None:
    folder = write_files(tmp_path / "old", ["sample_0.pt", "sample_2.pt"])
    words = ["import-pt", folder, tmp_path / "x.zarr.zip"]
    refused = run_ups_store(*words)
    assert refused.exit_code == 3
    assert "no sample_1.pt" in " ".join(refused.stderr.split())
    taken = run_ups_store(*words, "--on-error", "skip")
    assert taken.exit_code == 0
    assert "2 samples, 1 file left out" in " ".join(taken.stdout.split())


@pytest.mark.parametrize(
    "names",
    [
        ["sample_1.pt", "sample_2.pt", "sample_3.pt"],  # counted from 1
        ["sample_9.pt", "sample_10.pt"],
        ["sample_1_0.pt", "sample_1_1.pt", "sample_7_0.pt"],  # runs, each with its samples
        ["sample_a.pt", "sample_z.pt"],
        ["sample_01.pt", "sample_1.pt", "sample_2.pt"],
    ],
)
def test_folder_without_a_gap_is_taken(tmp_path: Path, names: list[str]) -> None:
    folder = write_files(tmp_path / "old", names)
    assert import_pt(folder, tmp_path / "x.zarr.zip").num_samples == len(names)
