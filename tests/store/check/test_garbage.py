"""`gc`: what dead builders left is found, what living ones work on is left alone."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import ups_store
from ups_store.check import garbage
from ups_store.check.garbage import find_garbage, remove_garbage
from ups_store.cli.app import app
from ups_store.system import files

ARRAYS = {"u": ups_store.ArraySpec((3, 4), "float32")}


def _leave(folder: Path, kind: str) -> Path:
    """Leave a file of a kind behind, as a builder would that died."""
    path = folder / "a.zarr.zip"
    with ups_store.create(path, ARRAYS, identity={}) as writer:
        writer.commit(1, {"u": np.ones(4, "float32")})
    building = path.with_name("a.zarr.zip.building")
    if kind == "unfinished":
        return building
    if kind == "damaged":
        with building.open("r+b") as file:
            file.truncate(files.size(file.fileno()) - 1)
        return building
    return building.rename(path.with_name(f"a.zarr.zip.building.{'0123456789abcdef'}"))


@pytest.mark.parametrize("kind", ["unfinished", "damaged", "temporary"])
def test_gc_finds_and_removes_each_kind(tmp_path: Path, kind: str) -> None:
    left = _leave(tmp_path, kind)
    (tmp_path / "a.zarr.zip.building.txt").write_text("not ours")
    (found,) = find_garbage(tmp_path)
    assert (found.path, found.kind) == (left, kind)
    assert (found.num_committed, found.num_samples) == ((1, 3) if kind == "unfinished" else (0, 0))
    assert found.nbytes == left.stat().st_size
    words = {
        "unfinished": "1 of 3 samples committed",
        "damaged": "can't be continued",
        "temporary": "that died",
    }
    assert words[kind] in CliRunner().invoke(app, ["gc", str(tmp_path)]).output
    assert remove_garbage(found)
    assert not left.exists()


def test_gc_leaves_what_a_newer_version_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = _leave(tmp_path, "unfinished")

    def refuse(*_: object, **__: object) -> None:
        raise ups_store.VersionTooNewError("newer", path=left)

    monkeypatch.setattr(garbage, "open_store", refuse)
    (found,) = find_garbage(tmp_path)
    assert found.kind == "too_new"
    assert not remove_garbage(found)
    result = CliRunner().invoke(app, ["gc", str(tmp_path), "--delete", "--unfinished"])
    assert "begun by a newer version of ups-store, left alone" in result.output
    assert left.exists()


def test_gc_leaves_the_file_of_a_living_builder(tmp_path: Path) -> None:
    with ups_store.create(tmp_path / "a.zarr.zip", ARRAYS, identity={}):
        assert find_garbage(tmp_path) == []
    (found,) = find_garbage(tmp_path)
    with ups_store.create(tmp_path / "a.zarr.zip", ARRAYS, identity={}) as writer:
        assert not remove_garbage(found), "a builder took it up after it was found"
        writer.commit_many(range(3), {"u": np.zeros((3, 4), "float32")})
        writer.finish()


@pytest.mark.parametrize("moment", ["listed", "looked at", "found"])
def test_gc_lets_others_publish_or_remove_what_it_lists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    left = _leave(tmp_path, "unfinished")
    if moment == "found":
        (found,) = find_garbage(tmp_path)
        left.unlink()
        assert remove_garbage(found)
        return
    name, module = ("open_existing", files) if moment == "listed" else ("open_store", garbage)
    real = getattr(module, name)

    def overtaken(path: Path, **options: Any) -> Any:
        left.unlink(missing_ok=True)
        return real(path, **options)

    monkeypatch.setattr(module, name, overtaken)
    assert find_garbage(tmp_path) == []


def test_gc_removes_notes_without_their_spool_alone(tmp_path: Path) -> None:
    spool, notes = tmp_path / "a.zarr.zip.building", tmp_path / "a.zarr.zip.building.notes"
    notes.write_bytes(b'0123abcd {"num_samples": 1}\n')
    (orphan,) = find_garbage(tmp_path)
    assert (orphan.path, orphan.kind) == (notes, "temporary")
    spool.write_bytes(b"")
    assert notes not in [found.path for found in find_garbage(tmp_path)]
    assert not remove_garbage(orphan)
    spool.unlink()
    assert remove_garbage(orphan)
    assert not notes.exists()


def _write_foreign(folder: Path, kind: str) -> Path:
    """A file under a name that only looks like a builder's."""
    path = folder / "precious.building"
    if kind == "text":
        path.write_text("notes")
    elif kind == "text_of_a_store":
        path = folder / "a.zarr.zip.building"
        path.write_text("notes")
    elif kind == "text_of_a_temporary":
        path = folder / f"a.building.{'0123456789abcdef'}"
        path.write_text("notes")
    elif kind == "text_of_notes":
        path = folder / "town.building.notes"
        path.write_text("notes")
    elif kind == "other_zip":
        path = folder / "a.zarr.zip.building"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("a.txt", "notes")
    else:
        _leave(folder, "unfinished").rename(path)
    return path


@pytest.mark.parametrize(
    "kind", ["text", "text_of_a_store", "text_of_a_temporary", "text_of_notes", "other_zip", "unfinished"]
)
def test_gc_lists_a_foreign_file_and_never_deletes_it(tmp_path: Path, kind: str) -> None:
    path = _write_foreign(tmp_path, kind)
    before = path.read_bytes()
    told = CliRunner().invoke(app, ["gc", str(tmp_path), "--delete", "--unfinished"])
    assert f"{path}: foreign file, left alone" in told.stdout
    assert path.read_bytes() == before


@pytest.mark.parametrize("name", ["a.zarr.zip.building", "a.zarr.zip.building.0123456789abcdef"])
def test_gc_never_deletes_a_finished_store(tmp_path: Path, name: str) -> None:
    with ups_store.create(tmp_path / "a", ARRAYS, identity={}) as writer:
        writer.commit_many(range(3), {"u": np.zeros((3, 4), "float32")})
        path = writer.finish().rename(tmp_path / name)
    told = CliRunner().invoke(app, ["gc", str(tmp_path), "--delete", "--unfinished"])
    assert f"{path}: finished store, left alone" in told.stdout
    assert "removed" not in told.stdout
    assert ups_store.open(path).verify().ok


@pytest.mark.parametrize(
    "start", [bytes(8192), b"\x89HDF\r\n\x1a\n", bytes(8) + b'{"__metadata__":{}}'], ids=range(3)
)
def test_gc_removes_what_a_killed_export_began(tmp_path: Path, start: bytes) -> None:
    path = tmp_path / "out.h5.building.0123456789abcdef"
    path.write_bytes(start)
    (found,) = find_garbage(tmp_path)
    assert found.kind == "temporary"
    assert remove_garbage(found)
    assert not path.exists()
