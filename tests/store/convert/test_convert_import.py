"""`import_pt`: folders of `.pt` files become stores; hostile and damaged files are told, never run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_stores import all_arrays, names_in

import ups_store
from ups_store.convert import import_pt as import_module
from ups_store.convert.import_pt import RefusedFilesError, import_pt
from ups_store.errors import SourceError


def sample(i: int, **changes: Any) -> dict[str, Any]:
    document = {
        "latent": torch.full((3, 4, 2), float(i)),
        "params": {"nu": 0.1 * i, "force": torch.tensor([i, i + 1])},
        "bc": {"left": torch.tensor(float(i))},
    }
    return {**document, **changes}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Twelve samples, numbered without leading zeros."""
    where = tmp_path / "pt"
    where.mkdir()
    for i in range(12):
        torch.save(sample(i), where / f"sample_{i}.pt")
    return where


def reasons(error: SourceError) -> str:
    assert error.kind in ("refused_files", "shapes_differ")
    return str(error)


def test_import_makes_a_store_in_order_of_the_numbers(folder: Path, tmp_path: Path) -> None:
    done = import_pt(folder, tmp_path / "out.zarr.zip")
    assert (done.num_samples, done.num_written, done.refused) == (12, 12, {})
    found = all_arrays(done.path)
    assert found["latent"].shape == (12, 3, 4, 2)
    assert found["latent"][:, 0, 0, 0].tolist() == list(range(12))
    assert found["force"].tolist() == [[i, i + 1] for i in range(12)]
    np.testing.assert_array_equal(found["nu"], [0.1 * i for i in range(12)])
    np.testing.assert_array_equal(found["bc_left"], np.arange(12, dtype=np.float32))
    with ups_store.open(done.path) as store:
        assert store.dims["latent"] == ("sample", "time", "token", "width")
        content = store.identity
        assert (content["kind"], content["encoder"]) == ("imported", "unknown")


@pytest.fixture
def clouds(tmp_path: Path) -> Path:
    """Five samples of 3, 0, 7, 1 and 4 points."""
    where = tmp_path / "clouds"
    where.mkdir()
    for i, num in enumerate((3, 0, 7, 1, 4)):
        torch.save({"points": torch.full((num, 2), float(i)), "nu": i}, where / f"sample_{i}.pt")
    return where


def test_import_of_arrays_of_different_lengths_makes_ragged_ones(clouds: Path, tmp_path: Path) -> None:
    done = import_pt(clouds, tmp_path / "out.zarr.zip", ragged=["points"])
    assert (done.num_samples, done.refused) == (5, {})
    with ups_store.open(done.path) as store:
        assert store.verify().ok
        for i, num in enumerate((3, 0, 7, 1, 4)):
            found = store.sample(i)
            np.testing.assert_array_equal(found["points"], np.full((num, 2), i, np.float32))
            assert found["nu"] == i


def test_import_refuses_ragged_arrays_that_differ_in_more_than_length(clouds: Path, tmp_path: Path) -> None:
    torch.save({"points": torch.zeros(3, 5), "nu": 0}, clouds / "sample_5.pt")
    with pytest.raises(RefusedFilesError) as caught:
        import_pt(clouds, tmp_path / "out.zarr.zip", ragged=["points"])
    assert list(caught.value.refused) == ["sample_5.pt"]
    assert "(None, 5), but float32 (None, 2)" in caught.value.refused["sample_5.pt"]


def test_import_of_the_same_files_elsewhere_gives_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    first = import_pt(folder, tmp_path / "a").path.read_bytes()
    os.rename(folder, tmp_path / "moved")
    assert import_pt(tmp_path / "moved", tmp_path / "b").path.read_bytes() == first


