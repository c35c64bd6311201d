"""A shared cache in a folder: copies that go on, races, other users, file systems that lack something."""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from remote_stores import Counted
from small_stores import names_in

from ups_store.errors import RemoteError, StoreNotFoundError
from ups_store.remote import shared_folder
from ups_store.remote.shared_folder import FolderCache
from ups_store.remote.shared_place import open_shared
from ups_store.system import files, locks

HASH = "a" * 64
NAME = "a.zarr.zip"
KEY = f"{HASH}/{NAME}"
DATA = bytes(range(256)) * 40


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FolderCache:
    monkeypatch.setattr(shared_folder, "_COPY_BYTES", 1000)
    (tmp_path / "shared").mkdir()
    return FolderCache(tmp_path / "shared")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Where the file goes."""
    return tmp_path / "shared" / KEY


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """What is pushed; a folder reads nothing of it."""
    path = tmp_path / NAME
    path.write_bytes(DATA)
    return path


def push(cache: FolderCache, store: Path, *, replace: bool = False) -> bool:
    return cache.create(KEY, store, replace=replace, progress=Counted())


def check_alone(place: Path, content: bytes = DATA) -> None:
    assert place.read_bytes() == content
    assert names_in(place.parent) == [NAME]


def leave_copy(cache: FolderCache, store: Path, place: Path, content: bytes) -> Path:
    """What a killed push leaves, with this content."""

    def die(*args: object, **options: object) -> bool:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(shared_folder, "_take_name", die)
        with pytest.raises(KeyboardInterrupt):
            push(cache, store)
    (left,) = place.parent.iterdir()
    left.write_bytes(content)
    return left


def copied(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Notes every range that is copied."""
    ranges: list[tuple[int, int]] = []
    copy_range = files.copy_range

    def noting(source: int, start: int, fd: int, offset: int, nbytes: int) -> int:
        ranges.append((offset, offset + nbytes))
        return copy_range(source, start, fd, offset, nbytes)

    monkeypatch.setattr(files, "copy_range", noting)
    return ranges


@pytest.mark.parametrize(
    ("content", "first"),
    [
        (DATA[:3500], 3500),
        (DATA[:2100] + b"?" + DATA[2101:], 2000),
        (DATA + b"more", len(DATA)),
        (DATA, len(DATA)),
        (b"", 0),
    ],
    ids=["shorter", "damaged", "longer", "whole", "empty"],
)
def test_push_that_was_killed_goes_on_after_the_bytes_that_are_equal(
    cache: FolderCache,
    store: Path,
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    content: bytes,
    first: int,
) -> None:
    leave_copy(cache, store, place, content)
    ranges = copied(monkeypatch)
    assert push(cache, store)
    check_alone(place)
    assert ranges == [(at, min(at + 1000, len(DATA))) for at in range(first, len(DATA), 1000)]


def test_copy_that_another_push_writes_is_left_to_it(cache: FolderCache, store: Path, place: Path) -> None:
    left = leave_copy(cache, store, place, b"")
    fd = files.open_existing(left, writable=True)
    assert locks.try_lock(fd, shared_folder._LOCK_AT)
    assert push(cache, store)
    assert place.read_bytes() == DATA
    assert names_in(place.parent) == sorted([NAME, left.name])
    files.close(fd)


