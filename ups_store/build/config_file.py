"""YAML of configurations: files with `include:`, and texts that are safe to parse.

Overrides: `key=value` with dotted keys, values in YAML.

What pydantic found wrong with a build's configuration, as one sentence about its keys.

One configuration for a whole run: which of its keys concern the build, and what they are called here.

Training, operator and the like are sections of whoever trains; a build passes over them. Where there is a
section `latent`, stores hold latents: then `training.latent_cache_dir` and `training.latent_cache_dtype` say
where and in what, instead of `cache`.
"""

from __future__ import annotations

import difflib
import io
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, get_args

from ups_store.build.shipped import find_config, near_config
from ups_store.errors import ConfigError, needs
from ups_store.old_names import with_present_names

with needs("hdf5"):
    import yaml
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from pydantic import BaseModel, ValidationError
    from pydantic_core import ErrorDetails

MAX_DEPTH = 32  # lists and mappings within each other; parsers recurse, some on the C stack

MAX_REFERENCES = 1000  # ${...}; each takes a while to resolve

MAX_BYTES = 1 << 20  # of a file: a configuration has a few kB

# What to do about texts that aren't a configuration, by a part of what the parser says.
_HINTS = {
    "duplicate key": "keep one of them",
    "constructor for the tag": "write plain values, without a tag (!...)",
    "undefined alias": "quote values that start with *",
    "node expansion": "write values out instead of using aliases",
    "single document": "keep one document: remove what follows ---",
    "control characters": "save it as UTF-8 without control characters",
    "alias": "write values out instead of using aliases",
}

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml is there where it was built with

_SYNTAX_HINT = "check the indentation, brackets and quotes"


def read_yaml(path: Path, *, including: tuple[Path, ...] = ()) -> Any:
    """A file's values over those of the files that it includes, as an OmegaConf dictionary.

    `include:` names one file or a list of them, relative to the file that it stands in, or shipped ones;
    later ones win.

    Raises:
        ConfigError: If a file can't be read, isn't YAML or has no keys, is too long or nested too deep, or if
            files include each other.
    """
    path = find_config(path)
    real = path.resolve()
    if real in including:
        chain = " -> ".join(file.name for file in (*including, real))
        raise ConfigError("files include each other in a circle", path=path, found=chain)
    own = _read_one(path, hint=f"check `include` in {including[-1].name}" if including else None)
    included = own.pop("include", None) or []
    names = [included] if isinstance(included, str) else list(included)
    found = [find_config(Path(str(name)), folder=path.parent) for name in names]
    parts = [read_yaml(file, including=(*including, real)) for file in found]
    return OmegaConf.merge(*parts, _present(own, path=path))


def _present(values: Any, *, path: Path | None = None) -> Any:
    """A source's values under the present names of their keys."""
    try:
        given = OmegaConf.to_container(values)
        return OmegaConf.create(with_present_names(given) if isinstance(given, dict) else given)
    except ValueError as error:
        raise ConfigError(str(error), path=path) from error


def check_shallow(text: str, *, subject: str, path: Path | None = None) -> None:
    """Refuse YAML that nests deeper than `MAX_DEPTH`, without recursion; errors of syntax are left to others.

    Raises:
        ConfigError: Kind "too_deep"; kind "too_long" for more than `MAX_REFERENCES` to other values.
    """
    if (found := text.count("${")) > MAX_REFERENCES:
        expected = f"at most {MAX_REFERENCES} references ${{...}}"
        raise ConfigError(subject, kind="too_long", path=path, expected=expected, found=found)
    depth = 0
    try:
        for event in yaml.parse(text, Loader=_LOADER):
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if depth > MAX_DEPTH:
                raise ConfigError(
                    subject,
                    kind="too_deep",
                    path=path,
                    expected=f"at most {MAX_DEPTH} lists and mappings within each other",
                    found="more",
                    hint="close brackets that were left open",
                )
    except yaml.YAMLError:  # whoever parses it tells what is wrong
        return


