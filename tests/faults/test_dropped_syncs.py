"""Every sync on the way to a file is needed: without any one of them a power loss loses or tears something.

The syncs are found in the source, so that a new one must be listed here: with a workload that shows why it is
there, or with the reason for which it stays although none does.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lossy_disk as disk_module
import pytest
from crash_builds import (
    Workload,
    check_image,
    damaged_build,
    images_of,
    in_three_batches,
    interrupted_and_resumed,
    joined_before_the_name_was_durable,
    killed_before_a_record_was_durable,
    killed_before_the_name_was_durable,
    undisturbed,
)
from crash_copies import check_copying
from crash_files import MAKERS, check_everywhere
from crash_ragged import check_spool, noted
from lossy_disk import Disk
from small_stores import begin, build, mixed_values

import ups_store
from ups_store.system import files
from ups_store.system.files import replace_file
from ups_store.writing.target import new_file

PACKAGE = Path(ups_store.__file__).parent
SYNCS = ("sync", "sync_data", "sync_folder")

Place = tuple[str, str, int]  # file, function, which sync of it
Check = Callable[[Path, Callable[..., Disk]], object]  # of every image that such a disk may leave


@functools.cache
def places_of_syncs() -> dict[tuple[str, int], Place]:
    """Every call of a sync in the package, by file and line."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        file, text = path.relative_to(PACKAGE).as_posix(), path.read_text()
        nodes = ast.walk(ast.parse(text)) if "sync" in text else ()
        for function in [node for node in nodes if isinstance(node, ast.FunctionDef)]:
            lines = sorted(node.lineno for node in ast.walk(function) if _is_sync(node))
            found |= {(file, line): (file, function.name, nth) for nth, line in enumerate(lines, 1)}
    return found


def _is_sync(node: ast.AST) -> bool:
    called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
    return called.removeprefix("files.") in SYNCS


