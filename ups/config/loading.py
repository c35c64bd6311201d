"""Reading a run's configuration and writing it back; all that is wrong with one, said about its keys.

What pydantic finds wrong is said about the configuration's keys. A key of earlier configurations that means
nothing any more is dropped with a warning.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from ups.config.build_keys import LISTS_KEYS
from ups.config.checks import misfits
from ups.config.legacy import SAME_AS, as_read, inner, with_present_names, without
from ups.config.run import RunConfig
from ups.config.stage_keys import OF_STAGES
from ups.config.stages import BUDGETS
from ups.errors import ConfigError, ConfigWarning, needs
from ups.log import logger
from ups.stages import BASELINES
from ups_store.build import config_errors, read_config
from ups_store.errors import ConfigError as StoreConfigError
from ups_store.printable import printable

with needs("train"):
    import yaml
    from pydantic import ValidationError

# What says how long a stage is, and what said it before.
_OTHER_LENGTHS = {"budget": {"steps"}, "steps": {"budget"}, "epochs": {"budget", "steps"}}
# What stands for a key that is needed and wrong, so that the others can be looked at.
_NEEDED: dict[tuple[str, ...], Any] = {("data", "tasks"): ["burgers1d"], ("data", "root"): "data"}
_MOST_ROUNDS = 8  # of leaving out what is wrong


@dataclass(frozen=True)
class Loaded:
    """What a configuration says, and everything that is wrong with it.

    Attributes:
        config: With defaults instead of what is wrong; None where too much is.
        problems: What is wrong, each by itself; empty for a configuration that a run takes.
        left_out: Dotted keys that have their defaults because what was said is wrong.
    """

    config: RunConfig | None
    problems: tuple[ConfigError, ...]
    left_out: tuple[str, ...] = ()


def load_config(
    source: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    *,
    overrides: Sequence[str] = (),
    name: str | None = None,
) -> RunConfig:
    """Read a configuration; later sources win: included files, the file, dotted overrides.

    `include:` names one file or a list of them, relative to the file that it stands in. Values of overrides
    are YAML: `training.lr=1e-4`, `data.tasks=[burgers1d,advection1d]`. An override of a key of `training`
    that stages can have, too, wins over what the file says of each stage; an override of the stage's own key
    wins over both.

    Args:
        source: YAML file or the name of a shipped one, or the keys that one would hold, such as those in a
            checkpoint, or None.
        overrides: `key=value` with dotted keys.
        name: What errors call the source; by default its path.

    Raises:
        ConfigError: Names each wrong key, what was found, what is expected, and the nearest known key.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ConfigWarning)
        config = _load(source, overrides, name)
    for warning in caught:
        logger.warning(str(warning.message))
    return config


def _load(
    source: str | os.PathLike[str] | Mapping[str, Any] | None, overrides: Sequence[str], name: str | None
) -> RunConfig:
    loaded = load_leniently(source, overrides=overrides, name=name)
    if loaded.problems:
        raise ConfigError.joined(loaded.problems)
    assert loaded.config is not None
    return loaded.config


def load_leniently(
    source: str | os.PathLike[str] | Mapping[str, Any] | None,
    *,
    overrides: Sequence[str] = (),
    name: str | None = None,
) -> Loaded:
    """Read a configuration with everything that is wrong with it, instead of raising; as `load_config` else.

    What is wrong is left out, and the rest looked at again: so problems of sections and of the whole are
    found together with those of single keys. A problem that names a key that was left out isn't repeated.
    """
    path = None if source is None or isinstance(source, Mapping) else Path(source)
    try:
        given = source if isinstance(source, Mapping) else path
        read = read_config(given, overrides=overrides, **_ADJUSTED)
    except StoreConfigError as error:
        return Loaded(None, (as_own(error),))
    is_own = not isinstance(source, Mapping)
    if is_own:  # what a checkpoint says names code of others
        try:
            _import_code(read.get("code"))
        except ConfigError as error:
            return Loaded(None, (error,))
    outside = [override.partition("=")[0] for override in overrides]
    values, reasons, contradictions = as_read(read)
    for key, reason in reasons.items():
        warnings.warn(f"{key} has no effect: {reason}", ConfigWarning, stacklevel=2)
    problems = list[ConfigError]()
    left_out: list[str] = []
    for _ in range(_MOST_ROUNDS):
        try:
            declared = tuple(map(str, inner(values, "tasks")))
            knows_stages = is_own or not values.get("code")  # else some are of code that isn't imported
            context = {"tasks": declared, "is_own": is_own, "knows_stages": knows_stages}
            config = RunConfig.model_validate(values, context=context)
        except ValidationError as error:
            options: dict[str, Any] = {"path": name or path, "outside": outside, "see": LISTS_KEYS}
            found = config_errors(error, model=RunConfig, **options)
            problems += _not_about(left_out, map(as_own, found))
            values, keys = _without_wrong(values, error)
            left_out += keys
        else:
            where = name or path
            wrong = [*misfits(config), *map(ConfigError, contradictions), *_other_sizes(config, read)]
            for problem in _not_about(left_out, wrong):
                problem.path = None if where is None else str(where)
                problems.append(problem)
            return Loaded(config, tuple(problems), tuple(left_out))
    return Loaded(None, tuple(problems), tuple(left_out))


