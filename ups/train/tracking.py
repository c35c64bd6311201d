"""Where the records of a run go: JSON lines, TensorBoard, and one run of Weights & Biases for all processes.

A sink has `write(record)`, `close(has_failed=...)` and `run_id`. Nothing here needs torch to be imported.
"""

from __future__ import annotations

import ctypes
import json
import os
import secrets
import string
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from queue import Full, Queue
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Self

from ups.config.legacy import stage_file
from ups.config.run import WandbConfig
from ups.data.identities import checkpoint_identity
from ups.data.origins import Origin, origins_of_checkpoint
from ups.errors import CheckpointError, MissingExtraError, OutputError, check_installed
from ups.log import logger
from ups.output import with_nulls, write_atomically
from ups.stages import BASELINES
from ups_store.launch import log_origin
from ups_store.printable import json_text
from ups_store.system.stalls import LookingThread

if TYPE_CHECKING:
    import torch

    from ups.config import RunConfig
    from ups.eval.report import Report

Record = Mapping[str, Any]  # JSON values by name, with `event`, `stage`, `time` and mostly `step`

# Names that users of the earlier system look for, whatever the stage.
GPU_LOAD, EPOCH_SECONDS = "training/gpu_utilization_pct", "training/epoch_time_sec"
CACHE_MINUTES, CACHE_REUSED = "startup/cache_precompute_time_min", "startup/cache_reused"
STARTUP_MINUTES = "startup/total_startup_time_min"
PROMISED = (GPU_LOAD, EPOCH_SECONDS, CACHE_MINUTES, CACHE_REUSED, STARTUP_MINUTES)

_ABOUT = "event stage time step total_steps config global_batch_size effective_batch_size preparation_flops"
_NO_METRICS = frozenset((*_ABOUT.split(), "report", "exports"))

CONTEXT_VARIABLE = "WANDB_CONTEXT_FILE"
INFO_VARIABLE = "FAST_TO_SOTA_WANDB_INFO"  # where the earlier system wants to read which run it is
CONTEXT_FILE = "wandb_context.json"
RUN_STEP = "run/step"  # counts the rows of all processes; wandb's own step begins again with an offline run
_MOST_WAITING = 10_000  # calls; a service that hangs would else fill the memory
_PATIENCE_S = 5.0  # then people hear what is waited for
_BETWEEN_LOOKS_S = 1.0  # at the GPU; NVML's own period is between 1/6 s and 1 s


def numbers_of(record: Record) -> dict[str, float]:
    """What of a record is measured, its report aside."""
    return numbers_within({name: value for name, value in record.items() if name not in _NO_METRICS})


def numbers_within(values: Record, prefix: str = "") -> dict[str, float]:
    """Numbers at any depth, names joined by slashes."""
    numbers: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            numbers |= numbers_within(value, f"{prefix}{name}/")
        elif isinstance(value, int | float):
            numbers[f"{prefix}{name}"] = value
    return numbers


def open_sinks(config: RunConfig, stage: str, *, run_id: str | None) -> list[Any]:
    """Open the sinks that a configuration asks for, the file first.

    Args:
        run_id: Run at Weights & Biases to continue, where no context says it.

    Raises:
        MissingExtraError: If TensorBoard's writer isn't installed.
    """
    folder = config.checkpoint.dir
    job = folder.name if stage in BASELINES else stage  # there is a baseline for each task
    sinks: list[Any] = [JsonLines(config.training.log_path or stage_file(folder / f"{stage}.jsonl"))]
    if config.logging.tensorboard.enabled:
        sinks.append(TensorboardSink((config.logging.tensorboard.dir or folder / "tensorboard") / job))
    values = config.model_dump(mode="json")
    wandb = open_wandb(config.logging.wandb, folder, job=job, run_config=values, run_id=run_id)
    return [*sinks, *([] if wandb is None else [wandb])]


class JsonLines:
    """Appends every record to a file, one JSON document a line, with "rank", "host", "pid" and "run"."""

    run_id: str | None = None

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file, self._origin = path.open("a", encoding="utf-8"), log_origin()

    def write(self, record: Record) -> None:
        """Append a line, which a reader sees at once."""
        self._file.write(json_text(with_nulls({**record, **self._origin})) + "\n")
        self._file.flush()

    def close(self, *, has_failed: bool) -> None:
        """Close the file."""
        self._file.close()


