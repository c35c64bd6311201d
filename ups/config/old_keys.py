"""Keys of earlier configurations that mean nothing any more.

A training and a build read the same files and both pass over these keys; a build shall not wait for an import
of the models, so none is needed here.
"""

from __future__ import annotations

# Patterns of dotted keys, and why the key means nothing.
MEANINGLESS = {
    "training.dt": "the physical step is the difference of the stored times",
    "training.persistent_workers": "readers live as long as the build does",
    "training.cache_dir": "training.latent_cache_dir says where latents are",
    "training.checkpoint_interval": "checkpoint.interval says it, in optimiser steps",
    "training.log_per_task_metrics": "metrics are always logged per task",
    "training.query_sampling.enabled": "query_sampling.num_queries switches it on",
    "training.query_sampling.strategy": "points are drawn uniformly",
    "data.patch_size": "encoder.patch_size says it",
    "data.shard_limit": "data.limit says it",
    "data.download": "data.files and data.root name the sources",
    "data.task_sampling": "every task gives as many batches as it has data",
    "ttc.steps": "a rollout is as long as --horizon says",
    "ttc.dt": "the physical step is the difference of the stored times",
    "ttc.beam_width": "one state is kept a step",
    "ttc.horizon": "candidates are compared after one step",
    "ttc.max_evaluations": "ttc.candidates bounds them",
    "ttc.early_stop_margin": "all candidates are compared",
    "ttc.gamma": "candidates are compared after one step",
    "ttc.sampler": "ttc.noise_std says it",
    "ttc.reward": "candidates are scored by the laws of their task",
    "ttc.decoder": "the operator's file holds its decoder",
    "stages.consistency_distill.tau_schedule": "training.distill_num_taus says it, for all epochs",
    "stages.consistency_distill.target_loss": "gates decide on a student, and no single loss",
    "stages.consistency_distill.distill_*": "training.distill_num_taus and distill_micro_batch say it",
    "benchmark": "cuDNN chooses its algorithms itself",
    "deterministic": "runs on a CPU always repeat to the bit",
}
