"""The earlier script `precompute_latent_cache.py`: `ups-store build` with the same flags, of latents.

That command builds stores of fields unless a section `latent` or `--checkpoint` says otherwise; this one
builds stores of latents unless `latent.encoder=none` does. Where the command line names neither a
configuration nor a task, it takes `configs/cache_precompute_defaults.yaml`. Where `logging.wandb.enabled` is
set, the seconds by phase and the throughput go to Weights & Biases, too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ups_store.build import main

if TYPE_CHECKING:
    from ups.config.run import WandbConfig
    from ups_store.build import BuildReport

# A section, in which everything has its default; what the configuration and the flags say merges in.
_LATENTS = "latent={}"
_DEFAULTS = "configs/cache_precompute_defaults.yaml"  # the user's own, or the shipped one
_JOB = "precompute"  # what its metrics are called at Weights & Biases
_NAMING = ("--config", "--tasks", "--task", "data.tasks", "data.task")


def precompute() -> None:
    """Build stores of latents as the command line says, and end the process with the build's exit code."""
    named = {word.partition("=")[0] for word in sys.argv[1:]}
    defaults = [] if named.intersection(_NAMING) else ["--config", _DEFAULTS]
    sys.argv[1:1] = [_LATENTS, *defaults]
    main(begin=begin)


def begin(config: Path | None, overrides: Sequence[str]) -> Callable[[BuildReport], None] | None:
    """What the build's report is given to: a run of Weights & Biases, if the configuration wants one."""
    from ups_store.build import read_config

    values = read_config(config, overrides=overrides)
    if not values.get("logging"):
        return None
    settings = _wandb(values["logging"], config, overrides)
    if not settings.enabled:
        return None
    from ups.train.launched import of_stores
    from ups.train.tracking import open_wandb

    folder = Path((values.get("checkpoint") or {}).get("dir") or "checkpoints")

    def log(report: BuildReport) -> None:
        sink = open_wandb(settings, folder, job=_JOB, run_config=values)
        if sink is not None:
            startup = report.startup
            promised = of_stores(startup.seconds["total"], is_reused=startup.reused)
            sink.write({"event": "startup", "stage": _JOB, **startup.metrics(), **promised})
            sink.close(has_failed=False)

    return log


def _wandb(logging: Any, config: Path | None, overrides: Sequence[str]) -> WandbConfig:
    """The settings of Weights & Biases, checked as a training checks them."""
    from pydantic import ValidationError, create_model

    from ups.config.run import LoggingConfig, RunConfig
    from ups_store.build import config_error

    given = (
        {key: value for key, value in logging.items() if value is not None}
        if isinstance(logging, dict)
        else logging
    )
    # The build has no such section, and a training's configuration may lack what only a training needs.
    model = create_model("OfLogging", logging=(LoggingConfig, ...))
    try:
        checked = model.model_validate({"logging": given})
    except ValidationError as error:
        outside = [override.partition("=")[0] for override in overrides]
        raise config_error(error, model=RunConfig, path=config, outside=outside) from error
    settings: WandbConfig = checked.logging.wandb  # type: ignore[attr-defined]
    return settings
