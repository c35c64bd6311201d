"""Which keys of a configuration change what a stage computes: by them a training is kept, continued or begun.

Without torch, so that what a run would do can be said before anything is imported that trains.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ups.config.run import RunConfig
from ups.config.stages import BASELINES

# How long a build may take for a batch, and where stores are shared: no store depends on it.
NOT_OF_STORES = (
    *("cache.encode_timeout_s", "cache.commit_timeout_s"),
    *("cache.remote", "cache.remote_timeout_s"),
)
# Keys that don't change what a step computes, so they may differ between a run and its continuation.
_FREE_KEYS = (
    *NOT_OF_STORES,
    "checkpoint.",
    "logging.",
    "evaluation.",
    "pipeline.",
    "ttc.",
    "reading.",
    "cache.dir",
    "cache.codec",
    "cache.partitions",
    "data.root",
    "data.stage_dir",
    "data.follow_external",
    "training.log_",
    "training.patience",
    "training.batch_size",  # the batch over all ranks is compared, see `check_batch`
    "training.global_batch_size",
    "training.device",
    "training.rank_timeout_s",
    "training.stall_timeout_s",
    "training.parallel",
    "training.async_checkpoint",
    "training.shard_size",
    "training.num_gpus",
    "training.use_fsdp2",
    "training.activation_checkpointing",
    "training.compile",  # with its mode, regions and cache
    "operator.pdet.use_activation_checkpoint",
    "operator.attention",
    "operator.pdet.use_flex",
    "training.use_flex",
    "training.cpu_offload_optimizer",
    "training.num_workers",
    "training.pin_memory",
    "training.prefetch_factor",
    "training.preload",
    "training.use_parallel_encoding",
    "training.latent_cache_dir",
    "training.latent_cache_dtype",  # its latents are other data, which `check_data` compares
    "latent.pin_memory",
)
# Of them those below `stages.<stage>`.
_FREE_KEYS_OF_EVERY_STAGE = (
    *("batch_size", "global_batch_size", "patience", "compile"),
    *("optimizer.cpu_offload", "optimizer.implementation"),
)

# Of the sections of other models, what the baselines' stages read.
_SHARED_BY_BASELINES = (
    *("operator.curriculum", "operator.val_trajectories"),
    *("baselines.horizon", "baselines.curriculum", "baselines.noise"),
)
_OTHER_MODELS = ("operator.", "latent.", "encoder.", "decoder.", "baselines.")

# What generative models alone read, and of that what doesn't change their training.
_OF_GENERATIVE = ("diffusion.", "steady_prior.", "training.tau_distribution.")
_STUDENT, _OF_STUDENT = "consistency_distill", ("training.distill_",)
_GENERATIVE = ("diff_residual", _STUDENT, "steady_prior")
_FREE_OF_GENERATIVE = (
    *("diffusion.sampler", "diffusion.num_sampler_steps", "diffusion.tolerance", "diffusion.max_evaluations"),
    *("diffusion.residual_dir", "diffusion.operator", "diffusion.val_members", "diffusion.export_anyway"),
)

# What decided the operator, and the stages before it.
_OF_EARLIER_STAGES = (
    *("operator.noise", "operator.curriculum", "encoder.", "decoder.", "latent.", "laws."),
    *("training.horizon", "training.pushforward", "training.rollout_loss", "training.lambda_"),
    *("training.use_inverse_losses", "training.inverse_loss_", "training.physics_priors."),
    *("training.allow_unknown_encoder", "training.cache_mode"),
    *("training.query_sampling.", "training.reconstruction_loss", "training.max_val_frames"),
)

# What of laws a stage reads that has no losses by them.
_AUGMENTED, _SYMMETRIES = ("autoencoder", "steady_prior", *BASELINES), (".equation", ".is_forced")

# Settings of the operator and of the encoder's use, which an autoencoder's training doesn't look at.
_FREE_KEYS_OF_STAGE = {
    "autoencoder": (
        "operator.",
        "latent.checkpoint",
        "latent.device",
        "latent.encoder",
        "latent.compute_dtype",
        "latent.micro_batch",
        "latent.compile",
        "training.stride",
        "training.horizon",
        "training.lambda_",
        "training.use_inverse_losses",
        "training.inverse_loss_",
        "training.physics_priors.",
        "training.allow_unknown_encoder",
        "training.cache_mode",
    ),
    # It depends on the operator's file, which its data's identity names, not on how that was trained.
    "diff_residual": (*_FREE_OF_GENERATIVE, "steady_prior.", *_OF_EARLIER_STAGES),
    # As of the teacher's; what pairs are made of, their stores' identities say.
    _STUDENT: (
        *("diffusion.", "steady_prior.", "training.distill_micro_batch", "training.distill_teacher"),
        *("training.distill_compile_teacher", "training.distill_pair_dir", "training.distill_num_pairs"),
        *_OF_EARLIER_STAGES,
    ),
    # An autoencoder's file is named by its data's identity.
    "steady_prior": (
        *_FREE_OF_GENERATIVE,
        *("diffusion.lead_times", "diffusion.residual_", "diffusion.num_pairs"),
        *("operator.noise", "operator.curriculum", "operator.val_trajectories", "decoder."),
        *("latent.checkpoint", "latent.device", "latent.encoder", "latent.compute_dtype"),
        *("latent.micro_batch", "latent.compile"),
        *("training.stride", "training.horizon", "training.pushforward", "training.rollout_loss"),
        *("training.lambda_", "training.use_inverse_losses", "training.inverse_loss_"),
        *("training.physics_priors.", "training.allow_unknown_encoder", "training.cache_mode"),
        *("training.query_sampling.", "training.reconstruction_loss", "training.max_val_frames"),
    ),
}


def stage_keys(config: RunConfig | Mapping[str, Any], stage: str) -> dict[str, Any]:
    """Values by dotted key of what changes what a stage computes.

    Args:
        config: Of a run, or the values that one was saved as.
    """
    values = config.model_dump(mode="json") if isinstance(config, RunConfig) else config
    return {key: value for key, value in flat_keys(values).items() if _matters(key, stage)}


def _matters(key: str, stage: str) -> bool:
    of_other_stage = key.startswith("stages.") and not key.startswith(f"stages.{stage}.")
    if stage in BASELINES and key.startswith(_OTHER_MODELS):
        return key.startswith((*_SHARED_BY_BASELINES, f"baselines.{stage}."))
    if stage in _AUGMENTED and key.startswith("laws."):
        return key.endswith(_SYMMETRIES)
    if stage != _STUDENT and key.startswith(_OF_STUDENT):
        return False
    if key.startswith("baselines.") or (stage not in _GENERATIVE and key.startswith(_OF_GENERATIVE)):
        return False
    own = key.removeprefix(f"stages.{stage}.")
    is_free = own != key and own.startswith(_FREE_KEYS_OF_EVERY_STAGE)
    return not (of_other_stage or is_free or key.startswith(_FREE_KEYS + _FREE_KEYS_OF_STAGE.get(stage, ())))


def nested_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    """Sections of values by dotted key, such as `flat_keys` gives."""
    nested: dict[str, Any] = {}
    for key, value in values.items():
        *sections, name = key.split(".")
        inner = nested
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[name] = value
    return nested


def flat_keys(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A configuration's values by dotted key, such as those of `RunConfig.model_dump`."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{prefix}{name}"
        flat |= flat_keys(value, f"{key}.") if isinstance(value, Mapping) else {key: value}
    return flat
