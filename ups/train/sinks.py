"""Where the records of a run go: a file of JSON lines, and Weights & Biases where it is switched on.

The load of a GPU comes from NVIDIA's driver, which a thread asks once a second.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import torch

from ups.config import RunConfig
from ups.config.run import WandbConfig
from ups.errors import ConfigError, needs
from ups.output import with_nulls
from ups_store.launch import log_origin
from ups_store.printable import json_text

Record = Mapping[str, Any]

_NO_METRICS = ("event", "stage", "time", "step", "config", "global_batch_size", "preparation_flops")
_LIBRARY = "libnvidia-ml.so.1"  # comes with the driver
_SECONDS_BETWEEN_LOOKS = 1.0  # NVML's own period is between 1/6 s and 1 s


class Sink(Protocol):
    """Takes the records of a run.

    Attributes:
        run_id: Id under which another service knows the run, to continue it.
    """

    run_id: str | None

    def write(self, record: Record) -> None:
        """Take a record: JSON values by name, with `event`, `stage`, `time` and mostly `step`."""
        ...

    def close(self, *, has_failed: bool) -> None:
        """The run is over."""
        ...


class JsonLines:
    """Appends every record to a file, one JSON document a line, with "rank", "host", "pid" and "run".

    Args:
        path: The file; its folder is made.
    """

    run_id: str | None = None

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file, self._origin = path.open("a", encoding="utf-8"), log_origin()

    def write(self, record: Record) -> None:
        """See `Sink.write`; a reader sees the line at once."""
        self._file.write(json_text(with_nulls({**record, **self._origin})) + "\n")
        self._file.flush()

    def close(self, *, has_failed: bool) -> None:
        """See `Sink.close`."""
        self._file.close()


class WandbSink:
    """Sends numbers to Weights & Biases; `WANDB_MODE=offline` keeps them on this machine.

    Args:
        config: Project, names and tags.
        stage: Job type of the run.
        folder: Where wandb keeps its files.
        run_config: The run's resolved configuration.
        run_id: Run to continue, or None.

    Attributes:
        run_id: The run's id, for continuing it.

    Raises:
        MissingExtraError: If wandb isn't installed.
        ConfigError: Kind "wandb", if it can't begin.
    """

    def __init__(
        self, config: WandbConfig, *, stage: str, folder: Path, run_config: Record, run_id: str | None
    ) -> None:
        wandb = import_wandb()
        folder.mkdir(parents=True, exist_ok=True)
        try:
            self._run = wandb.init(
                project=config.project,
                entity=config.entity,
                name=config.run_name,
                group=config.group,
                tags=list(config.tags),
                notes=config.notes,
                job_type=stage,
                dir=str(folder),
                config=dict(run_config),
                id=run_id,
                resume="allow",
            )
        except wandb.Error as error:
            raise ConfigError(
                f"Weights & Biases can't begin a run ({str(error).strip()})",
                kind="wandb",
                hint="set WANDB_MODE=offline, run `wandb login`, or logging.wandb.enabled=false",
            ) from error
        self.run_id: str | None = self._run.id

    def write(self, record: Record) -> None:
        """Send the numbers of a record under its step; what a stage reports becomes the run's summary."""
        if record["event"] == "end":
            self._run.summary.update(_numbers(record.get("report", {})))
            return
        if numbers := _numbers({name: value for name, value in record.items() if name not in _NO_METRICS}):
            self._run.log(numbers, step=record.get("step"))

    def close(self, *, has_failed: bool) -> None:
        """See `Sink.close`; waits until everything is sent."""
        self._run.finish(exit_code=int(has_failed))


def _numbers(values: Record, prefix: str = "") -> dict[str, float]:
    """Numbers at any depth, names joined by slashes."""
    found: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found |= _numbers(value, f"{prefix}{name}/")
        elif isinstance(value, int | float):
            found[f"{prefix}{name}"] = value
    return found


def import_wandb() -> Any:
    """The module.

    Raises:
        MissingExtraError: If it isn't installed.
    """
    with needs("wandb"):
        return import_module("wandb")


def open_sinks(config: RunConfig, stage: str, *, run_id: str | None) -> list[Sink]:
    """The sinks that a configuration asks for.

    Args:
        config: Configuration of the run.
        stage: Name of the stage.
        run_id: Run at Weights & Biases to continue.

    Raises:
        ConfigError: As `WandbSink`.
    """
    folder = config.checkpoint.dir
    sinks: list[Sink] = []
    if config.logging.wandb.enabled:
        values = config.model_dump(mode="json")
        sinks.append(
            WandbSink(config.logging.wandb, stage=stage, folder=folder, run_config=values, run_id=run_id)
        )
    sinks.append(JsonLines(config.training.log_path or folder / f"{stage}.jsonl"))
    return sinks


class _Utilization(ctypes.Structure):
    """nvmlUtilization_t: shares of the last period in per cent."""

    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class GpuWatch:
    """Averages the utilisation of a GPU between looks; a context manager. Says nothing where there is none.

    Args:
        device: The device that trains.
    """

    def __init__(self, device: torch.device) -> None:
        self._library = _open_library() if device.type == "cuda" else None
        self._handle = _find_gpu(self._library, device) if self._library is not None else None
        self._seen: list[int] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="gpu-watch", daemon=True)

    def read(self) -> dict[str, float]:
        """Mean since the last call in per cent, under its name in the log; empty if nothing was seen."""
        seen, self._seen = self._seen, []
        return {"training/gpu_utilization_pct": sum(seen) / len(seen)} if seen else {}

    def __enter__(self) -> Self:
        if self._handle is not None:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def _watch(self) -> None:
        assert self._library is not None
        utilization = _Utilization()
        while not self._over.wait(_SECONDS_BETWEEN_LOOKS):
            status = self._library.nvmlDeviceGetUtilizationRates(self._handle, ctypes.byref(utilization))
            if status != 0:
                return  # not known of this GPU, such as a part of one (MIG)
            self._seen.append(int(utilization.gpu))


def _open_library() -> Any:
    """NVML, initialised; None without a driver."""
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError:
        return None
    return library if library.nvmlInit_v2() == 0 else None


def _find_gpu(library: Any, device: torch.device) -> ctypes.c_void_p | None:
    """NVML's handle of a device of PyTorch: by UUID, since CUDA_VISIBLE_DEVICES renumbers them."""
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    handle = ctypes.c_void_p()
    found = library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle))
    return handle if found == 0 else None
