"""Configuration of a build: typed, from YAML, flags and dotted overrides; what is wrong with one."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, cast, get_args

from ups_store.building.config_file import load_other_keys, read_config
from ups_store.errors import ConfigError, SpecError, near_word, needs
from ups_store.printable import without_secrets
from ups_store.remote.fetch import EXPECTED, checked_url
from ups_store.remote.shared import EXPECTED as EXPECTED_SHARED
from ups_store.remote.shared import check_location
from ups_store.sources.declaration import DeclaredSection, LocalPath, TaskDeclaration, local_path
from ups_store.sources.source_files import SPLITS, SplitFractions, canonical_split
from ups_store.sources.tasks import TASKS, WELL_TASKS, Task, get_task
from ups_store.system.paths import instead_of_rclone, is_remote

with needs("hdf5"):
    from pydantic import (
        BaseModel,
        BeforeValidator,
        Field,
        PlainValidator,
        SerializationInfo,
        ValidationError,
        ValidationInfo,
        field_serializer,
        field_validator,
    )
    from pydantic_core import ErrorDetails

FIELDS_ENCODER = "none"  # `latent.encoder` of a build of fields
MAX_WORKERS = 256  # more than any file system serves better than a few

_TASK_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_]*")  # it starts the names of files
_SHORT_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32"}
_UNKNOWN, _MISSING = "unknown_key", "missing_key"  # kinds of errors
_ALTERNATIVES = ("constrained-", "literal[", "tuple[")  # how pydantic names those of a union within a key
# What pydantic says in terms of Python, by its type of error; {} are its own numbers.
_EXPECTED = {
    "model_type": "keys and values",
    "dict_type": "keys and values",
    "tuple_type": "a list",
    "path_type": "a path",
    "invalid_key": "a name",
    "missing": "one more value",
    "too_short": "{min_length} or more values",
    "too_long": "at most {max_length} values",
}


def long_dtype(value: object) -> object:
    """Return NumPy's name of a dtype, for a short one such as "bf16"; any other value as it is."""
    return _SHORT_DTYPES.get(value, value) if isinstance(value, str) else value


Count = Annotated[int, Field(strict=True, ge=1)]  # strict: `yes` isn't 1
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
FieldDtype = Annotated[Literal["float16", "bfloat16", "float32", "float64"], BeforeValidator(long_dtype)]
ComputeDtype = Annotated[Literal["float32", "bfloat16", "float16"], BeforeValidator(long_dtype)]


Codec = Literal["none", "blosc", "pcodec"]


def _root(value: object) -> object:
    """Take a folder as a path, a remote one as the text that it is."""
    if not isinstance(value, str | Path):
        raise ConfigError("", expected=f"a path, or {EXPECTED}", found=repr(value))
    if isinstance(value, str) and is_remote(value):
        try:
            checked_url(value)
        except ConfigError as error:  # of an unknown kind; the code that catches it knows the key
            error.problem, error.found = "", error.path
            raise
        return value
    if hint := instead_of_rclone(str(value)):
        expected = f"a path, or {EXPECTED}, and no rclone remote"
        raise ConfigError("", kind="rclone", expected=expected, found=repr(value), hint=hint)
    return Path(cast("str | Path", local_path(value)))


def _shared(value: object) -> str | None:
    """Take a shared cache's URL as the text that it is, its folder as an absolute path."""
    if value is None:
        return None
    if not isinstance(value, str | Path):
        raise ConfigError("", expected=EXPECTED_SHARED, found=repr(value))
    try:
        return check_location(str(value))
    except SpecError as error:  # the code that catches it knows the key
        raise ConfigError("", expected=error.expected, found=error.path, hint=error.hint) from error


def _places(value: Any, info: SerializationInfo) -> Any:
    """Show places as checkpoints, reports and trackers have them: without what is secret of a URL."""
    show = str if (info.context or {}).get("secrets") else without_secrets
    if isinstance(value, tuple):
        return [show(name) for name in value]
    return None if value is None else show(str(value))


