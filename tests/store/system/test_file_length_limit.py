"""A limit of the length of files is said to be one, and not want of room."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path

import pytest

from ups_store.errors import DiskFullError
from ups_store.system import files


@pytest.mark.parametrize(
    ("limit", "found", "hint"),
    [
        (20_480, "at most 20,480 by `ulimit -f`", "raise that limit"),
        (resource.RLIM_INFINITY, "a limit of the file system", "choose a file system"),
    ],
)
def test_limit_of_lengths_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int, found: str, hint: str
) -> None:
    monkeypatch.setattr(files.resource, "getrlimit", lambda _: (limit, limit))
    with pytest.raises(DiskFullError, match=hint) as caught, files.disk_full_as_error(tmp_path / "a", 10):
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
    assert (caught.value.found, caught.value.errno) == (found, errno.EFBIG)
    assert "free" not in str(caught.value)