def _other_sizes(config: RunConfig, read: Mapping[str, Any]) -> Iterator[ConfigError]:
    """Sizes of latents that keys of earlier versions say otherwise than `latent.dim` does."""
    for key in SAME_AS if config.uses_encoder else ():
        *sections, name = key.split(".")
        if (size := inner(read, *sections).get(name)) not in (None, config.latent.dim):
            yield ConfigError(
                f"{key} = {size}, but latent.dim = {config.latent.dim}", hint=f"leave {key} out"
            )


def _import_code(modules: Any) -> None:
    """Import the modules of `code`, which may lie in the working directory."""
    for module in modules if isinstance(modules, list | tuple) else ():
        if os.getcwd() not in sys.path:  # as `python -m` has it; what is installed goes first
            sys.path.append(os.getcwd())
        try:
            if not all(word.isidentifier() for word in str(module).split(".")):
                raise ImportError("expected the name of a module, such as mylab.stages")
            import_module(str(module))
        except ImportError as error:
            hint = "install it, or run the command in the folder that it lies in"
            raise ConfigError(f"code: {module}: {error}", kind="no_code", hint=hint) from error


def _not_about(left_out: Sequence[str], problems: Iterable[ConfigError]) -> list[ConfigError]:
    """Problems of what was said, and not of what stands for it."""
    said = ((problem, f"{problem.problem} {problem.expected}") for problem in problems)
    return [problem for problem, sentence in said if not any(key in sentence for key in left_out)]


def _without_wrong(values: dict[str, Any], error: ValidationError) -> tuple[dict[str, Any], list[str]]:
    """The values without those that pydantic found wrong, and their keys."""
    keys = dict[str, None]()
    for one in error.errors():
        names, place = [], values
        for part in one["loc"]:  # lists, and what pydantic adds to a key, aren't gone into
            if not isinstance(place, dict) or part not in place:
                break
            names.append(str(part))
            place = place[part]
        if one["type"] != "missing" and names:
            values = without(values, ".".join(names))
            keys[".".join(names)] = None
    for (section, name), value in _NEEDED.items():
        if name not in inner(values, section):
            values = {**values, section: {**inner(values, section), name: value}}
            keys[f"{section}.{name}"] = None
    return values, list(keys)


def _without_overridden(values: dict[Any, Any], overrides: dict[Any, Any]) -> dict[Any, Any]:
    """A file's values without those of stages that an override of `training` wins over; warns of each."""
    for text in _without_other_lengths(values, overrides):
        warnings.warn(printable(text), ConfigWarning, stacklevel=5)
    said = inner(overrides, "training")
    for stage in inner(values, "stages"):
        for key, place in OF_STAGES.items():
            section, name = inner(values, "stages", stage, *place[:-1]), place[-1]
            if key not in said or section.get(name) is None:
                continue
            if name in inner(overrides, "stages", stage, *place[:-1]):
                continue  # the command line decides this one, too
            old = f"stages.{stage}.{'.'.join(place)} = {section.pop(name)}"
            text = f"training.{key} = {said[key]} takes the place of {old}"
            warnings.warn(printable(text), ConfigWarning, stacklevel=5)
    return values


def _without_other_lengths(values: dict[Any, Any], newer: dict[Any, Any]) -> list[str]:
    """Remove what said how long stages are and newer values say by another key; a sentence for each."""
    removed = []
    for stage, given in inner(newer, "stages").items():
        own = inner(values, "stages", stage)
        for key in _OTHER_LENGTHS.keys() & {name for name in inner(given) if given[name]}:
            for other in _OTHER_LENGTHS[key] & own.keys() - given.keys():
                if (old := own.pop(other)) is not None:
                    new = f"stages.{stage}.{key} = {given[key]}"
                    removed.append(f"{new} takes the place of stages.{stage}.{other} = {old}")
        limits, of_file = inner(given, "budget").keys() & BUDGETS, inner(own, "budget")
        for limit in BUDGETS if limits else ():
            of_file.pop(limit, None)
    return removed


_ADJUSTED: dict[str, Any] = {
    "adjust": _without_overridden,
    "adjust_included": _without_other_lengths,
    "rename": with_present_names,
}


def dump_config(config: RunConfig) -> str:
    """Write a configuration as YAML that `load_config` reads back to an equal one.

    Stages of baselines hold what was said of them alone: the rest is the operator's.
    """
    values = config.model_dump(mode="json", context={"secrets": True})  # other documents leave them out
    for name in values["stages"].keys() & {*BASELINES}:
        values["stages"][name] = config.stages[name].model_dump(mode="json", exclude_unset=True)
    return yaml.safe_dump(values, sort_keys=False)


def as_own(error: StoreConfigError) -> ConfigError:
    """An error of a configuration that the build reads as one of the training stack."""
    facts = {name: getattr(error, name) for name in ("kind", "path", "expected", "found", "hint")}
    return ConfigError(error.problem, **facts)


def write_standalone(source: str | os.PathLike[str], *, overrides: Sequence[str] = ()) -> str:
    """What a file, those that it includes, and overrides say, as the YAML of one file, without defaults.

    Args:
        source: YAML file or the name of a shipped one.
        overrides: `key=value` with dotted keys, as `load_config` takes them.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConfigWarning)  # `load_config` gives them
            values = read_config(Path(source), overrides=overrides, **_ADJUSTED)
    except StoreConfigError as error:
        raise as_own(error) from error
    return yaml.safe_dump(values, sort_keys=False)
