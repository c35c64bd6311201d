"""Stores of a run: where they lie, and whether they were made from what the configuration says."""

from __future__ import annotations

import glob
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ups_store
from ups.config import RunConfig
from ups.config.build_keys import to_build
from ups.config.own_encoder import check_own_encoder
from ups.errors import ConfigError
from ups.grid import FIELDS, LATENT
from ups.trained.encoder import LatentEncoder
from ups.trained.specs import AUTOENCODER_FILE
from ups_store.build import (
    BuildConfig,
    BuildRank,
    CacheConfig,
    DataConfig,
    LatentConfig,
    ReadingConfig,
    check_replaceable,
)
from ups_store.errors import CorruptChunkError, FormatError, StoreError, StoreNotFoundError

__all__ = ["UNREADABLE", "Store", "StoreError"]  # the others go without saying

Store = ups_store.AnyStore

UNREADABLE = (CorruptChunkError, FormatError, StoreNotFoundError)  # a store that is read, as a source can be

_SUFFIX = ".zarr.zip"
# Precision of encoding is part of a store's identity, but it makes no other encoder.
_PRECISION = ("compute_dtype",)


def open_as(path: Path, identity: Mapping[str, Any]) -> ups_store.Store | None:
    """A store that is there already, if it is the one that is wanted; None if it has to be built.

    Args:
        path: Where it would be.
        identity: What was passed to `ups_store.create`.
    """
    try:
        store = ups_store.open(path)
    except UNREADABLE:
        return None
    if isinstance(store, ups_store.Store) and not ups_store.differences(store.identity, identity):
        return store
    with store:
        kind = store.identity.get("kind")
    if kind != identity["kind"]:
        expected = f"a store of kind {identity['kind']}"
        hint = "move it away, or choose another folder"
        raise ConfigError(
            "a store that this run didn't make is there",
            kind="not_ours",
            path=path,
            expected=expected,
            found=kind,
            hint=hint,
        )
    return None


def latent_folder(config: RunConfig) -> Path:
    """Where the latent stores lie: `training.latent_cache_dir`, or `cache.dir` where that isn't said."""
    return config.training.latent_cache_dir or config.cache.dir


def latent_build(config: RunConfig, *, autoencoder_path: Path, device: str) -> BuildConfig:
    """The configuration of `ups-store build` that makes the stores of a run."""
    if config.latent.encoder == "none":
        hint = "leave latent.encoder out"
        raise ConfigError("latent.encoder", expected="an encoder", found="none: stores of fields", hint=hint)
    check_configured_encoder(config, autoencoder_path)
    sections = {"training", "checkpoint", "cache", "reading", "latent"}
    said = to_build({"latent": {}} | config.model_dump(include=sections, exclude_unset=True))
    latent = LatentConfig(**{**said["latent"], "checkpoint": autoencoder_path, "device": device})
    cache, reading = CacheConfig(**said["cache"]), ReadingConfig(**said.get("reading", {}))
    return config.build.model_copy(update={"cache": cache, "latent": latent, "reading": reading})


def check_configured_encoder(config: RunConfig, autoencoder_path: Path) -> None:
    """As `check_own_encoder`, of the autoencoder that the run would train."""
    own = config.checkpoint.dir / AUTOENCODER_FILE
    if autoencoder_path.absolute() == own.absolute():
        check_own_encoder(own, encoder=config.encoder, decoder=config.decoder)


def check_stores_replaceable(config: RunConfig, *, fields: bool, latents: bool) -> None:
    """Refuse to begin a run whose builds of stores would refuse to replace what is in their places.

    Args:
        fields: Whether it builds stores of fields.
        latents: Whether it builds stores of latents.
    """
    for task in config.data.tasks:
        for split in config.data.split:
            where: dict[str, Any] = {"task": task, "split": split, "most": config.data.limit}
            if fields:
                check_replaceable(store_path(config.cache.dir, task, split), holds="fields", **where)
            if latents:
                check_replaceable(store_path(latent_folder(config), task, split), holds="latents", **where)


def open_latents(
    config: RunConfig,
    task: str,
    split: str,
    *,
    autoencoder_path: Path,
    allow_unknown_encoder: bool = False,
) -> Store:
    """Open the latent store of a task and split.

    Args:
        split: "train", "val" or "test".
        autoencoder_path: The checkpoint whose latents are wanted.
        allow_unknown_encoder: Whether a store may be used that doesn't say what encoded it, such as one that
            was imported from `.pt` files.
    """
    check_configured_encoder(config, autoencoder_path)
    encoder = LatentEncoder.load(autoencoder_path, task=task)
    store = _open(latent_folder(config), task, split, holds=LATENT)
    _check_same_data(store, config.data)
    found = encoder_of(store)
    if found is not None:
        _check_same_encoder(store, found, encoder)
    elif not allow_unknown_encoder:
        raise ConfigError(
            "nothing says which weights made these latents",
            kind="unknown_encoder",
            path=store.path,
            expected=f"latents of {autoencoder_path}",
            hint="build the store again, or training.allow_unknown_encoder=true",
        )
    return store


