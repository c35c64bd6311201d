"""Where the stores of a run lie, and what they say about what they were made of."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ups.config.shared import DataConfig

if TYPE_CHECKING:
    from ups.data.fields import Store

_SUFFIX = ".zarr.zip"


def store_path(folder: Path, task: str, split: str) -> Path:
    """Where the build puts the store of a task and split."""
    return folder / f"{task}_{split}{_SUFFIX}"


def place_of(path: Path) -> Path | None:
    """Where a store is: at its path, or as the partitions that several machines made; None if nowhere."""
    if path.exists():
        return path
    name = path.name.removesuffix(_SUFFIX)
    partitions = sorted(path.parent.glob(f"{name}-*-of-*{_SUFFIX}"))
    if not partitions:
        return None
    count = partitions[0].name.rpartition("-of-")[2]
    return path.with_name(f"{name}-*-of-{count}")


def encoder_of(store: Store) -> Mapping[str, Any] | None:
    """Identity of the encoder that made a store's latents; None if the store doesn't say."""
    found = store.identity.get("content", {}).get("encoder")
    return found if isinstance(found, Mapping) else None


def differing_selection(store: Store, data: DataConfig) -> dict[str, tuple[Any, Any]]:
    """In what a store holds another selection of the data than the configured one.

    Only a store of a split that was drawn has split fractions.

    Returns:
        By key of `data` what the store says, None if it doesn't, and what is wanted.
    """
    content = store.identity.get("content", {})
    wanted: dict[str, Any] = {"reduce_space": data.reduce_space, "reduce_time": data.reduce_time}
    if content.get("split_fractions") is not None:
        wanted["split_fractions"] = list(data.split_fractions)
    return {key: (content.get(key), value) for key, value in wanted.items() if content.get(key) != value}