def _read_one(path: Path, *, hint: str | None) -> Any:
    hint = hint or _hint_of_name(path)
    text = _read_text(path, hint=hint)
    check_shallow(text, subject="configuration", path=path)
    try:
        loaded = OmegaConf.load(io.StringIO(text))
    except OSError as error:
        raise ConfigError("can't be read (a single value instead of keys)", path=path, hint=hint) from error
    except Exception as error:  # the YAML parser's own tree of errors
        raise _not_yaml(path, error) from error
    if not OmegaConf.is_dict(loaded):
        raise ConfigError("configuration", path=path, expected="keys and values", found="a list")
    return loaded


def _hint_of_name(path: Path) -> str:
    near = None if path.exists() else near_config(path)
    return f"did you mean {near}?" if near else "check the name; `ups configs` lists those that are shipped"


def _read_text(path: Path, *, hint: str) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"can't be read ({error.strerror})", path=path, hint=hint) from error
    if len(content) > MAX_BYTES:
        expected = f"a configuration of at most {MAX_BYTES:,} bytes"
        raise ConfigError("file", kind="too_long", path=path, expected=expected, found="more", hint=hint)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"is not YAML ({error})", path=path, hint="save it as UTF-8") from error


def _not_yaml(path: Path, error: Exception) -> ConfigError:
    reason = " ".join(str(error).split())
    hint = next((hint for part, hint in _HINTS.items() if part in reason), _SYNTAX_HINT)
    return ConfigError(f"is not YAML ({reason})", path=path, hint=hint)


def parse_overrides(overrides: Sequence[str]) -> Any:
    """Values of overrides, as an OmegaConf dictionary; later ones win.

    Raises:
        ConfigError: If one has no `=`, isn't YAML, or nests too deep.
        OmegaConfBaseException: If dotted keys contradict each other.
    """
    for override in overrides:
        if "=" not in override:
            raise ConfigError(
                "override", expected="key=value", found=repr(override), hint="flags start with --"
            )
        key, _, value = override.partition("=")
        if key.count(".") + key.count("[") > MAX_DEPTH:
            expected = f"a key of at most {MAX_DEPTH} parts"
            raise ConfigError("override", kind="too_deep", expected=expected, found="more")
        check_shallow(value, subject=f"override {key}")
    try:
        return _present(OmegaConf.from_dotlist(list(overrides)))
    except (OmegaConfBaseException, ConfigError):
        raise
    except Exception as error:  # the YAML parser's own tree of errors
        raise ConfigError(
            "overrides",
            expected="YAML values",
            found=repr(" ".join(overrides)),
            hint="check brackets and quotes",
        ) from error


def check_like(file: object, given: object, key: str = "") -> None:
    """Refuse an override that says a list where the file has keys, or the other way round.

    Raises:
        ConfigError: With the key.
    """
    if isinstance(file, dict) and isinstance(given, dict):
        for name, value in given.items():
            if name in file:
                check_like(file[name], value, f"{key}.{name}" if key else str(name))
    elif isinstance(file, dict) and isinstance(given, list):
        hint = f"say {key}.<name>=..."
        raise ConfigError(key, expected="keys and values", found="a list", hint=hint)
    elif isinstance(file, list) and isinstance(given, dict):
        hint = f"say {key}=[...], which replaces the list as a whole"
        raise ConfigError(key, expected="a list", found="keys and values", hint=hint)


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


