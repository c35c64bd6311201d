"""Keys of earlier configurations that mean nothing any more, and those whose feature isn't there yet.

A training and a build read the same files and both pass over these keys; a build shall not wait for an import
of the models, so none is needed here.
"""

from __future__ import annotations

from typing import Any

# Patterns of dotted keys, and why the key means nothing.
MEANINGLESS = {
    "training.dt": "the physical step is the difference of the stored times",
    "training.num_gpus": "`torchrun --nproc-per-node N` starts a process a GPU",
    "training.persistent_workers": "readers live as long as the build does",
    "training.cache_dir": "training.latent_cache_dir says where latents are",
    "training.checkpoint_interval": "checkpoint.interval says it, in optimiser steps",
    "training.inverse_loss_warmup_epochs": "inverse losses have their weight from the start",
    "training.inverse_loss_max_weight": "inverse losses have weight 1",
    "training.lambda_inv_enc": "inverse losses have weight 1",
    "training.lambda_inv_dec": "inverse losses have weight 1",
    "training.log_per_task_metrics": "metrics are always logged per task",
    "training.query_sampling.enabled": "query_sampling.num_queries switches it on",
    "training.query_sampling.strategy": "points are drawn uniformly",
    "data.patch_size": "encoder.patch_size says it",
    "data.shard_limit": "data.limit says it",
    "data.download": "data.files and data.root name the sources",
    "data.task_sampling": "every task gives as many batches as it has data",
    "benchmark": "cuDNN chooses its algorithms itself",
    "deterministic": "runs on a CPU always repeat to the bit",
}

# Patterns of dotted keys whose feature isn't there yet, its name, and the values that leave it off.
NOT_YET: dict[str, tuple[str, tuple[Any, ...]]] = {
    "training.use_fsdp2": ("sharded training (FSDP2)", (None, False)),
    "training.cpu_offload_optimizer": ("optimiser states on the CPU", (None, False)),
    "training.query_sampling.curriculum.enabled": ("a curriculum of queries", (None, False)),
    "training.query_sampling.curriculum": ("a curriculum of queries", (None, False)),
    "training.physics_priors.enabled": ("physics priors", (None, False)),
    "training.physics_priors": ("physics priors", (None, False)),
    "training.distill_*": ("distillation", ()),
    "training.tau_distribution": ("distillation", ()),
    "ttc.enabled": ("test-time conditioning", (None, False)),
    "ttc": ("test-time conditioning", (None, False)),
    "diffusion": ("the diffusion corrector", ()),
}
# Settings of features that have no switch of their own: their stage is the switch, and it isn't there yet.
SET_BY_STAGE = ("training.distill_*", "training.tau_distribution", "diffusion")
