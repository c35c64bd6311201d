"""Optimisers of the package torchao: AdamW with states of 8 bits, and AdamW on the CPU for a model on a GPU.

Both have the groups, rates and states of any optimiser here: a training state holds plain tensors by the
names of the parameters, from which a run goes on to the bit.

Sources: Dettmers et al. 2022 (arXiv:2110.02861), states of 8 bits in blocks of 256; Rajbhandari et al. 2020
(arXiv:1910.02054), states and steps on the CPU.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._triton import has_triton

from ups.errors import check_installed

# What a state of 8 bits is saved as: numbers of its values in a table, and a scale for each block of them.
_CODES, _SCALE = "_codes", "_scale"
_TALKATIVE = ("torchao", "torch.utils._pytree")  # they log, at import, what a user can do nothing about


def import_torchao() -> ModuleType:
    """The package's optimisers; importing them takes a second, so only those who take one do."""
    check_installed("torchao", extra="torchao")
    loggers = [logging.getLogger(name) for name in _TALKATIVE]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        import torchao.optim
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
    optimisers: ModuleType = torchao.optim
    return optimisers


class AdamW8bit(torch.optim.Optimizer):
    """AdamW whose two moments take a byte a weight each, of parameters of 4096 numbers or more.

    Args:
        groups: As PyTorch's optimisers take them.
        **settings: `lr`, `betas` and `eps` of AdamW.
    """

    def __init__(self, groups: Sequence[dict[str, Any]], **settings: Any) -> None:
        package = import_torchao()
        # It is handed groups and state in every step: it wants learning rates as tensors.
        self._inner = package.AdamW8bit([{"params": []}], **settings)
        super().__init__(groups, {**self._inner.defaults, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """See `torch.optim.Optimizer.step`."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._inner.param_groups = [
            {**group, "lr": torch.tensor(group["lr"], dtype=torch.float32)} for group in self.param_groups
        ]
        self._inner.state = self.state
        with self._stance():
            self._inner.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """As of any optimiser, in plain tensors: `exp_avg_codes` and `exp_avg_scale` for `exp_avg`."""
        packed = super().state_dict()
        return {**packed, "state": {number: _plain(state) for number, state in packed["state"].items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from what `state_dict` gave."""
        states = {number: _of_plain(state) for number, state in state_dict["state"].items()}
        super().load_state_dict({**state_dict, "state": states})

    def _stance(self) -> AbstractContextManager[Any]:
        """torchao compiles its step for each shape, which a CPU takes longer for than for many steps."""
        first = next(p for group in self.param_groups for p in group["params"])
        is_compiled = first.is_cuda and has_triton()
        return nullcontext() if is_compiled else torch.compiler.set_stance("force_eager")


def _plain(state: dict[str, Any]) -> dict[str, Any]:
    plain = dict[str, Any]()
    for name, value in state.items():
        if hasattr(value, "codes"):
            plain |= {f"{name}{_CODES}": value.codes, f"{name}{_SCALE}": value.scale}
        else:
            plain[name] = value
    return plain


def _of_plain(state: dict[str, Any]) -> dict[str, Any]:
    from torchao.optim.subclass_8bit import OptimState8bit

    whole = dict[str, Any]()
    for name, value in state.items():
        if name.endswith(_CODES):
            moment = name.removesuffix(_CODES)
            scale, is_signed = state[f"{moment}{_SCALE}"], moment == "exp_avg"
            made = OptimState8bit.zeros(
                value.shape, is_signed, value.numel() // scale.numel(), value.device, dtype=torch.float32
            )
            made.codes.copy_(value)
            made.scale.copy_(scale)
            whole[moment] = made
        elif not name.endswith(_SCALE):
            whole[name] = value
    return whole


class OffloadedAdamW(torch.optim.Optimizer):
    """AdamW whose moments, and whose step, are the CPU's; parameters of fewer than 4096 numbers stay.

    Gradients go to the CPU while the backward pass runs, so nothing may change them afterwards: no clipping,
    no gradient scaler.

    Args:
        groups: As PyTorch's optimisers take them, of parameters on one GPU.
        **settings: `lr`, `betas` and `eps` of AdamW.
    """

    def __init__(self, groups: Sequence[dict[str, Any]], **settings: Any) -> None:
        super().__init__(groups, {**settings, "weight_decay": 0.0})
        numbered = [{**group, "number": number} for number, group in enumerate(self.param_groups)]
        self._inner = import_torchao().CPUOffloadOptimizer(numbered, torch.optim.AdamW, **settings)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """See `torch.optim.Optimizer.step`."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self._inner.param_groups:
            group["lr"] = self.param_groups[group["number"]]["lr"]
        self._inner.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """As of AdamW; most of its tensors are on the CPU."""
        for parameter in self._parameters():
            if state := self._home_of(parameter)[0].state.get(self._home_of(parameter)[1]):
                self.state[parameter] = state
        return super().state_dict()

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from what `state_dict` gave, with the parameters as they are now."""
        super().load_state_dict(state_dict)
        for parameter in self._parameters():
            optimizer, twin = self._home_of(parameter)
            if parameter in self.state:
                optimizer.state[twin] = {
                    name: value.to(twin.device) for name, value in self.state[parameter].items()
                }
            if twin is not parameter:
                twin.copy_(parameter)  # it was copied from the weights of the start

    def _parameters(self) -> list[nn.Parameter]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _home_of(self, parameter: nn.Parameter) -> tuple[torch.optim.Optimizer, Tensor]:
        """Which optimiser has a parameter, and the parameter as that one knows it."""
        inner = self._inner
        if parameter in inner.optim_dict:
            return inner.optim_dict[parameter], inner.param_d2h_map[parameter]
        return inner.d_opt, parameter
