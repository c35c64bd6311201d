"""Configuration of a run: typed, from YAML with includes and dotted overrides.

Names come when they are first asked for: every build of stores asks `build_keys`, which needs none of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ups.config.loading import dump_config, load_config
    from ups.config.run import OptimizerConfig, RunConfig, SchedulerConfig, StageConfig, TrainingConfig

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
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    from ups.errors import needs

    module = "loading" if name.endswith("_config") else "run"
    with needs("train"):
        value = globals()[name] = getattr(import_module(f"ups.config.{module}"), name)
    return value
