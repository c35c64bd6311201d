"""`ups-store export` and `import-pt`: what they print, exit codes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import run_command
from small_stores import MakeStore

import ups_store
from ups_store.console import format_nbytes
from ups_store.convert import export_store

Invoke = Callable[..., tuple[int, str, str]]


@pytest.fixture
def invoke(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Invoke:
    """Run the command line in this process: exit code, stdout, stderr."""

    def run(*args: object) -> tuple[int, str, str]:
        return run_command(monkeypatch, *args), *capsys.readouterr()

    return run


def test_export_prints_the_target_and_refuses_to_overwrite(
    make_store: MakeStore, tmp_path: Path, invoke: Invoke
) -> None:
    path, target = make_store(), tmp_path / "out.h5"
    assert invoke("export", path, "--to", "hdf5", target)[:2] == (0, f"{target}\n")
    code, _, err = invoke("export", path, "--to", "hdf5", target)
    assert (code, "--force" in err) == (2, True)
    assert invoke("export", path, "--to", "hdf5", target, "--force", "--no-verify")[0] == 0


def test_export_interrupted_once_its_target_is_there_does_not_say_that_nothing_was_written(
    make_store: MakeStore, tmp_path: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: Any, **options: Any) -> Path:
        export_store(*args, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr("ups_store.cli.convert.export_store", interrupted)
    code, _, err = invoke("export", make_store(), "--to", "hdf5", tmp_path / "out.h5")
    assert (code, (tmp_path / "out.h5").exists()) == (5, True)
    assert "the target is whole, or as it was before" in err
    assert "nothing was written" not in err


def test_export_tells_counts_and_size_beside_its_result(
    make_store: MakeStore, tmp_path: Path, invoke: Invoke
) -> None:
    path, target = make_store(), tmp_path / "out.h5"
    err = invoke("export", path, "--to", "hdf5", target)[2]
    assert err == f"{target}: wrote 4 samples, {format_nbytes(target.stat().st_size)}\n"
    folder = tmp_path / "out"
    nbytes = invoke("export", path, "--to", "zarr", folder)[2].removeprefix(f"{folder}: wrote 4 samples, ")
    assert (
        nbytes
        == format_nbytes(sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())) + "\n"
    )


def test_import_pt_keeps_an_existing_target_unless_forced(
    make_store: MakeStore, tmp_path: Path, invoke: Invoke
) -> None:
    torch.save({"latent": torch.zeros(2, 2)}, tmp_path / "sample_0.pt")
    path = make_store()
    before = path.read_bytes()
    code, _, err = invoke("import-pt", tmp_path, path)
    assert (code, "--force" in err, path.read_bytes() == before) == (2, True, True)
    assert invoke("import-pt", tmp_path, tmp_path / "sample_0.pt", "--force")[0] == 2
    assert invoke("import-pt", tmp_path, path, "--force")[0] == 0
    assert len(ups_store.open(path)) == 1


def test_export_to_an_unknown_format_is_a_usage_error(
    make_store: MakeStore, tmp_path: Path, invoke: Invoke
) -> None:
    assert invoke("export", make_store(), "--to", "csv", tmp_path / "out")[0] == 2


def test_import_pt_says_what_was_left_out(tmp_path: Path, invoke: Invoke) -> None:
    for i in range(3):
        torch.save({"latent": torch.zeros(2, 2), "params": {}, "bc": {}}, tmp_path / f"sample_{i}.pt")
    (tmp_path / "sample_1.pt").write_bytes(b"cut")
    target = tmp_path / "out.zarr.zip"
    code, out, err = invoke("import-pt", tmp_path, target, "--json")
    assert (code, "sample_1.pt" in err) == (3, True)
    assert json.loads(out)["refused"].keys() == {"sample_1.pt"}
    first, second, end = err.split("\n")  # what to do belongs to the sentence, and the list follows it
    assert "; repair or remove these files" in first
    assert (second.startswith("  sample_1.pt: "), end) == (True, "")
    code, out, err = invoke("import-pt", tmp_path, target, "--on-error", "skip", "--json")
    assert (code, json.loads(out)["num_samples"], "left out" in err) == (0, 2, True)
    assert json.loads(out)["refused"].keys() == {"sample_1.pt"}
    assert len(ups_store.open(target)) == 2


def test_import_pt_takes_other_names_and_files(tmp_path: Path, invoke: Invoke) -> None:
    for i in range(2):
        torch.save({"image": torch.zeros(2, 2), "fields": torch.zeros(i)}, tmp_path / f"{i}.pt")
    target = tmp_path / "out.zarr.zip"
    assert "--pattern" in invoke("import-pt", tmp_path, target)[2]
    words = ("--pattern", "*.pt", "--map", "image=x", "--ignore", "fields")
    assert invoke("import-pt", tmp_path, target, *words)[0] == 0
    assert list(ups_store.open(target).arrays) == ["x"]
    code, _, err = invoke("import-pt", tmp_path, target, "--force", "--map", "image")
    assert (code, "expected KEY=NAME, found 'image'" in err) == (2, True)
    for other, what in (("image=y", "key 'image'"), ("fields=x", "name 'x'")):
        code, _, err = invoke("import-pt", tmp_path, target, "--map", "image=x", "--map", other)
        assert (code, f"the {what} is given twice" in err) == (2, True)


def test_unpack_of_an_unfinished_store_says_that_it_is_being_built(tmp_path: Path, invoke: Invoke) -> None:
    path = tmp_path / "a.zarr.zip"
    arrays = {"u": ups_store.ArraySpec((2, 3), "float32")}
    with ups_store.create(path, arrays, identity={}) as writer:
        code, _, err = invoke("unpack", writer.path, tmp_path / "out.zarr.zip")
    assert (code, "it is being built" in err) == (1, True)
