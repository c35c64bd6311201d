"""Configuration of a build: typed, from YAML, flags and dotted overrides."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from ups_store.errors import ConfigError
from ups_store.ingest.splits import SPLITS, SplitFractions, canonical_split
from ups_store.tasks import get_task

Count = Annotated[int, Field(strict=True, ge=1)]  # strict: `yes` isn't 1
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
FieldDtype = Literal["float16", "bfloat16", "float32", "float64"]


MAX_WORKERS = 256  # more than any file system serves better than a few


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class DataConfig(_Section):
    """Which samples of which files."""

    task: tuple[str, ...] = Field(min_length=1, description="names of tasks, see ups_store/tasks.py")
    root: Path = Field(description="folder with the HDF5 files; by default the variable PDEBENCH_ROOT")
    split: tuple[str, ...] = Field(SPLITS, min_length=1, description="train, val, test")
    files: tuple[str, ...] | None = Field(
        None, min_length=1, description="names or glob patterns below root, to choose"
    )
    reduce_space: Count = Field(1, description="every how many-th point, on each spatial axis")
    reduce_time: Count = Field(1, description="every how many-th time step")
    split_fractions: tuple[float, float, float] = Field((0.8, 0.1, 0.1), description="train, val, test")
    limit: Count | None = Field(None, description="at most so many samples a store")
    on_nan: Literal["fail", "keep"] = Field("fail", description="what to do with NaN and Inf")
    source_digest: Literal["full", "sampled"] = Field("full", description="how sources are identified")

    @field_validator("task", "split", "files", mode="before")
    @classmethod
    def _one_or_more(cls, value: object) -> object:
        return value.split(",") if isinstance(value, str) else value

    @field_validator("task")
    @classmethod
    def _known_tasks(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(get_task(name).name for name in value))

    @field_validator("split")
    @classmethod
    def _known_splits(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(canonical_split(name) for name in value))

    @field_validator("split_fractions")
    @classmethod
    def _valid_fractions(cls, value: tuple[float, float, float]) -> tuple[float, float, float]:
        SplitFractions(*value)
        return value

    @property
    def fractions(self) -> SplitFractions:
        """`split_fractions` by name."""
        return SplitFractions(*self.split_fractions)


class CacheConfig(_Section):
    """Where stores go and what they hold."""

    dir: Path = Field(Path("cache"), description="folder of the stores")
    dtype: FieldDtype = Field("float32", description="dtype of the fields")


class ReadingConfig(_Section):
    """How sources are read; what is read doesn't depend on it, so it isn't part of a store's identity."""

    num_workers: int | Literal["auto"] = Field(
        "auto", description="reader processes; 0: read in the build's own, without deadlines"
    )
    timeout_s: Seconds = Field(300.0, description="for one batch of samples, or without progress")
    open_timeout_s: Seconds = Field(60.0, description="for opening a file")
    retries: Annotated[int, Field(strict=True, ge=0)] = Field(
        2, description="how often a read is tried again after its reader was late or died"
    )
    on_error: Literal["fail", "skip"] = Field(
        "fail", description="what to do with samples that can't be read"
    )
    stall_warning_s: Seconds = Field(
        60.0, description="time without progress after which a diagnosis is shown"
    )

    @field_validator("num_workers", mode="before")
    @classmethod
    def _count_or_auto(cls, value: object) -> object:
        is_count = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_WORKERS
        if is_count or value == "auto":
            return value
        expected = f"auto, or a whole number 0..{MAX_WORKERS}"
        raise ConfigError("reading.num_workers", expected=expected, found=repr(value))


class BuildConfig(_Section):
    """Everything that a build is told."""

    data: DataConfig
    cache: CacheConfig = CacheConfig()
    reading: ReadingConfig = ReadingConfig()


