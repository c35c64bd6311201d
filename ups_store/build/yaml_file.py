"""YAML of configurations: files with `include:`, and texts that are safe to parse."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from ups_store.errors import ConfigError

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

    `include:` names one file or a list of them, relative to the file that it stands in; later ones win.

    Raises:
        ConfigError: If a file can't be read, isn't YAML or has no keys, is too long or nested too deep, or if
            files include each other.
    """
    real = path.resolve()
    if real in including:
        chain = " -> ".join(file.name for file in (*including, real))
        raise ConfigError("files include each other in a circle", path=path, found=chain)
    own = _read_one(
        path,
        hint=f"check `include` in {including[-1].name}"
        if including
        else "check the name of the configuration",
    )
    included = own.pop("include", None) or []
    names = [included] if isinstance(included, str) else list(included)
    parts = [read_yaml(path.parent / str(name), including=(*including, real)) for name in names]
    return OmegaConf.merge(*parts, own)


def expect_shallow(text: str, *, subject: str, path: Path | None = None) -> None:
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


def _read_one(path: Path, *, hint: str) -> Any:
    text = _read_text(path, hint=hint)
    expect_shallow(text, subject="configuration", path=path)
    try:
        loaded = OmegaConf.load(io.StringIO(text))
    except OSError as error:
        raise ConfigError("can't be read (a single value instead of keys)", path=path, hint=hint) from error
    except Exception as error:  # the YAML parser's own tree of errors
        raise _not_yaml(path, error) from error
    if not OmegaConf.is_dict(loaded):
        raise ConfigError("configuration", path=path, expected="keys and values", found="a list")
    return loaded


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
