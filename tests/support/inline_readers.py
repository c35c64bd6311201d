"""Readers that run in the process of a test, which saves the quarter of a second that starting one takes."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator

import pytest

from ups_store.sources.reader_pool import ReaderPool, ReaderProcess
from ups_store.sources.reader_process import Reader, Request, send_answer


class InlineReader(ReaderProcess):
    """Runs a request as it is sent; there is no process to be ended, so deadlines mean nothing."""

    def start(self, channel_fd: int, memory_fd: int) -> subprocess.Popen[bytes]:
        """Keep both ends of the socket."""
        self._channel = socket.socket(fileno=os.dup(channel_fd))
        self._reader = Reader(self.memory.write_status)
        return _NoProcess()  # type: ignore[return-value]

    def send(self, request: Request, *, request_id: int, slot: int) -> bool:
        """Run it; the answer waits in the socket."""
        answer = self._reader.answer(request_id, lambda: request, self.memory, slot)
        send_answer(self._channel, answer)
        return True

    def close(self) -> None:
        """Close the files that are open."""
        self._reader.close()
        self._channel.close()
        super().close()


class _NoProcess:
    pid = os.getpid()

    def poll(self) -> int:
        return 0

    def wait(self, timeout: float) -> int:
        return 0

    def send_signal(self, number: int) -> None:
        pass


def in_this_process() -> Iterator[None]:
    """Have pools start no processes while a generator is suspended; for fixtures."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ReaderPool, "process_class", InlineReader)
        yield
