"""Muon for the hidden matrices of a model and AdamW for the rest, as one optimiser.

Muon moves a matrix by its momentum made orthogonal, so that all its directions are learnt alike (Jordan et
al. 2024, https://kellerjordan.github.io/posts/muon/).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ups.distributed.sharding import shared_out

NUM_MATRICES = "num_matrices"  # key of the groups that Muon takes
_MOMENTUM = "momentum_buffer"  # as Muon names it
_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
# Layers of blocks whose input isn't a hidden state, but a condition or a place: they are like embeddings.
_NOT_HIDDEN = frozenset({"modulation", "bias"})
_FUSED = {"qkv": 3}  # matrices that lie above each other in the weight of a layer of that name


def muon_matrices(model: nn.Module) -> dict[str, int]:
    """Weights that Muon is for: of linear layers and convolutions in blocks, the members of lists.

    So inputs, heads, embeddings and the weights of Fourier modes aren't among them.

    Returns:
        By the parameter's name, how many matrices of equal size lie above each other in it: queries, keys and
        values are three.
    """
    modules = dict(model.named_modules())
    lists = tuple(
        f"{name}." if name else "" for name, module in modules.items() if isinstance(module, nn.ModuleList)
    )
    return {
        f"{name}.weight": _FUSED.get(name.rpartition(".")[2], 1)
        for name, module in modules.items()
        if isinstance(module, _LAYERS) and name.startswith(lists) and _NOT_HIDDEN.isdisjoint(name.split("."))
    }


class MuonHybrid(torch.optim.Optimizer):
    """Muon and AdamW behind one `step`, with one list of groups and one state.

    A convolution's weight is taken as a matrix with a row for each channel that goes out.

    Args:
        groups: As PyTorch's optimisers take them; those with `num_matrices` are Muon's, so many matrices of
            equal size above each other in each parameter.
        muon: Settings of `torch.optim.Muon` beside those of groups.
        adamw: Settings of `torch.optim.AdamW` beside those of groups.
    """

    def __init__(
        self, groups: Sequence[dict[str, Any]], *, muon: Mapping[str, Any], adamw: Mapping[str, Any]
    ) -> None:
        # Both are handed groups and state in every step, since loading a state makes new ones.
        self._muon = torch.optim.Muon([{"params": []}], **muon)
        self._adamw = torch.optim.AdamW([{"params": []}], **adamw)
        defaults = {True: self._muon.defaults, False: self._adamw.defaults}
        super().__init__([{**defaults[NUM_MATRICES in group], **group} for group in groups], {})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """See `torch.optim.Optimizer.step`."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if NUM_MATRICES in group:
                self._step_matrices(group)
        self._adamw.param_groups = [group for group in self.param_groups if NUM_MATRICES not in group]
        self._adamw.state = self.state
        self._adamw.step()
        return loss

    def _step_matrices(self, group: dict[str, Any]) -> None:
        ready = [parameter for parameter in group["params"] if parameter.grad is not None]
        for parameter in ready:
            if _MOMENTUM not in self.state[parameter]:
                self.state[parameter][_MOMENTUM] = torch.zeros_like(parameter)
            if not isinstance(parameter, DTensor):
                self._step_whole(group, *self._of_step(parameter))
        sharded = [parameter for parameter in ready if isinstance(parameter, DTensor)]
        num_ranks = dist.get_world_size() if sharded else 1
        for first in range(0, len(sharded), num_ranks):
            self._step_shared(group, sharded[first : first + num_ranks])

    def _step_shared(self, group: dict[str, Any], parameters: Sequence[DTensor]) -> None:
        """A step of at most as many sharded parameters as there are ranks, each of which moves one.

        Orthogonal is a property of the whole matrix, not of a rank's rows. All are gathered before the first
        one is moved, as no rank takes part in the next collective while it computes.
        """
        rank, mine = dist.get_rank(), list[Tensor]()
        for owner, parameter in enumerate(parameters):
            whole = [tensor.full_tensor() for tensor in self._of_step(parameter)]
            if owner == rank:
                mine = whole
        if mine:
            self._step_whole(group, *mine)
        for owner, parameter in enumerate(parameters):
            weight, _, momentum = self._of_step(parameter)
            for number, shard in ((0, weight), (2, momentum)):
                moved = (
                    mine[number]
                    if owner == rank
                    else torch.empty(shard.shape, dtype=shard.dtype, device=shard.device)
                )
                dist.broadcast(moved, src=owner)
                shard.copy_(shared_out(moved, shard))

    def _of_step(self, parameter: Tensor) -> list[Any]:
        assert parameter.grad is not None
        return [parameter.detach(), parameter.grad, self.state[parameter][_MOMENTUM]]

    def _step_whole(self, group: dict[str, Any], parameter: Tensor, grad: Tensor, momentum: Tensor) -> None:
        """A step in place, of one parameter."""
        rows, num = len(parameter), group[NUM_MATRICES]
        matrices, momenta = (tensor.view(rows, -1).chunk(num) for tensor in (parameter, momentum))
        for matrix, part in zip(matrices, grad.reshape(rows, -1).chunk(num), strict=True):
            matrix.grad = part
        self._muon.param_groups = [{**group, "params": list(matrices)}]
        for matrix, part in zip(matrices, momenta, strict=True):
            self._muon.state[matrix] = {_MOMENTUM: part}
        self._muon.step()
        self._muon.param_groups.clear()  # what it holds is as large as the parameter
        self._muon.state.clear()