class ForgetfulDisk(Disk):
    """A disk that doesn't do one of the syncs of the package."""

    def __init__(self, *arguments: Any, forgets: Place | None, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.forgets, self.num_forgotten = forgets, 0

    def sync_data(self, fd: int) -> None:
        if self._is_forgotten():
            self._change()
        else:
            super().sync_data(fd)

    def sync_folder(self, path: Path) -> None:
        if self._is_forgotten():
            self._change()
        else:
            super().sync_folder(path)

    def after_power_loss(self, *, seed: int = 0) -> Iterator[dict[Path, bytes]]:
        """Only where something was forgotten: else the other tests have checked it."""
        if self.num_forgotten or self.forgets is None:
            yield from super().after_power_loss(seed=seed)

    def _is_forgotten(self) -> bool:
        frame = sys._getframe(2)
        while frame.f_code.co_filename in (__file__, disk_module.__file__):
            assert frame.f_back is not None
            frame = frame.f_back
        file = Path(frame.f_code.co_filename)
        if not file.is_relative_to(PACKAGE):
            return False
        is_it = places_of_syncs()[file.relative_to(PACKAGE).as_posix(), frame.f_lineno] == self.forgets
        self.num_forgotten += is_it
        return is_it


def builds(workload: Workload, before: Callable[[Path], dict[Path, bytes]] = lambda path: {}) -> Check:
    """Check every image of a build."""

    def check(path: Path, disk_type: Callable[..., Disk]) -> None:
        names, expected = before(path), undisturbed(path)
        for _, run, left in images_of(workload, path, names, disk_type=disk_type):
            check_image(path, left, run, expected=expected)

    return check


def makes(name: str) -> Check:
    """Check every image while a file or folder is made."""
    return lambda path, disk_type: check_everywhere(MAKERS[name], path.parent, disk_type=disk_type)


def copying(path: Path, disk_type: Callable[..., Disk]) -> object:
    """Check every image of copies of sources."""
    return check_copying(path.parent / "copies", disk_type)


def noting(path: Path, disk_type: Callable[..., Disk]) -> object:
    """Check every image of a spool with notes."""
    return check_spool(path, disk_type, workload=noted, room=64)


TAKING_BACK = builds(lambda run: run.to_the_end(), before=damaged_build)
NEEDED: dict[Place, Check] = {
    ("writing/commit.py", "commit_samples", 1): builds(in_three_batches),
    ("writing/commit.py", "write_records", 1): builds(in_three_batches),
    ("writing/commit.py", "take_back", 1): TAKING_BACK,
    ("writing/commit.py", "finish", 2): builds(in_three_batches),
    ("writing/commit.py", "finish", 3): builds(in_three_batches),
    ("writing/commit.py", "publish", 2): builds(in_three_batches),
    ("writing/create.py", "create_building", 1): builds(in_three_batches),
    ("writing/create.py", "create_building", 3): builds(in_three_batches),
    ("writing/create.py", "_resume", 1): builds(killed_before_a_record_was_durable),
    ("writing/create.py", "_resume", 2): builds(killed_before_the_name_was_durable),
    ("writing/create.py", "join", 1): builds(joined_before_the_name_was_durable),
    ("writing/target.py", "new_file", 1): makes("safetensors"),
    ("writing/target.py", "publish_file", 2): makes("safetensors"),
    ("writing/target.py", "new_folder", 1): makes("zarr"),
    ("writing/target.py", "new_folder", 2): makes("zarr"),
    ("writing/target.py", "new_folder", 3): makes("zarr"),
    ("system/files.py", "replace_file", 1): makes("small file"),
    ("writing/spool.py", "_commit", 1): noting,
    ("writing/spool.py", "_commit", 2): noting,
    ("writing/spool.py", "_commit", 3): check_spool,
    ("remote/fetch.py", "run", 2): copying,
    ("remote/fetch.py", "run", 1): copying,
    ("remote/fetch.py", "_take", 1): copying,
    ("remote/fetch.py", "_start_again", 1): copying,
}
DEARER = {
    ("writing/spool.py", "_commit", 2),
    ("writing/create.py", "create_building", 3),
    ("writing/create.py", "_resume", 2),
    ("writing/create.py", "join", 1),
    ("writing/target.py", "new_folder", 1),
    ("writing/target.py", "new_folder", 2),
    ("writing/target.py", "new_folder", 3),
}
STAYS = {
    ("writing/commit.py", "finish", 1): "the one before the tail is cut off covers it; here an error of the "
    "disk is found before anything of the finished layout is written",
    (
        "writing/create.py",
        "create_building",
        2,
    ): "the one after the link covers it where names of a folder "
    "are kept in order, which not every file system promises",
}
OF_OTHER_MACHINES = {  # of a server's disk, or after the bytes were synced by `fetch`
    (
        "remote/shared.py",
        "create",
        1,
    ): "the copy before its link: a store that a server lost is damaged, which a pull finds",
    ("remote/shared.py", "create", 2): "a name that is lost is pushed again",
    ("remote/transfer.py", "_land", 1): "a name that is lost is pulled again",
}
OF_PERMISSIONS = {  # the disk in memory has none: see test_mode_is_durable_before_the_name_is_given
    ("writing/commit.py", "publish", 1),
    ("writing/target.py", "publish_file", 1),
}


def test_every_sync_of_the_package_is_listed() -> None:
    assert {*NEEDED, *STAYS, *OF_OTHER_MACHINES, *OF_PERMISSIONS} == set(places_of_syncs().values())


def _name(place: Place) -> str:
    return "-".join(map(str, place)).replace("/", ".")


@pytest.mark.no_cover
@pytest.mark.parametrize(
    "place",
    [
        pytest.param(place, marks=pytest.mark.slow if place in DEARER else (), id=_name(place))
        for place in NEEDED
    ],
)
def test_dropped_sync_loses_or_tears_something(tmp_path: Path, place: Place) -> None:
    with pytest.raises((AssertionError, ups_store.StoreError)):
        NEEDED[place](tmp_path / "a.zarr.zip", functools.partial(ForgetfulDisk, forgets=place))


@pytest.mark.no_cover
@pytest.mark.slow
def test_where_no_sync_is_dropped_nothing_is_lost(tmp_path: Path) -> None:
    """Of the damaged build; the others are in `test_crash_consistency` and `test_power_loss_of_files`."""
    TAKING_BACK(tmp_path / "a.zarr.zip", functools.partial(ForgetfulDisk, forgets=None))


@pytest.mark.no_cover
@pytest.mark.slow
@pytest.mark.parametrize("place", STAYS, ids=_name)
@pytest.mark.parametrize("workload", [in_three_batches, interrupted_and_resumed])
def test_sync_that_stays_for_other_reasons_loses_nothing(
    tmp_path: Path, place: Place, workload: Workload
) -> None:
    """If this fails the sync has become needed: list it as such."""
    builds(workload)(tmp_path / "a.zarr.zip", functools.partial(ForgetfulDisk, forgets=place))


@pytest.mark.parametrize("how", ["publish", "publish_file", "replace_file"])
def test_mode_is_durable_before_the_name_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """What replaces a private file must not come back from a power loss readable by all."""
    path = build(tmp_path / "a.zarr.zip", mixed_values())
    calls = calls_of(monkeypatch, "set_mode", "sync", "rename")
    if how == "replace_file":
        path.chmod(0o640)
        replace_file(path, b"new")
    elif how == "publish_file":
        with new_file(path, force=True):
            path.chmod(0o640)
    else:
        with begin(path, mixed_values()) as writer:
            writer.commit_many(range(4), mixed_values())
            path.chmod(0o640)
            writer.finish()
    assert calls[-3:] == ["set_mode", "sync", "rename"]


def calls_of(patch: pytest.MonkeyPatch, *names: str) -> list[str]:
    """What is called of `files` from now on."""
    calls: list[str] = []

    def noting(name: str) -> Callable[..., Any]:
        really = getattr(files, name)

        def call(*arguments: Any) -> Any:
            calls.append(name)
            return really(*arguments)

        return call

    for name in names:
        patch.setattr(files, name, noting(name))
    return calls
