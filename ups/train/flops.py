"""Floating-point operations of a training step, counted: of matrix products, convolutions, attention, FFTs.

PyTorch's `FlopCounterMode` counts a multiply-add as 2 operations, as everywhere. It is taught what it counts
as nothing or too little: an FFT of n points takes 5 n log2 n operations (the radix-2 count that FFT
benchmarks use, see fftw.org/speed), and half of that from or to real numbers; a complex multiply-add is four
real ones; attention takes its matrix products, whichever kernel computes it. Elementwise operations, norms
and optimisers aren't counted, as is usual; nor is what activation checkpointing computes once more. So the
count depends on shapes alone, on no machine, and a budget is as many steps with every such switch. What a
device could make at most, `peak_flops` says.
"""

from __future__ import annotations

import copy
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from ups.nn.activation_checkpointing import without_recomputation
from ups.nn.shifted_window import with_sdpa

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ups.config import StageConfig
    from ups.train.stage import Stage

Found = TypeVar("Found")
Precision = Literal["float32", "tf32", "float16", "bfloat16"]

_FFT = 5.0  # operations of a complex transform for each point and factor 2 of its length
_COMPLEX = 4  # real multiply-adds of a complex one
_PRODUCTS = 2  # matrix products of attention, of one size: scores, and their mean of the values
_aten = torch.ops.aten

# By the name that CUDA gives: 10^12 operations a second in float32, in TF32 and in 16 bits, without sparsity.
# From NVIDIA's data sheets: "HGX B200", "H200 Tensor Core GPU", "H100 Tensor Core GPU", "A100 Tensor Core
# GPU", "L40S", "L4", "A40", "A10", "RTX A6000", "V100", "T4", which name tensor rates with sparsity from H100
# on (halved here); RTX cards: appendices A of the "Ada" and "GA102" architecture papers; AMD's "MI300X".
_GPUS: Mapping[str, tuple[float, float, float]] = {
    r"B200": (75, 1100, 2250),
    r"H200": (67, 494.7, 989.5),
    r"H100 PCIe": (51, 378, 756),
    r"H100 NVL": (60, 417.5, 835.5),
    r"H100": (67, 494.7, 989.5),
    r"A100": (19.5, 156, 312),
    r"L40S": (91.6, 183, 362),
    r"L4$": (30.3, 60, 121),
    r"A40$": (37.4, 74.8, 149.7),
    r"A10$": (31.2, 62.5, 125),
    r"RTX A6000": (38.7, 77.4, 154.8),
    r"V100": (15.7, 15.7, 125),
    r"T4$": (8.1, 8.1, 65),
    r"RTX 4090$": (82.6, 82.6, 165.2),
    r"RTX 3090$": (35.6, 35.6, 71),
    r"MI300X": (163.4, 653.7, 1307.4),
}
_COLUMN = {"float32": 0, "tf32": 1, "float16": 2, "bfloat16": 2}
_SIZE = 768  # of the matrices that a device is measured with, 0.9 GFLOP a product; on a GPU 8 times that
_REPEATS = 8


def fft_flops(shape: Sequence[int], axes: Sequence[int], *, is_real: bool) -> int:
    """Operations of a transform along some axes.

    Args:
        shape: Of the whole array, on the side where the transform has all its points.
        axes: Those that are transformed.
        is_real: Whether that side holds real numbers.
    """
    num_points = math.prod(shape[axis] for axis in axes)
    flops = _FFT * math.prod(shape) * math.log2(num_points) if num_points else 0
    return round(flops / 2 if is_real else flops)


def count_flops(work: Callable[[], object]) -> int:
    """Floating-point operations that some work takes, forward and backward passes in it alike."""
    with counting() as counter:
        work()
    return int(counter.get_total_flops())


def counting() -> FlopCounterMode:
    """Inside, operations are counted by these formulas."""
    return FlopCounterMode(display=False, custom_mapping=_FORMULAS)


class ShapesOf:
    """A copy of a model without its numbers, for counting what a sharded one computes; made before that."""

    def __init__(self, model: nn.Module) -> None:
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        tensors = (*model.parameters(), *model.buffers())
        self.model = copy.deepcopy(model, {id(tensor): self._mode.from_tensor(tensor) for tensor in tensors})

    @contextmanager
    def in_place_of(self, stage: Stage) -> Iterator[None]:
        """Inside, the stage has the copy, and nothing is computed."""
        own, stage.model = stage.model, self.model.train(stage.model.training)
        try:
            with self._mode:
                yield
        finally:
            stage.model = own


def count_step(
    stage: Stage, batch: Any, *, autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
) -> int:
    """Floating-point operations of a stage's losses of a batch and of their gradients; see `of_step`."""
    return of_step(stage, batch, count_flops, autocast=autocast)


