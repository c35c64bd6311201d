"""What a killed call leaves is removed by the next one of the same target, or by `gc`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import ups_store

KILLED = """
import os, signal, sys
import numpy as np
import ups_store
from ups_store.convert import export_store

name, nth = sys.argv[2], int(sys.argv[3])
real = getattr(os, name)
calls = 0

def killing(*args, **options):
    global calls
    calls += 1
    if calls == nth:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*args, **options)

os.chdir(sys.argv[1])
setattr(os, name, killing)
verb = sys.argv[4]
if verb == "write":
    samples = ({"u": np.full((30, 30), i, "f4")} for i in range(30))
    ups_store.write("a.zarr.zip", samples, identity={"v": 1}, buffer_bytes=40_000)
elif verb == "data":
    ups_store.write("a.zarr.zip", np.arange(50.0), identity={"v": 1})
else:
    with ups_store.open("source.zarr.zip") as store:
        export_store(store, "out.zarr", to="zarr", force=True)
"""


def killed(folder: Path, name: str, nth: int, verb: str) -> set[str]:
    """Kill a call before its nth call of a function of `os`; what it leaves."""
    command = [sys.executable, "-c", KILLED, folder, name, str(nth), verb]
    assert subprocess.run(command, check=False, timeout=60).returncode == -9
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@pytest.mark.parametrize(
    ("verb", "name", "nth"),
    [("write", "link", 1), ("write", "posix_fallocate", 1), ("data", "link", 1), ("data", "unlink", 1)],
)
def test_next_write_leaves_nothing_but_the_store(tmp_path: Path, verb: str, name: str, nth: int) -> None:
    left = killed(tmp_path, name, nth, verb)
    assert any(".building." in each for each in left)
    samples = ({"u": np.full((30, 30), i, "f4")} for i in range(30))
    given = samples if verb == "write" else np.arange(50.0)
    ups_store.write(tmp_path / "a.zarr.zip", given, identity={"v": 1}).close()
    assert os.listdir(tmp_path) == ["a.zarr.zip"]


@pytest.mark.parametrize("nth", [1, 2])
@pytest.mark.parametrize("how", ["export", "gc"])
def test_next_export_or_gc_removes_what_a_killed_export_left(tmp_path: Path, nth: int, how: str) -> None:
    from ups_store.check.garbage import find_garbage, remove_garbage
    from ups_store.convert import export_store

    ups_store.save(tmp_path / "source.zarr.zip", u=np.arange(6.0))
    with ups_store.open(tmp_path / "source.zarr.zip") as store:
        export_store(store, tmp_path / "out.zarr", to="zarr")
        before = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")}
        left = killed(tmp_path, "rename", nth, "export") - before
        assert any(".exporting." in each for each in left)
        if how == "export":
            export_store(store, tmp_path / "out.zarr", to="zarr", force=True)
        else:
            for garbage in find_garbage(tmp_path):
                assert remove_garbage(garbage)
        kept = {path.name for path in tmp_path.iterdir()}
        old = {each for each in kept if each.endswith(".old")}
        assert kept - old == ({"source.zarr.zip", "out.zarr"} if not old else {"source.zarr.zip"})
        assert len(old) == (how == "gc" and nth == 2)  # the only copy that there is


def test_begun_file_of_a_living_process_stays(tmp_path: Path) -> None:
    begun = tmp_path / "a.zarr.zip.building.0123456789abcdef"
    with ups_store.create(tmp_path / "b.zarr.zip", {"u": ups_store.ArraySpec((1,), "int8")}, identity={}):
        os.link(tmp_path / "b.zarr.zip.building", begun)  # locked by the process that builds it
        ups_store.save(tmp_path / "a.zarr.zip", u=np.arange(3))
        assert begun.exists()
    ups_store.save(tmp_path / "a.zarr.zip", u=np.arange(4))
    assert not begun.exists()
