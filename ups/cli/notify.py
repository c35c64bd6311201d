"""`--notify COMMAND`: a command that is run once, when a verb has ended or failed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from ups.cli.common import STORE_IS_SOURCE, UNREADABLE_STORE, note
from ups_store.console import exit_code_of, message_of
from ups_store.launch import rank_of

TIME_LIMIT_S = 60.0
_STATUS = {0: "done", 5: "interrupted", 10: "gate_missed"}  # of an exit code; others: failed

Notify = Annotated[
    str | None,
    typer.Option(
        "--notify",
        metavar="COMMAND",
        help="run by the shell at the end or at failure, with UPS_STATUS, UPS_EXIT_CODE, UPS_MESSAGE and "
        "UPS_RUN; has a minute",
    ),
]


@dataclass
class Notice:
    """Says how a verb ended, once.

    Attributes:
        command: For the shell; None says nothing.
        run: Folder of what was run, as far as that is known.
    """

    command: str | None
    run: Path | None = None

    def failed(self, error: BaseException) -> None:
        """Say that it ended by an error, and by which."""
        is_source = isinstance(error, UNREADABLE_STORE)
        self.send(STORE_IS_SOURCE if is_source else exit_code_of(error), message_of(error))

    def send(self, exit_code: int, message: str) -> None:
        """Run the command unless it was; its failure is a warning."""
        command, self.command = self.command, None
        if command is None or rank_of():
            return
        variables = {
            "UPS_STATUS": _STATUS.get(exit_code, "failed"),
            "UPS_EXIT_CODE": str(exit_code),
            "UPS_MESSAGE": message.replace("\0", ""),
            "UPS_RUN": str(self.run.absolute()) if self.run is not None else "",
        }
        if problem := _run(command, variables):
            note(f"warning: --notify: {command}: {problem}")


@contextmanager
def notifying(command: str | None) -> Iterator[Notice]:
    """Inside, a verb works; when it ends, however it does, the command is run.

    Args:
        command: For the shell, or None.
    """
    notice = Notice(command)
    try:
        yield notice
    except BaseException as error:
        notice.failed(error)
        raise
    notice.send(0, "done")


def _run(command: str, variables: dict[str, str]) -> str | None:
    """What went wrong with it. Its output goes to stderr: stdout has the verb's results."""
    try:
        process = subprocess.Popen(
            command,
            shell=True,
            env={**os.environ, **variables},
            stdin=subprocess.DEVNULL,
            stdout=2,
            start_new_session=True,
        )
    except OSError as error:  # such as a message that is longer than an environment may be
        return f"can't be started ({(error.strerror or str(error)).lower()})"
    try:
        code = process.wait(TIME_LIMIT_S)
    except subprocess.TimeoutExpired:
        return f"ended, as it took longer than {TIME_LIMIT_S:g} s"
    finally:
        if process.poll() is None:  # also what the shell started
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return f"failed with exit code {code}" if code else None
