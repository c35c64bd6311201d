"""What the pages on packing, joining, converting and preloading tell to type works, in the page's order."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import run_command
from small_stores import all_arrays, assert_same_bits, build, mixed_constants, mixed_values, samples_of

import ups_store

DOCS = Path(__file__).parents[2] / "docs"
VALUES = mixed_values(120)


def blocks(page: str, language: str) -> list[str]:
    """The code blocks of a page in one language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)


def run_page(page: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Run every `ups-store` line of a page, one after another; all must succeed."""
    lines = [line for block in blocks(page, "sh") for line in block.splitlines() if line]
    assert {line.split()[0] for line in lines} == {"ups-store"}
    for line in lines:
        assert run_command(monkeypatch, *shlex.split(line)[1:]) == 0, line
    return lines


def run_python(code: str) -> dict[str, Any]:
    """The variables that a block leaves."""
    variables: dict[str, Any] = {"ups_store": ups_store}
    exec(compile(code, "snippet", "exec"), variables)
    return variables


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The present folder, with the stores that the pages name."""
    monkeypatch.chdir(tmp_path)
    build(tmp_path / "burgers1d_train.zarr.zip", VALUES, constants=mixed_constants())
    return tmp_path


def test_commands_of_the_packing_page_give_the_same_file_back(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("pcodec")
    unpacked = run_page("guides/pack.md", monkeypatch)[-1].split()[-1]
    assert (folder / unpacked).read_bytes() == (folder / "burgers1d_train.zarr.zip").read_bytes()
    (code,) = blocks("guides/pack.md", "python")
    assert_same_bits(run_python(code)["batch"], samples_of(VALUES, [3, 1, 2]))


def test_commands_of_the_concat_page_join_and_cut(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = folder / "burgers1d_train.zarr.zip"
    whole.rename("all.zarr.zip")
    parts = {"burgers1d_a.zarr.zip": range(50), "burgers1d_b.zarr.zip": range(50, 120)}
    for name, samples in parts.items():
        build(folder / name, samples_of(VALUES, samples), constants=mixed_constants())
    assert len(run_page("guides/concat.md", monkeypatch)) == 3
    assert_same_bits(all_arrays(whole), VALUES)
    assert_same_bits(all_arrays(folder / "first.zarr.zip"), samples_of(VALUES, range(100)))
    names = ("train", "val", "test")
    assert [len(ups_store.open(folder / f"{name}.zarr.zip")) for name in names] == [96, 12, 12]


def test_commands_of_the_convert_page_write_hdf5_and_read_a_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    h5py = pytest.importorskip("h5py")
    exported = blocks("guides/convert.md", "sh")[0].split()
    imported = blocks("guides/convert.md", "sh")[1].split()
    assert run_command(monkeypatch, *exported[1:]) == 0
    with h5py.File(folder / exported[-1]) as file:
        assert file["fields"][...].tobytes() == VALUES["fields"].tobytes()
    source, folder_of_pt, target = exported[2], imported[2], imported[3]
    Path(folder_of_pt).mkdir()
    for i, latent in enumerate(VALUES["latent"]):
        tensor = torch.from_numpy(latent.view("int16")).view(torch.bfloat16)
        torch.save({"latent": tensor}, Path(folder_of_pt) / f"sample_{i}.pt")
    Path(source).unlink()
    assert run_command(monkeypatch, *imported[1:]) == 0
    assert all_arrays(folder / target)["latent"].tobytes() == VALUES["latent"].tobytes()


def test_command_of_the_reading_page_draws(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_page("guides/read.md", monkeypatch)
    assert (folder / "sample.png").read_bytes().startswith(b"\x89PNG")


def test_python_of_the_preload_page_says_mode_and_residency(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "cache").mkdir()
    (folder / "burgers1d_train.zarr.zip").rename("cache/burgers1d_train.zarr.zip")
    left = run_python(blocks("guides/preload.md", "python")[0])
    assert left["report"].mode == "page-cache"
    first, residency = capsys.readouterr().out.splitlines()
    assert first.startswith("page-cache ")
    assert 0 <= float(residency) <= 1
    left["store"].close()
