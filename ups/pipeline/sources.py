"""What the data of a run are, by the heads of their sources or by stores that stand for them; no torch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ups.config import RunConfig
from ups.data.fields import FieldsInfo, info_of
from ups.data.splits import open_split, open_suitable
from ups.data.stores import Store, latent_folder, place_of, store_path
from ups.errors import UpsError
from ups.grid import FIELDS
from ups_store.build import Build, DigestCache, Readers
from ups_store.errors import ReadTimeoutError, StoreError
from ups_store.sources import SourceFile, find_sources

TRAINED = ("train", "val")  # splits that every run needs
_TIMEOUT_S = 10.0  # of opening a file, and of reading a few time steps


@dataclass
class TaskSources:
    """What one task's samples come from.

    Attributes:
        task: Its name.
        builds: What would build the field store of each split, where there are sources.
        errors: Why there is none, by split.
        stores: Field stores, by split, that serve without sources.
        latents: Splits whose latents are there and no fields, as those that were imported.
        info: What the fields are; None where nothing says it.
        num_times: Stored time steps; 0 where nothing says it.
    """

    task: str
    builds: dict[str, Build] = field(default_factory=dict)
    errors: dict[str, UpsError | StoreError] = field(default_factory=dict)
    stores: dict[str, Store] = field(default_factory=dict)
    latents: set[str] = field(default_factory=set)
    info: FieldsInfo | None = None
    num_times: int = 0

    def num_samples(self, split: str) -> int:
        """Samples of a split; 0 where nothing says it."""
        if split in self.builds:
            return self.builds[split].num_samples
        return len(self.stores[split]) if split in self.stores else 0

    def problems(self) -> Iterator[tuple[str, UpsError | StoreError]]:
        """Splits that have neither sources nor a store, and why."""
        for split, error in self.errors.items():
            if split not in self.stores and split not in self.latents:
                yield split, error


def quick_readers(config: RunConfig) -> Readers:
    """What opens sources for checks, which shall not wait as long as a build."""
    reading = config.reading
    limits = {name: min(_TIMEOUT_S, getattr(reading, name)) for name in ("timeout_s", "open_timeout_s")}
    return Readers(reading.model_copy(update={**limits, "retries": 0}))


def find_tasks(
    config: RunConfig, readers: Readers, late: Iterable[ReadTimeoutError] = ()
) -> dict[str, TaskSources]:
    """Look at the sources of all tasks, and at stores where there are none; no sample is read.

    Args:
        config: The configuration.
        readers: What opens sources.
        late: About files that didn't answer before, which aren't waited for again.
    """
    errors = {str(error.path): error for error in late}
    return {task: _find(config, task, readers, errors) for task in config.data.tasks}


def _find(config: RunConfig, task: str, readers: Readers, late: dict[str, ReadTimeoutError]) -> TaskSources:
    found = TaskSources(task)
    digests = DigestCache(config.cache.dir, save=False, readers=readers)
    for split in dict.fromkeys((*TRAINED, *config.data.split)):
        store, _ = open_suitable(store_path(config.cache.dir, task, split), config.data)
        if store is not None:
            found.stores[split] = store
        if place_of(store_path(latent_folder(config), task, split)) is not None:
            found.latents.add(split)
        try:
            if late:
                _check_answered(config, task, split, late)
            build = open_split(config.build, task, split, readers=readers, digests=digests)
        except (UpsError, StoreError) as error:
            found.errors[split] = error
            if isinstance(error, ReadTimeoutError):
                late[str(error.path)] = error
        else:
            found.builds[split] = build
    described: list[Any] = [build.plan for build in found.builds.values()]
    described += found.stores.values()
    if described:
        found.info = info_of(described[0])
        found.num_times = described[0].arrays[FIELDS].shape[1]
    return found


def _check_answered(config: RunConfig, task: str, split: str, late: Mapping[str, ReadTimeoutError]) -> None:
    data = config.data
    sources: Iterable[SourceFile] = ()
    with contextlib.suppress(StoreError):  # which opening the split says
        sources = find_sources(data.root, task=config.build.get_task(task), split=split, files=data.files)
    for source in sources:
        if str(source.path) in late:
            raise late[str(source.path)]
