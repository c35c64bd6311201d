"""Where a batch goes: memory that `gather` is given."""

from __future__ import annotations

from typing import Any

import numpy as np

from ups_store.errors import SpecError


def check_output(name: str, dtype: np.dtype[Any], shape: tuple[int, ...], out: Any) -> None:
    """Fail unless a batch can be written to `out`, converted if need be.

    Args:
        name: The array's name, for messages.
        dtype: Its dtype.
        shape: Shape of the batch, (B, ...).
        out: What the caller gave.
    Raises:
        SpecError: For another shape, read-only memory, or a dtype that doesn't hold the array's numbers.
    """
    if not isinstance(out, np.ndarray):
        found = type(out).__name__
        raise SpecError("out", kind="out", array=name, expected="an ndarray", found=found)
    is_same = out.dtype == dtype
    if out.shape == shape and out.flags.writeable and (is_same or _holds(out.dtype, dtype)):
        return
    hint = "floating-point numbers convert to any floating-point dtype, others where nothing can be lost"
    raise SpecError(
        "out",
        kind="out",
        array=name,
        expected=f"writeable {dtype} {shape}",
        found=f"{'writeable' if out.flags.writeable else 'read-only'} {out.dtype} {out.shape}",
        hint=None if is_same else hint,
    )


def _holds(dtype: np.dtype[Any], values: np.dtype[Any]) -> bool:
    """Whether an output may be of `dtype`: by asking for it the caller accepts rounding, nothing else."""
    return np.can_cast(values, dtype, "safe") or (_is_floating(values) and _is_floating(dtype))


def _is_floating(dtype: np.dtype[Any]) -> bool:
    return dtype.kind == "f" or dtype.name == "bfloat16"