class DataConfig(DeclaredSection):
    """Which samples of which files."""

    tasks: tuple[str, ...] = Field(
        min_length=1, description="names of tasks, such as burgers1d: see ups_store/sources/tasks.py"
    )
    root: Annotated[Path | str, PlainValidator(_root)] = Field(
        description="folder with the HDF5 files, or its URL; by default the variable PDEBENCH_ROOT"
    )
    split: tuple[str, ...] = Field(SPLITS, min_length=1, description="train, val, test")
    files: tuple[str, ...] | None = Field(
        None, min_length=1, description="names or glob patterns below root, or URLs, to choose"
    )
    stage_dir: LocalPath | None = Field(
        None,
        description="folder of a local disk that sources are copied into and read from; by default only what"
        " a URL names is copied, into the folder sources beside the stores",
    )
    follow_external: Path | None = Field(
        None,
        description="folder of other files that sources may take data from; by default none may",
    )
    reduce_space: Count = Field(1, description="every how many-th point, on each spatial axis")
    reduce_time: Count = Field(1, description="every how many-th time step")
    split_fractions: tuple[float, float, float] = Field((0.8, 0.1, 0.1), description="train, val, test")
    limit: Count | None = Field(None, description="at most so many samples a store")
    on_nan: Literal["fail", "keep"] = Field("fail", description="fail on NaN and Inf, or keep them")
    source_digest: Literal["full", "sampled"] = Field(
        "full", description="how sources are identified: by all of their bytes, or some"
    )

    _as_json = field_serializer("root", "files", when_used="json")(_places)

    @field_validator("tasks", "split", "files", mode="before")
    @classmethod
    def _one_or_more(cls, value: object) -> object:
        return value.split(",") if isinstance(value, str) else value

    @field_validator("tasks")
    @classmethod
    def _known_tasks(cls, value: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        declared = (info.context or {}).get("tasks", ())  # they stand in another section
        for name in value:
            if name not in declared:
                get_task(name, declared=declared)
        return tuple(dict.fromkeys(value))

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
    def is_remote(self) -> bool:
        """Tell whether the root, or a name of a file, is a URL."""
        return isinstance(self.root, str) or any(map(is_remote, self.files or ()))

    @property
    def fractions(self) -> SplitFractions:
        """Return `split_fractions` by name."""
        return SplitFractions(*self.split_fractions)


class CacheConfig(DeclaredSection):
    """Where stores go and what they hold."""

    dir: LocalPath = Field(Path("cache"), description="folder of the stores")
    dtype: FieldDtype = Field(
        "float32", description="dtype of the fields or latents: float16, bfloat16, float32 or float64"
    )
    codec: Codec = Field("none", description="pack stores, which are decoded then; none: map them")
    partitions: Count | None = Field(
        None, description="files that a new store is built in, one by one; chosen by size for a packed one"
    )
    encode_timeout_s: Seconds = Field(
        600.0,
        description="for encoding one batch, the first ten times as long; then stacks are written and the"
        " process ends with exit code 4",
    )
    commit_timeout_s: Seconds = Field(600.0, description="for committing one batch; then as for encoding")
    remote: Annotated[str | None, PlainValidator(_shared)] = Field(
        None,
        description="shared cache: a URL or a folder that stores are pulled from, and pushed to once built",
    )
    remote_timeout_s: Seconds = Field(
        60.0, description="for the shared cache to bring 4 MiB; then stores are built here, with a warning"
    )

    _as_json = field_serializer("remote", when_used="json")(_places)


class EncodingConfig(DeclaredSection):
    """How a build encodes."""

    encoder: str = Field("ups", description="entry point, or module:callable as an override; none: fields")
    device: str = Field("auto", description="auto, cpu, cuda or cuda:N")
    compute_dtype: ComputeDtype = Field("float32", description="of encoding")
    micro_batch: Count = Field(256, description="frames that are encoded together; decides the last bits")
    pin_memory: bool = Field(True, description="copy to a CUDA device from page-locked memory")
    compile: bool = Field(False, description="torch.compile the encoder; may change the last bits")


class LatentConfig(EncodingConfig):
    """What encodes, where stores hold latents instead of fields."""

    checkpoint: LocalPath = Field(
        description="weights of an autoencoder, to store latents instead of fields; in a run by default "
        "<checkpoint.dir>/autoencoder.safetensors"
    )
    dim: Count | None = Field(None, description="channels of a latent token, as the checkpoint has them")
    tokens: Count | None = Field(None, description="latent tokens of a frame, as the checkpoint has them")


class ReadingConfig(DeclaredSection):
    """How sources are read; what is read doesn't depend on it, so it isn't part of a store's identity."""

    num_workers: int | Literal["auto"] = Field(
        "auto", description="reader processes; 0 is 1, as a read that hangs is given up with its process"
    )
    batch_size: Count | Literal["auto"] | None = Field(
        None, description="samples that are read, encoded and committed at a time; by default about 32 MiB"
    )
    timeout_s: Seconds = Field(300.0, description="for one batch of samples, or without progress")
    open_timeout_s: Seconds = Field(60.0, description="for opening a file")
    retries: Annotated[int, Field(strict=True, ge=0)] = Field(
        2, description="how often a read is tried again after its reader was late or died"
    )
    on_error: Literal["fail", "skip"] = Field(
        "fail", description="fail on samples that can't be read, or skip them"
    )
    stall_warning_s: Seconds = Field(
        60.0, description="time without progress after which a diagnosis is shown"
    )
    check_on_resume: bool = Field(
        True, description="read back and check what an unfinished store holds before it is continued"
    )

    @field_validator("batch_size", "num_workers", mode="before")
    @classmethod
    def _count_or_auto(cls, value: object, info: ValidationInfo) -> object:
        is_workers = info.field_name == "num_workers"
        least, most = (0, MAX_WORKERS) if is_workers else (1, float("inf"))
        is_count = isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
        if is_count or value == "auto" or (value is None and not is_workers):
            return value
        expected = f"auto, or a whole number {f'0..{MAX_WORKERS}' if is_workers else '>= 1'}"
        raise ConfigError(f"reading.{info.field_name}", expected=expected, found=repr(value))


class BuildConfig(DeclaredSection):
    """Everything that decides a build."""

    data: DataConfig
    cache: CacheConfig = CacheConfig()
    reading: ReadingConfig = ReadingConfig()
    latent: LatentConfig | None = Field(None, description="where stores hold latents")
    tasks: dict[str, TaskDeclaration] = Field({}, description="tasks of your own, see docs/guides/layouts.md")

    @field_validator("tasks")
    @classmethod
    def _new_names(cls, value: dict[str, TaskDeclaration]) -> dict[str, TaskDeclaration]:
        for name in value:
            if not _TASK_NAME.fullmatch(name):
                raise ConfigError("", expected="a name of letters, digits and '_'", found=repr(name))
            if name in TASKS or name in WELL_TASKS:
                raise ConfigError("", expected="another name: there is such a task", found=repr(name))
        return value

    @property
    def stage_dir(self) -> Path | None:
        """Folder that sources are copied into; None where they are read in place."""
        if self.data.stage_dir is not None:
            return self.data.stage_dir
        return self.cache.dir / "sources" if self.is_fetched else None

    @property
    def is_fetched(self) -> bool:
        """Tell whether a source has a URL."""
        return self.data.is_remote or any(map(is_remote, self.source_names))

    @property
    def source_names(self) -> tuple[str, ...]:
        """Names of files, patterns and URLs that `data.files` and declared tasks give."""
        declared = (name for task in self.tasks.values() for names in task.files.values() for name in names)
        return (*(self.data.files or ()), *declared)

    def get_task(self, name: str) -> Task:
        """Return the task of a name in `data.tasks`, which this configuration declares, or which is known."""
        if name not in self.tasks:
            return get_task(name)
        declared = self.tasks[name]
        layout = declared.layout
        return Task(
            name=name,
            ndim=len(layout.space) if layout else declared.ndim or 0,
            channels=layout.channels if layout else (),
            boundary={str(axis): kind for axis, kind in declared.boundary.items()},
            test_part=declared.test_part,
            steady=layout.is_steady if layout else None,
            files={str(split): patterns for split, patterns in declared.files.items()},
            layout=layout,
        )


def load_config(
    path: Path | None = None,
    *,
    flags: Mapping[str, Any] | None = None,
    overrides: Sequence[str] = (),
    note: Callable[[str], None] | None = None,
) -> BuildConfig:
    """Read a configuration; later sources win: YAML file, flags, dotted overrides.

    Args:
        path: YAML file, or None.
        flags: Values by dotted key; None values are left out.
        overrides: `key=value` with dotted keys, values in YAML.
        note: Given a sentence for each key, such as a misspelled one of `training`, that has no effect.
    Raises:
        ConfigError: Names the key, what was found, what is expected, and the nearest known key.
    """
    flags = {key: value for key, value in (flags or {}).items() if value is not None}
    outside = {*flags, *(override.partition("=")[0] for override in overrides)}
    values = read_config(path, flags=flags, overrides=overrides)
    data, sections = values.get("data"), BuildConfig.model_fields.keys() - {"latent"}
    is_of_build = isinstance(data, dict) and data.keys() <= DataConfig.model_fields.keys()
    if not (is_of_build and values.keys() <= sections):  # else other packages needn't be asked
        whole, latent = values, values.get("latent")
        if isinstance(latent, dict) and latent.get("encoder") == FIELDS_ENCODER:
            values = {key: value for key, value in whole.items() if key != "latent"}
        for others in load_other_keys():
            for sentence in others.without_effect(values) if note is not None else ():
                note(sentence)  # type: ignore[misc]
            values = others.to_build(values)
        # What is said of `cache` beside the file wins over that of latents there.
        names = {key.split(".")[1] for key in outside if key.startswith("cache.")}
        names -= {name for name in names if f"training.latent_cache_{name}" in outside}
        if names:
            values["cache"] |= {name: whole["cache"][name] for name in names}
    declared = values.get("tasks")
    tasks = tuple(map(str, declared)) if isinstance(declared, dict) else ()
    try:
        return BuildConfig.model_validate(values, context={"tasks": tasks})
    except ValidationError as error:
        raise config_error(error, model=BuildConfig, path=path, outside=outside) from error


# --- what is wrong with one ---------------------------------------------------------------------------


def config_error(error: ValidationError, **options: Any) -> ConfigError:
    """Say everything that pydantic found in one error, a line each where it is several."""
    return ConfigError.joined(config_errors(error, **options))


def config_errors(
    error: ValidationError,
    *,
    model: type[BaseModel],
    path: Path | str | None,
    outside: Collection[str],
    see: str | None = None,
) -> list[ConfigError]:
    """Say everything that pydantic found: a sentence for each key.

    Args:
        error: What was raised.
        model: The configuration's type.
        path: File that was read, or another name for it.
        outside: Dotted keys that the file didn't decide.
        see: A page or a command that lists all keys; by default the error lists them.
    """
    by_key: dict[str, list[ErrorDetails]] = {}
    for problem in error.errors():
        # Of a union pydantic names every alternative, as in `num_workers.int` or `mixer.tuple[...].1`.
        names = [str(name) for name in problem["loc"]]
        names = names[:-1] if names[-1:] == ["int"] else names
        key = ".".join(name for name in names if not name.startswith(_ALTERNATIVES))
        by_key.setdefault(key, []).append(problem)
    known, errors = _known_keys(model), dict[str, ConfigError]()
    for key, alternatives in by_key.items():
        one = alternatives[0]
        is_outside = any(key == name or name.startswith(f"{key}.") for name in outside)
        is_outside |= ".".join(key.split(".")[:2]) in outside
        source = None if is_outside else path
        if one["type"] == "extra_forbidden":
            hint = _hint(key, one["loc"], model, known, see)
            errors[key] = ConfigError("unknown key", kind=_UNKNOWN, path=source, found=repr(key), hint=hint)
        elif one["type"] == "missing" and isinstance(one["input"], dict):
            say = f"say {key}=..., or name a --config that has it" if key in known else None
            errors[key] = ConfigError("missing key", kind=_MISSING, path=path, expected=key, hint=say)
        elif one["type"] == "value_error":  # of a validator, which may not know where it is
            inner = one["ctx"]["error"]
            facts = {name: getattr(inner, name, None) for name in ("kind", "expected", "found", "hint")}
            errors[key] = ConfigError(getattr(inner, "problem", str(inner)) or key, path=source, **facts)
        else:
            words: dict[str, None] = {}  # what pydantic expected, in the terms of a YAML file
            for other in alternatives:
                template = _EXPECTED.get(other["type"])
                text = other["msg"].removeprefix("Input should be ")
                words[template.format(**other.get("ctx", {})) if template else text] = None
            expected = (", or " if any(" or " in word for word in words) else " or ").join(words)
            errors[key] = ConfigError(key, path=source, expected=expected, found=repr(one["input"]))
    # A misspelled key explains why another one is missing, a wrong part why the whole is wrong.
    meant = {problem.hint for problem in errors.values() if problem.kind == _UNKNOWN}
    return [
        problem
        for key, problem in errors.items()
        if not (problem.kind == _MISSING and f"did you mean {key}?" in meant)
        and not any(other.startswith(f"{key}.") for other in errors)
    ]


def _known_keys(model: type[BaseModel], prefix: str = "") -> list[str]:
    """Return dotted keys, such as `stages.<name>.epochs` where names are the user's own."""
    keys: list[str] = []
    for name, field in model.model_fields.items():
        kinds = get_args(field.annotation) if isinstance(field.annotation, UnionType) else (field.annotation,)
        section = next(
            (kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None
        )
        if section is not None:
            keys += _known_keys(section, f"{prefix}{name}.")
            continue
        keys.append(f"{prefix}{name}")
        if (inner := _model_within(field.annotation)) is not None:
            keys += _known_keys(inner, f"{prefix}{name}.<name>.")
    return keys


def _model_within(annotation: Any) -> type[BaseModel] | None:
    """Return the model that an annotation such as `dict[str, Model] | None` is about."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    models = map(_model_within, get_args(annotation))
    return next((model for model in models if model is not None), None)


def _hint(
    key: str, location: Sequence[int | str], model: type[BaseModel], known: Sequence[str], see: str | None
) -> str:
    """Say what to do about an unknown key."""
    if key in known:  # {"data.root": ...} instead of {"data": {"root": ...}}
        return "in YAML, indent what follows a dot below what precedes it"
    section, _, name = key.rpartition(".")
    parent, beside = ".".join(map(str, location[:-1])), []
    if parent.startswith("tasks."):  # the keys that a task's declaration may have there
        for part in location[:-1]:
            if part in model.model_fields:  # other parts are names and numbers of a collection's items
                model = _model_within(model.model_fields[str(part)].annotation) or model
        beside = [f"{parent}.{field}" for field in model.model_fields]
        near = near_word(name, (other.rpartition(".")[2] for other in beside))
        near = near and f"{section}.{near}"
    else:
        near = _near(key, known)
    if near:
        return f"did you mean {near}?"
    return f"see {see} for the known keys" if see else f"known keys: {', '.join(beside or known)}"


def _near(key: str, known: Sequence[str]) -> str | None:
    """Return the known key that an unknown one was probably meant to be: by its section, then within that."""
    words, split = key.split("."), [name.split(".") for name in known]
    path: list[str] = []
    for depth, word in enumerate(words):
        names = {parts[depth] for parts in split if parts[:depth] == path and len(parts) > depth}
        near = "<name>" if "<name>" in names else near_word(word, names)
        if near is None:
            break
        path.append(near)
    else:
        return ".".join(path)
    if len(path) < len(words) - 1:
        return None
    # The section is right: then the only key of such a name in any section, or the one that `training` has.
    near = near_word(words[-1], {parts[-1] for parts in split})
    same = [name for name in known if name.rpartition(".")[2] == near]
    in_training = [name for name in same if name.startswith("training.")]
    return next((names[0] for names in (in_training, same) if len(names) == 1), None)
