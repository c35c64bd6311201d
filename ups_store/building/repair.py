"""`verify --repair`: a damaged store made whole again from its sources, reading only what is damaged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ups_store.building.build import Build, open_build
from ups_store.building.config import BuildConfig, load_config
from ups_store.building.joining import create_file
from ups_store.building.progress import Watcher
from ups_store.building.readers import Readers
from ups_store.check.doctor import Diagnosis, Status, examine
from ups_store.check.intact import read_intact
from ups_store.errors import AccessError, ConfigError, FormatError, IdentityMismatchError, hinting
from ups_store.format.root import config_hash, describe_differences, differences
from ups_store.system import files


@dataclass(frozen=True)
class Repair:
    """What a repair did.

    Attributes:
        path: The store.
        num_samples: N.
        num_copied: Samples taken from the damaged store.
        num_rebuilt: Samples read from the sources.
    """

    path: Path
    num_samples: int
    num_copied: int
    num_rebuilt: int

    @property
    def is_needed(self) -> bool:
        """Whether anything was wrong."""
        return self.num_copied + self.num_rebuilt > 0


def repair_store(path: Path, config: Path, *, overrides: Sequence[str] = (), watcher: Watcher) -> Repair:
    """Rebuild what is damaged of a finished store into a new file, and rename that over it.

    The damaged file is only read; mappings of it stay valid. Interrupted, it continues when it is run again.
    The checksum of an array without slots covers all samples, so damage there means to read all of them.
    """
    found = examine(path)
    if found.status.is_sound:
        return Repair(path, found.num_samples, 0, 0)
    if found.catalog is None or found.status not in (Status.DAMAGED, Status.TRUNCATED):
        raise FormatError(
            "it can't be repaired",
            path=path,
            kind="not_repairable",
            expected="a damaged store whose metadata can be read",
            found=found.status.value,
            hint=found.status.advice,
        )
    identity = found.catalog.root.identity
    settings = _settings(path, identity.get("content"), config, overrides)
    reading = settings.reading.model_copy(update={"on_error": "fail"})  # a repaired store has all samples
    with Readers(reading, note=watcher.note) as readers:
        watcher.watch(readers.pool)
        task, split = settings.data.tasks[0], settings.data.split[0]
        build = open_build(settings, task, split, readers=readers, watcher=watcher)
        _check_identity(build, identity, path)
        return _rebuild(build, found, watcher)


def _settings(path: Path, content: Any, config: Path, overrides: Sequence[str]) -> BuildConfig:
    """The configuration for the store's own task and split, whichever it names."""
    words = words_of(content)
    if not words:
        raise ConfigError(
            "it wasn't built from a configuration",
            path=path,
            expected="a store that `ups-store build` made",
            hint="`doctor --salvage OUT` copies what verifies",
        )
    return load_config(config, overrides=[*overrides, *words])


def words_of(content: Any) -> list[str]:
    """What a build of a store's own task, split and kind is told, by its identity; empty if none made it."""
    if not isinstance(content, dict) or content.get("kind") not in ("fields", "latents"):
        return []
    if not {"task", "split", "sources"} <= content.keys():
        return []
    holds = "latent={}" if content["kind"] == "latents" else "latent.encoder=none"
    return [holds, f"data.tasks={content['task']}", f"data.split={content['split']}"]


def _check_identity(build: Build, found: Mapping[str, Any], path: Path) -> None:
    if build.config_hash == config_hash(dict(found)):
        return
    differing = differences(found, build.document)
    error = IdentityMismatchError(
        f"the configuration gives another store (found -> given):\n{describe_differences(differing)}\n",
        path=path,
        hint="repair it with the configuration and the sources that it was built from",
    )
    error.differences = differing
    raise error


def _good(found: Diagnosis) -> npt.NDArray[np.bool_]:
    """Which samples verify in every array, bool, shape (N,)."""
    assert found.intact is not None
    good = np.ones(found.num_samples, bool)
    for name, mask in found.intact.samples.items():
        good &= mask & (name not in found.intact.suspect)
    return good


def _rebuild(build: Build, found: Diagnosis, watcher: Watcher) -> Repair:
    assert found.catalog is not None
    layout, good = found.catalog.layout, _good(found)
    groups = np.arange(len(good)) // build.plan.group_size  # which are encoded together
    good &= ~np.isin(groups, groups[~good])
    plan = replace(build.plan, path=found.path, attrs=found.catalog.root.attrs)
    hint, writable = "finish that build first, or move its file away", "make it writable with chmod u+w first"
    with hinting(hint, IdentityMismatchError, FormatError), hinting(writable, AccessError):
        writer = create_file(plan, build.identify())
    with writer:
        missing = writer.missing()
        copied, damaged = missing[good[missing]], missing[~good[missing]]
        watcher.stage(f"{plan.title}: samples", len(missing), unit="samples")
        with files.opened(plan.path) as fd:
            for samples, arrays in read_intact(fd, layout, tuple(plan.arrays), copied, path=plan.path):
                writer.commit_many(samples, arrays)
                watcher.advance(len(samples))
        build.filling_into(writer).fill(damaged)
        plan.check_sources()
        writer.finish()
    return Repair(plan.path, len(good), len(copied), len(damaged))
