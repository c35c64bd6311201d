"""Equal budgets: what an operator's training took, for the baselines that are to be compared with it."""

from __future__ import annotations

from collections.abc import Sequence

from ups.errors import ConfigError
from ups.eval.train_baseline import Budget
from ups.eval.training_logs import StageLog

_ENCODERS = ("autoencoder", "joint")  # stages that leave an autoencoder, of which the last one's is used


def equal_budgets(
    logs: Sequence[StageLog],
    *,
    num_tasks: int,
    seconds: float | None = None,
    samples: int | None = None,
) -> list[Budget]:
    """Wall time and samples of each baseline of each task.

    Wall time is that of the stages that made the operator, its autoencoder's included, from the first
    optimiser step on; samples are the windows that the operator was trained on, in stage operator or, without
    one, in stage joint. A run on several tasks had that much for all of them, so a baseline of one task gets
    its share.

    Args:
        logs: Of the operator's run.
        num_tasks: Tasks of the run.
        seconds: Wall time instead of the logs'.
        samples: Windows instead of the logs'.

    Raises:
        ConfigError: Kind "no_log", if there is no log of the operator and a budget isn't given.
    """
    used = _used(logs)
    operator = next((log for log in reversed(used) if log.stage != "autoencoder"), None)
    if operator is None and (seconds is None or samples is None):
        raise ConfigError(
            "no training log says what the operator's training took",
            kind="no_log",
            expected="operator.jsonl or joint.jsonl in checkpoint.dir",
            hint="say --budget-seconds and --budget-samples",
        )
    if seconds is None:
        seconds = sum(log.seconds - log.startup_s for log in used) / num_tasks
    if samples is None:
        assert operator is not None
        samples = max(1, operator.samples // num_tasks)
    return [Budget(seconds=round(seconds, 1)), Budget(samples=samples)]


def _used(logs: Sequence[StageLog]) -> list[StageLog]:
    """Logs of one autoencoder and of what came after it: another one's time made nothing that is used."""
    encoders = [log for log in logs if log.stage in _ENCODERS]
    last = max(encoders, key=lambda log: log.trained_at, default=None)
    return [log for log in logs if log is last or log.stage not in _ENCODERS]
