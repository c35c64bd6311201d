"""Reading configurations: YAML files with `include:`, and dotted overrides `key=value` with values in YAML.

Texts are bounded in length, depth and what aliases expand to before a parser sees them; `references` bounds
what is left. A file alone can neither import code nor let what is stored depend on the environment.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ups_store.building.other_keys import load_other_keys
from ups_store.building.references import Literal, References, variables_in
from ups_store.building.shipped import find_config, near_config
from ups_store.errors import ConfigError, needs
from ups_store.launch import ALLOWED_VARIABLES
from ups_store.old_names import with_present_names
from ups_store.system.urls import is_remote

with needs("hdf5"):
    import yaml
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

MAX_DEPTH = 32  # lists and mappings within each other; parsers recurse, some on the C stack

MAX_REFERENCES = 1000  # ${...}; OmegaConf takes a while to parse each

MAX_NODES = 10_000  # values of a file, with those that aliases repeat

MAX_FILES = 100  # that include each other

_LONG_NUMBER = re.compile(r"[-+0-9][0-9_:.]{100,}")  # `1:1:1` is one of base 60, read in quadratic time

MAX_BYTES = 1 << 20  # of a file: a configuration has a few kB

# Keys that say where something is or how it is done, not what is stored: they may depend on the environment.
PLACES = (
    *("data.root", "data.stage_dir", "data.follow_external", "cache.dir", "cache.remote", "reading."),
    *("latent.checkpoint", "latent.device", "latent.pin_memory"),
)

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
    adjust_included: Callable[[Any, Any], object] | None = None,
) -> dict[str, Any]:
    """Values of a configuration, of whatever sections; later sources win: file, flags, dotted overrides.

    A file names others that it adds to by `include:`. Where `data.root` isn't said, it is the variable
    PDEBENCH_ROOT, or `data`.

    Args:
        source: YAML file or the name of a shipped one, or the keys that one would hold.
        flags: Values by dotted key, taken as they are.
        overrides: `key=value` with dotted keys, values in YAML.
        adjust: Given the file's values and those of the overrides; returns the file's that these win over.
        adjust_included: Given the values of included files and those of the file that includes them; removes
            what these take the place of under another key.
    Returns:
        Nested dictionaries, with references `${...}` resolved.
    Raises:
        ConfigError: If something can't be read, isn't YAML, or doesn't go together; kind "from_environment"
            for `${oc.env:...}` in what decides a store, "environment_not_allowed" in what leaves this machine
            or stands in an included file, unless UPS_ALLOW_ENV names the variable, "encoder_not_allowed" for
            a `latent.encoder` of the kind `module:callable` that neither `flags` nor `overrides` say.
    """
    path = source if isinstance(source, Path) else None
    try:
        keys = {} if source is None or isinstance(source, Path) else source
        file = _present(keys) if path is None else read_yaml(path, adjust=adjust_included)
        said = parse_overrides(overrides)
        check_like(file, said)
        if adjust is not None:
            file = adjust(file, said)
        merged = _merged(_merged(file, nested := _nested(flags or {}), path=path), said, path=path)
        references = References(merged, path=path)
        values = references.resolved()
    except OmegaConfBaseException as error:
        raise ConfigError(str(error).splitlines()[0], path=path, hint="check the dotted keys") from error
    except RecursionError as error:
        raise ConfigError("keys within too many others", kind="too_deep", path=path) from error
    if references.variables:
        _check_environment(references, values, path=path)
    _check_encoder(values, [_encoder_of(nested), _encoder_of(said)], path=path)
    if isinstance(data := values.setdefault("data", {}), dict) and data.get("root") is None:
        data["root"] = os.environ.get("PDEBENCH_ROOT") or "data"
    return values


def _nested(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Values of flags, which are meant as they are written: only YAML and overrides refer to other values."""
    nested: dict[str, Any] = {}
    for key, value in flags.items():
        *sections, name = key.split(".")
        inner = nested
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[name] = _literal(value)
    return nested


