"""Configuration of a run: typed, from YAML with includes and dotted overrides."""

from ups.errors import needs

with needs("train"):
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
