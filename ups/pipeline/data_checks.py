"""`ups validate data`: every source of a run is there, opens, and holds what the run is about; no torch.

Files are read by reader processes with short deadlines; where there are stores and no sources, the stores.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import ups_store
from ups.config import RunConfig
from ups.config.loading import load_leniently
from ups.data.fields import too_short
from ups.data.splits import open_fields
from ups.data.stores import Store, latent_folder, place_of, store_path
from ups.errors import ConfigError, UpsError
from ups.grid import FIELDS, LATENT
from ups.pipeline.first_steps import FirstSteps, FirstStepsRequest, Values, by_channel, every, spread
from ups.pipeline.report import Checks, Report
from ups.pipeline.sources import TRAINED, TaskSources, find_tasks, quick_readers
from ups.train.checks import check_grid, first_stage, has_sizes
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
    tasks = find_tasks(config, readers, late)
    for name, task in tasks.items():
        for split, error in task.problems():
            is_said = not sound[name] and split not in task.builds  # by one of its files
            if split in TRAINED and not is_said:
                checks.refuse(name, error)
            elif split not in TRAINED and not checks.has_said(str(error)):
                checks.warn(name, f"{split}: {error}")
        for store in _stores_instead(config, task, checks):
            _check_store(name, store, config, checks)
        _check_dimensions(config, task, checks)
        if "residual" in config.training.physics_priors.weights and not checks.has_problem(name):
            _check_equation(config, task, checks)


def _check_files(
    config: RunConfig, name: str, readers: Readers, checks: Checks, late: list[ReadTimeoutError]
) -> bool:
    """Whether all source files of a task are sound; files of several splits are looked at once.

    `late` gets the errors of those that don't answer.
    """
    data, task, is_sound = config.data, config.build.get_task(name), True
    paths: dict[Path, None] = {}
    for split in dict.fromkeys((*TRAINED, *data.split)):
        try:
            found = find_sources(data.root, task=task, split=split, files=data.files)
        except (UpsError, StoreError):  # said for the split as a whole
            continue
        paths |= dict.fromkeys(source.path for source in found)
    for path in paths:
        try:
            if path.stat().st_size == 0:
                raise SourceError("the file is empty", kind="empty_file", path=path, hint="copy it again")
            steps = readers.pool.ask(FirstStepsRequest(path, task, data.follow_external))
            _check_values(name, path, steps, config, checks)
        except StoreError as error:
            checks.refuse(name, error)
            is_sound = False
            late += [error] if isinstance(error, ReadTimeoutError) else []
        except OSError as error:
            problem = f"can't be read ({error.strerror})"
            checks.refuse(name, SourceError(problem, kind="missing_file", path=path))
            is_sound = False
    return is_sound


def _check_values(name: str, path: Path, steps: FirstSteps, config: RunConfig, checks: Checks) -> None:
    what = f"{path.name}: {counted(steps.num_samples, 'sample')}, {'; '.join(map(str, steps.values))}"
    _check_finite(name, path, steps.values, what, config, checks)


def _check_finite(
    name: str, path: object, values: Sequence[Values], what: str, config: RunConfig, checks: Checks
) -> None:
    facts = {"path": str(path), "values": [vars(each) for each in values]}
    odd = [
        each.name for each in values if each.is_finite and each.minimum == each.maximum and each.name != "t"
    ]
    if all(each.is_finite for each in values):
        if odd and any(each.name not in odd for each in values):
            what = f"{what} (constant: {', '.join(odd)})"
        checks.ok(name, what, **facts)
    else:
        bad = ", ".join(str(each) for each in values if not each.is_finite)
        kept = "; stores keep them, and training refuses them" if config.data.on_nan == "keep" else ""
        problem, hint = f"values that are not finite: {bad}{kept}", "mend the source"
        checks.refuse(name, SourceError(problem, kind="not_finite", path=path, hint=hint))


def _stores_instead(config: RunConfig, task: TaskSources, checks: Checks) -> list[Store]:
    """Stores of splits that have no sources."""
    stores = []
    for split in task.errors:
        if split in task.stores:
            stores.append(task.stores[split])
        elif split in task.latents:
            place = place_of(store_path(latent_folder(config), task.task, split))
            with checks.collecting(task.task):
                assert place is not None
                stores.append(ups_store.open(place))
    return stores


def _check_store(name: str, store: Store, config: RunConfig, checks: Checks) -> None:
    array = FIELDS if FIELDS in store else LATENT
    with checks.collecting(name), store:
        num_times = store.arrays[array].shape[1]
        few = {"start": 0, "length": min(3, num_times), "stride": every(num_times)}
        values = by_channel(array, store.gather(spread(len(store)), [array], **few)[array], _channels(store))
        what = f"{store.path}: {counted(len(store), 'sample')}, {'; '.join(map(str, values))}"
        _check_finite(name, store.path, values, what, config, checks)


def _channels(store: Store) -> tuple[str, ...]:
    return tuple(store.attrs.get("channels") or ())


def _check_equation(config: RunConfig, task: TaskSources, checks: Checks) -> None:
    """How well the data keep the equation of a residual prior."""
    from ups.eval.physics import check_residual_floor, residual_floor, shown_floor  # which need torch

    few = config.build.data.model_copy(update={"limit": _FEW_SAMPLES})
    with checks.collecting(task.task):
        fields = open_fields(config.build.model_copy(update={"data": few}), task.task, "train")
        floor = residual_floor(config, fields)
        check_residual_floor(floor, task=task.task)
        if floor is not None:
            checks.ok(task.task, shown_floor(floor))


def _check_dimensions(config: RunConfig, task: TaskSources, checks: Checks) -> None:
    """Sizes of the data against those that the configuration, or a trained encoder, has."""
    if task.info is None:
        return
    name, grid, problems = task.task, task.info.grid, len(checks.lines)
    with checks.collecting(name):
        if has_sizes(config, first_stage(config)):
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