class TensorboardSink:
    """Writes the numbers of records as events over their optimiser steps; a folder is a run there."""

    run_id: str | None = None

    def __init__(self, folder: Path) -> None:
        check_installed("tensorboard", extra="tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder))

    def write(self, record: Record) -> None:
        """Write the numbers, which a reader sees once an epoch is over."""
        numbers = numbers_of(record)
        if record["event"] == "end":
            numbers |= numbers_within(record.get("report", {}), "report/")
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, global_step=record.get("step"), walltime=record["time"])
        if record["event"] == "epoch":
            self._writer.flush()

    def close(self, *, has_failed: bool) -> None:
        """Close the file of events."""
        self._writer.close()


@dataclass(frozen=True)
class WandbContext:
    """Which run of Weights & Biases all processes that work on a run continue, and how far it is.

    The first of them makes the file: builds of stores, stages, evaluations and `ups run` find it at
    WANDB_CONTEXT_FILE, else beside the checkpoints.

    Attributes:
        run_id: Its id.
        project: Project.
        entity: User or team; None for W&B's own choice, as of those that follow.
        group: Group of runs.
        name: Of the run, for people.
        mode: "online" or "offline", where WANDB_MODE doesn't say it.
        step: Rows that all processes have sent.
        url: Where to see it.
    """

    run_id: str
    project: str | None = None
    entity: str | None = None
    group: str | None = None
    name: str | None = None
    mode: str | None = None
    step: int = 0
    url: str | None = None

    @classmethod
    def of(cls, settings: WandbConfig, run_id: str | None = None) -> Self:
        """The context of a run that begins."""
        letters = string.ascii_lowercase + string.digits
        return cls(
            run_id or "".join(secrets.choice(letters) for _ in range(8)),
            project=settings.project or os.environ.get("WANDB_PROJECT") or "uncategorized",
            entity=settings.entity,
            group=settings.group,
            name=settings.run_name,
            mode=os.environ.get("WANDB_MODE"),
        )

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """What a file says; None if there is none, or it is no context."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            known = {name: values[name] for name in cls.__dataclass_fields__ if name in values}
            return replace(cls(**known), step=int(known.get("step", 0)))
        except (OSError, ValueError, TypeError):
            return None

    def write(self, path: Path) -> None:
        """Write the file.

        Raises:
            OutputError: Such as on a full disk.
        """
        write_atomically(path, json.dumps(asdict(self), indent=2).encode() + b"\n")


def context_path(folder: Path, variables: Mapping[str, str] = os.environ) -> Path:
    """Where the context of a run lies."""
    return Path(variables.get(CONTEXT_VARIABLE) or folder / CONTEXT_FILE).absolute()


def forget_run(folder: Path) -> None:
    """Let a run that begins from scratch be one of its own, unless its context was handed over."""
    if not os.environ.get(CONTEXT_VARIABLE):
        (folder / CONTEXT_FILE).unlink(missing_ok=True)


@contextmanager
def handing_on(path: Path) -> Iterator[None]:
    """Inside, this process and those that it starts work on the run of a context."""
    before = os.environ.get(CONTEXT_VARIABLE)
    os.environ[CONTEXT_VARIABLE] = str(path)
    try:
        yield
    finally:
        del os.environ[CONTEXT_VARIABLE]
        if before is not None:
            os.environ[CONTEXT_VARIABLE] = before


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
        run_config: Configuration of the run, for W&B.
        run_id: Of a run that begins, where it is known.
        joins: Whether a run is only continued, never begun.
    """
    if not settings.enabled or os.environ.get("WANDB_MODE") == "disabled":
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
    except (OSError, OutputError) as error:
        logger.warning(f"nothing goes to Weights & Biases: {error}")
        return None
    return WandbSink(settings, context, path=path, job=job, folder=folder, run_config=run_config)


def is_wandb_there() -> bool:
    """Whether wandb is installed; wandb's own folder of files, called the same, is no package."""
    try:
        module = find_spec("wandb")
    except ValueError:  # a stand-in without a specification
        return False
    return module is not None and module.origin is not None


