"""Settings that change nothing: a sentence for each, so that you don't believe to use what isn't used."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ups.config import RunConfig, StageConfig
from ups.config.stage_keys import SWITCHED_BY, not_read
from ups.section import Section

# How a latent operator is trained while encoder and decoder are frozen; joint training has its own losses.
_READ_BY_OPERATOR = {
    "operator": ("noise", "curriculum"),
    "training": ("lambda_relative", "lambda_spectral", "rollout_loss", "losses", "pushforward"),
}


def unused_settings(config: RunConfig, stage: str) -> Iterator[str]:
    """One sentence for each setting of a stage that has another value than its default and no effect."""
    settings = config.stages.get(stage)
    if settings is not None:
        where = f"stages.{stage}"
        for section, values in (("optimizer", settings.optimizer), ("scheduler", settings.scheduler)):
            for name in _changed(values, not_read(type(values), values.name)):
                yield f"{where}.{section}.{name} has no effect: {values.name} has no such setting"
        for name in _changed(settings, SWITCHED_BY.keys() & StageConfig.model_fields.keys()):
            is_own = getattr(settings, name) != getattr(config.training, name)  # a budget fills in the others
            if is_own and not getattr(config.stage(stage), switch := SWITCHED_BY[name]):
                yield f"{where}.{name} has no effect: {where}.{switch} is off"
    for name in _changed(config.training, SWITCHED_BY):
        switch = SWITCHED_BY[name]
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
    if config.training.losses and stage != "joint":
        for name in _changed(config.training, ("rollout_loss",)):
            yield f"training.{name} has no effect: training.losses has all losses"
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


def _changed(section: Section, names: Iterable[str]) -> Iterator[str]:
    fields = type(section).model_fields
    return (name for name in names if getattr(section, name) != fields[name].default)
