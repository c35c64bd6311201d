"""What replaces a file takes over its place, mode and owner; a new one follows the umask."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from build_helpers import BURGERS, Recorder, settings, write_burgers
from build_helpers import build as run_build
from pdebench_files import T
from small_stores import IDENTITY, begin, build, flip, mixed_values, names_in, samples_of

import ups_store
from ups_store import AccessError, StoreNotFoundError
from ups_store.building import repair
from ups_store.building.config import BuildConfig
from ups_store.building.repair import repair_store
from ups_store.building.stores import explain_all
from ups_store.convert import export_store
from ups_store.packed.pack import pack_store, unpack_store
from ups_store.read.recovery import building_path
from ups_store.system import files
from ups_store.system.files import real_place, replace_text, take_over_permissions
from ups_store.writing.concat import concat_stores

VALUES = mixed_values()
OTHER = {"kind": "other"}
Write = Callable[[Path, Path], object]  # takes a store, and what is made of it


def export(to: str) -> Write:
    def write(store: Path, target: Path) -> None:
        with ups_store.open(store) as opened:
            export_store(opened, target, to=to, force=True)

    return write


def pack(store: Path, target: Path) -> None:
    with ups_store.open(store) as opened:
        pack_store(opened, target, force=True)


def unpack(store: Path, target: Path) -> None:
    packed = store.with_name("packed.zarr.zip")
    pack(store, packed)
    with ups_store.open(packed) as opened:
        unpack_store(opened, target, force=True)
    packed.unlink()


def concat(store: Path, target: Path) -> None:
    with ups_store.open(store) as opened:
        concat_stores([opened, opened], target, force=True)


WRITERS: dict[str, Write] = {  # kerchunk takes the way of safetensors, a preview that of text
    "create": lambda store, target: build(target, VALUES, identity=OTHER),
    "pack": pack,
    "unpack": unpack,
    "concat": concat,
    "safetensors": export("safetensors"),
    "hdf5": export("hdf5"),
    "text": lambda store, target: replace_text(target, "new"),
}
FOLDERS: dict[str, Write] = {"zarr": export("zarr")}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("store") / "store.zarr.zip", VALUES)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "target"


@pytest.fixture
def umask() -> Iterator[int]:
    before = os.umask(0o027)
    yield 0o027
    os.umask(before)


def mode_of(path: Path) -> int:
    return path.stat().st_mode & 0o7777


def make_old(target: Path, mode: int = 0o644) -> None:
    """A store that is about to be replaced."""
    build(target, VALUES, identity={"kind": "old"})
    target.chmod(mode)


@pytest.mark.parametrize("name", WRITERS)
def test_replacing_file_keeps_the_mode_and_is_never_more_open(
    name: str, store: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_old(target, 0o604)
    old, modes, write_at = target.read_bytes(), [], files.write_at

    def noting(fd: int, offset: int, data: bytes) -> None:
        modes.append(os.fstat(fd).st_mode & 0o777)
        write_at(fd, offset, data)

    if name != "unpack":  # which packs a new file first
        monkeypatch.setattr(files, "write_at", noting)
    WRITERS[name](store, target)
    assert target.read_bytes() != old
    assert mode_of(target) == 0o604
    assert set(modes) <= {0o604}
    assert names_in(target.parent) == [target.name]


@pytest.mark.parametrize("name", WRITERS)
def test_new_file_follows_the_umask(name: str, store: Path, target: Path, umask: int) -> None:
    WRITERS[name](store, target)
    assert mode_of(target) == 0o666 & ~umask


@pytest.mark.parametrize("name", FOLDERS)
def test_folder_keeps_its_mode_and_that_of_its_files_and_a_new_one_follows_the_umask(
    name: str, store: Path, target: Path, umask: int
) -> None:
    FOLDERS[name](store, target)
    found = {mode_of(path) for path in [target, *target.rglob("*")]}
    assert found == {0o777 & ~umask, 0o666 & ~umask}
    for path in target.rglob("*"):
        path.chmod(0o700 if path.is_dir() else 0o600)
    target.chmod(0o750)
    FOLDERS[name](store, target)
    assert {mode_of(path) for path in target.rglob("*") if path.is_file()} == {0o600}
    assert {mode_of(path) for path in [target, *target.rglob("*")] if path.is_dir()} == {0o750}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
@pytest.mark.parametrize("name", [*WRITERS, *FOLDERS])
def test_owner_is_kept(name: str, store: Path, target: Path) -> None:
    write = {**WRITERS, **FOLDERS}[name]
    if name in FOLDERS:
        write(store, target)
    else:
        make_old(target)
    os.chown(target, 12345, 23456)
    write(store, target)
    assert (target.stat().st_uid, target.stat().st_gid) == (12345, 23456)


def test_group_that_can_not_be_kept_hands_its_rights_to_no_other(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> None:
        raise PermissionError

    new = target.with_name("new")
    new.touch(0o600)
    target.touch()
    target.chmod(0o664)
    theirs = files.Permissions(0o664, 12345, 23456)
    own = files.permissions
    monkeypatch.setattr(files, "permissions", lambda place: theirs if place == target else own(place))
    monkeypatch.setattr(files, "set_owner", refuse)
    assert take_over_permissions(new, target)
    assert mode_of(new) == 0o644


def test_mode_that_changed_during_the_build_is_made_durable_before_the_rename(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_old(target, 0o600)
    done, order = [], ("set_mode", "sync", "rename")
    for name in order:
        call = getattr(files, name)
        monkeypatch.setattr(files, name, lambda *a, name=name, call=call: (done.append(name), call(*a)))
    with begin(target, VALUES, identity=OTHER) as writer:
        writer.commit_many(range(4), samples_of(VALUES, range(4)))
        target.chmod(0o640)
        done.clear()
        writer.finish()
    assert [name for name in done if name in order][-3:] == ["set_mode", "sync", "rename"]
    assert mode_of(target) == 0o640


def test_unfinished_store_keeps_the_mode_that_it_was_given(target: Path) -> None:
    with begin(target, VALUES) as writer:
        writer.commit_many([0, 1], samples_of(VALUES, [0, 1]))
    building_path(target).chmod(0o640)
    build(target, VALUES)
    assert mode_of(target) == 0o640


# --- symbolic links -----------------------------------------------------------------------------------


@pytest.fixture
def link(tmp_path: Path) -> Path:
    """A link `links/target` to `data/real`, which isn't there yet."""
    (tmp_path / "links").mkdir()
    (tmp_path / "data").mkdir()
    link = tmp_path / "links" / "target"
    link.symlink_to(Path("..", "data", "real"))
    return link