def _literal(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_literal(each) for each in value]
    return Literal(value) if isinstance(value, str) else value


def _merged(old: Any, new: Any, key: str = "", *, path: Path | None) -> Any:
    """The newer of two values; keys of both where both have some."""
    if isinstance(old, dict) and isinstance(new, dict):
        both = {
            name: _merged(old[name], value, f"{key}.{name}", path=path) if name in old else value
            for name, value in new.items()
        }
        return {**old, **both}
    if isinstance(new, dict) and isinstance(old, str) and "${" in old:
        hint = f"say all keys of {key[1:]} instead of {old[:100]}"
        raise ConfigError(f"{key[1:]}: keys and a reference don't merge", path=path, hint=hint)
    if {type(old), type(new)} == {dict, list}:
        hint = "say the same kind here and in the files that it includes"
        raise ConfigError(f"{key[1:]}: a list and keys don't merge", path=path, hint=hint)
    return new


def _check_environment(references: References, values: Any, *, path: Path | None) -> None:
    """Refuse a variable in what decides a store or a training: the same file would mean another elsewhere.

    Likewise one that a URL, or another key that leaves this machine, would tell to somebody, unless the
    command line allows it.
    """
    others = load_other_keys()
    allowed = (*PLACES, *(place for other in others for place in other.PLACES))
    sent = tuple(key for other in others for key in other.SENT)
    for key, names in references.variables.items():
        if not key.startswith(allowed):
            name = min(names)
            raise ConfigError(
                f"{key} decides what is stored, and that must not depend on the environment",
                kind="from_environment",
                path=path,
                expected="a value",
                found=f"${{oc.env:{name}}}",
                hint=f'let the shell say it on the command line: {key}="${name}"',
            )

        value = values
        for part in key.split("."):
            value = value[int(part)] if isinstance(value, list) else value[part]
        if key.startswith(sent) or is_remote(value):
            check_allowed(names, f"{key} would send it to another machine", path=path)


def check_allowed(variables: Iterable[str], problem: str, *, path: Path | None) -> None:
    """Refuse variables of the environment that `--allow-env` doesn't name, nor UPS_ALLOW_ENV."""
    allowed = os.environ.get(ALLOWED_VARIABLES, "").split(",")
    for name in sorted(set(variables).difference(allowed)):
        raise ConfigError(
            f"variable {name} of the environment: {problem}",
            kind="environment_not_allowed",
            path=path,
            hint=f"if that is meant, say --allow-env {name}",
        )


def _check_encoder(values: Mapping[str, Any], said: Sequence[Any], *, path: Path | None) -> None:
    """Refuse code that only a file or a checkpoint names; entry points are code that was installed."""
    name = _encoder_of(values)
    if isinstance(name, str) and ":" in name and name not in said:
        raise ConfigError(
            "latent.encoder names code to import, which the command line has to allow",
            kind="encoder_not_allowed",
            path=path,
            expected="the name of an entry point",
            found=repr(name),
            hint=f"if you trust it, add the override latent.encoder={name}",
        )


def _encoder_of(values: Mapping[str, Any]) -> Any:
    latent = values.get("latent")
    return latent.get("encoder") if isinstance(latent, dict) else None


