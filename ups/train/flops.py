"""Floating-point operations of a training step, counted: of matrix products, convolutions, attention, FFTs.

PyTorch's `FlopCounterMode` counts a multiply-add as 2 operations, as everywhere. It is taught what it counts
as nothing or too little: an FFT of n points takes 5 n log2 n operations (the radix-2 count that FFT
benchmarks use, see fftw.org/speed), and half of that from or to real numbers; a complex multiply-add is four
real ones; attention takes its matrix products, whichever kernel computes it. Elementwise operations, norms
and optimisers aren't counted, as is usual; nor is what activation checkpointing computes once more. So the
count depends on shapes alone, on no machine, and a budget is as many steps with every such switch.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from ups.nn.activation_checkpointing import without_recomputation
from ups.nn.shifted_window import with_sdpa

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ups.train.stage import Stage

Found = TypeVar("Found")

_FFT = 5.0  # operations of a complex transform for each point and factor 2 of its length
_COMPLEX = 4  # real multiply-adds of a complex one
_PRODUCTS = 2  # matrix products of attention, of one size: scores, and their mean of the values
_aten = torch.ops.aten


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

    It computes them once more, uncompiled, and leaves weights, buffers, gradients and random numbers as
    they were.

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