def open_field_states(config: RunConfig, task: str, split: str) -> Store:
    """Open the field store of a task and split, for an operator that works on the fields themselves."""
    store = _open(config.cache.dir, task, split, holds=FIELDS)
    _check_same_data(store, config.data)
    return store


def tells_encoder(store: Store) -> bool:
    """Whether nothing is unknown about how a store's states were made: fields, or latents that say it."""
    return LATENT not in store or encoder_of(store) is not None


def _open(folder: Path, task: str, split: str, *, holds: str) -> Store:
    path = store_path(folder, task, split)
    encoder = "" if holds == LATENT else " latent.encoder=none"
    command = f"ups-store build --config YOURS data.tasks={task}{encoder}"
    place = place_of(path)
    if place is None:
        building = path.with_name(f"{path.name}.building")
        raise ConfigError(
            f"no {holds} store of {task} {split}",
            kind="no_store",
            path=path,
            found="an unfinished one" if building.exists() else None,
            hint=f"build it: `{command}`; it says so if the split has no samples",
        )
    store = ups_store.open(place)
    if holds not in store:
        shown = ", ".join(store.arrays)
        raise ConfigError(
            f"the store holds no {holds}", kind="no_store", path=place, found=shown, hint=f"`{command}`"
        )
    if len(store) == 0:
        raise ConfigError(f"{task} {split} has no samples", kind="empty_split", path=place)
    return store


def _check_same_data(store: Store, data: DataConfig) -> None:
    """Fail if the store was made by another selection; what it doesn't say isn't compared."""
    differing = differing_selection(store, data)
    if differing:
        raise ConfigError(
            "the store holds another selection of the data",
            kind="other_data",
            path=store.path,
            expected=", ".join(f"data.{key} = {value}" for key, (_, value) in differing.items()),
            found=", ".join(str(found) for found, _ in differing.values()),
            hint="build it again, or configure what it has",
        )


def _check_same_encoder(store: Store, found: Mapping[str, Any], encoder: LatentEncoder) -> None:
    wanted = {key: value for key, value in encoder.identity().items() if key not in _PRECISION}
    known = {key: found.get(key) for key in wanted}
    differing = ups_store.differences(known, wanted)
    if not differing:
        return
    raise ConfigError(
        "its latents are those of another encoder",
        kind="other_encoder",
        path=store.path,
        expected=f"those of {encoder.path}",
        found="; ".join(ups_store.describe_differences(differing).splitlines()),
        hint="build the store again with this checkpoint",
    )


def store_path(folder: Path, task: str, split: str) -> Path:
    """Where the build puts the store of a task and split."""
    return folder / f"{task}_{split}{_SUFFIX}"


def place_of(path: Path) -> Path | None:
    """Where a store is: at its path, or as the partitions that several machines made; None if nowhere."""
    if path.exists():
        return path
    name = path.name.removesuffix(_SUFFIX)
    partitions = sorted(path.parent.glob(f"{glob.escape(name)}-*-of-*{_SUFFIX}"))
    if not partitions:
        return None
    count = partitions[0].name.rpartition("-of-")[2]
    return path.with_name(f"{name}-*-of-{count}")


def encoder_of(store: Store) -> Mapping[str, Any] | None:
    """Identity of the encoder that made a store's latents; None if the store doesn't say."""
    found = store.identity.get("encoder")
    return found if isinstance(found, Mapping) else None


def differing_selection(store: Store, data: DataConfig) -> dict[str, tuple[Any, Any]]:
    """In what a store holds another selection of the data than the configured one.

    What its identity doesn't say isn't compared: of a store that no build made, of a split that wasn't drawn.

    Returns:
        By key of `data` what the store says, and what is wanted.
    """
    wanted: dict[str, Any] = {"reduce_space": data.reduce_space, "reduce_time": data.reduce_time}
    wanted |= {"split_fractions": list(data.split_fractions)}
    found = {key: store.identity.get(key) for key in wanted}
    return {key: (found[key], value) for key, value in wanted.items() if found[key] not in (None, value)}


def shown_place(store: Store) -> str:
    """Where a store is, for people: the path of one in memory means nothing to them."""
    return "in memory" if store.path.is_relative_to("/proc") else str(store.path)


def are_reused(manifest: Path) -> bool:
    """Whether a build has found all stores valid.

    Args:
        manifest: The path that it was given; of several machines each has its own.
    """
    own = BuildRank.from_environment().own_file(manifest)
    stores = json.loads(own.read_text(encoding="utf-8"))["stores"]
    return all(store["reused"] for store in stores)
