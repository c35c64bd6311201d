"""Paths at which there is no file, or none of ours: typed errors say so, and nothing there is replaced."""

from __future__ import annotations

import errno
import os
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ups_store
from ups_store import AccessError, ArraySpec, FormatError, SpecError, StoreNotFoundError
from ups_store.convert.export import export_store
from ups_store.errors import StoreError
from ups_store.packed.pack import pack_store, unpack_store
from ups_store.system import files
from ups_store.system.files import replace_file
from ups_store.writing.concat import concat_stores, split_store

SAMPLE = {"u": np.zeros(4, np.float32)}


def _samples() -> Iterator[dict[str, Any]]:
    yield from [SAMPLE] * 3


def _create(path: Path) -> object:
    arrays = {"u": ArraySpec((3, 4), "float32")}
    with ups_store.create(path, arrays, identity={}, on_mismatch="restart") as writer:
        writer.commit_many(range(3), {"u": np.zeros((3, 4), np.float32)})
        return writer.finish()


READING: dict[str, Callable[[Path], Any]] = {
    "open": ups_store.open,
    "open, partial": lambda path: ups_store.open(path, partial=True),
    "load": ups_store.load,
}
WRITING: dict[str, Callable[[Path], Any]] = {
    "create": _create,
    "write": lambda path: ups_store.write(path, _samples(), identity={}, on_mismatch="restart"),
    "write, a list": lambda path: ups_store.write(path, [SAMPLE], identity={}, on_mismatch="restart"),
    "cached": lambda path: ups_store.cached(path, {}, _samples),
    "save": lambda path: ups_store.save(path, u=np.zeros((3, 4))),
}


def _place(path: Path, kind: str) -> None:
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(os.fspath(path))
    elif kind == "link to nothing":
        path.symlink_to("nowhere")
    elif kind == "circle":
        path.symlink_to(path)
    else:
        path.parent.write_text("a file")


def _error_of(call: Callable[[], object]) -> StoreError | None:
    """The typed error of a call; any other goes on."""
    try:
        call()
    except StoreError as error:
        return error
    return None


@pytest.mark.parametrize("kind", ["folder", "pipe", "socket", "link to nothing", "circle", "below a file"])
@pytest.mark.parametrize("ending", ["zip", "json"])
def test_what_is_no_file_is_a_typed_error_and_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, ending: str
) -> None:
    monkeypatch.chdir(tmp_path)  # names of sockets are short
    path = Path("below/a.zarr.zip" if kind == "below a file" else "a.zarr.zip").with_suffix(f".{ending}")
    _place(path, kind)
    before = [(each, stat.S_IFMT(each.lstat().st_mode)) for each in sorted(tmp_path.iterdir())]
    for name, call in {**READING, **WRITING}.items():
        error = _error_of(lambda call=call: call(path))
        assert error is not None, name
        assert error.kind in ("not_a_file", "not_found", "dangling_link", "path", "exists", "set"), name
        assert str(error.path).endswith((".zarr.zip", ".zarr.json", "below")), name
        after = [(each, stat.S_IFMT(each.lstat().st_mode)) for each in sorted(tmp_path.iterdir())]
        assert set(before) <= set(after), name


@pytest.fixture
def stores(tmp_path: Path) -> tuple[ups_store.AnyStore, ups_store.AnyStore]:
    store = ups_store.open(ups_store.save(tmp_path / "store.zarr.zip", u=np.zeros((3, 4))))
    pack_store(store, tmp_path / "packed.zarr.zip")
    return store, ups_store.open(tmp_path / "packed.zarr.zip")


@pytest.mark.parametrize("name", ["pack", "unpack", "export", "small file"])
def test_nothing_replaces_a_pipe_though_it_is_forced(tmp_path: Path, stores: Any, name: str) -> None:
    store, packed = stores
    target = tmp_path / "pipe"
    os.mkfifo(target)
    calls: dict[str, Callable[[], object]] = {
        "pack": lambda: pack_store(store, target, force=True),
        "unpack": lambda: unpack_store(packed, target, force=True),
        "export": lambda: export_store(store, target, to="safetensors", force=True),
        "small file": lambda: replace_file(target, b"x"),
    }
    with pytest.raises(FormatError) as caught:
        calls[name]()
    assert (caught.value.kind, caught.value.path) == ("not_a_file", str(target))
    assert target.is_fifo()


