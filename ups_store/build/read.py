"""Samples out of their sources, in the store's order and dtypes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ups_store.build.plan import StorePlan
from ups_store.errors import SourceError
from ups_store.ingest.source import Source, SourceInfo, open_source
from ups_store.metadata import dtype_of

BATCH_BYTES = 16 << 20  # read and committed together: from 4 MiB on the two syncs of a batch cost little


def split_batches(samples: npt.NDArray[np.int64], sample_nbytes: int) -> list[npt.NDArray[np.int64]]:
    """Cut sample numbers into batches of about `BATCH_BYTES`, at least one sample each."""
    size = max(1, BATCH_BYTES // max(1, sample_nbytes))
    return [samples[first : first + size] for first in range(0, len(samples), size)]


def read_batches(
    plan: StorePlan, missing: npt.NDArray[np.int64], *, on_nan: str
) -> Iterator[tuple[npt.NDArray[np.int64], dict[str, npt.NDArray[Any]]]]:
    """Read missing samples with all their arrays, in the order of the store, one file at a time.

    Args:
        plan: The store's plan.
        missing: Sample numbers of the store, sorted, shape (M,).
        on_nan: "fail" or "keep" NaN and Inf.
    Yields:
        Sample numbers (B,) and every per-sample array (B, ...) in the store's dtype.
    Raises:
        SourceError: As `Source.read`, and kind "not_finite".
    """
    first = 0
    for part, info in zip(plan.parts, plan.infos, strict=True):
        wanted = missing[(missing >= first) & (missing < first + len(part.indices))]
        if len(wanted):
            _expect_finite_parameters(info, on_nan)
            with open_source(part.path, task=plan.task, selection=plan.selection) as source:
                for samples in split_batches(wanted, plan.sample_nbytes):
                    in_file = samples - first + part.indices.start
                    arrays = _read(plan, source, in_file, on_nan)
                    numbers = {key: np.full(len(samples), value) for key, value in info.parameters.items()}
                    yield samples, {**arrays, **numbers}
        first += len(part.indices)


def _read(
    plan: StorePlan, source: Source, in_file: npt.NDArray[np.int64], on_nan: str
) -> dict[str, npt.NDArray[Any]]:
    """Read samples of a file in the store's dtypes."""
    arrays = {}
    for name, values in source.read(in_file.tolist()).items():
        with np.errstate(over="ignore", invalid="ignore"):  # Inf and NaN are counted, not warned about
            arrays[name] = values.astype(dtype_of(str(plan.arrays[name].dtype)), copy=False)
        if on_nan == "fail":
            _check_finite(source.info.path, name, values, arrays[name], in_file)
    return arrays


def _expect_finite_parameters(info: SourceInfo, on_nan: str) -> None:
    for name, value in info.parameters.items():
        if on_nan == "fail" and not np.isfinite(value):
            raise SourceError(
                "the parameter is not finite",
                kind="not_finite",
                path=info.path,
                array=name,
                found=value,
                hint="mend the source, or --on-nan keep",
            )


def _check_finite(
    path: Path,
    name: str,
    values: npt.NDArray[Any],
    cast: npt.NDArray[Any],
    in_file: npt.NDArray[np.int64],
) -> None:
    bad = ~np.isfinite(cast).reshape(len(cast), -1)
    if not bad.any():
        return
    row = int(np.flatnonzero(bad.any(axis=1))[0])
    overflowed = bool(np.isfinite(values[row]).all())
    raise SourceError(
        f"{int(bad[row].sum())} of {bad.shape[1]} values are not finite"
        + (f" as {cast.dtype}" if overflowed else ""),
        kind="not_finite",
        path=path,
        array=name,
        sample=int(in_file[row]),
        hint="choose a wider --cache-dtype" if overflowed else "mend the source, or --on-nan keep",
    )
