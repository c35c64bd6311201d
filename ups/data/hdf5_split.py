"""A split that is read straight from HDF5, whole, into memory."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import numpy.typing as npt

import ups_store
from ups.config.shared import BuildConfig
from ups.data.errors import hints_in_keys
from ups.data.split_plan import plan_split
from ups.errors import ConfigError
from ups_store.build.plan import StorePlan
from ups_store.build.read import read_batches
from ups_store.build.readers import Readers

_log = logging.getLogger(__name__)
_MEMORY_SHARE = 0.5  # of what is free, for one split

Array = npt.NDArray[Any]


def read_split(config: BuildConfig, task: str, split: str) -> tuple[StorePlan, dict[str, Array]]:
    """Read all samples of a split.

    Args:
        config: Which samples of which files; `data.on_nan` decides about NaN and Inf.
        task: Name of the task.
        split: "train", "val" or "test".

    Returns:
        What a store of it would be, and its arrays by name, new, the samples along the first axis; fields
        in float32.
    Raises:
        ConfigError: As `plan_split`; kind "too_large".
        ups_store.SourceError: If the files can't be read; kind "not_finite", with the file and the number of
            the sample in it.
    """
    cache = config.cache.model_copy(update={"dtype": "float32"})
    reading = config.reading.model_copy(update={"on_error": "fail"})  # nothing goes on without a sample here
    with hints_in_keys(), Readers(reading, note=_log.info) as readers:
        plan = plan_split(config.model_copy(update={"cache": cache}), task, split, readers=readers)
        _expect_room(plan)
        arrays = {name: np.empty(spec.shape, spec.dtype) for name, spec in plan.arrays.items()}
        samples = np.arange(plan.num_samples)
        for batch in read_batches(plan, samples, on_nan=config.data.on_nan, readers=readers):
            for name, values in batch.arrays.items():
                arrays[name][batch.samples] = values
    return plan, arrays


def _expect_room(plan: StorePlan) -> None:
    needed, free = plan.num_samples * plan.sample_nbytes, ups_store.available_memory_bytes()
    if needed > _MEMORY_SHARE * free:
        raise ConfigError(
            f"{plan.title} doesn't fit into memory",
            kind="too_large",
            expected=f"at most {_MEMORY_SHARE * free / 2**20:.0f} MiB, {_MEMORY_SHARE:.0%} of what is free",
            found=f"{needed / 2**20:.0f} MiB",
            hint="build a field store with `python -m ups_store.build`, use data.limit, or raise the limit of"
            " the container",
        )
