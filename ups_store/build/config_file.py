"""Reading configurations: YAML files with `include:`, and dotted overrides `key=value` with values in YAML.

Texts are bounded in length and depth before a parser sees them, as parsers recurse.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ups_store.build.shipped import find_config, near_config
from ups_store.errors import ConfigError, needs
from ups_store.old_names import with_present_names

with needs("hdf5"):
    import yaml
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

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


def read_config(
    source: Path | Mapping[str, Any] | None,
    *,
    flags: Mapping[str, Any] | None = None,
    overrides: Sequence[str] = (),
    adjust: Callable[[Any, Any], Any] | None = None,
) -> dict[str, Any]:
    """Values of a configuration, of whatever sections; later sources win: file, flags, dotted overrides.

    A file names others that it adds to by `include:`. Where `data.root` isn't said, it is the variable
    PDEBENCH_ROOT, or `data`.

    Args:
        source: YAML file or the name of a shipped one, or the keys that one would hold.
        flags: Values by dotted key, taken as they are.
        overrides: `key=value` with dotted keys, values in YAML.
        adjust: Given the file's values and those of the overrides; returns the file's that these win over.
    Returns:
        Nested dictionaries, with references `${...}` resolved.
    Raises:
        ConfigError: If something can't be read, isn't YAML, or doesn't go together.
    """
    path = source if isinstance(source, Path) else None
    try:
        keys = {} if source is None or isinstance(source, Path) else dict(source)
        file = _present(OmegaConf.create(keys)) if path is None else read_yaml(path)
        said = parse_overrides(overrides)
        check_like(OmegaConf.to_container(file), OmegaConf.to_container(said))
        if adjust is not None:
            file = OmegaConf.create(adjust(OmegaConf.to_container(file), OmegaConf.to_container(said)))
        merged = OmegaConf.merge(file, _nested(flags or {}), said)
        values = OmegaConf.to_container(merged, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError(str(error).splitlines()[0], path=path, hint="check the dotted keys") from error
    except TypeError as error:  # OmegaConf's, which names no key
        hint = "say the same kind here and in the files that it includes"
        raise ConfigError("a list and keys don't merge", path=path, hint=hint) from error
    assert isinstance(values, dict)
    named = {str(key): value for key, value in values.items()}
    if isinstance(data := named.setdefault("data", {}), dict) and data.get("root") is None:
        data["root"] = os.environ.get("PDEBENCH_ROOT") or "data"
    return named


def _nested(flags: Mapping[str, Any]) -> Any:
    config = OmegaConf.create({})
    for key, value in flags.items():
        OmegaConf.update(config, key, _literal(value) if isinstance(value, str) else value)
    return config


def _literal(text: str) -> str:
    """The text escaped: a flag is meant as it is written, only YAML and overrides refer to other values."""
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", text)


def read_yaml(path: Path, *, including: tuple[Path, ...] = ()) -> Any:
    """A file's values over those of the files that it includes, as an OmegaConf dictionary.

    `include:` names one file or a list of them, relative to the file that it stands in, or shipped ones;
    later ones win.
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
    """Refuse YAML that nests deeper than `MAX_DEPTH`, without recursion; of syntax others judge."""
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
    """Values of overrides, as an OmegaConf dictionary; later ones win."""
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
    """Refuse an override that says a list where the file has keys, or the other way round."""
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
