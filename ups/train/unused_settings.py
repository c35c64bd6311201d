"""Settings that someone has changed and that change nothing, because of other settings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from pydantic import BaseModel

from ups.config import RunConfig

# Which kinds of optimiser and schedule read a setting.
_READ_BY_OPTIMIZER = {
    "betas": ("adamw", "adam"),
    "eps": ("adamw", "adam"),
    "momentum": ("sgd",),
    "muon_momentum": ("muon_hybrid",),
    "muon_ns_steps": ("muon_hybrid",),
    "muon_backend": ("muon_hybrid",),
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
    "inverse_loss_frequency": "use_inverse_losses",
}
# How a latent operator is trained while encoder and decoder are frozen; joint training has its own losses.
_READ_BY_OPERATOR = {
    "operator": ("noise", "curriculum"),
    "training": ("lambda_relative", "lambda_spectral"),
}


def unused_settings(config: RunConfig, stage: str) -> Iterator[str]:
    """One sentence for each setting of a stage that has another value than its default and no effect."""
    settings = config.stages.get(stage)
    if settings is not None:
        optimizer, scheduler = settings.optimizer, settings.scheduler
        where = f"stages.{stage}"
        yield from _not_read(optimizer, optimizer.name, _READ_BY_OPTIMIZER, f"{where}.optimizer")
        yield from _not_read(scheduler, scheduler.name, _READ_BY_SCHEDULER, f"{where}.scheduler")
    for name in _changed(config.training, _SWITCHED_BY):
        switch = _SWITCHED_BY[name]
        if not getattr(config.training, switch):
            yield f"training.{name} has no effect: training.{switch} is off"
    if stage == "autoencoder" and config.training.use_inverse_losses and not config.trains_jointly:
        yield "training.use_inverse_losses has no effect: stage joint trains with them"
    if stage == "joint":
        for section, names in _READ_BY_OPERATOR.items():
            for name in _changed(getattr(config, section), names):
                yield f"{section}.{name} has no effect in stage joint: stage operator reads it"
    if stage == "operator" and config.operator.curriculum and config.training.rollout_horizon == 1:
        yield "operator.curriculum has no effect: training.rollout_horizon is 1"


def unused_in_one_stage(config: RunConfig) -> Iterator[str]:
    """As `unused_settings`, for what `--stage all` alone reads."""
    if config.evaluation.enabled:
        yield "evaluation.enabled has no effect: stage all evaluates, after training"


def unused_in_all_stages(config: RunConfig) -> Iterator[str]:
    """As `unused_settings`, for what the evaluation at the end of `--stage all` reads."""
    for name in ("baseline_seconds", "baseline_samples"):
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
