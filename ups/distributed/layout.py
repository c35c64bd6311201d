"""How ranks share a training: whole copies (DDP), shards over all of them (FSDP2) or over groups (HSDP)."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from ups.distributed.ranks import Ranks
from ups.errors import ConfigError

Parallel = Literal["ddp", "fsdp2", "hsdp"]


def make_mesh(
    parallel: Parallel, ranks: Ranks, *, device_type: str, shard_size: int | None = None
) -> DeviceMesh | None:
    """Over which ranks parameters are shared out; a collective.

    Args:
        parallel: How.
        ranks: All of them.
        device_type: Where parameters are.
        shard_size: Ranks of a group that has all parameters between them, with "hsdp"; by default those of a
            machine.

    Returns:
        Of one axis with "fsdp2"; with "hsdp" of the groups and the ranks in each; None where every rank has
        all parameters.
    """
    if parallel == "ddp" or ranks.world_size == 1:
        return None
    if parallel == "fsdp2":
        return init_device_mesh(device_type, (ranks.world_size,), mesh_dim_names=("shard",))
    size = shard_size or ranks.local_world_size
    if ranks.world_size % size:
        raise ConfigError(
            f"training.shard_size = {size}: {ranks.world_size} ranks don't make whole groups of that size",
            kind="shard_size",
            expected=f"a divisor of {ranks.world_size}",
        )
    groups = ranks.world_size // size
    return init_device_mesh(device_type, (groups, size), mesh_dim_names=("replicate", "shard"))


def sharding_options(amp_dtype: torch.dtype | None) -> dict[str, Any]:
    """What `fully_shard` is called with.

    Weights are sent in the dtype of autocast, which would round them anyway, and gradients are added in
    float32. What a block is given stays as it is: autocast decides, operation by operation.

    Args:
        amp_dtype: Of autocast; None where there is none.
    """
    if amp_dtype is None:
        return {}
    policy = MixedPrecisionPolicy(
        param_dtype=amp_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    return {"mp_policy": policy}


def set_exchange(modules: list[torch.nn.Module], is_on: bool) -> None:
    """Whether backward passes through sharded modules exchange gradients, or only add them up."""
    for module in modules:
        assert isinstance(module, FSDPModule)
        module.set_requires_gradient_sync(is_on)
