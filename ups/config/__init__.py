"""Configuration of a run: typed, from YAML with includes and dotted overrides.

Names come when they are first asked for: every build of stores asks `build_keys`, which needs none of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ups.config.loading import dump_config, load_config
    from ups.config.run import RunConfig
    from ups.config.stages import OptimizerConfig, SchedulerConfig, StageConfig
    from ups.config.training import TrainingConfig

# Module of each name.
_HOMES = {
    "OptimizerConfig": "stages",
    "RunConfig": "run",
    "SchedulerConfig": "stages",
    "StageConfig": "stages",
    "TrainingConfig": "training",
    "dump_config": "loading",
    "load_config": "loading",
}

__all__ = [
    "OptimizerConfig",
    "RunConfig",
    "SchedulerConfig",
    "StageConfig",
    "TrainingConfig",
    "dump_config",
    "load_config",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    from ups.errors import needs

    with needs("train"):
        value = globals()[name] = getattr(import_module(f"ups.config.{_HOMES[name]}"), name)
    return value