def load_config(
    path: Path | None = None, *, flags: Mapping[str, Any] | None = None, overrides: Sequence[str] = ()
) -> BuildConfig:
    """Read a configuration; later sources win: YAML file, flags, dotted overrides.

    Args:
        path: YAML file, or None.
        flags: Values by dotted key; None values are left out.
        overrides: `key=value` with dotted keys, values in YAML.
    Raises:
        ConfigError: Names the key, what was found, what is expected, and the nearest known key.
    """
    given = {key: value for key, value in (flags or {}).items() if value is not None}
    try:
        merged = OmegaConf.merge(_read_yaml(path), _nested(given), _from_dotted(overrides))
        values = OmegaConf.to_container(merged, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError(str(error).splitlines()[0], path=path, hint="check the dotted keys") from error
    assert isinstance(values, dict)
    data = values.setdefault("data", {})
    if isinstance(data, dict) and data.get("root") is None:
        data["root"] = os.environ.get("PDEBENCH_ROOT") or "data"
    try:
        return BuildConfig.model_validate(values)
    except ValidationError as error:
        outside = {*given, *(override.partition("=")[0] for override in overrides)}
        raise _first_problem(error, path, outside) from error


def _read_yaml(path: Path | None) -> Any:
    if path is None:
        return OmegaConf.create({})
    try:
        loaded = OmegaConf.load(path)
    except OSError as error:
        reason = error.strerror or "a single value instead of keys"
        raise ConfigError(f"can't be read ({reason})", path=path, hint="check --config") from error
    except Exception as error:  # the YAML parser's own tree of errors
        reason = " ".join(str(error).split())
        raise ConfigError(f"is not YAML ({reason})", path=path, hint="check the indentation") from error
    if not OmegaConf.is_dict(loaded):
        raise ConfigError("configuration", path=path, expected="keys and values", found="a list")
    return loaded


def _nested(flags: Mapping[str, Any]) -> Any:
    config = OmegaConf.create({})
    for key, value in flags.items():
        OmegaConf.update(config, key, _literal(value) if isinstance(value, str) else value)
    return config


def _literal(text: str) -> str:
    """The text escaped: a flag is meant as it is written, only YAML and overrides refer to other values."""
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", text)


def _from_dotted(overrides: Sequence[str]) -> Any:
    for override in overrides:
        if "=" not in override:
            raise ConfigError(
                "override", expected="key=value", found=repr(override), hint="flags start with --"
            )
    try:
        return OmegaConf.from_dotlist(list(overrides))
    except OmegaConfBaseException:
        raise
    except Exception as error:  # the YAML parser's own tree of errors
        raise ConfigError(
            "overrides",
            expected="YAML values",
            found=repr(" ".join(overrides)),
            hint="check brackets and quotes",
        ) from error


# What pydantic says in terms of Python, by its type of error; {} are its own numbers.
_EXPECTED = {
    "model_type": "keys and values",
    "tuple_type": "a list",
    "path_type": "a path",
    "invalid_key": "a name",
    "missing": "one more value",
    "too_short": "{min_length} or more values",
    "too_long": "at most {max_length} values",
}


def _first_problem(error: ValidationError, path: Path | None, outside: Collection[str]) -> ConfigError:
    """One sentence for the first thing that pydantic found; `outside`: keys that the file didn't decide."""
    first = error.errors()[0]
    parts = [str(part) for part in first["loc"]]
    key, context = ".".join(parts), first.get("ctx", {})
    where = None if ".".join(parts[:2]) in outside else path
    inner = context.get("error")
    if isinstance(inner, ConfigError):
        inner.path = str(where) if where else None
        return inner
    if first["type"] == "extra_forbidden":
        return ConfigError("unknown key", kind="unknown_key", path=where, found=repr(key), hint=_near(key))
    if first["type"] == "missing" and key in _known_keys(BuildConfig):
        hint = f"say {key}=... or give its flag"
        return ConfigError("missing key", kind="missing_key", path=path, expected=key, hint=hint)
    template = _EXPECTED.get(first["type"])
    expected = template.format(**context) if template else first["msg"].removeprefix("Input should be ")
    return ConfigError(key, path=where, expected=expected, found=repr(first["input"]))


def _near(key: str) -> str:
    known = _known_keys(BuildConfig)
    if key in known:  # {"data.root": ...} instead of {"data": {"root": ...}}
        return "in YAML, indent what follows a dot below what precedes it"
    near = difflib.get_close_matches(key, known, n=1)
    return f"did you mean {near[0]}?" if near else f"known keys: {', '.join(known)}"


def _known_keys(model: type[BaseModel], prefix: str = "") -> list[str]:
    keys: list[str] = []
    for name, field in model.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            keys += _known_keys(inner, f"{prefix}{name}.")
        else:
            keys.append(f"{prefix}{name}")
    return keys
