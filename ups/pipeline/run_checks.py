"""Checks of what a run leaves and reports: checkpoints, Weights & Biases, the evaluation; no torch."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

from ups.config import RunConfig
from ups.config.checks import check_latent_size
from ups.errors import CheckpointError, MissingExtraError, check_installed
from ups.laws import laws_of
from ups.output import check_writable
from ups.pipeline.report import Checks
from ups.train.checks import has_given_encoder
from ups.train.saved_state import SavedState, state_path
from ups.train.tracking import is_wandb_there
from ups.trained.checkpoint import read_document
from ups.trained.specs import AUTOENCODER, check_task, parse_spec

_WITHOUT_KEY = ("offline", "disabled")  # modes of wandb


def check_checkpoints(config: RunConfig, stages: tuple[str, ...], checks: Checks) -> None:
    """Where checkpoints go, what stages continue from, and an encoder that is given."""
    group, folder = "checkpoints", config.checkpoint.dir
    if checks.passes(group, lambda: check_writable(folder)):
        checks.ok(group, f"{folder}: can be written")
    for other in _named_folders(config):
        checks.passes(group, partial(check_writable, other))
    for name in stages:
        _check_state(config, name, checks)
    if has_given_encoder(config):
        with checks.collecting(group):
            _check_given(config)
            checks.ok(group, f"{config.autoencoder_path}: an autoencoder of these tasks and sizes")


def _named_folders(config: RunConfig) -> list[Path]:
    """Where `ups run` writes, besides `checkpoint.dir`, which has all that isn't named."""
    pipeline = config.pipeline
    return [folder for folder in (pipeline.dir, pipeline.report_dir, pipeline.best_dir) if folder is not None]


def _check_state(config: RunConfig, stage: str, checks: Checks) -> None:
    path = state_path(config, stage)
    if not path.exists():
        checks.ok("checkpoints", f"stage {stage} begins from scratch")
        return
    try:
        state = SavedState.read(path)
        state.check_config(config, stage=stage)
    except CheckpointError as error:
        if error.kind in ("other_config", "too_old") and SavedState.read(path).is_over:
            checks.warn("checkpoints", f"stage {stage} would be trained again: {error}")
        else:
            checks.refuse("checkpoints", error)
    else:
        checks.ok("checkpoints", f"stage {stage} continues after step {state.document['position']['step']}")


def _check_given(config: RunConfig) -> None:
    """Refuse a given encoder that isn't there, or isn't for this run."""
    path = config.autoencoder_path
    spec = parse_spec(read_document(path, kind=AUTOENCODER), path)
    for task in config.data.tasks:
        check_task(spec, task, path)
    check_latent_size(config, (spec.num_tokens, spec.latent_dim), path)


def check_wandb(config: RunConfig, checks: Checks) -> None:
    """Whether Weights & Biases is there, and lets a run begin."""
    group, settings = "W&B", config.logging.wandb
    if not settings.enabled:
        checks.ok(group, "off: logging.wandb.enabled = false")
        return
    if not is_wandb_there():
        checks.warn(group, f"nothing goes there: {MissingExtraError.of('wandb', extra='wandb')}")
        return
    mode = os.environ.get("WANDB_MODE", "online")
    has_key = "WANDB_API_KEY" in os.environ or (Path.home() / ".netrc").exists()
    if mode not in _WITHOUT_KEY and not has_key:
        checks.warn(group, "no WANDB_API_KEY and no ~/.netrc: run `wandb login`, or set WANDB_MODE=offline")
    project = settings.project or os.environ.get("WANDB_PROJECT")
    if project is None:
        checks.warn(group, "logging.wandb.project isn't set: runs go to `uncategorized`")
    checks.ok(group, f"{mode}, project {project or 'uncategorized'}")


def check_events(config: RunConfig, checks: Checks) -> None:
    """Whether events for TensorBoard can be written, where they are wanted."""
    group = "TensorBoard"
    if not config.logging.tensorboard.enabled:
        checks.ok(group, "off: logging.tensorboard.enabled = false")
    elif checks.passes(group, lambda: check_installed("tensorboard", extra="tensorboard")):
        checks.ok(group, "events can be written")


def check_evaluation(config: RunConfig, folder: Path, checks: Checks) -> None:
    """What is evaluated; that it can be is checked with what stages refuse."""
    group = "evaluation"
    if not config.evaluation.enabled:
        checks.ok(group, "off: evaluation.enabled = false")
    elif not checks.has_problem(group):
        checks.ok(group, f"on {config.evaluation.split}, to {folder}")
    if config.ttc.enabled:
        for task in config.data.tasks:
            laws = laws_of(task, config.own_laws)
            if laws.equation is None and not laws.conserved:
                checks.warn(group, f"ttc.enabled, but no law of {task} is known: say it under laws.{task}")
