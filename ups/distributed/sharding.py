"""Parameters shared out over the ranks (FSDP2), and such tensors made whole and shared out again.

A tensor of a training state is either plain, the same on every rank, or a `DTensor`, of which each rank has a
shard. Whole form is what one process would have; both forms have the same names.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

from ups.device import compiled_or_eager, with_own_code
from ups.distributed.ranks import Ranks

# What has no forward pass of its own.
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


@dataclass(frozen=True)
class ShardedPart:
    """A module whose parameters are shared out, its blocks each by itself.

    Attributes:
        module: Its blocks are the members of the lists in it.
        methods: Those that are called from outside; its parameters are whole while one of them runs.
    """

    module: nn.Module
    methods: Sequence[str] = ("forward",)


def shard_part(part: ShardedPart, mesh: DeviceMesh, **options: Any) -> None:
    """Share out the parameters of a module in place: first of each block, then those that are left.

    Args:
        part: Which module.
        mesh: Over which ranks.
        **options: As `fully_shard` has them.
    """
    # The rest would stay whole after a pass without gradients, and then miss a change of the weights.
    options = {"reshard_after_forward": True, **options}
    for block in blocks_of(part.module):
        fully_shard(block, mesh=mesh, **options)
    fully_shard(part.module, mesh=mesh, **options)
    for method in part.methods:
        if method != "forward":
            register_fsdp_forward_method(part.module, method)


def is_sharded(model: nn.Module) -> bool:
    """Whether parts of a model are."""
    return any(isinstance(module, FSDPModule) for module in model.modules())


def compile_blocks(part: ShardedPart, **options: Any) -> None:
    """Compile the forward pass of each block of a part in place, before it is sharded.

    Weights are gathered and given back around it, uncompiled.

    Args:
        part: Which module.
        **options: As `torch.compile` has them.
    """
    failures: set[str] = set()
    for block in blocks_of(part.module):
        compiled = compiled_or_eager(with_own_code(block.forward), said=failures, **options)
        setattr(block, "forward", compiled)  # noqa: B010  # mypy: a method


def blocks_of(module: nn.Module) -> list[nn.Module]:
    """Members of the outermost lists in a module that are made of several layers.

    A single layer isn't worth a message of its own: it stays with the rest of the module.
    """
    found: list[nn.Module] = []
    for child in module.children():
        if not isinstance(module, nn.ModuleList) or isinstance(child, _CONTAINERS):
            found += blocks_of(child)
        elif _num_layers(child) > 1:
            found.append(child)
    return found


def _num_layers(module: nn.Module) -> int:
    return sum(any(True for _ in layer.parameters(recurse=False)) for layer in module.modules())


def whole(tensors: Mapping[str, Tensor], *, is_kept: bool = True) -> dict[str, Tensor]:
    """Tensors of any form in whole form; a collective if one of them is sharded.

    Args:
        tensors: By name, on every rank the same names in the same order.
        is_kept: Whether this rank wants them: what was sharded doesn't stay in the memory of another one.

    Returns:
        By name, detached: what was sharded, on the CPU, and what was plain, as it is; nothing if not kept.
    """
    kept = {}
    for name, tensor in tensors.items():
        full = tensor.full_tensor().cpu() if isinstance(tensor, DTensor) else tensor
        if is_kept:
            kept[name] = full.detach()
    return kept


def shared_out(tensor: Tensor, like: Tensor) -> Tensor:
    """A whole tensor, the same on every rank, in the form of another one and on its device; no collective.

    Args:
        tensor: The whole one; one in that form already is only moved.
        like: Of the same shape, or plain.
    """
    if not isinstance(like, DTensor) or isinstance(tensor, DTensor):
        return tensor.to(like.device)
    there = tensor.to(like.to_local().device)
    return distribute_tensor(there, like.device_mesh, like.placements, src_data_rank=None)


@dataclass(frozen=True)
class Shard:
    """A part of a tensor.

    Attributes:
        values: Of the part.
        offsets: Where it begins along each axis.
    """

    values: Tensor
    offsets: tuple[int, ...]


def own_shards(tensors: Mapping[str, Tensor], ranks: Ranks) -> dict[str, Shard]:
    """What this rank has of tensors of any form, so that all ranks together have each number once.

    What several ranks have, they take in turns.

    Args:
        tensors: By name, on every rank the same names in the same order.
        ranks: All of them.

    Returns:
        Views, by name; without those that other ranks take.
    """
    own = {}
    for number, (name, tensor) in enumerate(tensors.items()):
        if not isinstance(tensor, DTensor):
            if number % ranks.world_size == ranks.rank:
                own[name] = Shard(tensor.detach(), (0,) * tensor.ndim)
        elif (local := tensor.to_local().detach()).numel() and _is_in_turn(tensor, number):
            (chunk,) = tensor.__create_chunk_list__()
            own[name] = Shard(local, tuple(chunk.offsets))
    return own


def _is_in_turn(tensor: DTensor, number: int) -> bool:
    """Whether this rank's shard, of those that are equal, is the one that counts."""
    mesh = tensor.device_mesh
    return all(
        mesh.get_local_rank(axis) == number % mesh.size(axis)
        for axis, placement in enumerate(tensor.placements)
        if placement.is_replicate()
    )


def load_shards(
    folder: str | os.PathLike[str], form_of: Callable[[str], Tensor | None] = lambda name: None
) -> dict[str, Tensor]:
    """Read the safetensors files of a folder, which hold shards, in whole form or sharded over other ranks.

    No collective: every rank reads what it needs, also a process without a group.

    Args:
        folder: Of files that say where their shards begin (`save_checkpoint` with `offsets`).
        form_of: Given a name, a tensor in whose form it is wanted; where there is none of its shape, it is
            read whole.

    Returns:
        New, by name; on the CPU where they are whole.
    """
    reader = HuggingFaceStorageReader(os.fspath(folder))
    tensors: dict[str, Tensor] = {}
    for name, found in reader.read_metadata().state_dict_metadata.items():
        assert isinstance(found, TensorStorageMetadata)
        form, dtype = form_of(name), found.properties.dtype
        if isinstance(form, DTensor) and form.shape == found.size:
            tensors[name] = torch.empty_like(form, dtype=dtype)
        else:
            tensors[name] = torch.empty(found.size, dtype=dtype)
    with _without_group():
        state_dict_loader.load(tensors, storage_reader=reader, no_dist=True)
    return tensors


@contextmanager
def _without_group() -> Iterator[None]:
    """Inside, PyTorch doesn't say that a process does alone what it is meant to do alone."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
