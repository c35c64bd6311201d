"""Reader processes that are forked of one which has imported what they need, as that takes most of a second.

They aren't forked of the test's own process, which may have threads (BLAKE3's, obstore's). Run as a program
this is what forks: the parent of a reader ends at once, and the system gives the reader to who asked for it.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from typing import Any

import pytest

from ups_store.sources.reader_pool import ReaderPool, ReaderProcess
from ups_store.sources.reader_process import main

_MAX_BYTES = 1 << 17  # of a request, which has the environment
_PR_SET_CHILD_SUBREAPER = 36  # prctl(2)


class ForkedReader(ReaderProcess):
    """A reader in all but how it starts; what it imports, or has preloaded, needs a `ReaderProcess`."""

    forker: socket.socket
    owner = 0

    def start(self, channel_fd: int, memory_fd: int) -> subprocess.Popen[bytes]:
        """Have it forked, or start it where this process is itself a fork of the test's."""
        if os.getpid() != self.owner:
            return super().start(channel_fd, memory_fd)
        numbers = (self.memory.num_slots, self.memory.slot_nbytes)
        request = pickle.dumps((os.getpid(), numbers, dict(os.environ), os.getcwd(), sys.path))
        prctl = ctypes.CDLL(None).prctl
        prctl(_PR_SET_CHILD_SUBREAPER, 1)
        try:
            socket.send_fds(self.forker, [request], [channel_fd, memory_fd, self._log_fd])
            pid = int(self.forker.recv(64))
            while os.stat(f"/proc/{pid}") and _parent_of(pid) != self.owner:
                time.sleep(1e-3)
        finally:
            prctl(_PR_SET_CHILD_SUBREAPER, 0)
        process = subprocess.Popen.__new__(subprocess.Popen)
        nothing = dict.fromkeys(("stdin", "stdout", "stderr", "returncode"))
        vars(process).update(nothing, pid=pid, args=["reader"], _child_created=True, _sigint_wait_secs=0.25)
        process._waitpid_lock = threading.Lock()  # type: ignore[attr-defined]
        return process


def _parent_of(pid: int) -> int:
    with open(f"/proc/{pid}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[1])


def forked() -> Iterator[None]:
    """Have pools fork their readers while a generator is suspended; for fixtures."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    command = [sys.executable, __file__, str(theirs.fileno())]
    with (
        ours,
        pytest.MonkeyPatch.context() as patch,
        subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment) as forker,
    ):
        theirs.close()
        patch.setattr(ForkedReader, "forker", ours, raising=False)
        patch.setattr(ForkedReader, "owner", os.getpid())
        patch.setattr(ReaderPool, "process_class", ForkedReader)
        yield
        ours.close()
        forker.wait(60)


def _serve(asked: socket.socket) -> None:
    for name in ("ups_store.sources.source", "reader_faults"):
        importlib.import_module(name)
    gc.freeze()
    while True:
        request, fds, _, _ = socket.recv_fds(asked, _MAX_BYTES, 3)
        if not request:
            return
        if between := os.fork():
            os.waitpid(between, 0)
            for fd in fds:
                os.close(fd)
        elif pid := os.fork():
            asked.send(str(pid).encode())
            os._exit(0)
        else:
            asked.close()
            _be_reader(fds, *pickle.loads(request))


def _be_reader(
    fds: list[int], supervisor: int, numbers: Any, environment: dict[str, str], folder: str, paths: list[str]
) -> None:
    code = 1
    try:
        os.setpgid(0, 0)
        os.dup2(fds.pop(), 2)
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(null, 1)
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        sys.path[:] = paths
        sys.argv = ["reader", *map(str, (supervisor, *fds, *numbers))]
        while os.getppid() != supervisor:
            time.sleep(1e-3)
        main()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
