"""The numbers of a record, by name: what charts show of a log. Nothing here needs torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Record = Mapping[str, Any]

# Names that people know from the earlier system.
GPU_LOAD, EPOCH_SECONDS = "training/gpu_utilization_pct", "training/epoch_time_sec"
CACHE_MINUTES, CACHE_REUSED = "startup/cache_precompute_time_min", "startup/cache_reused"
STARTUP_MINUTES = "startup/total_startup_time_min"
PROMISED = (GPU_LOAD, EPOCH_SECONDS, CACHE_MINUTES, CACHE_REUSED, STARTUP_MINUTES)

_NO_METRICS = (
    "event",
    "stage",
    "time",
    "step",
    "total_steps",
    "config",
    "global_batch_size",
    "effective_batch_size",
    "preparation_flops",
    "report",
    "exports",
)


def numbers_of(record: Record) -> dict[str, float]:
    """What of a record is measured, its report aside."""
    return numbers_within({name: value for name, value in record.items() if name not in _NO_METRICS})


def numbers_within(values: Record, prefix: str = "") -> dict[str, float]:
    """Numbers at any depth, names joined by slashes."""
    found: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found |= numbers_within(value, f"{prefix}{name}/")
        elif isinstance(value, int | float):
            found[f"{prefix}{name}"] = value
    return found
