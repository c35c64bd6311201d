"""Issue 32, 30: what other systems lack isn't needed to read a store; writing says that it needs Linux."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import ups_store

WITHOUT = """
import fcntl, mmap, os, resource, sys
LACKING = {
    os: "sched_getaffinity sched_setaffinity posix_fadvise posix_fallocate fdatasync memfd_create RWF_NOWAIT "
        "POSIX_FADV_SEQUENTIAL MFD_CLOEXEC MFD_ALLOW_SEALING",
    fcntl: "F_OFD_SETLK F_OFD_GETLK F_OFD_SETLKW F_ADD_SEALS F_GET_SEALS",
    mmap: "MADV_HUGEPAGE",
    resource: "RUSAGE_THREAD",
}
for module, names in LACKING.items():
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)
import numpy as np
import ups_store
path = sys.argv[1]
"""
READ = """
with ups_store.open(path) as store:
    assert store.gather([1, 3])["x"].tolist() == [[1.0] * 3, [3.0] * 3]
    assert store.verify().ok
    for mode in ("auto", "page-cache", "copy"):
        assert store.preload(mode).mode == ("page-cache" if mode == "auto" else mode)
    assert store["x"][2].tolist() == [2.0] * 3
with ups_store.open(path, access="pread", verify="touch") as store:
    assert store["x"][2].tolist() == [2.0] * 3
"""
WRITE = """
try:
    ups_store.write(path + ".new.zarr.zip", {"x": np.zeros((3, 2))})
except ups_store.CommitError as error:
    assert error.kind == "no_locks"
    assert "writing needs Linux" in str(error)
else:
    raise AssertionError("written")
"""


@pytest.mark.parametrize("code", [READ, WRITE], ids=["read", "write"])
def test_system_without_what_linux_alone_has(tmp_path: Path, code: str) -> None:
    path = ups_store.save(tmp_path / "x.zarr.zip", x=np.arange(10.0)[:, None] * np.ones(3))
    command = [sys.executable, "-c", WITHOUT + code, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
