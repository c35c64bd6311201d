"""Activation checkpointing: what a forward pass doesn't keep, the backward pass computes once more.

It trades operations for memory and changes neither weights nor their names. Methods that may be computed once
more are marked in their class (`recomputed`); `set_activation_checkpointing` tells a model how. Source:
Chen et al. 2016 (arXiv:1604.06174); selective: Korthikanti et al. 2022 (arXiv:2205.05198).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

ActivationCheckpointing = Literal["none", "selective", "full"]

_aten = torch.ops.aten
# What `selective` keeps: results of linear layers, convolutions and attention kernels, which cost much for
# each number. Not those of FFTs, whose backward pass needs no numbers of theirs, nor of batched products
# (Fourier modes, scores of attention): with them a spectral layer would keep more than without checkpointing.
_COSTLY = [
    *(_aten.mm.default, _aten.addmm.default, _aten.convolution.default),
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
]
_OPTIONS: Mapping[ActivationCheckpointing, Mapping[str, Any]] = {
    "selective": {"context_fn": partial(create_selective_checkpoint_contexts, _COSTLY)},
    "full": {},
}


class Recomputing(nn.Module):
    """A module with methods that may be computed once more.

    Attributes:
        activation_checkpointing: What the methods marked by `recomputed` keep while training: "none" of them
            is computed once more, "selective" keeps what costly operations give, "full" keeps the arguments
            alone. Autocast shall have no cache with "selective": it makes operations differ the second time.
    """

    activation_checkpointing: ActivationCheckpointing = "none"


Self = TypeVar("Self", bound=Recomputing)
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
Method = Callable[Concatenate[Self, Arguments], Result]


def recomputed(method: Method[Self, Arguments, Result]) -> Method[Self, Arguments, Result]:
    """Mark a method that the backward pass may compute once more, with the same random numbers."""

    @wraps(method)
    def call(self: Self, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        how = self.activation_checkpointing
        if how == "none" or not (self.training and torch.is_grad_enabled()):
            return method(self, *args, **kwargs)
        work = partial(method, self, *args, **kwargs)
        result: Result = checkpoint(work, use_reentrant=False, **_OPTIONS[how])
        return result

    return call


def set_activation_checkpointing(model: nn.Module, how: ActivationCheckpointing) -> None:
    """Say what the marked methods of all parts of a model keep."""
    for module in _recomputing(model):
        module.activation_checkpointing = how


@contextmanager
def without_recomputation(model: nn.Module) -> Iterator[None]:
    """Inside, everything is kept."""
    before = [(module, module.activation_checkpointing) for module in _recomputing(model)]
    set_activation_checkpointing(model, "none")
    try:
        yield
    finally:
        for module, how in before:
            module.activation_checkpointing = how


def _recomputing(model: nn.Module) -> list[Recomputing]:
    return [module for module in model.modules() if isinstance(module, Recomputing)]
