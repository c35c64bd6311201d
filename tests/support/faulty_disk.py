"""A disk whose reads hang or fail, as reader processes see it: `slow_disk.c` is preloaded into them."""

from __future__ import annotations

import functools
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from ups_store.sources.reader_pool import ReaderPool, ReaderProcess


@functools.cache
def _library() -> tuple[tempfile.TemporaryDirectory[str], Path]:
    """The compiled library, and its folder, which is there as long as this is referred to."""
    folder = tempfile.TemporaryDirectory(prefix="slow_disk")
    library = Path(folder.name) / "slow_disk.so"
    source = Path(__file__).with_name("slow_disk.c")
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    return folder, library


class FaultyDisk:
    """Has processes that start from now on misbehave in reads of HDF5 files, while the file `flag` exists."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        if shutil.which("gcc") is None:
            pytest.skip("gcc: not found")
        self.flag = folder / "disk_is_faulty"
        self._monkeypatch = monkeypatch

    def begin(self, how: str, *, nbytes: int = 4096, digests: bool = False) -> None:
        """Be faulty.

        Args:
            how: "hang"; "fail" with EIO; "fail_once".
            nbytes: In reads of at least so many bytes: with 1 also while a file is opened.
            digests: In reads for a digest, too.
        """
        variables = {
            "LD_PRELOAD": _library()[1],
            "SLOW_DISK": self.flag,
            "SLOW_DISK_HOW": how,
            "SLOW_DISK_BYTES": nbytes,
        }
        for name, value in variables.items():
            self._monkeypatch.setenv(name, str(value))
        if digests:
            self._monkeypatch.setenv("SLOW_DISK_DIGESTS", "1")
        self._monkeypatch.setattr(ReaderPool, "process_class", ReaderProcess)
        self.flag.touch()

    def end(self) -> None:
        """Be sound, also for the processes that run."""
        self.flag.unlink(missing_ok=True)
        for name in ("LD_PRELOAD", "SLOW_DISK", "SLOW_DISK_HOW", "SLOW_DISK_BYTES", "SLOW_DISK_DIGESTS"):
            self._monkeypatch.delenv(name, raising=False)