def first_problem(
    error: ValidationError, *, model: type[BaseModel], path: Path | None, outside: Collection[str]
) -> ConfigError:
    """One sentence for one thing that pydantic found.

    Args:
        error: What was raised.
        model: The configuration's type.
        path: File that was read.
        outside: Dotted keys that the file didn't decide.
    """
    problems = error.errors()
    # A misspelled key explains why another is missing.
    first = next((each for each in problems if each["type"] == "extra_forbidden"), problems[0])
    parts = [str(part) for part in first["loc"]]
    key, context = ".".join(parts), first.get("ctx", {})
    where = None if ".".join(parts[:2]) in outside else path
    inner = context.get("error")
    if isinstance(inner, ConfigError):
        inner.path = str(where) if where else None
        inner.problem = inner.problem or key  # a validator below doesn't know where it is
        return inner
    if first["type"] == "extra_forbidden":
        near = _near(key, _known_keys(model), _keys_beside(model, first["loc"]))
        return ConfigError("unknown key", kind="unknown_key", path=where, found=repr(key), hint=near)
    if first["type"] == "missing" and isinstance(first["input"], dict):
        hint = f"say {key}=... or give its flag" if key in _known_keys(model) else None
        return ConfigError("missing key", kind="missing_key", path=path, expected=key, hint=hint)
    return ConfigError(key, path=where, expected=expected_by(first), found=repr(first["input"]))


def expected_by(problem: ErrorDetails) -> str:
    """What pydantic expected, in the terms of a YAML file."""
    template = _EXPECTED.get(problem["type"])
    if template is None:
        return problem["msg"].removeprefix("Input should be ")
    return template.format(**problem.get("ctx", {}))


def _near(key: str, known: Sequence[str], beside: Sequence[str]) -> str:
    if key in known:  # {"data.root": ...} instead of {"data": {"root": ...}}
        return "in YAML, indent what follows a dot below what precedes it"
    known = [*beside, *known] if key.startswith("tasks.") else known
    near = difflib.get_close_matches(key, known, n=1)
    return f"did you mean {near[0]}?" if near else f"known keys: {', '.join(beside or known)}"


def _known_keys(model: type[BaseModel], prefix: str = "") -> list[str]:
    keys: list[str] = []
    for name, field in model.model_fields.items():
        inner = _section_of(field.annotation)
        if inner is not None:
            keys += _known_keys(inner, f"{prefix}{name}.")
        else:
            keys.append(f"{prefix}{name}")
    return keys


def _section_of(annotation: object) -> type[BaseModel] | None:
    """The section that a key's annotation names, optional ones too."""
    kinds = get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


def _keys_beside(model: type[BaseModel], location: Sequence[int | str]) -> list[str]:
    """The keys that a task's declaration may have where it has an unknown one."""
    for part in location[:-1]:
        if part in model.model_fields:  # other parts are names and numbers of a collection's items
            model = _model_within(model.model_fields[str(part)].annotation) or model
    parent = ".".join(map(str, location[:-1]))
    return [f"{parent}.{name}" for name in model.model_fields] if parent.startswith("tasks.") else []