class WandbSink:
    """A run of Weights & Biases, as one command continues it.

    A daemon thread calls wandb, one call after the other: training waits for it in `close` alone, and there
    not longer than `logging.wandb.timeout_s`. What goes wrong is a warning, said by the thread that trains.
    Metrics of a job are over its own steps, those of all jobs over `RUN_STEP`.

    Args:
        context: Which run it is.
        path: The context's file.
        job: What the command does, such as "operator": its metrics begin so.
        folder: Where wandb keeps its files.
        run_config: Configuration of the run.
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
        self._settings, self._context, self._path, self._job = settings, context, path, job
        self._folder, self._axis, self._exit_code = folder, f"{job}/step", 0
        self._calls = Queue[tuple[str, Callable[[Any], object]] | None](_MOST_WAITING)
        self._problems, self._is_behind = deque[str](), False
        self._thread = threading.Thread(target=self._send, args=(run_config,), name="wandb", daemon=True)
        self._thread.start()

    def write(self, record: Record) -> None:
        """Send the numbers of a record over its step; what a stage reports becomes the run's summary."""
        self._warn()
        if record["event"] == "end":
            summary = self._named(numbers_within(record.get("report", {})) | numbers_of(record))
            self._call("summary", lambda run: run.summary.update(summary))
            exports = {Path(path): kind for path, kind in record.get("exports", {}).items()}
            for path, kind in exports.items():
                self.log_checkpoint(path, kind=kind, name=self._job if len(exports) == 1 else path.stem)
        elif numbers := numbers_of(record):
            # The GPU's load is promised of the first epoch.
            is_early = record["event"] == "epoch" and record.get("epoch") == 1
            promised = {n: numbers[n] for n in PROMISED if n in numbers and (is_early or n != GPU_LOAD)}
            step = {self._axis: record["step"]} if "step" in record else {}
            self.log({**self._named(numbers), **promised, **step})

    def log(self, numbers: Mapping[str, Any]) -> None:
        """Send numbers as they are named."""
        self._call("row", lambda run: self._log(run, dict(numbers)))

    def log_table(self, name: str, *, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
        """Send a table; a column that has ranges in it is text, as W&B takes values of one kind."""
        cells = [list(row) for row in rows]
        for column in range(len(columns)):
            if any(isinstance(row[column], list | tuple) for row in cells):
                for row in cells:
                    ends = row[column] if isinstance(row[column], list | tuple) else [row[column]]
                    row[column] = " to ".join(map(str, ends))
        self._call("table", lambda run: self._log(run, {name: _wandb().Table(list(columns), data=cells)}))

    def log_images(self, images: Mapping[str, tuple[Path, str]]) -> None:
        """Send pictures, each with its caption; the files have to stay until `close`."""

        def send(run: Any) -> None:
            shown = {name: _wandb().Image(str(path), caption=text) for name, (path, text) in images.items()}
            self._log(run, shown)

        self._call("images", send)

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
        metadata = {**about, "made_from": [origin.to_json() for origin in origins]}

        def send(run: Any) -> None:
            for origin in () if run.offline else origins:  # wandb takes no inputs offline
                if origin.hash:
                    run.use_artifact(_input(origin))
            artifact = _wandb().Artifact(f"run_{self.run_id}_{name}", type=kind, metadata=metadata)
            for file in files:
                artifact.add_file(str(file.absolute()))
            run.log_artifact(artifact, aliases=["latest", f"run-{self.run_id}"])

        self._call("artifact", send)

    def close(self, *, has_failed: bool) -> None:
        """End the run: wait until everything is sent, or leave it behind."""
        self._exit_code = int(has_failed)
        deadline_s = self._settings.timeout_s
        try:
            self._calls.put(None, timeout=deadline_s)
        except Full:
            deadline_s = 0.0
        self._thread.join(patience_s := min(_PATIENCE_S, deadline_s))
        if self._thread.is_alive() and deadline_s > patience_s:
            logger.info(f"waiting for Weights & Biases, at most {deadline_s:g} s")
            self._thread.join(deadline_s - patience_s)
        if self._thread.is_alive():
            self._leave_behind()
        self._warn()

    def _named(self, numbers: Mapping[str, float]) -> dict[str, float]:
        return {f"{self._job}/{name}": value for name, value in numbers.items()}

    def _leave_behind(self) -> None:
        problem = (
            f"Weights & Biases took longer than {self._settings.timeout_s:g} s and is left behind; "
            f"`wandb sync` sends what lies in {self._folder / 'wandb'}"
        )
        if problem not in self._problems:  # as both threads may see it
            self._problems.append(problem)

    def _warn(self) -> None:
        while self._problems:
            logger.warning(self._problems.popleft())

    def _call(self, what: str, call: Callable[[Any], object]) -> None:
        try:
            self._calls.put_nowait((what, call))
        except Full:
            if not self._is_behind:
                self._problems.append("Weights & Biases is too far behind; some of what follows isn't sent")
            self._is_behind = True

    def _send(self, run_config: Mapping[str, Any]) -> None:
        """Begin the run, make the calls that come, end it; of several that fail the first is reported."""
        has_failed = False
        try:
            run = self._begin(run_config)
            while (item := self._calls.get()) is not None:
                what, call = item
                try:
                    call(run)
                except Exception as error:
                    if not has_failed:
                        self._problems.append(f"Weights & Biases didn't take {what} ({_one_line(error)})")
                    has_failed = True
            try:
                run.finish(exit_code=self._exit_code)
            except TimeoutError:
                self._leave_behind()
        except Exception as error:
            problem = f"Weights & Biases gets nothing more of this command ({_one_line(error)})"
            self._problems.append(problem)

    def _begin(self, run_config: Mapping[str, Any]) -> Any:
        """The run; one that can't begin online is kept on this machine."""
        wandb, context, timeout_s = _wandb(), self._context, self._settings.timeout_s
        options: dict[str, Any] = {
            **{name: getattr(context, name) for name in ("project", "entity", "name", "group")},
            "id": context.run_id,
            "tags": list(self._settings.tags),
            "notes": self._settings.notes,
            "job_type": self._job,
            "dir": str(self._folder.absolute()),
            "config": dict(run_config),
            "resume": "allow",
            "allow_val_change": True,  # a continuation may differ in what doesn't matter
            # Output isn't captured: each line of it would wait for wandb's service. Half of the time is for
            # the beginning, so that a run that doesn't begin can still be kept offline.
            "settings": wandb.Settings(
                console="off",
                silent=True,
                init_timeout=timeout_s / 2,
                finish_timeout=timeout_s,
                finish_timeout_raises=True,  # else nobody would hear that rows are missing
            ),
        }
        mode = os.environ.get("WANDB_MODE") or context.mode
        try:
            run = wandb.init(**options, mode=mode)
            if run.id != context.run_id:  # one that was left behind, which wandb gives back
                raise RuntimeError(f"run {run.id} isn't over in this process")
        except Exception as error:
            if mode == "offline":
                raise
            wandb.teardown()  # else its service still has the run
            run = wandb.init(**options, mode="offline")
            self._problems.append(
                f"Weights & Biases can't begin online ({_one_line(error)}): the run is kept in "
                f"{self._folder.absolute() / 'wandb'}; `wandb login`, then `wandb sync` sends it"
            )
        for metric, axis in {
            f"{self._job}/*": self._axis,
            "startup/*": RUN_STEP,
            "training/*": RUN_STEP,
        }.items():
            run.define_metric(axis)
            run.define_metric(metric, step_metric=axis)
        names = ["project", "entity", "name", "url"]  # which wandb completes
        asked = names[:-1] if run.offline else names
        known = {name: value for name in asked if (value := getattr(run, name, None))}
        self._context = replace(context, **known)
        self._context.write(self._path)
        if info := os.environ.get(INFO_VARIABLE):
            text = json.dumps({"id": run.id} | {name: getattr(self._context, name) for name in names})
            write_atomically(Path(info).absolute(), text.encode())
        return run

    def _log(self, run: Any, row: dict[str, Any]) -> None:
        self._context = replace(self._context, step=self._context.step + 1)
        self._context.write(self._path)  # first: a kill in between leaves a gap, and no step twice
        run.log({**row, RUN_STEP: self._context.step}, step=self._context.step, commit=True)


def _wandb() -> Any:
    # Its own error reports would hold up the end of a process for 25 s where nothing answers (wandb 0.31).
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    return import_module("wandb")  # by the thread: it takes a second


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _input(origin: Origin) -> Any:
    """A file before another one, as an artifact that holds its hash alone: the same content, one version."""
    name = Path(origin.path or origin.role).name
    safe = "".join(c if c.isalnum() or c in "-_." else "_" for c in name)
    artifact = _wandb().Artifact(safe, type=origin.kind, metadata=origin.to_json())
    with artifact.new_file("identity.json") as file:
        json.dump(origin.to_json(), file, sort_keys=True)
    return artifact


def send_report(report: Report, files: Mapping[str, Path], *, name: str, joins: bool = False) -> None:
    """Send a report to the run that its configuration and context say; what goes wrong is a warning.

    Args:
        files: It, as it was written, by suffix.
        name: What the evaluation is called there, such as "small-eval".
        joins: Whether it is only sent where the trained run is there already.
    """
    sink = None
    try:
        settings = WandbConfig.model_validate(report.config["logging"]["wandb"])
        folder = Path(report.config["checkpoint"]["dir"])
        sink = open_wandb(settings, folder, job=name, run_config=report.config, joins=joins)
        if sink is None:
            return
        rows = [
            (task.task, row, metric, value)
            for task in report.tasks
            for row in task.rows
            for metric, value in row.scores.metrics.items()
        ]
        sink.log({f"{name}/{task}/{row.name}/{metric}": value.mean for task, row, metric, value in rows})
        cells = []
        for task, row, metric, value in rows:
            pair = row.paired.get(metric)
            verdict = pair.verdict if pair else ""
            cells.append((task, row.name, metric, value.mean, value.low, value.high, verdict, row.note))
        columns = ("task", "row", "metric", "mean", "low", "high", "verdict", "note")
        sink.log_table(f"{name}/errors", columns=columns, rows=cells)
        with TemporaryDirectory(prefix="ups-figures-") as pictures:
            images = {}
            for drawing in report.drawings:
                path = Path(pictures) / f"{drawing.name}.png"
                path.write_bytes(drawing.images("png")["png"])
                images[f"{name}/{drawing.name}"] = (path, drawing.caption)
            if images:
                sink.log_images(images)
            if settings.log_checkpoints:
                about = {"split": report.split, "test_uses": report.test_uses}
                paths = list(files.values())
                sink.log_files(name, kind="evaluation", files=paths, about=about, made_from=report.made_from)
            sink.close(has_failed=False)
    except Exception as error:
        logger.warning(f"the report isn't at Weights & Biases: {error}")
        if sink is not None:  # else it would be the run of what this process does next
            sink.close(has_failed=True)


class _Utilization(ctypes.Structure):
    """nvmlUtilization_t: shares of the last period in per cent."""

    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class GpuWatch(LookingThread):
    """Averages the load of a GPU between looks, as its driver says it; a context manager.

    It is empty where there is no GPU, no driver, or of a part of a GPU (MIG).
    """

    def __init__(self, device: torch.device) -> None:
        self._library = _open_nvml() if device.type == "cuda" else None
        self._handle = ctypes.c_void_p()
        is_known = self._library is not None and _find_gpu(self._library, device, self._handle)
        super().__init__("gpu-watch", every_s=_BETWEEN_LOOKS_S if is_known else None)
        self._recent, self._of_epoch = list[int](), list[int]()

    def read(self) -> dict[str, float]:
        """Mean since the last call in per cent, under its name in the log; empty if nothing was seen."""
        recent, self._recent = self._recent, []
        self._of_epoch += recent
        return {GPU_LOAD: sum(recent) / len(recent)} if recent else {}

    def end_epoch(self) -> dict[str, float]:
        """The same over all that `read` has given since the last call."""
        loads, self._of_epoch = self._of_epoch, []
        return {GPU_LOAD: sum(loads) / len(loads)} if loads else {}

    def _look(self) -> bool:
        load, library = _Utilization(), self._library
        assert library is not None
        if library.nvmlDeviceGetUtilizationRates(self._handle, ctypes.byref(load)):
            return False
        self._recent.append(int(load.gpu))
        return True


def _open_nvml() -> Any:
    """NVML, which comes with the driver, initialised; None without a driver."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    return library if library.nvmlInit_v2() == 0 else None


def _find_gpu(library: Any, device: torch.device, handle: ctypes.c_void_p) -> bool:
    """Whether NVML knows a device of PyTorch: by UUID, since CUDA_VISIBLE_DEVICES renumbers them."""
    import torch

    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    return bool(library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle)) == 0)