@pytest.mark.parametrize("code", [errno.EACCES, errno.EPERM])
def test_file_that_may_not_be_read_is_an_access_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(code, os.strerror(code))

    monkeypatch.setattr(files.os, "open", refuse)
    with pytest.raises(AccessError) as caught:
        ups_store.open(tmp_path / "a.zarr.zip")
    assert (caught.value.kind, caught.value.errno) == ("access", code)
    assert os.strerror(code).lower() in str(caught.value)


def test_want_of_descriptors_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(files.os, "open", refuse)
    with pytest.raises(OSError, match="open files") as caught:
        ups_store.open(tmp_path / "a.zarr.zip")
    assert isinstance(caught.value, ups_store.errors.ReadError)
    assert (caught.value.kind, caught.value.path) == ("open_files", str(tmp_path / "a.zarr.zip"))


def test_name_that_can_not_be_encoded_is_refused(tmp_path: Path) -> None:
    for call in (*READING.values(), *WRITING.values()):
        with pytest.raises(SpecError, match="can't be encoded") as caught:
            call(tmp_path / "a\ud800.zarr.zip")
        assert caught.value.kind == "path"


def test_bytes_that_are_no_text_are_a_name(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"\xff.zarr.zip")
    ups_store.save(path, u=np.zeros((3, 4)))
    assert ups_store.load(path)["u"].shape == (3, 4)


def test_path_without_a_name_is_refused() -> None:
    for call in WRITING.values():
        with pytest.raises(SpecError, match="ends in a name") as caught:
            call(Path("/"))
        assert caught.value.kind == "path"


def test_link_to_nothing_at_the_building_name_is_said(tmp_path: Path) -> None:
    (tmp_path / "a.zarr.zip.building").symlink_to("nowhere")
    with pytest.raises(StoreNotFoundError) as caught:
        _create(tmp_path / "a.zarr.zip")
    assert (caught.value.kind, caught.value.path) == (
        "dangling_link",
        str(tmp_path / "a.zarr.zip.building"),
    )


@pytest.mark.parametrize("name", ["a", "a.zip", "a.b.c"])
def test_samples_of_unknown_number_go_where_they_were_sent(tmp_path: Path, name: str) -> None:
    store = ups_store.write(tmp_path / name, _samples(), identity={})
    assert (store.path, len(store)) == (tmp_path / name, 3)
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize(("name", "hint"), [("a.zarr.json", "append"), (":memory:", "create")])
@pytest.mark.parametrize("call", ["write", "write, a list", "cached", "save"])
def test_write_takes_no_manifest_and_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, hint: str, call: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SpecError, match=hint) as caught:
        WRITING[call](Path(name))
    assert caught.value.kind == "path"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("call", ["create", "concat", "split", "pack", "unpack"])
def test_no_store_gets_the_name_of_a_manifest(tmp_path: Path, call: str) -> None:
    path, packed, name = tmp_path / "a.zarr.zip", tmp_path / "p.zarr.zip", tmp_path / "b.zarr.json"
    _create(path)
    pack_store(ups_store.open(path), packed)
    with ups_store.open(path) as store, ups_store.open(packed) as small, pytest.raises(SpecError) as caught:
        {
            "create": lambda: _create(name),
            "concat": lambda: concat_stores([store], name),
            "split": lambda: split_store(store, [tmp_path / "c.zarr.zip", name], samples=[(0, 2), (2, 3)]),
            "pack": lambda: pack_store(store, name),
            "unpack": lambda: unpack_store(small, name),
        }[call]()
    assert caught.value.kind == "path"
    assert sorted(each.name for each in tmp_path.iterdir()) == [path.name, packed.name]


def test_join_and_folders_of_caches_check_their_paths(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="too long"):
        ups_store.join(tmp_path / ("a" * 250), identity={})
    with pytest.raises(SpecError, match="found bytes"):
        ups_store.cached(os.fsencode(tmp_path), {}, _samples)  # type: ignore[arg-type]
