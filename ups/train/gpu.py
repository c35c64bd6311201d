"""How busy a GPU is, as NVIDIA's driver says, looked at by a thread once a second."""

from __future__ import annotations

import ctypes
import threading
from types import TracebackType
from typing import Any, Self

import torch

_LIBRARY = "libnvidia-ml.so.1"  # comes with the driver
_SECONDS_BETWEEN_LOOKS = 1.0  # NVML's own period is between 1/6 s and 1 s


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
                return  # not told for this GPU, such as a part of one (MIG)
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
