"""Commands in forked children of a test, which saves the second that an interpreter takes to import them."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path


class Forked:
    """Work in a child, as a `subprocess.Popen` of text; readers in the test's process are in the child's."""

    returncode: int | None = None

    def __init__(self, work: Callable[[], object], folder: Path, environment: Mapping[str, object]) -> None:
        self._streams = [os.memfd_create(name) for name in ("stdout", "stderr")]
        self.pid = os.fork()
        if self.pid:
            return
        code = 1
        try:
            os.chdir(folder)
            os.environ.update({name: str(value) for name, value in environment.items()})
            for number, stream in enumerate(self._streams, start=1):
                os.dup2(stream, number)
            sys.stdout, sys.stderr = open(1, "w", buffering=1), open(2, "w", buffering=1)  # noqa: SIM115
            work()
            code = 0
        except SystemExit as ended:
            code = int(ended.code or 0)
        finally:
            sys.stdout.flush()
            os._exit(code)

    def poll(self) -> int | None:
        """The exit code, once there is one."""
        if self.returncode is None and (status := os.waitpid(self.pid, os.WNOHANG))[0]:
            self.returncode = os.waitstatus_to_exitcode(status[1])
        return self.returncode

    def communicate(self, timeout: float) -> tuple[str, str]:
        """What it wrote, once it has ended."""
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                self.kill()
                raise TimeoutError(f"{timeout} s")
            time.sleep(0.005)
        return self.written(1), self.written(2)

    def written(self, number: int) -> str:
        """What it wrote so far on stdout (1) or stderr (2)."""
        return os.pread(self._streams[number - 1], 1 << 20, 0).decode()

    def kill(self) -> None:
        """End it."""
        os.kill(self.pid, signal.SIGKILL)
