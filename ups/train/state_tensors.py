"""`StateTensors`: the tensors of a training that continuing needs, by name, and back into their places.

They are named `model.<name>`, `ema.<name>`, `optimizer.<parameter>.<name>` and `stage.<name>`, and are plain
or sharded; in whole form they are what one process would have.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from ups.distributed.sharding import shared_out
from ups.optim import AveragedWeights
from ups.trained.checkpoint import check_tensors


class StateTensors:
    """The tensors of a training that continuing needs, by name, plain or sharded.

    Args:
        model: Model, without wrappers.
        optimizer: Its optimiser.
        averaged: Averaged weights, if there are any.
        stage: The stage's own, as `Stage.state` has them.
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        averaged: AveragedWeights | None,
        stage: Mapping[str, Tensor],
    ) -> None:
        self._model, self._optimizer, self._averaged, self._stage = model, optimizer, averaged, stage
        names = {parameter: name for name, parameter in model.named_parameters()}
        # PyTorch numbers them in this order.
        self._trained = [names[p] for group in optimizer.param_groups for p in group["params"]]

    def now(self) -> dict[str, Tensor]:
        """As they are now, on every rank in the same order; views."""
        tensors = _prefixed("model.", self._model.state_dict())
        if self._averaged is not None:
            tensors |= _prefixed("ema.", self._averaged.averages)
        for number, state in self._optimizer.state_dict()["state"].items():
            own = {name: value for name, value in state.items() if value is not None}
            tensors |= _prefixed(f"optimizer.{self._trained[number]}.", own)
        return tensors | _prefixed("stage.", self._stage)

    def form_of(self, name: str) -> Tensor | None:
        """A tensor here that has the form of the one of a name, such as a parameter that of its averages."""
        section, _, rest = name.partition(".")
        if section == "stage":
            return self._stage.get(rest)
        own = rest.rpartition(".")[0] if section == "optimizer" else rest
        return self._model.state_dict().get(own)

    def fill(self, tensors: Mapping[str, Tensor], *, ema_updates: int, path: Path) -> dict[str, Tensor]:
        """Bring model, averages and optimiser to what `now` gave, and return the stage's own.

        Args:
            tensors: Whole, or in the form of those that are here; on every rank.
            ema_updates: Updates that made the averages.
            path: Where they are from, for the error.

        Returns:
            In the form of those that are here, by the names that the stage gave.

        Raises:
            OtherTensorsError: With the names that are missing, unexpected or of another shape.
        """
        self._fill_model(_below(tensors, "model."), path)
        if self._averaged is not None:
            self._averaged.restore(_below(tensors, "ema."), num_updates=ema_updates, path=path)
        self._fill_optimizer(_below(tensors, "optimizer."), path)
        own = _below(tensors, "stage.")
        check_tensors(
            own, self._stage, path=path, problem="the training state is of a stage with other tensors"
        )
        return {name: shared_out(own[name], tensor) for name, tensor in self._stage.items()}

    def _fill_model(self, saved: Mapping[str, Tensor], path: Path) -> None:
        own = self._model.state_dict()
        check_tensors(saved, own, path=path, problem="the training state is of other parameters")
        self._model.load_state_dict({name: shared_out(saved[name], tensor) for name, tensor in own.items()})

    def _fill_optimizer(self, saved: Mapping[str, Tensor], path: Path) -> None:
        # PyTorch's `set_optimizer_state_dict` would make a step of zero gradients first, which Adam counts.
        parameters = dict(self._model.named_parameters())
        numbers = {name: number for number, name in enumerate(self._trained)}
        states: dict[int, dict[str, Tensor]] = {}
        for key, tensor in saved.items():
            name, _, part = key.rpartition(".")
            if name not in numbers:
                problem = "the training state's optimiser is of other parameters"
                check_tensors({name: tensor}, {}, path=path, problem=problem)
            has_its_shape = tensor.shape == parameters[name].shape
            value = shared_out(tensor, parameters[name]) if has_its_shape else tensor
            states.setdefault(numbers[name], {})[part] = value
        self._optimizer.load_state_dict({**self._optimizer.state_dict(), "state": states})


def _prefixed(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}{name}": tensor for name, tensor in tensors.items()}


def _below(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {key.removeprefix(prefix): t for key, t in tensors.items() if key.startswith(prefix)}
