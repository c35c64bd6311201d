"""What is said about a reader that took too long or died: where, what it did, how long, and what may help.

The stack, and whatever else the reader wrote to stderr, goes with the error as a note (PEP 678).
"""

from __future__ import annotations

import re
import time

from ups_store.errors import ReadTimeoutError, SourceError
from ups_store.ingest.read_request import Request
from ups_store.ingest.reader_handle import STOPPED, ReaderHandle

_FRAME = re.compile(r'File "(?:.*/)?(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>\S+)')
_HINTS = {
    "starting": "check the load of the machine, and the file system of its Python packages",
    "opening": "check the disk or network mount, or raise --open-timeout",
}


def timed_out(
    request: Request, reader: ReaderHandle, *, attempt: str, stack: str, timeout_s: float
) -> ReadTimeoutError:
    """The error for a reader that passed a deadline; call it while the process is there."""
    status = reader.status
    doing_s = time.monotonic() - (status.since_s or reader.started_s)
    frame = _FRAME.search(stack)
    where = f" in {frame['function']} ({frame['file']}:{frame['line']})" if frame else ""
    state = reader.process_state()
    hint = _HINTS.get(status.doing, "check the disk or network mount, or raise --timeout")
    if state == STOPPED:
        hint = "find out who stops processes (SIGSTOP, a debugger, a frozen container), and run it again"
    error = ReadTimeoutError(
        f"reader {reader.pid} was late with {request.subject} ({attempt})",
        path=request.path,
        sample=request.first_sample,
        expected=f"at most {timeout_s:g} s",
        found=f"{status.activity} for {doing_s:.1f} s{where}, process {state}",
        hint=hint,
    )
    error.dataset = status.dataset or None
    _add_log(error, stack)
    return error


def died(request: Request, reader: ReaderHandle, *, attempt: str) -> SourceError:
    """The error for a reader that ended by itself, or was killed by another."""
    how, status = reader.how_it_ended(), reader.status
    hint = "check the file and the HDF5 filters that it needs; -vv shows what the reader said"
    if "SIGKILL" in how:
        hint = "if the system ran out of memory, lower --num-workers"
    if "SIGBUS" in how:
        hint = "the file was cut, or its disk failed, while it was read: check both, and run it again"
    error = SourceError(
        f"reader {reader.pid} was lost with {request.subject} ({attempt})",
        kind="reader_died",
        path=request.path,
        sample=request.first_sample,
        found=f"{how} while {status.activity}",
        hint=hint,
    )
    error.dataset = status.dataset or None
    _add_log(error, reader.log())
    return error


def _add_log(error: SourceError, log: str) -> None:
    if log.strip():
        error.add_note(f"the reader's stderr:\n{log.rstrip()}")
