"""`WandbSink`: hands records, reports and checkpoints to the process that sends them to Weights & Biases.

Nothing here waits for W&B but `WandbSink.close`, and that not longer than `logging.wandb.timeout_s`. What
goes wrong is a warning. Nothing here needs torch.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from ups.config.run import WandbConfig
from ups.data.identities import checkpoint_identity
from ups.data.origins import Origin, origins_of_checkpoint
from ups.errors import CheckpointError, MissingExtraError, OutputError
from ups.log import logger
from ups.train.numbers import GPU_LOAD, PROMISED, Record, numbers_of, numbers_within
from ups.train.wandb_context import CONTEXT_VARIABLE, INFO_VARIABLE, OFF, WandbContext, context_path
from ups.train.wandb_process import RUN_STEP

_PROGRAM = Path(__file__).with_name("wandb_process.py")
_MOST_WAITING = 10_000  # messages; a service that hangs would else fill the memory
_PATIENCE_S = 5.0  # then people hear what is waited for
_LAST_WORDS_S = 1.0  # its service may hold the pipe open for longer
_WARNING = "warning: "


class WandbSink:
    """A run of Weights & Biases, as one command continues it.

    Args:
        settings: What the configuration says.
        context: Which run it is.
        path: The context's file.
        job: What the command does, such as "operator": metrics are under its name, over its own steps.
        folder: Where wandb keeps its files.
    """

    def __init__(
        self,
        settings: WandbConfig,
        context: WandbContext,
        *,
        path: Path,
        job: str,
        folder: Path,
        run_config: Mapping[str, Any],
    ) -> None:
        self.run_id: str | None = context.run_id
        self._settings, self._job, self._folder = settings, job, folder
        self._queue, self._said = SimpleQueue[dict[str, Any] | None](), deque[str]()
        self._process: subprocess.Popen[str] | None = self._start()
        self._axis, self._has_warned, self._is_behind = f"{job}/step", False, False
        info = os.environ.get(INFO_VARIABLE)
        self._put(
            {
                "options": self._options(context, run_config),
                "mode": os.environ.get("WANDB_MODE") or context.mode,
                "timeout_s": settings.timeout_s / 2,  # so that a run that doesn't begin can be kept offline
                "axes": {f"{job}/*": self._axis, "startup/*": RUN_STEP, "training/*": RUN_STEP},
                "context": context.to_json(),
                "context_path": str(path),
                "info_path": info and str(Path(info).absolute()),
            }
        )

    def _options(self, context: WandbContext, run_config: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments of `wandb.init`."""
        return {
            **{name: getattr(context, name) for name in ("project", "entity", "name", "group")},
            "id": context.run_id,
            "tags": list(self._settings.tags),
            "notes": self._settings.notes,
            "job_type": self._job,
            "dir": str(self._folder.absolute()),
            "config": dict(run_config),
            "resume": "allow",
            "allow_val_change": True,  # a continuation may differ in what doesn't matter
        }

    def _start(self) -> subprocess.Popen[str]:
        """The process; signals of the terminal don't reach it, and -P hides files that are called wandb."""
        process = subprocess.Popen(
            [sys.executable, "-P", str(_PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            text=True,
        )
        self._threads = [
            threading.Thread(target=work, args=(process,), name="wandb", daemon=True)
            for work in (self._hand_over, self._listen)
        ]
        for thread in self._threads:
            thread.start()
        return process

    def write(self, record: Record) -> None:
        """Send the numbers of a record over its step; what a stage reports becomes the run's summary."""
        self._warn()
        if record["event"] == "end":
            self._put({"summary": self._named(numbers_within(record.get("report", {})))})
            self._put({"summary": self._named(numbers_of(record))})
            exports = {Path(path): kind for path, kind in record.get("exports", {}).items()}
            for path, kind in exports.items():
                self.log_checkpoint(path, kind=kind, name=self._job if len(exports) == 1 else path.stem)
        elif numbers := numbers_of(record):
            step = {self._axis: record["step"]} if "step" in record else {}
            self._put({"row": {**self._named(numbers), **promised(record, numbers), **step}})

    def log(self, numbers: Mapping[str, float]) -> None:
        """Send numbers as they are named."""
        self._put({"row": dict(numbers)})

    def log_table(self, name: str, *, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
        """Send a table; a column that has ranges in it is text, as W&B takes values of one kind."""
        cells = [list(row) for row in rows]
        for column in range(len(columns)):
            if any(isinstance(row[column], list | tuple) for row in cells):
                for row in cells:
                    ends = row[column] if isinstance(row[column], list | tuple) else [row[column]]
                    row[column] = " to ".join(map(str, ends))
        self._put({"table": {"name": name, "columns": list(columns), "rows": cells}})

    def log_images(self, images: Mapping[str, tuple[Path, str]]) -> None:
        """Send pictures, each with its caption; the files have to stay until `close`."""
        self._put({"images": {name: (str(path), caption) for name, (path, caption) in images.items()}})

    def log_checkpoint(self, path: Path, *, kind: str, name: str) -> None:
        """Send a checkpoint with what it was made from; only if `logging.wandb.log_checkpoints` says so."""
        if not self._settings.log_checkpoints:
            return
        try:
            origins = origins_of_checkpoint(path)
        except CheckpointError:  # such as of a stage that leaves another kind of file
            origins = []
        about = {"kind": kind, "identity": checkpoint_identity(path, kind=kind)}
        self.log_files(name, kind="model", files=[path], about=about, made_from=origins)

    def log_files(
        self,
        name: str,
        *,
        kind: str,
        files: Sequence[Path],
        about: Mapping[str, Any],
        made_from: Iterable[Origin],
    ) -> None:
        """Send files as an artifact, a new version unless they are the same.

        Args:
            name: Of the artifact, behind the run's id.
            kind: W&B's type, such as "model".
            files: What it holds.
            about: Hashes and more, for its metadata.
            made_from: Files before it: inputs of the run online, and in the metadata.
        """
        origins = list(made_from)
        artifact = {
            "name": f"run_{self.run_id}_{name}",
            "type": kind,
            "files": [str(path.absolute()) for path in files],
            "metadata": {**about, "made_from": [origin.to_json() for origin in origins]},
            "aliases": ["latest", f"run-{self.run_id}"],
            "uses": [_input(origin) for origin in origins if origin.hash],
        }
        self._put({"artifact": artifact})

    def close(self, *, has_failed: bool) -> None:
        """See `Sink.close`; waits until everything is sent, or leaves it behind."""
        self._put({"end": int(has_failed)})
        self._queue.put(None)
        process, self._process = self._process, None
        if process is None:
            return
        code = 0
        try:
            code = self._wait(process)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            self._said.append(
                f"Weights & Biases took longer than {self._settings.timeout_s:g} s and is left behind; "
                f"`wandb sync` sends what lies in {self._folder / 'wandb'}"
            )
        for thread in self._threads:
            thread.join(_LAST_WORDS_S)
        if code and not (self._said or self._has_warned):
            self._said.append(f"the process for Weights & Biases ended with code {code}")
        self._warn()

    def _wait(self, process: subprocess.Popen[str]) -> int:
        """Its exit code."""
        patience_s = min(_PATIENCE_S, self._settings.timeout_s)
        try:
            return process.wait(patience_s)
        except subprocess.TimeoutExpired:
            logger.info(f"waiting for Weights & Biases, at most {self._settings.timeout_s:g} s")
            return process.wait(self._settings.timeout_s - patience_s)

    def _named(self, numbers: Mapping[str, float]) -> dict[str, float]:
        return {f"{self._job}/{name}": value for name, value in numbers.items()}

    def _put(self, message: dict[str, Any]) -> None:
        """Let a message be handed over, by a thread."""
        if self._process is None:
            return
        if self._queue.qsize() < _MOST_WAITING or "end" in message:
            self._queue.put(message)
        elif not self._is_behind:
            self._is_behind = True
            self._said.append("Weights & Biases is too far behind; some of what follows isn't sent")

    def _hand_over(self, process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None
        with suppress(OSError), process.stdin as pipe:  # it may have ended
            for message in iter(self._queue.get, None):
                pipe.write(json.dumps(message, default=str) + "\n")
                pipe.flush()

    def _listen(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with process.stdout as pipe:
            for line in pipe:
                if line.startswith(_WARNING):  # else it is wandb's
                    self._said.append(line.removeprefix(_WARNING).strip())

    def _warn(self) -> None:
        """Pass on what the process has reported; in the command's thread, as notes are for one alone."""
        while self._said:
            self._has_warned = True
            logger.warning(self._said.popleft())


def promised(record: Record, numbers: Mapping[str, float]) -> dict[str, float]:
    """Numbers that users of the earlier system look for by name, whatever the stage.

    The GPU's load is that of the first epoch.
    """
    is_early = record["event"] == "epoch" and record.get("epoch") == 1
    names = [name for name in PROMISED if is_early or name != GPU_LOAD]
    return {name: numbers[name] for name in names if name in numbers}


def _input(origin: Origin) -> dict[str, Any]:
    """A file before another one, as an artifact that holds its hash alone."""
    name = Path(origin.path or origin.role).name
    safe = "".join(c if c.isalnum() or c in "-_." else "_" for c in name)
    return {"name": safe, "type": origin.kind, "metadata": origin.to_json()}


def open_wandb(
    settings: WandbConfig,
    folder: Path,
    *,
    job: str,
    run_config: Mapping[str, Any],
    run_id: str | None = None,
    joins: bool = False,
) -> WandbSink | None:
    """Continue the run of a context, or begin one; None where that is switched off or isn't possible.

    Args:
        settings: What the configuration says.
        folder: Of the checkpoints.
        job: What the command does.
        run_id: Of a run that begins, where it is known.
        joins: Whether a run is only continued, never begun.
    """
    if not settings.enabled or os.environ.get("WANDB_MODE") == OFF:
        return None
    if not is_wandb_there():
        missing = MissingExtraError.of("wandb", extra="wandb")
        logger.warning(f"nothing goes to Weights & Biases: {missing}")
        return None
    path = context_path(folder)
    context = WandbContext.read(path)
    if context is None and joins and not os.environ.get(CONTEXT_VARIABLE):
        return None
    try:
        if context is None:
            context = WandbContext.of(settings, run_id)
            context.write(path)
        folder.mkdir(parents=True, exist_ok=True)
        return WandbSink(settings, context, path=path, job=job, folder=folder, run_config=run_config)
    except (OSError, OutputError) as error:
        logger.warning(f"nothing goes to Weights & Biases: {error}")
        return None


def is_wandb_there() -> bool:
    """Whether wandb is installed; wandb's own folder of files, called the same, is no package."""
    try:
        found = find_spec("wandb")
    except ValueError:  # a stand-in without a specification
        return False
    return found is not None and found.origin is not None