def read_yaml(
    path: Path,
    *,
    including: tuple[Path, ...] = (),
    read: list[Path] | None = None,
    adjust: Callable[[Any, Any], object] | None = None,
) -> dict[Any, Any]:
    """A file's values over those of the files that it includes, with references as they are written.

    `include:` names one file or a list of them, relative to the file that it stands in, or shipped ones;
    later ones win.

    Args:
        adjust: As `adjust_included` of `read_config`.
    """
    path = find_config(path)
    real = path.resolve()
    if real in including:
        chain = " -> ".join(file.name for file in (*including, real))
        raise ConfigError("files include each other in a circle", path=path, found=chain)
    read = [] if read is None else read
    read.append(real)
    if len(read) > MAX_FILES:
        raise ConfigError("files include others", kind="too_long", path=path, expected=f"at most {MAX_FILES}")
    if including and not path.is_file() and path.exists():  # reading a FIFO may never end
        hint = f"check `include` in {including[-1].name}"
        raise ConfigError("it is no file", path=path, kind="not_a_file", hint=hint)
    own = _read_one(path, hint=f"check `include` in {including[-1].name}" if including else None)
    if including:
        check_allowed(variables_in(own), "an included file refers to it", path=path)
    included = own.pop("include", None) or []
    names = included if isinstance(included, list) else [included]
    values: dict[Any, Any] = {}
    for name in names:
        file = find_config(Path(str(name)), folder=path.parent)
        newer = read_yaml(file, including=(*including, real), read=read, adjust=adjust)
        values = _over(values, newer, adjust, path)
    return _over(values, _present(own, path=path), adjust, path)


def _over(
    old: dict[Any, Any], new: dict[Any, Any], adjust: Callable[[Any, Any], object] | None, path: Path
) -> dict[Any, Any]:
    if adjust is not None:
        adjust(old, new)
    merged: dict[Any, Any] = _merged(old, new, path=path)
    return merged


def _present(values: Mapping[Any, Any], *, path: Path | None = None) -> dict[Any, Any]:
    """A source's values under the present names of their keys; new dictionaries and lists."""
    try:
        return with_present_names(values)
    except ValueError as error:
        raise ConfigError(str(error), path=path) from error


def check_shallow(text: str, *, subject: str, path: Path | None = None) -> None:
    """Refuse YAML that is too deep or grows too large by its aliases, without recursion or making it.

    Of its syntax others judge.
    """
    if (found := text.count("${")) > MAX_REFERENCES:
        expected = f"at most {MAX_REFERENCES} references ${{...}}"
        raise ConfigError(subject, kind="too_long", path=path, expected=expected, found=found)
    num_nodes, sizes = 0, dict[str, int]()
    begun: list[tuple[str | None, int]] = []  # collections: anchor, nodes before
    try:
        for event in yaml.parse(text, Loader=_LOADER):
            if isinstance(event, yaml.CollectionStartEvent):
                begun.append((event.anchor, num_nodes))
            if isinstance(event, yaml.CollectionEndEvent):
                anchor, before = begun.pop()
                sizes[anchor or ""] = num_nodes - before
            elif isinstance(event, yaml.ScalarEvent) and _LONG_NUMBER.fullmatch(event.value):
                expected = "numbers of at most 100 digits"
                raise ConfigError(subject, kind="too_long", path=path, expected=expected, found="more")
            elif isinstance(event, yaml.NodeEvent):
                num_nodes += sizes.get(str(event.anchor), 1) if isinstance(event, yaml.AliasEvent) else 1
            if num_nodes > MAX_NODES:
                raise ConfigError(
                    subject,
                    kind="too_long",
                    path=path,
                    expected=f"at most {MAX_NODES:,} values, with those that aliases repeat",
                    found="more",
                    hint="write values out instead of using aliases",
                )
            if len(begun) > MAX_DEPTH:
                raise ConfigError(
                    subject,
                    kind="too_deep",
                    path=path,
                    expected=f"at most {MAX_DEPTH} lists and mappings within each other",
                    found="more",
                    hint="close brackets that were left open",
                )
    except yaml.YAMLError:  # parsing it says what is wrong
        return


def _read_one(path: Path, *, hint: str | None) -> dict[Any, Any]:
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
    return _plain(loaded)


def _plain(config: Any) -> dict[Any, Any]:
    """An OmegaConf dictionary as it is written."""
    values: Any = OmegaConf.to_container(config)
    assert isinstance(values, dict)
    return values


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


def parse_overrides(overrides: Sequence[str]) -> dict[Any, Any]:
    """Values of overrides, with references as they are written; later ones win."""
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
        return _present(_plain(OmegaConf.from_dotlist(list(overrides))))
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
