"""Which keys of a configuration change what a stage computes: by them a training is kept, continued or begun.

Without torch, so that what a run would do can be said before anything is imported that trains.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ups.config.run import RunConfig
from ups.config.stages import BASELINE_LR, BASELINES, StageConfig
from ups.config.training import TrainingConfig

# Keys of `training` that each stage may have for itself, and where it has them.
OF_STAGES: dict[str, tuple[str, ...]] = {
    key: (key,) for key in TrainingConfig.model_fields if key in StageConfig.model_fields
}
OF_STAGES["lr"] = ("optimizer", "lr")
OF_STAGES["cpu_offload_optimizer"] = ("optimizer", "cpu_offload")
_DEFAULTS = StageConfig().model_dump(mode="json")  # of a stage that isn't named

# Which kinds of optimiser and schedule read a setting.
READ_BY_OPTIMIZER = {
    "betas": ("adamw", "adam", "muon_hybrid", "adamw8bit"),
    "eps": ("adamw", "adam", "muon_hybrid", "adamw8bit"),
    "implementation": ("adamw", "adam", "sgd", "muon_hybrid"),
    "momentum": ("sgd",),
    "muon_momentum": ("muon_hybrid",),
    "muon_ns_steps": ("muon_hybrid",),
    "muon_adjust_lr": ("muon_hybrid",),
    "muon_backend": (),
}
READ_BY_SCHEDULER = {
    "t_max": ("cosine",),
    "eta_min": ("cosine",),
    "step_size": ("step",),
    "gamma": ("step",),
    "factor": ("plateau",),
    "patience": ("plateau",),
    "min_lr": ("plateau",),
}
# Settings of `training` that another one switches on.
SWITCHED_BY = {
    "amp_dtype": "amp",
    "compile_mode": "compile",
    "compile_regions": "compile",
    "compile_cache": "compile",
    "inverse_loss_frequency": "use_inverse_losses",
    "lambda_alignment": "use_inverse_losses",
    "inverse_loss_warmup_epochs": "use_inverse_losses",
    "inverse_loss_max_weight": "use_inverse_losses",
    "lambda_inv_enc": "use_inverse_losses",
    "lambda_inv_dec": "use_inverse_losses",
}

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
    "training.num_workers",
    "training.pin_memory",
    "training.prefetch_factor",
    "training.preload",
    "training.use_parallel_encoding",
    "training.latent_cache_dir",
    "training.latent_cache_dtype",  # its latents are other data, which `check_data` compares
    "latent.pin_memory",
)
# Of them those below `stages.<stage>`; of batches, that over all ranks is compared, see `check_batch`.
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
    """Values by dotted key of what changes what a stage computes, as the stage uses them.

    What a stage may have for itself is the stage's key, whether it says it or takes it from `training`; what
    another setting switches off is left out, and of a stage that trains nothing all about training.

    Args:
        config: Of a run, or the values that one was saved as.
    """
    values = config.model_dump(mode="json") if isinstance(config, RunConfig) else config
    flat = flat_keys(_DEFAULTS, f"stages.{stage}.") | flat_keys(values)
    is_untrained = stage == "autoencoder" and flat.get("encoder.residual") is False
    left_out = {f"training.{key}" for key in OF_STAGES}
    for key, place in OF_STAGES.items():
        own = ".".join(("stages", stage, *place))
        sources = [own, f"training.{key}"]
        if stage in BASELINES:
            sources.insert(1, ".".join(("stages.operator", *place)))
        if stage in BASELINES and key == "lr":
            flat[own] = flat[own] or BASELINE_LR[stage]
        flat[own] = next((flat[name] for name in sources if flat.get(name) is not None), None)
    for key, switch in SWITCHED_BY.items():
        where = f"stages.{stage}" if key in OF_STAGES else "training"
        if not flat.get(f"{where}.{switch}"):
            left_out.add(f"{where}.{key}")
    for section, readers in (("optimizer", READ_BY_OPTIMIZER), ("scheduler", READ_BY_SCHEDULER)):
        kind = flat.get(f"stages.{stage}.{section}.name")
        left_out |= {f"stages.{stage}.{section}.{name}" for name, by in readers.items() if kind not in by}
    of_training = ("stages.", "training.") if is_untrained else ()
    return {
        key: value
        for key, value in flat.items()
        if _matters(key, stage) and key not in left_out and not key.startswith(of_training)
    }


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
