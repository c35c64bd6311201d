"""Settings that change nothing: a sentence for each, so that you don't believe to use what isn't used."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from ups.config import RunConfig, StageConfig
from ups.errors import needs

with needs("train"):
    from pydantic import BaseModel

# Which kinds of optimiser and schedule read a setting.
_READ_BY_OPTIMIZER = {
    "betas": ("adamw", "adam", "muon_hybrid", "adamw8bit"),
    "eps": ("adamw", "adam", "muon_hybrid", "adamw8bit"),
    "implementation": ("adamw", "adam", "sgd", "muon_hybrid"),
    "momentum": ("sgd",),
    "muon_momentum": ("muon_hybrid",),
    "muon_ns_steps": ("muon_hybrid",),
    "muon_adjust_lr": ("muon_hybrid",),
    "muon_backend": (),
}
_READ_BY_SCHEDULER = {
    "t_max": ("cosine",),
    "eta_min": ("cosine",),
    "step_size": ("step",),
    "gamma": ("step",),
    "factor": ("plateau",),
    "patience": ("plateau",),
    "min_lr": ("plateau",),
}
# Settings of `training` that another one switches on.
_SWITCHED_BY = {
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
# How a latent operator is trained while encoder and decoder are frozen; joint training has its own losses.
_READ_BY_OPERATOR = {
    "operator": ("noise", "curriculum"),
    "training": ("lambda_relative", "lambda_spectral", "rollout_loss", "pushforward"),
}


def unused_settings(config: RunConfig, stage: str) -> Iterator[str]:
    """One sentence for each setting of a stage that has another value than its default and no effect."""
    settings = config.stages.get(stage)
    if settings is not None:
        optimizer, scheduler = settings.optimizer, settings.scheduler
        where = f"stages.{stage}"
        yield from _not_read(optimizer, optimizer.name, _READ_BY_OPTIMIZER, f"{where}.optimizer")
        yield from _not_read(scheduler, scheduler.name, _READ_BY_SCHEDULER, f"{where}.scheduler")
        for name in _changed(settings, _SWITCHED_BY.keys() & StageConfig.model_fields.keys()):
            is_own = getattr(settings, name) != getattr(config.training, name)  # a budget fills in the others
            if is_own and not getattr(config.stage(stage), switch := _SWITCHED_BY[name]):
                yield f"{where}.{name} has no effect: {where}.{switch} is off"
    for name in _changed(config.training, _SWITCHED_BY):
        switch = _SWITCHED_BY[name]
        of_stages = (getattr(some, switch, False) for some in config.stages.values())
        if not (getattr(config.training, switch) or any(of_stages)):
            yield f"training.{name} has no effect: training.{switch} is off"
    if config.training.shard_size is not None and config.training.parallel != "hsdp":
        yield f"training.shard_size has no effect: training.parallel is {config.training.parallel}"
    if stage == "autoencoder" and config.training.use_inverse_losses and not config.trains_jointly:
        yield "training.use_inverse_losses has no effect: stage joint trains with them"
    if stage == "joint":
        for section, names in _READ_BY_OPERATOR.items():
            for name in _changed(getattr(config, section), names):
                yield f"{section}.{name} has no effect in stage joint: stage operator reads it"
    if stage == "operator" and config.training.horizon == 1:
        if config.operator.curriculum:
            yield "operator.curriculum has no effect: training.horizon is 1"
        if config.training.pushforward:
            yield "training.pushforward has no effect: training.horizon is 1"
    if stage == "autoencoder" and not config.encoder.residual:
        for name in _changed(config.training, ("reconstruction_loss",)):
            yield f"training.{name} has no effect: encoder.residual is off, so nothing is trained"


def unused_in_one_stage(config: RunConfig) -> Iterator[str]:
    """As `unused_settings`, for what `--stage all` alone reads."""
    if config.evaluation.enabled:
        yield "evaluation.enabled has no effect: stage all evaluates, after training"


def unused_in_all_stages(config: RunConfig) -> Iterator[str]:
    """As `unused_settings`, for what the evaluation at the end of `--stage all` reads."""
    for name in ("baseline_flops", "baseline_samples", "baseline_seconds"):
        if getattr(config.evaluation, name) is not None and not config.evaluation.enabled:
            yield f"evaluation.{name} has no effect: evaluation.enabled is off"


def _not_read(
    section: BaseModel, kind: str, readers: Mapping[str, tuple[str, ...]], where: str
) -> Iterator[str]:
    for name in _changed(section, readers):
        if kind not in readers[name]:
            yield f"{where}.{name} has no effect: {kind} has no such setting"


def _changed(section: BaseModel, names: Iterable[str]) -> Iterator[str]:
    fields = type(section).model_fields
    return (name for name in names if getattr(section, name) != fields[name].default)
