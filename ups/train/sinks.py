"""Where the records of a run go: a file of JSON lines, and TensorBoard and W&B where they are switched on.

The load of a GPU comes from NVIDIA's driver, which a thread asks once a second.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any, Protocol

import torch

from ups.config import RunConfig
from ups.config.stages import BASELINES
from ups.output import with_nulls
from ups.train.numbers import GPU_LOAD, Record
from ups.train.tensorboard_sink import TensorboardSink
from ups.train.wandb_sink import open_wandb
from ups_store.launch import log_origin
from ups_store.printable import json_text
from ups_store.system.stalls import LookingThread

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


def open_sinks(
    config: RunConfig,
    stage: str,
    *,
    run_id: str | None,
) -> list[Sink]:
    """The sinks that a configuration asks for.

    Args:
        run_id: Run at Weights & Biases to continue, where no context says it.

    Raises:
        MissingExtraError: If TensorBoard's writer isn't installed.
    """
    folder, job = config.checkpoint.dir, job_of(config, stage)
    sinks: list[Sink] = [JsonLines(config.training.log_path or folder / f"{stage}.jsonl")]
    if config.logging.tensorboard.enabled:
        sinks.append(TensorboardSink((config.logging.tensorboard.dir or folder / "tensorboard") / job))
    values = config.model_dump(mode="json")
    options: dict[str, Any] = {"job": job, "run_config": values, "run_id": run_id}
    if (sink := open_wandb(config.logging.wandb, folder, **options)) is not None:
        sinks.append(sink)
    return sinks


def job_of(config: RunConfig, stage: str) -> str:
    """What a stage is called in charts: of a baseline its folder, since there is one for each task."""
    return config.checkpoint.dir.name if stage in BASELINES else stage


class _Utilization(ctypes.Structure):
    """nvmlUtilization_t: shares of the last period in per cent."""

    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class GpuWatch(LookingThread):
    """Averages the utilisation of a GPU between looks; a context manager. Empty where there is none."""

    def __init__(self, device: torch.device) -> None:
        self._library = _open_library() if device.type == "cuda" else None
        self._handle = _find_gpu(self._library, device) if self._library is not None else None
        super().__init__("gpu-watch", every_s=None if self._handle is None else _SECONDS_BETWEEN_LOOKS)
        self._seen, self._seen_in_epoch = list[int](), list[int]()

    def read(self) -> dict[str, float]:
        """Mean since the last call in per cent, under its name in the log; empty if nothing was seen."""
        seen, self._seen = self._seen, []
        self._seen_in_epoch += seen
        return _mean_of(seen)

    def end_epoch(self) -> dict[str, float]:
        """The same over all that `read` has given since the last call."""
        seen, self._seen_in_epoch = self._seen_in_epoch, []
        return _mean_of(seen)

    def _look(self) -> bool:
        assert self._library is not None
        utilization = _Utilization()
        status = self._library.nvmlDeviceGetUtilizationRates(self._handle, ctypes.byref(utilization))
        if status != 0:
            return False  # not known of this GPU, such as a part of one (MIG)
        self._seen.append(int(utilization.gpu))
        return True


def _mean_of(seen: list[int]) -> dict[str, float]:
    return {GPU_LOAD: sum(seen) / len(seen)} if seen else {}


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
