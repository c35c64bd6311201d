"""A command in a process of its own: signals go to it, and it doesn't outlive this process unseen.

The child of a run keeps the lock of the run's folder until it has ended. If the run is killed, the kernel
sends SIGTERM to the child (PR_SET_PDEATHSIG), which saves itself and ends: a second run waits for that.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from types import FrameType

from ups.errors import GateMissedError, InterruptedTrainingError, UpsError
from ups.output import terminal
from ups.train.interrupt import SAME_COMMAND

# PR_SET_PDEATHSIG is 1 (prctl(2)); it outlives exec. If the parent ended before, nothing is begun.
_PROGRAM = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if os.getppid() != int(sys.argv[1]):
    sys.exit(5)
os.execv(sys.argv[2], sys.argv[2:])
"""


def run_process(command: Sequence[str], *, what: str, kind: str, lock_fd: int | None = None) -> None:
    """Run a command with its output on stderr, -q without its results; signals to stop go to it.

    Args:
        command: With its interpreter.
        what: What it is, for errors, such as "the build of stores".
        kind: Of the error where it fails, "<kind>_interrupted" where it was stopped.
        lock_fd: Holds the lock of the run's folder; the process inherits it, and ends with this one.

    Raises:
        UpsError: With the exit code of the command; its own message went to stderr.
        GateMissedError: If that is what its exit code says; the same command would judge the same again.
        InterruptedTrainingError: If this process was asked to stop.
    """
    running: list[subprocess.Popen[bytes]] = []
    stopped_by: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        stopped_by.append(number)
        for process in running:
            process.send_signal(number)

    # Before the process is there: a signal between its start and ours would leave it behind.
    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
    before = {number: signal.signal(number, forward) for number in numbers}
    try:
        # In a session of its own a Ctrl-C on the terminal reaches it once, through us.
        stdout = subprocess.DEVNULL if terminal().quiet else sys.stderr.fileno()  # only a step of the run
        process = subprocess.Popen(
            command if lock_fd is None else [*_ending_with(os.getpid()), *command],
            stdout=stdout,
            start_new_session=True,
            pass_fds=() if lock_fd is None else (lock_fd,),
        )
        running.append(process)
        for number in stopped_by[:1]:
            process.send_signal(number)
        code = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if code != 0 and stopped_by:
        problem = f"stopped by {signal.Signals(stopped_by[0]).name} during {what}"
        raise InterruptedTrainingError(problem, kind=f"{kind}_interrupted", continued_by=SAME_COMMAND)
    if code != 0:
        raise _failure(code, what=what, kind=kind)


def _failure(code: int, *, what: str, kind: str) -> UpsError:
    if code == GateMissedError.exit_code:
        return GateMissedError(f"{what} missed a gate", hint="number and limit stand above")
    if code < 0:  # such as by the kernel, for want of memory
        problem, hint = f"{what} was ended by {signal.Signals(-code).name}", None
    else:
        problem, hint = f"{what} ended with exit code {code}", "fix what its own message above says"
    error = UpsError(problem, kind=kind, hint=hint, continued_by=SAME_COMMAND)
    error.exit_code = code if code > 0 else UpsError.exit_code
    return error


def _ending_with(parent: int) -> list[str]:
    """What starts a command that gets SIGTERM when its parent ends; 20 ms.

    It isn't a `preexec_fn`: what that calls between fork and exec may wait for a lock that a thread held.
    """
    return [sys.executable, "-I", "-S", "-c", _PROGRAM, str(parent)]