def _model_within(annotation: Any) -> type[BaseModel] | None:
    """The model that an annotation such as `dict[str, Model] | None` is about."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    found = (_model_within(inner) for inner in get_args(annotation))
    return next((model for model in found if model is not None), None)


OF_OTHERS = frozenset(
    ("encoder", "decoder", "operator", "training", "stages", "checkpoint", "logging", "evaluation", "seed")
)
# All keys of the sections of others that the build takes something from; tests/ups holds them to theirs.
KEYS_OF_OTHERS: dict[str, tuple[str, ...]] = {
    "training": (
        *("latent_cache_dir", "latent_cache_dtype", "num_workers", "use_parallel_encoding", "pin_memory"),
        *("batch_size", "lr", "accum_steps", "grad_clip", "ema_decay", "amp", "amp_dtype", "compile"),
        *("compile_mode", "patience", "log_path", "log_every", "device", "rank_timeout_s", "field_source"),
        *("augment", "query_sampling", "max_val_frames", "cache_mode", "prefetch_factor", "preload"),
        *("stride", "horizon", "lambda_spectral", "lambda_relative", "use_inverse_losses"),
        *("allow_unknown_encoder", "inverse_loss_frequency"),
    ),
    "checkpoint": ("dir", "interval", "keep_training_state"),
}
# Sections and keys of earlier configurations that nobody reads (docs/migration.md).
OLD_SECTIONS = frozenset(("diffusion", "ttc", "benchmark", "deterministic"))

OLD_KEYS: dict[str, frozenset[str]] = {
    "data": frozenset(("patch_size", "shard_limit", "download", "task_sampling")),
    "training": frozenset(
        (
            *("dt", "num_gpus", "persistent_workers", "cache_dir", "checkpoint_interval"),
            *("inverse_loss_warmup_epochs", "inverse_loss_max_weight", "lambda_inv_enc", "lambda_inv_dec"),
            "log_per_task_metrics",
        )
    ),
}
# Keys of features of training that aren't there yet; a training says so where they are switched on.
_LATER_KEYS = frozenset(("use_fsdp2", "cpu_offload_optimizer", "physics_priors", "tau_distribution"))

_LATER_PREFIX = "distill_"

FIELDS_ENCODER = "none"  # `latent.encoder` of a build of fields

_LATENT_DTYPE = "float16"

_CHECKPOINT = "autoencoder.safetensors"

_SHORT_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32"}


def long_dtype(value: object) -> object:
    """The name that NumPy has for a dtype, of a short one such as "bf16"; any other value as it is."""
    return _SHORT_DTYPES.get(value, value) if isinstance(value, str) else value


def keys_without_effect(values: dict[str, Any]) -> Iterator[str]:
    """One sentence for each key of a run's configuration that nobody reads.

    Args:
        values: Configuration as nested dictionaries; wrong keys of the build's own sections are errors.
    """
    for section, old in OLD_KEYS.items():
        for name in _section(values, section):
            if name in old:
                yield f"{section}.{name} has no effect; docs/migration.md says what there is instead"
    for section, known in KEYS_OF_OTHERS.items():
        passed = {*known, *OLD_KEYS.get(section, ()), *_LATER_KEYS}
        for name in map(str, _section(values, section)):
            if name not in passed and not name.startswith(_LATER_PREFIX):
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {section}.{near[0]}?" if near else "docs/training.md has the known keys"
                yield f"{section}.{name} is no key and has no effect; {hint}"


def take_build_keys(values: dict[str, Any]) -> dict[str, Any]:
    """What a run's configuration says to a build.

    Args:
        values: Configuration as nested dictionaries; unchanged.
    Returns:
        Sections of `BuildConfig`, and unknown ones, for it to refuse.
    """
    kept = {key: value for key, value in values.items() if key not in OF_OTHERS | OLD_SECTIONS}
    if isinstance(data := kept.get("data"), dict):
        kept["data"] = {key: value for key, value in data.items() if key not in OLD_KEYS["data"]}
    training, checkpoint = _section(values, "training"), _section(values, "checkpoint")
    kept["reading"] = _reading(training) | _section(values, "reading")
    if not kept["reading"]:
        del kept["reading"]
    latent = values.get("latent")
    if not isinstance(latent, dict):
        return kept
    if latent.get("encoder") == FIELDS_ENCODER:
        del kept["latent"]
        return kept
    folder = Path(str(checkpoint.get("dir") or "checkpoints"))
    said = {name: value for name, value in latent.items() if value is not None}
    kept["latent"] = {"checkpoint": str(folder / _CHECKPOINT)} | _pinned(training) | said
    kept["cache"] = _section(values, "cache") | _latent_cache(training)
    return kept


def _reading(training: dict[str, Any]) -> dict[str, Any]:
    """How sources are read, by the names of `training`."""
    if training.get("use_parallel_encoding") is False:
        return {"num_workers": 0}
    return {"num_workers": training["num_workers"]} if training.get("num_workers") is not None else {}


def _pinned(training: dict[str, Any]) -> dict[str, Any]:
    return {"pin_memory": training["pin_memory"]} if training.get("pin_memory") is not None else {}


def _latent_cache(training: dict[str, Any]) -> dict[str, Any]:
    dtype = training.get("latent_cache_dtype") or _LATENT_DTYPE
    folder = training.get("latent_cache_dir")
    return {"dtype": dtype} | ({"dir": folder} if folder else {})


def _section(values: dict[str, Any], name: str) -> dict[str, Any]:
    section = values.get(name)
    return dict(section) if isinstance(section, dict) else {}
