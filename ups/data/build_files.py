"""Where a build of stores, run as a process of its own, leaves what it says."""

from __future__ import annotations

from pathlib import Path

from ups_store.build.ranks import Ranks


def own_manifest(path: Path) -> Path:
    """Where a build that is told a manifest's path writes it: each of several machines has its own.

    Raises:
        ups_store.ConfigError: If the variables of `torchrun` contradict each other.
    """
    return Ranks.from_environment().own_file(path)