def test_copy_of_another_user_is_left_alone(
    cache: FolderCache, store: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, open_or_create = leave_copy(cache, store, place, b"of another user"), files.open_or_create

    def denying(path: Path) -> int:
        if path == left:
            raise PermissionError(path)
        return open_or_create(path)

    monkeypatch.setattr(files, "open_or_create", denying)
    assert push(cache, store)
    assert place.read_bytes() == DATA
    assert left.read_bytes() == b"of another user"


def test_folder_that_may_not_be_written_to_is_an_error(
    cache: FolderCache, store: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def deny(path: Path) -> int:
        raise PermissionError(path)

    for name in ("open_or_create", "create_new"):
        monkeypatch.setattr(files, name, deny)
    with pytest.raises(RemoteError, match="can't write there") as caught:
        push(cache, store)
    assert (caught.value.kind, caught.value.path) == ("not_allowed", str(place))


@pytest.mark.parametrize(
    "error", [PermissionError(errno.EACCES, "denied"), OSError(errno.EROFS, "read-only")]
)
def test_folder_that_cannot_be_made_is_an_error(
    cache: FolderCache, store: Path, monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    def fail(path: Path, *, exist_ok: bool) -> None:
        raise error

    monkeypatch.setattr(os, "makedirs", fail)
    with pytest.raises(RemoteError, match="can't make the folder") as caught:
        push(cache, store)
    assert caught.value.kind == ("not_allowed" if isinstance(error, PermissionError) else "refused")


def test_copies_that_are_removed_all_the_time_are_an_error(
    cache: FolderCache, store: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "is_file_at", lambda fd, path: False)
    with pytest.raises(RemoteError) as caught:
        push(cache, store)
    assert caught.value.kind == "refused"
    assert not place.exists()


def test_file_system_without_locks_takes_a_name_of_the_process(
    cache: FolderCache, store: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(fd: int, offset: int) -> bool:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(locks, "try_lock", fail)
    assert push(cache, store)
    assert place.read_bytes() == DATA


def link_fails(number: int) -> Callable[[Path, Path], None]:
    def fail(old: Path, new: Path) -> None:
        raise OSError(number, os.strerror(number))

    return fail


class LibcWithout:
    """A C library whose rename has no flags; or fails in another way."""

    def __init__(self, number: int) -> None:
        self._number = number

    def renameat2(self, *args: object) -> int:
        ctypes.set_errno(self._number)
        return -1


without_flags = pytest.mark.parametrize(
    "number", [0, errno.EINVAL, errno.ENOSYS], ids=["flags", "no flags", "no call"]
)


@without_flags
def test_file_system_without_hard_links_takes_renames(
    cache: FolderCache, store: Path, place: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(files, "link", link_fails(errno.EPERM))
    if number:
        monkeypatch.setattr(files, "libc", lambda: LibcWithout(number))
    assert push(cache, store)
    check_alone(place)
    place.write_bytes(b"damaged")
    assert not push(cache, store)
    assert push(cache, store, replace=True)
    check_alone(place)


@without_flags
def test_loser_without_hard_links_replaces_nothing(
    cache: FolderCache, store: Path, place: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def link(old: Path, new: Path) -> None:
        new.write_bytes(b"of another machine")
        raise OSError(errno.EPERM, "no links")

    monkeypatch.setattr(files, "link", link)
    if number:
        monkeypatch.setattr(files, "libc", lambda: LibcWithout(number))
    assert not push(cache, store)
    check_alone(place, b"of another machine")


def test_loser_of_a_race_replaces_nothing(
    cache: FolderCache, store: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = files.link

    def too_late(old: Path, new: Path) -> None:
        new.write_bytes(b"of another machine")
        link(old, new)

    monkeypatch.setattr(files, "link", too_late)
    assert not push(cache, store)
    check_alone(place, b"of another machine")


@pytest.mark.parametrize("links", [errno.EIO, errno.EPERM])
def test_disk_that_fails_is_an_error(
    cache: FolderCache, store: Path, place: Path, monkeypatch: pytest.MonkeyPatch, links: int
) -> None:
    monkeypatch.setattr(files, "link", link_fails(links))
    monkeypatch.setattr(files, "libc", lambda: LibcWithout(errno.EIO))
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        push(cache, store)
    assert not place.exists()


def test_listing_leaves_out_what_is_no_file_or_goes_meanwhile(
    cache: FolderCache, tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.parent.mkdir()
    place.write_bytes(DATA)
    os.mkfifo(place.with_name("b.zarr.zip"))
    place.with_name("gone.zarr.zip").symlink_to(tmp_path / "nothing")
    assert stat.S_ISFIFO(place.with_name("b.zarr.zip").stat().st_mode)
    (entry,), strays = cache.entries()
    assert (entry.key, entry.nbytes, strays) == (KEY, len(DATA), [])
    assert cache.look("b" * 64, []) == []

    def deny(folder: Path, *, onerror: Callable[[OSError], None]) -> list[object]:
        onerror(PermissionError(folder))
        return []

    monkeypatch.setattr(os, "walk", deny)
    with pytest.raises(PermissionError):
        cache.entries()


def test_removing_removes_the_folder_that_is_empty_then(
    cache: FolderCache, store: Path, place: Path, tmp_path: Path
) -> None:
    push(cache, store)
    (tmp_path / "shared" / "README").write_text("")
    for key in (KEY, KEY, "README"):
        cache.remove(key)
    assert names_in(tmp_path / "shared") == []


def test_folder_that_is_not_there_is_never_made(tmp_path: Path, store: Path) -> None:
    """It may be a mount that is missing."""
    cache = open_shared(f"file://{tmp_path}/absent")
    for work in (lambda: cache.look(HASH, []), cache.entries, lambda: push(cache, store)):  # type: ignore[arg-type]
        with pytest.raises(StoreNotFoundError) as caught:
            work()
        assert caught.value.kind == "no_cache"
    assert not (tmp_path / "absent").exists()
