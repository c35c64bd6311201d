"""`verify --repair`: a damaged store made whole again from its sources, reading only what is damaged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ups_store.building.build import Build, create_file, open_build
from ups_store.building.config import load_config
from ups_store.building.progress import Watcher
from ups_store.building.readers import Readers
from ups_store.check.doctor import Diagnosis, Status, examine
from ups_store.check.intact import read_intact
from ups_store.errors import AccessError, ConfigError, FormatError, IdentityMismatchError, hinting
from ups_store.format.root import config_hash, describe_differences, differences
from ups_store.system import files


@dataclass(frozen=True)
class Repair:
    """What a repair did."""

    path: Path
    num_samples: int
    num_copied: int  # from the damaged store
    num_rebuilt: int  # read from the sources

    @property
    def is_needed(self) -> bool:
        """Tell whether anything was wrong."""
        return self.num_copied + self.num_rebuilt > 0


def repair_store(path: Path, config: Path, *, overrides: Sequence[str] = (), watcher: Watcher) -> Repair:
    """Rebuild what is damaged of a finished store into a new file, and rename that over it.

    The damaged file is only read; mappings of it stay valid. Interrupted, it continues when it is run again.
    The checksum of an array without slots covers all samples, so damage there means to read all of them.
    """
    diagnosis = examine(path)
    if diagnosis.status.is_sound:
        return Repair(path, diagnosis.num_samples, 0, 0)
    if diagnosis.catalog is None or diagnosis.status not in (Status.DAMAGED, Status.TRUNCATED):
        raise FormatError(
            "it can't be repaired",
            path=path,
            kind="not_repairable",
            expected="a damaged store whose metadata can be read",
            found=diagnosis.status.value,
            hint=diagnosis.status.advice,
        )
    identity = diagnosis.catalog.root.identity
    words = words_of(identity.get("content"))
    if not words:
        raise ConfigError(
            "it wasn't built from a configuration",
            path=path,
            expected="a store that `ups-store build` made",
            hint="`doctor --salvage OUT` copies what verifies",
        )
    settings = load_config(config, overrides=[*overrides, *words])
    reading = settings.reading.model_copy(update={"on_error": "fail"})  # a repaired store has all samples
    with Readers(reading, note=watcher.note) as readers:
        watcher.watch(readers.pool)
        task, split = settings.data.tasks[0], settings.data.split[0]
        build = open_build(settings, task, split, readers=readers, watcher=watcher)
        if build.config_hash != config_hash(dict(identity)):
            differing = differences(identity, build.document)
            text = f"another store (found -> given):\n{describe_differences(differing)}\n"
            hint = "repair it with the configuration and the sources that it was built from"
            error = IdentityMismatchError(f"the configuration gives {text}", path=path, hint=hint)
            error.differences = differing
            raise error
        return _make_again(build, diagnosis, watcher)


def words_of(content: Any) -> list[str]:
    """Return what a build of a store's task, split and kind is told, by its identity; none if it has none."""
    if not isinstance(content, dict) or content.get("kind") not in ("fields", "latents"):
        return []
    if not {"task", "split", "sources"} <= content.keys():
        return []
    holds = "latent={}" if content["kind"] == "latents" else "latent.encoder=none"
    return [holds, f"data.tasks={content['task']}", f"data.split={content['split']}"]


def _make_again(build: Build, diagnosis: Diagnosis, watcher: Watcher) -> Repair:
    assert diagnosis.catalog is not None
    assert diagnosis.intact is not None
    good = np.ones(diagnosis.num_samples, bool)  # samples that verify in every array
    for name, mask in diagnosis.intact.samples.items():
        good &= mask & (name not in diagnosis.intact.suspect)
    groups = np.arange(len(good)) // build.plan.group_size  # which are encoded together
    good &= ~np.isin(groups, groups[~good])
    plan = replace(build.plan, path=diagnosis.path, attrs=diagnosis.catalog.root.attrs)
    hint, writable = "finish that build first, or move its file away", "make it writable with chmod u+w first"
    with (
        hinting(hint, IdentityMismatchError, FormatError),
        hinting(writable, AccessError, kind="read_only"),
    ):
        writer = create_file(plan, build.identify())
    with writer:
        missing = writer.missing()
        copied, damaged = missing[good[missing]], missing[~good[missing]]
        watcher.stage(f"{plan.title}: samples", len(missing), unit="samples")
        with files.opened(plan.path) as fd:
            layout, arrays = diagnosis.catalog.layout, tuple(plan.arrays)
            for samples, values in read_intact(fd, layout, arrays, copied, path=plan.path):
                writer.commit_many(samples, values)
                watcher.advance(len(samples))
        build.filling_into(writer).fill(damaged)
        plan.check_sources()
        writer.finish()
    return Repair(plan.path, len(good), len(copied), len(damaged))
