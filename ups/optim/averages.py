"""Copies of a model's weights, and averages of them that can take their place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from ups.distributed.sharding import shared_out
from ups.trained.checkpoint import check_tensors


class WeightsCopy:
    """Copy of a model's trained parameters.

    Args:
        device: Where the copy lies; by default beside each parameter.
    """

    def __init__(self, model: nn.Module, *, device: torch.device | str | None = None) -> None:
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._copies = {
            name: p.detach().to(device or p.device, copy=True) for name, p in self._parameters.items()
        }

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the model has the copied weights."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for name, parameter in self._parameters.items():
            kept = parameter.detach().clone()
            parameter.copy_(self._copies[name])
            self._copies[name].copy_(kept)


class AveragedWeights(WeightsCopy):
    """Averaged copy of a model's trained parameters.

    Early on the average follows faster, by (1 + n) / (10 + n) after n updates, so that it forgets the random
    start.

    Args:
        decay: Share of the old average that an update keeps.
    """

    def __init__(self, model: nn.Module, *, decay: float) -> None:
        super().__init__(model)
        self._decay = decay
        self.num_updates = 0

    @property
    def averages(self) -> dict[str, Tensor]:
        """The averages by name."""
        return self._copies

    @torch.no_grad()
    def update(self) -> None:
        """Take in the weights as they are now."""
        decay = min(self._decay, (1 + self.num_updates) / (10 + self.num_updates))
        self.num_updates += 1
        current = [p.detach() for p in self._parameters.values()]
        torch._foreach_lerp_(list(self.averages.values()), current, 1 - decay)

    def restore(self, averages: Mapping[str, Tensor], *, num_updates: int, path: Path) -> None:
        """Continue from saved averages.

        Args:
            averages: By name, as `averages` has them, in whole form.
            num_updates: Updates that made them.
            path: Where they are from, for the error.
        """
        check_tensors(averages, self.averages, path=path, problem="its averages aren't those of the weights")
        self.num_updates = num_updates
        for name, average in self.averages.items():
            average.copy_(shared_out(averages[name], average))