@pytest.mark.parametrize("name", [*WRITERS, *FOLDERS])
def test_link_stays_and_what_it_points_to_is_replaced(name: str, store: Path, link: Path) -> None:
    write, real = {**WRITERS, **FOLDERS}[name], link.parents[1] / "data" / "real"
    if name in FOLDERS:
        write(store, real)
    else:
        make_old(real)
    before = real.stat().st_ino
    write(store, link)
    assert os.readlink(link) == "../data/real"
    assert not real.is_symlink()
    assert real.stat().st_ino != before
    assert (names_in(link.parent), names_in(real.parent)) == (["target"], ["real"])


@pytest.mark.parametrize("name", [*WRITERS, *FOLDERS])
def test_link_to_nothing_is_an_error_that_names_both(name: str, store: Path, link: Path) -> None:
    with pytest.raises(StoreNotFoundError) as caught:
        {**WRITERS, **FOLDERS}[name](store, link)
    real = link.parents[1] / "data" / "real"
    assert (caught.value.kind, caught.value.path, caught.value.found) == (
        "dangling_link",
        str(link),
        str(real),
    )
    assert (names_in(link.parent), names_in(real.parent)) == (["target"], [])


def test_link_to_itself_and_a_store_behind_a_dangling_link_are_named_so(link: Path, tmp_path: Path) -> None:
    (tmp_path / "round").symlink_to(tmp_path / "round")
    for open_it in (real_place, ups_store.open):
        with pytest.raises(StoreNotFoundError) as caught:
            open_it(link)
        assert caught.value.kind == "dangling_link"
    with pytest.raises(StoreNotFoundError) as caught:
        begin(tmp_path / "round", VALUES)
    assert caught.value.kind == "dangling_link"


