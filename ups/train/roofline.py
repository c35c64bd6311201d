"""How close a step comes to what its device can do: peak rates, and the least time of each operation.

The roofline model (Williams et al. 2009, doi:10.1145/1498765.1498785): an operation takes at least the time
of its arithmetic at the peak, and at least the time of moving what it reads and writes once to and from
memory; the longer of both bounds it. What a compiler fuses moves less, and what stays in caches moves faster,
so the share that bandwidth bounds is that of eager operations on tensors in main memory.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ups.config import StageConfig
from ups.train.flops import counting

Precision = Literal["float32", "tf32", "float16", "bfloat16"]

_TERA = 1e12
_SIZE = 768  # of the matrices that a device is measured with, 0.9 GFLOP a product; on a GPU 8 times that
_COPIED_BYTES = 64 << 20  # more than the caches of most processors
_REPEATS = 8


@dataclass(frozen=True)
class Limits:
    """The most that a device can do.

    Attributes:
        flops_per_s: Floating-point operations of matrix products, dense, in one precision.
        bytes_per_s: To and from its memory together.
    """

    flops_per_s: float
    bytes_per_s: float


# By the name that CUDA gives: 10^12 operations a second in float32, in TF32 and in 16 bits, without sparsity,
# and 10^12 bytes a second. From NVIDIA's data sheets: "H200 Tensor Core GPU", "H100 Tensor Core GPU", "A100
# Tensor Core GPU", "L40S", "L4", "A40", "A10", "RTX A6000", "V100", "T4", which name tensor rates with
# sparsity from H100 on (halved here); RTX cards: appendices A of the "Ada" and "GA102" architecture papers.
_GPUS: Mapping[str, tuple[float, float, float, float]] = {
    r"H200": (67, 494.7, 989.5, 4.8),
    r"H100 PCIe": (51, 378, 756, 2.0),
    r"H100 NVL": (60, 417.5, 835.5, 3.9),
    r"H100": (67, 494.7, 989.5, 3.35),
    r"A100.*80GB": (19.5, 156, 312, 1.935),
    r"A100": (19.5, 156, 312, 1.555),
    r"L40S": (91.6, 183, 362, 0.864),
    r"L4$": (30.3, 60, 121, 0.3),
    r"A40$": (37.4, 74.8, 149.7, 0.696),
    r"A10$": (31.2, 62.5, 125, 0.6),
    r"RTX A6000": (38.7, 77.4, 154.8, 0.768),
    r"V100": (15.7, 15.7, 125, 0.9),
    r"T4$": (8.1, 8.1, 65, 0.3),
    r"RTX 4090$": (82.6, 82.6, 165.2, 1.008),
    r"RTX 3090$": (35.6, 35.6, 71, 0.936),
}
_COLUMN = {"float32": 0, "tf32": 1, "float16": 2, "bfloat16": 2}


def precision_of(stage: StageConfig, *, matmul_precision: str) -> Precision:
    """What a stage's matrix products are made in.

    Args:
        stage: With what it takes from `training`, as `RunConfig.stage` gives it.
        matmul_precision: Of `training`.
    """
    if stage.amp:
        return stage.amp_dtype or "bfloat16"
    return "float32" if matmul_precision == "highest" else "tf32"


def limits_of(device: torch.device, precision: Precision) -> Limits:
    """The most that a device can do: of known GPUs as their maker says, of others and of the CPU measured.

    Measuring takes a tenth of a second, once in a process, with its present number of threads.
    """
    if device.type == "cuda":
        known = known_gpu(torch.cuda.get_device_name(device), precision)
        if known is not None:
            return known
    return _measured(device, precision, torch.get_num_threads())


def known_gpu(name: str, precision: Precision) -> Limits | None:
    """Of a GPU by its name; None of one that isn't in the table, and of a part of one (MIG)."""
    if "MIG" in name:
        return None
    for pattern, rates in _GPUS.items():
        if re.search(pattern, name):
            return Limits(rates[_COLUMN[precision]] * _TERA, rates[-1] * _TERA)
    return None


@lru_cache
def _measured(device: torch.device, precision: Precision, num_threads: int) -> Limits:
    """By a matrix product and a copy: the best of several, as whatever else runs only slows them."""
    is_gpu = device.type == "cuda"
    dtype = torch.float32 if precision in ("float32", "tf32") else getattr(torch, precision)
    size = _SIZE * (8 if is_gpu else 1)
    one, other = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
    source = torch.ones(_COPIED_BYTES * (8 if is_gpu else 1), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    out = torch.empty_like(one)
    product_s = _least_seconds(lambda: torch.mm(one, other, out=out), device)
    copy_s = _least_seconds(lambda: target.copy_(source), device)
    return Limits(2 * size**3 / product_s, 2 * source.nbytes / copy_s)


def _least_seconds(work: Callable[[], object], device: torch.device) -> float:
    def seconds() -> float:
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - began

    with torch.no_grad():
        seconds()
        return min(seconds() for _ in range(_REPEATS))


@dataclass(frozen=True)
class Cost:
    """What some work takes at least.

    Attributes:
        flops: Counted operations.
        least_s: Seconds in which a device could make its operations one by one.
        bandwidth_bound_s: Of these, seconds of operations that move bytes for longer than they compute.
    """

    flops: float = 0.0
    least_s: float = 0.0
    bandwidth_bound_s: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.flops + other.flops,
            self.least_s + other.least_s,
            self.bandwidth_bound_s + other.bandwidth_bound_s,
        )


def cost_of(work: Callable[[], object], *, limits: Limits) -> Cost:
    """What some work takes at least on a device, operation by operation."""
    total = Cost()
    with counting() as counter, _Operations(counter.get_total_flops) as operations:
        work()
    for flops, nbytes in operations.found:
        computing_s, moving_s = flops / limits.flops_per_s, nbytes / limits.bytes_per_s
        is_moving = moving_s > computing_s
        total += Cost(flops, max(computing_s, moving_s), moving_s if is_moving else 0.0)
    return total


class _Operations(TorchDispatchMode):
    """Inside, arithmetic and bytes of every operation are noted.

    Args:
        count: Operations that were counted so far, by the mode that this one lies in.
    """

    def __init__(self, count: Callable[[], int]) -> None:
        super().__init__()
        self._count = count
        self.found: list[tuple[int, int]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        before = self._count()
        result = func(*args, **(kwargs or {}))
        read = list(_tensors((args, kwargs)))
        made = list(_tensors(result))
        nbytes = 0 if _moves_nothing(func, read, made) else sum(map(_nbytes, [*read, *made]))
        self.found.append((self._count() - before, nbytes))
        return result


def _moves_nothing(func: Any, read: list[Tensor], made: list[Tensor]) -> bool:
    """Whether an operation gives views or memory that nothing was written to."""
    schema = getattr(func, "_schema", None)  # operations of higher order have none
    if schema is None or schema.is_mutable:
        return False
    known = set(map(_storage, read))
    is_view = all(_storage(tensor) in known for tensor in made)
    return is_view or schema.name.startswith(("aten::empty", "aten::new_empty"))


def _tensors(values: Any) -> Iterator[Tensor]:
    return (value for value in tree_leaves(values) if isinstance(value, Tensor))


def _storage(tensor: Tensor) -> int:
    """Which storage it is a view of; an address wouldn't say that of tensors without numbers (`ShapesOf`)."""
    return int(tensor.untyped_storage()._cdata)


def _nbytes(tensor: Tensor) -> int:
    """Bytes that reading it once moves; what is repeated without a copy is read once."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())