class Evil:
    """Runs a command when a careless loader unpickles it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_import_into_memory_writes_no_file(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with ups_store.open(import_pt(folder, ":memory:").path) as store:
        assert len(store) == 12
    assert names_in(tmp_path) == ["pt"]


def test_refused_files_of_inner_folders_are_said_to_be_in_the_one_given(folder: Path, tmp_path: Path) -> None:
    (folder / "sample_3.pt").write_bytes(b"")
    with pytest.raises(RefusedFilesError) as caught:
        import_pt(tmp_path, tmp_path / "out.zarr.zip", pattern="*/sample_*.pt")
    assert (caught.value.path, [*caught.value.refused]) == (str(tmp_path), ["sample_3.pt"])


@pytest.mark.parametrize("name", ["nothing", "pt/sample_0.pt"])
def test_import_of_no_folder_says_so(folder: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(SourceError, match="no such folder"):
        import_pt(tmp_path / name, tmp_path / "out.zarr.zip")


def test_import_never_runs_what_a_file_holds(folder: Path, tmp_path: Path) -> None:
    torch.save(sample(3, params={"nu": Evil(tmp_path / "ran")}), folder / "sample_3.pt")
    with pytest.raises(SourceError) as caught:
        import_pt(folder, tmp_path / "out")
    assert "sample_3.pt: it holds a posix.mkdir" in reasons(caught.value)
    assert not (tmp_path / "ran").exists()


BAD: dict[str, tuple[Any, str]] = {
    "other_keys": ({"latents": torch.zeros(2)}, "array 'bc_left' is absent, but float32 () in sample_0.pt"),
    "no_dict": ([torch.zeros(2)], "found a list"),
    "empty": ({}, "it holds no array"),
    "text": (sample(5, params={"nu": "0.1"}), "params.nu is a str, expected a dense tensor or a number"),
    "complex": (sample(5, latent=torch.zeros(3, dtype=torch.complex64)), "latent is complex64"),
    "sparse": (sample(5, latent=torch.eye(3).to_sparse()), "latent is a tensor of layout torch.sparse_coo"),
    "huge_integer": (sample(5, params={"force": 2**70}), "more than 64 bits"),
    "bad_name": (sample(5, params={"../nu": 1.0}), "is no name of an array"),
    "twice": (sample(5, params={"bc_left": 1.0, "nu": 1.0, "force": 2}), "would both be array 'bc_left'"),
    "other_shape": (
        sample(5, latent=torch.zeros(3, 4, 3)),
        r"float32 (3, 4, 3), but float32 (3, 4, 2) in sample_0",
    ),
}


@pytest.mark.parametrize("defect", BAD)
@pytest.mark.filterwarnings("ignore:Sparse")
def test_import_tells_what_is_wrong_with_a_file(folder: Path, tmp_path: Path, defect: str) -> None:
    document, reason = BAD[defect]
    torch.save(document, folder / "sample_5.pt")
    with pytest.raises(RefusedFilesError) as caught:
        import_pt(folder, tmp_path / "out")
    assert list(caught.value.refused) == ["sample_5.pt"]
    assert reason in reasons(caught.value)
    assert caught.value.exit_code == 3
    assert names_in(tmp_path) == ["pt"]


@pytest.mark.parametrize("keep", [0, 900])
def test_import_lists_every_truncated_file(folder: Path, tmp_path: Path, keep: int) -> None:
    for i in (2, 7):
        raw = (folder / f"sample_{i}.pt").read_bytes()
        (folder / f"sample_{i}.pt").write_bytes(raw[:keep])
    with pytest.raises(SourceError) as caught:
        import_pt(folder, tmp_path / "out")
    assert all(name in reasons(caught.value) for name in ("2 files", "sample_2.pt", "sample_7.pt"))


def test_import_that_skips_leaves_damaged_files_out(folder: Path, tmp_path: Path) -> None:
    (folder / "sample_4.pt").write_bytes(b"PK")
    (folder / "sample_9.pt").write_bytes(b"")
    done = import_pt(folder, tmp_path / "out", on_error="skip")
    assert sorted(done.refused) == ["sample_4.pt", "sample_9.pt"]
    expected = [i for i in range(12) if i not in (4, 9)]
    assert all_arrays(done.path)["latent"][:, 0, 0, 0].tolist() == expected


def test_import_with_nothing_good_fails_even_if_it_skips(folder: Path, tmp_path: Path) -> None:
    for path in folder.iterdir():
        path.write_bytes(b"no")
    with pytest.raises(SourceError):
        import_pt(folder, tmp_path / "out", on_error="skip")


def test_interrupted_import_continues_where_it_stopped(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = import_pt(folder, tmp_path / "whole").path.read_bytes()
    monkeypatch.setattr(import_module, "COMMIT_BYTES", 1)
    total = sum(path.stat().st_size for path in folder.iterdir())
    done = 0

    def stop(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if done > 1.5 * total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        import_pt(folder, tmp_path / "out", progress=stop)
    resumed = import_pt(folder, tmp_path / "out")
    assert 0 < resumed.num_written < 12
    assert resumed.path.read_bytes() == expected


def test_import_notices_a_file_that_changes_meanwhile(folder: Path, tmp_path: Path) -> None:
    total = sum(path.stat().st_size for path in folder.iterdir())
    seen = 0

    def change(nbytes: int) -> None:
        nonlocal seen
        seen += nbytes
        if seen == total:
            torch.save(sample(77), folder / "sample_8.pt")

    with pytest.raises(SourceError, match="changed during the import"):
        import_pt(folder, tmp_path / "out", progress=change)
    assert not (tmp_path / "out").exists()