def of_step(
    stage: Stage,
    batch: Any,
    measure: Callable[[Callable[[], object]], Found],
    *,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Found:
    """What is measured of computing a stage's losses of a batch and their gradients.

    It computes them once more, uncompiled, and leaves weights, buffers, gradients and random numbers alone.

    Args:
        stage: With its model in training mode, not sharded (`ShapesOf.in_place_of`).
        batch: This rank's rows of it.
        measure: Calls what it is given, and returns what it found.
        autocast: Precision of the forward pass.
    """
    trained = [parameter for parameter in stage.model.parameters() if parameter.requires_grad]

    def work() -> None:
        with autocast():
            losses = stage.losses(stage.model, batch)
        total = torch.stack(list(losses.values())).sum()
        torch.autograd.grad(total, trained, allow_unused=True)

    random_numbers_kept = _random_numbers_kept(batch.draws.generator, trained[0].device)
    buffers = [(buffer, buffer.clone()) for buffer in stage.model.buffers()]  # such as running means
    with without_recomputation(stage.model), with_sdpa(stage.model), random_numbers_kept:
        measured = measure(work)
    for buffer, before in buffers:
        buffer.copy_(before)
    return measured


def precision_of(stage: StageConfig, *, matmul_precision: str) -> Precision:
    """What a stage's matrix products are made in.

    Args:
        stage: With what it takes from `training`, as `RunConfig.stage` gives it.
        matmul_precision: Of `training`.
    """
    if stage.amp:
        return stage.amp_dtype or "bfloat16"
    by_name: dict[str, Precision] = {"highest": "float32", "high": "tf32", "medium": "bfloat16"}
    return by_name[matmul_precision]


def peak_flops(device: torch.device, precision: Precision) -> float:
    """Most operations of matrix products a second: of known GPUs as their maker says, of others measured.

    Measuring takes a tenth of a second, once in a process, with its present number of threads.
    """
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return known_peak(name, precision) or _measured_peak(device, precision, torch.get_num_threads())


def known_peak(name: str, precision: Precision) -> float | None:
    """Of a GPU by its name; None of one that isn't in the table, and of a part of one (MIG)."""
    rates = (rates for pattern, rates in _GPUS.items() if "MIG" not in name and re.search(pattern, name))
    return next((1e12 * each[_COLUMN[precision]] for each in rates), None)


@lru_cache
@torch.no_grad()
def _measured_peak(device: torch.device, precision: Precision, num_threads: int) -> float:
    """By a matrix product: the best of several, as whatever else runs only slows them."""
    is_gpu = device.type == "cuda"
    dtype = torch.float32 if precision in ("float32", "tf32") else getattr(torch, precision)
    size, seconds = _SIZE * (8 if is_gpu else 1), list[float]()
    one, other, out = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(3))
    for _ in range(1 + _REPEATS):
        began = time.perf_counter()
        torch.mm(one, other, out=out)
        if is_gpu:
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
    return 2 * size**3 / min(seconds[1:])


def shape_of(batch: Any) -> tuple[object, ...]:
    """What the cost of a batch depends on: its task, the shapes of its tensors, what else it says."""
    return tuple(_shape(value) for name, value in vars(batch).items() if name not in ("draws", "share"))


def _shape(value: Any) -> object:
    if isinstance(value, Tensor):
        return tuple(value.shape)
    return tuple(value) if isinstance(value, Mapping) else value  # weights by name cost what they weigh on


@contextmanager
def _random_numbers_kept(generator: torch.Generator, device: torch.device) -> Iterator[None]:
    """Inside, random numbers may be drawn; afterwards the same ones come again."""
    before = generator.get_state()
    gpus = [device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=gpus):
            yield
    finally:
        generator.set_state(before)


def _from_real(x: Tensor, axes: Sequence[int], *rest: object, out_val: Tensor, **options: object) -> int:
    return fft_flops(x.shape, axes, is_real=True)


def _to_real(x: Tensor, axes: Sequence[int], *rest: object, out_val: Tensor, **options: object) -> int:
    return fft_flops(out_val.shape, axes, is_real=True)


def _between_complex(
    x: Tensor, axes: Sequence[int], *rest: object, out_val: Tensor, **options: object
) -> int:
    return fft_flops(x.shape, axes, is_real=False)


def _also_complex(formula: Callable[..., int]) -> Callable[..., int]:
    """The formula of a product, four times as much where its numbers are complex."""

    def flops(*operands: Any, out_val: Tensor, **options: Any) -> int:
        return formula(*operands, out_val=out_val, **options) * (_COMPLEX if out_val.is_complex() else 1)

    return flops


def _attention(query: Tensor, key: Tensor, value: Tensor, *rest: object, **options: object) -> int:
    """Both products of queries (..., L, K), keys (..., S, K) and values (..., S, V)."""
    pairs = query.shape[:-1].numel() * key.shape[-2]
    return 2 * pairs * (query.shape[-1] + value.shape[-1])


def _attention_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: object, **options: object
) -> int:
    """Two products for each of the forward pass; that some kernels compute scores once more isn't counted."""
    return _PRODUCTS * _attention(query, key, value)


_FORWARD = (
    *("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention"),
    *("_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention"),
)


def _formulas() -> dict[Any, Callable[..., int]]:
    formulas: dict[Any, Callable[..., int]] = {
        _aten._fft_r2c: _from_real,
        _aten._fft_c2r: _to_real,
        _aten._fft_c2c: _between_complex,
    }
    products = (_aten.mm, _aten.bmm, _aten.addmm, _aten.baddbmm)
    formulas |= {product: _also_complex(flop_registry[product]) for product in products}
    for name in _FORWARD:
        formulas[getattr(_aten, name)] = _attention
        formulas[getattr(_aten, f"{name}_backward")] = _attention_backward
    for formula in formulas.values():
        formula._get_raw = True  # type: ignore[attr-defined]  # FlopCounterMode gives tensors then, not shapes
    return formulas


_FORMULAS = _formulas()
