"""`ups validate data`: every source of a run is there, opens, and holds what the run is about; no torch.

Files are read by reader processes with short deadlines; where there are stores and no sources, the stores.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import ups_store
from ups.config import RunConfig
from ups.config.loading import load_leniently
from ups.data.fields import too_short
from ups.data.splits import open_fields
from ups.data.stores import Store, latent_folder, place_of, store_path
from ups.errors import ConfigError, UpsError
from ups.grid import FIELDS, LATENT
from ups.pipeline.first_steps import FirstStepsRequest, Values, by_channel, every, spread
from ups.pipeline.report import Checks, Report
from ups.pipeline.sources import TRAINED, TaskSources, find_tasks, quick_readers
from ups.train.checks import check_grid, has_sizes
from ups.trained.checkpoint import read_document
from ups.trained.specs import AUTOENCODER, parse_spec
from ups_store.build import Readers
from ups_store.errors import ReadTimeoutError, SourceError, StoreError
from ups_store.printable import counted
from ups_store.sources import find_sources

_FEW_SAMPLES = 8


def check_data(config_path: Path | None, overrides: Sequence[str] = ()) -> Report:
    """Check the data of a run.

    Args:
        config_path: YAML file, or the name of a shipped one.

    Returns:
        A line for each file and task; nothing is raised for what is wrong.
    """
    began, checks = time.perf_counter(), Checks()
    loaded = load_leniently(config_path, overrides=overrides)
    checks.refuse("configuration", *loaded.problems)
    if loaded.config is not None and not loaded.problems:
        config = loaded.config
        with quick_readers(config) as readers:
            _check_all(config, readers, checks)
    return Report(tuple(checks.lines), time.perf_counter() - began)


def _check_all(config: RunConfig, readers: Readers, checks: Checks) -> None:
    late: list[ReadTimeoutError] = []
    sound = {task: _check_files(config, task, readers, checks, late) for task in config.data.tasks}
    for name, task in find_tasks(config, readers, late).items():
        for split, error in task.problems():
            is_said = not sound[name] and split not in task.builds  # by one of its files
            if split in TRAINED and not is_said:
                checks.refuse(name, error)
            elif split not in TRAINED and not checks.has_said(str(error)):
                checks.warn(name, f"{split}: {error}")
        for split in task.errors:  # stores stand for sources that aren't there
            place = place_of(store_path(latent_folder(config), name, split))
            if split in task.stores:
                _check_store(name, task.stores[split], config, checks)
            elif split in task.latents and place is not None:
                with checks.collecting(name):
                    _check_store(name, ups_store.open(place), config, checks)
        _check_dimensions(config, task, checks)
        if "residual" in config.training.physics_priors.weights and not checks.has_problem(name):
            from ups.eval.physics import check_residual_floor, residual_floor, shown_floor  # with torch

            few = config.build.data.model_copy(update={"limit": _FEW_SAMPLES})
            with checks.collecting(name):
                fields = open_fields(config.build.model_copy(update={"data": few}), name, "train")
                floor = residual_floor(config, fields)
                check_residual_floor(floor, task=name)
                if floor is not None:
                    checks.ok(name, shown_floor(floor))


def _check_files(
    config: RunConfig, name: str, readers: Readers, checks: Checks, late: list[ReadTimeoutError]
) -> bool:
    """Check all source files of a task, those of several splits once; `late` gets errors of slow ones."""
    data, task, is_sound = config.data, config.build.get_task(name), True
    paths: dict[Path, None] = {}
    for split in dict.fromkeys((*TRAINED, *data.split)):
        with suppress(UpsError, StoreError):  # said for the split as a whole
            sources = find_sources(data.root, task=task, split=split, files=data.files)
            paths |= dict.fromkeys(source.path for source in sources)
    for path in paths:
        error: StoreError
        try:
            if path.stat().st_size == 0:
                raise SourceError("the file is empty", kind="empty_file", path=path, hint="copy it again")
            num, values = readers.pool.ask(FirstStepsRequest(path, task, data.follow_external))
            title = f"{path.name}: {counted(num, 'sample')}"
            _check_finite(name, path, title, values, config, checks)
            continue
        except StoreError as raised:
            error = raised
        except OSError as raised:
            problem = f"can't be read ({raised.strerror})"
            error = SourceError(problem, kind="missing_file", path=path)
        checks.refuse(name, error)
        is_sound = False
        late += [error] if isinstance(error, ReadTimeoutError) else []
    return is_sound


def _check_store(name: str, store: Store, config: RunConfig, checks: Checks) -> None:
    """Look at a few samples of a store, and close it."""
    array = FIELDS if FIELDS in store else LATENT
    with checks.collecting(name), store:
        num_times = store.arrays[array].shape[1]
        few = {"start": 0, "length": min(3, num_times), "stride": every(num_times)}
        channels = tuple(store.attrs.get("channels") or ())
        values = by_channel(array, store.gather(spread(len(store)), [array], **few)[array], channels)
        title = f"{store.path}: {counted(len(store), 'sample')}"
        _check_finite(name, store.path, title, values, config, checks)


def _check_finite(
    name: str, path: object, title: str, values: Sequence[Values], config: RunConfig, checks: Checks
) -> None:
    bad = ", ".join(str(each) for each in values if not each.is_finite)
    if bad:
        kept = "; stores keep them, and training refuses them" if config.data.on_nan == "keep" else ""
        problem = f"values that are not finite: {bad}{kept}"
        checks.refuse(name, SourceError(problem, kind="not_finite", path=path, hint="mend the source"))
        return
    text = f"{title}, {'; '.join(map(str, values))}"
    constant = [each.name for each in values if each.minimum == each.maximum and each.name != "t"]
    if constant and len(constant) < len(values):
        text = f"{text} (constant: {', '.join(constant)})"
    checks.ok(name, text, path=str(path), values=[vars(each) for each in values])


def _check_dimensions(config: RunConfig, task: TaskSources, checks: Checks) -> None:
    """Sizes of the data against those that the configuration, or a trained encoder, has."""
    if task.info is None:
        return
    name, grid, problems = task.task, task.info.grid, len(checks.lines)
    with checks.collecting(name):
        if has_sizes(config):
            check_grid(config, grid)
    span = config.training.horizon * config.training.stride
    if not task.info.steady and task.num_times <= span:
        training = config.training
        checks.refuse(
            name, too_short(training.horizon, training.stride, path=config.data.root, longest=task.num_times)
        )
    path = config.autoencoder_path
    if config.latent.checkpoint is not None and path.exists():
        with checks.collecting(name):
            spec = parse_spec(read_document(path, kind=AUTOENCODER), path)
            if name in spec.tasks and spec.tasks[name].grid != grid:
                found, expected = grid.name, spec.tasks[name].grid.name
                problem = f"the fields of {name} aren't those that the autoencoder was trained on"
                raise ConfigError(problem, kind="other_grid", path=path, expected=expected, found=found)
    if len(checks.lines) == problems:
        points, channels = " x ".join(map(str, grid.points)), ", ".join(task.info.channels)
        steps = "steady" if task.info.steady else counted(task.num_times, "time step")
        checks.ok(name, f"{points} points, {steps}, channels {channels}: as the configuration needs them")