def test_unfinished_store_behind_a_link_is_joined_opened_and_continued_by_the_link(link: Path) -> None:
    real = link.parents[1] / "data" / "real"
    make_old(real)
    with begin(link, VALUES) as writer, ups_store.join(link, identity=IDENTITY) as other:
        other.commit_many([0, 1], samples_of(VALUES, [0, 1]))
        assert names_in(real.parent) == ["real", "real.building"]
        for path in (link.with_name("target.building"), building_path(link)):
            with ups_store.open(path, partial=True) as unfinished:
                assert unfinished.committed.tolist() == [True, True, False, False]
        assert writer.missing().tolist() == [2, 3]
    with begin(real, VALUES) as writer:
        assert writer.missing().tolist() == [2, 3]


# --- read-only stores ---------------------------------------------------------------------------------


def test_read_only_store_is_replaced_on_demand_only_and_stays_read_only(target: Path) -> None:
    make_old(target, 0o444)
    old = target.read_bytes()
    with pytest.raises(AccessError) as caught:
        begin(target, VALUES)
    assert (caught.value.kind, caught.value.path, caught.value.exit_code) == ("read_only", str(target), 2)
    assert isinstance(caught.value, PermissionError)
    assert (target.read_bytes(), names_in(target.parent)) == (old, [target.name])
    build(target, VALUES, on_mismatch="restart")
    assert target.read_bytes() != old
    assert mode_of(target) == 0o444


@pytest.fixture
def config(tmp_path: Path) -> BuildConfig:
    """A build whose store, of something else, is read-only."""
    write_burgers(tmp_path / "source" / BURGERS)
    run_build(settings(tmp_path, split="train"))
    (path,) = tmp_path.glob("cache/*.zarr.zip")
    path.chmod(0o444)
    return settings(tmp_path, split="train", reduce_time=2)


def test_build_refuses_to_replace_a_read_only_store_and_says_so_before(
    config: BuildConfig, tmp_path: Path
) -> None:
    (path,) = tmp_path.glob("cache/*.zarr.zip")
    (explained,) = explain_all(config, watcher=Recorder())
    assert (explained.action, "read-only" in explained.reason) == ("refuse", True)
    watcher = Recorder()
    with pytest.raises(AccessError, match="--overwrite"):
        run_build(config, watcher)
    assert watcher.notes == []  # no rebuilding is announced
    (explained,) = explain_all(config, watcher=Recorder(), overwrite=True)
    assert explained.action == "rebuild"
    run_build(config, overwrite=True)
    assert mode_of(path) == 0o444
    with ups_store.open(path) as store:
        assert store.arrays["fields"].shape[1] == (T + 1) // 2


def raising(error: Exception) -> Callable[..., Any]:
    def fail(*arguments: object) -> Any:
        raise error

    return fail


def test_build_reuses_a_read_only_store_and_does_not_repair_it(
    config: BuildConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, file = settings(tmp_path, split="train"), tmp_path / "build.yaml"
    run_build(whole)
    (path,) = tmp_path.glob("cache/*.zarr.zip")
    file.write_text(
        f"data: {{task: burgers1d, root: {tmp_path / 'source'}}}\ncache: {{dir: {path.parent}}}\n"
    )
    with ups_store.open(path) as store:
        place = store._catalog.layout.arrays["fields"].offset
    flip(path, place)
    with pytest.raises(AccessError, match="make it writable"):
        repair_store(path, file, watcher=Recorder())
    path.chmod(0o640)
    with monkeypatch.context() as patch:  # somebody else's file, which no chmod of ours makes writable
        denied = PermissionError(errno.EACCES, "Permission denied")
        patch.setattr(repair, "create_file", raising(files.opening_error(path, denied)))
        with pytest.raises(AccessError, match="check its permissions"):
            repair_store(path, file, watcher=Recorder())
    assert repair_store(path, file, watcher=Recorder()).is_needed
    assert mode_of(path) == 0o640
