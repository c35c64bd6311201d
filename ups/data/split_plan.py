"""What a build of a split would read: for those that read it themselves, now or while they train."""

from __future__ import annotations

from ups.config.shared import BuildConfig
from ups.errors import ConfigError
from ups_store.build.plan import StorePlan, plan_store
from ups_store.build.readers import Readers


def plan_split(config: BuildConfig, task: str, split: str, *, readers: Readers) -> StorePlan:
    """The plan of a split's store, which has samples.

    Args:
        config: Which samples of which files.
        task: Name of the task.
        split: "train", "val" or "test".
        readers: Who looks at the files.

    Raises:
        ConfigError: Kind "empty_split".
        ups_store.SourceError: If sources are missing or unreadable.
    """
    plan = plan_store(config, task, split, readers=readers)
    if plan.num_samples == 0:
        raise ConfigError(
            f"{plan.title} would be empty",
            kind="empty_split",
            path=config.data.root,
            expected="at least 1 sample",
            hint="change data.split_fractions, or bring more samples",
        )
    return plan
