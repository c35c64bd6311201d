"""Read configurations: YAML files with `include:`, dotted overrides `key=value`, references `${...}`.

Texts are bounded in length, depth and what aliases expand to before anything is made of them. A file alone
can neither import code nor let what is stored depend on the environment.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ups_store.errors import ConfigError, needs
from ups_store.launch import ALLOWED_VARIABLES
from ups_store.old_names import with_present_names
from ups_store.system.files import opened_text
from ups_store.system.paths import check_local, is_remote

with needs("hdf5"):
    import yaml

MAX_BYTES = 1 << 20  # of a file: a configuration has a few kB
MAX_DEPTH = 32  # lists and mappings within each other, and references to references
MAX_NODES = 10_000  # values of a file, with those that aliases repeat
MAX_REFERENCES = 1000
MAX_EXPANDED = 1 << 20  # letters that all references together become
MAX_FILES = 100  # that include each other

# Keys that say where something is or how it is done, not what is stored: they may depend on the environment.
PLACES = (
    *("data.root", "data.stage_dir", "data.follow_external", "cache.dir", "cache.remote", "reading."),
    *("latent.checkpoint", "latent.device", "latent.pin_memory"),
)
# Entry points: packages with sections of their own in the same configuration. Each names an object or module,
# which every build of such a configuration imports, with `to_build(values)`, the sections of `BuildConfig`
# that a configuration says, and unknown ones to be refused; `without_effect(values)`, a sentence for each key
# that isn't read; `PLACES` as above, of its own sections; and `SENT`, beginnings of those among them that
# another machine is told.
OTHER_KEYS = "ups_store.config_keys"
SHIPPED = "ups_store.configs"  # entry points: packages with a folder of configurations

_LONG_NUMBER = re.compile(r"[-+0-9][0-9_:.]{100,}")  # `1:1:1` is one of base 60, read in quadratic time
_REFERENCE = re.compile(r"(\\?)\$\{([^${}]*)(\}?)")
_ENVIRONMENT = ("env", "oc.env")  # schemes of references
_WRITE_OUT = "write values out instead of using aliases"
# What to do about texts that aren't YAML, by words of what the parser says.
_HINTS = {
    "duplicate key": "keep one of them",
    "constructor for the tag": "write plain values, without a tag (!...)",
    "undefined alias": "quote values that start with *",
    "single document": "keep one document: remove what follows ---",
    "control characters": "save it as UTF-8 without control characters",
    "alias": _WRITE_OUT,
    "": "check the indentation, brackets and quotes",
}

Adjust = Callable[[Any, Any], Any]
Rename = Callable[[Mapping[Any, Any]], dict[Any, Any]]
Key = tuple[Any, ...]  # names and numbers from the root to a value


def read_config(
    source: Path | Mapping[str, Any] | None,
    *,
    flags: Mapping[str, Any] | None = None,
    overrides: Sequence[str] = (),
    adjust: Adjust | None = None,
    adjust_included: Adjust | None = None,
    rename: Rename = with_present_names,
) -> dict[str, Any]:
    """Read the values of a configuration, of whatever sections; later ones win: file, flags, overrides.

    A file names others that it adds to by `include:`. Where `data.root` isn't said, it is the variable
    PDEBENCH_ROOT, or `data`.

    Args:
        source: YAML file or the name of a shipped one, or the keys that one would hold.
        flags: Values by dotted key, taken as they are.
        overrides: `key=value` with dotted keys, values in YAML.
        adjust: Given the file's values and those of the overrides; returns the file's that these win over.
        adjust_included: Given the values of included files and those of the file that includes them; removes
            what these take the place of under another key.
        rename: Gives the keys of each source their present names.
    Returns:
        Nested dictionaries, with references `${...}` resolved.
    Raises:
        ConfigError: If something can't be read, isn't YAML, or doesn't go together; kind "from_environment"
            for `${env:...}` in what decides a store, "environment_not_allowed" in what leaves this machine
            or stands in an included file, unless UPS_ALLOW_ENV names the variable, "encoder_not_allowed" for
            a `latent.encoder` of the kind `module:callable` that neither `flags` nor `overrides` say.
    """
    path = source if isinstance(source, Path) else None
    try:
        if isinstance(source, Path):
            file = _read_file(source, adjust_included, rename, including=(), read=[])
        else:
            file = _renamed(source or {}, path, rename)
        newer = _read_overrides(overrides, rename)
        _merge(file, newer, path, is_override=True)  # what doesn't go together is an error, also to `adjust`
        if adjust is not None:
            file = adjust(file, newer)
        flagged: dict[str, Any] = {}
        for key, value in (flags or {}).items():
            flagged = _merge(flagged, _nest(key.split("."), _as_written(value)), path)
        references = _References(_merge(_merge(file, flagged, path), newer, path), path)
        values = references.resolved()
    except RecursionError as error:
        raise ConfigError("keys within too many others", kind="too_deep", path=path) from error
    _check_environment(references.variables, values, path)
    name = _encoder_name(values)
    if isinstance(name, str) and ":" in name and name not in map(_encoder_name, (flagged, newer)):
        raise ConfigError(
            "latent.encoder names code to import, which the command line has to allow",
            kind="encoder_not_allowed",
            path=path,
            expected="the name of an entry point",
            found=repr(name),
            hint=f"if you trust it, add the override latent.encoder={name}",
        )
    if isinstance(data := values.setdefault("data", {}), dict) and data.get("root") is None:
        data["root"] = os.environ.get("PDEBENCH_ROOT") or "data"
    return values


def _encoder_name(values: Mapping[str, Any]) -> Any:
    latent = values.get("latent")
    return latent.get("encoder") if isinstance(latent, dict) else None


def load_other_keys() -> tuple[Any, ...]:
    """Load what all installed packages know of their own sections, by the names of their entry points."""
    entries = sorted(metadata.entry_points(group=OTHER_KEYS), key=lambda entry: entry.name)
    return tuple(entry.load() for entry in entries)


# --- files and overrides ------------------------------------------------------------------------------


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Safe YAML with numbers such as 1e-4, dates as texts, and no key twice."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        """Refuse a key that is there already; those of `<<` are replaced by a mapping's own."""
        names: set[str] = set()
        for key, _ in node.value:
            if key.tag == "tag:yaml.org,2002:str" and key.value in names:
                problem = f"found duplicate key {key.value}"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            names.add(key.value)
        return super().construct_mapping(node, deep=deep)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in _Loader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)[eE][-+]?[0-9]+$"),
    list("-+.0123456789"),
)


def _read_file(
    name: Path, adjust: Adjust | None, rename: Rename, *, including: tuple[Path, ...], read: list[Path]
) -> dict[Any, Any]:
    """Read a file over those that it includes, references as they are written; later included ones win."""
    path = find_config(name)
    real = path.resolve()
    if real in including:
        chain = " -> ".join(file.name for file in (*including, real))
        raise ConfigError("files include each other in a circle", path=path, found=chain)
    read.append(real)
    if len(read) > MAX_FILES:
        raise ConfigError("files include others", kind="too_long", path=path, expected=f"at most {MAX_FILES}")
    hint = f"check `include` in {including[-1].name}" if including else None
    if including and not path.is_file() and path.exists():  # reading a FIFO may never end
        raise ConfigError("it is no file", path=path, kind="not_a_file", hint=hint)
    content = _load_yaml(path, hint=hint)
    if including:
        _check_allowed(_variables_in(content), "an included file refers to it", path)
    included = content.pop("include", None) or []
    newer = []
    for other in included if isinstance(included, list) else [included]:
        file = find_config(Path(str(other)), folder=path.parent)
        newer.append(_read_file(file, adjust, rename, including=(*including, real), read=read))
    values: dict[Any, Any] = {}
    for new in (*newer, _renamed(content, path, rename)):
        if adjust is not None:
            adjust(values, new)
        values = _merge(values, new, path)
    return values


def _renamed(values: Mapping[Any, Any], path: Path | None, rename: Rename) -> dict[Any, Any]:
    try:
        return rename(values)
    except ValueError as error:
        raise ConfigError(str(error), path=path) from error


def _load_yaml(path: Path, *, hint: str | None) -> dict[Any, Any]:
    if hint is None:
        near = None if path.exists() else near_config(path)
        hint = (
            f"did you mean {near}?" if near else "check the name; `ups configs` lists those that are shipped"
        )
    try:
        with opened_text(path) as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        if path.is_fifo():
            hint = "begin what writes into the pipe first; a command reads it once"
        raise ConfigError(f"can't be read ({error.strerror})", path=path, hint=hint) from error
    if len(content) > MAX_BYTES:
        expected = f"a configuration of at most {MAX_BYTES:,} bytes"
        raise ConfigError("file", kind="too_long", path=path, expected=expected, found="more", hint=hint)
    try:
        values = _parse(content.decode("utf-8-sig"), subject="configuration", path=path)
    except UnicodeDecodeError as error:
        raise ConfigError(f"is not YAML ({error})", path=path, hint="save it as UTF-8") from error
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        hint = next(hint for words, hint in _HINTS.items() if words in reason)
        raise ConfigError(f"is not YAML ({reason})", path=path, hint=hint) from error
    if isinstance(values, list):
        raise ConfigError("configuration", path=path, expected="keys and values", found="a list")
    if not isinstance(values, dict | None):
        raise ConfigError("can't be read (a single value instead of keys)", path=path, hint=hint)
    return values or {}


def _parse(text: str, *, subject: str, path: Path | None = None) -> Any:
    """Parse YAML; refused before, without recursion, is what is too deep or grows too large by aliases."""

    def refuse(kind: str, expected: str, found: object = "more", hint: str | None = None) -> ConfigError:
        return ConfigError(subject, kind=kind, path=path, expected=expected, found=found, hint=hint)

    if (num_references := text.count("${")) > MAX_REFERENCES:
        raise refuse("too_long", f"at most {MAX_REFERENCES} references ${{...}}", num_references)
    num_nodes, sizes = 0, dict[str, int]()
    begun: list[tuple[str | None, int]] = []  # collections: anchor, nodes before
    try:
        for event in yaml.parse(text, Loader=_Loader):
            if isinstance(event, yaml.CollectionStartEvent):
                begun.append((event.anchor, num_nodes))
            if isinstance(event, yaml.CollectionEndEvent):
                anchor, before = begun.pop()
                sizes[anchor or ""] = num_nodes - before
            elif isinstance(event, yaml.AliasEvent):
                if any(event.anchor == anchor for anchor, _ in begun):
                    raise yaml.YAMLError(f"alias *{event.anchor} within what it names")
                num_nodes += sizes.get(str(event.anchor), 1)
            elif isinstance(event, yaml.NodeEvent):
                num_nodes += 1
            if isinstance(event, yaml.ScalarEvent) and _LONG_NUMBER.fullmatch(event.value):
                raise refuse("too_long", "numbers of at most 100 digits")
            if num_nodes > MAX_NODES:
                expected = f"at most {MAX_NODES:,} values, with those that aliases repeat"
                raise refuse("too_long", expected, hint=_WRITE_OUT)
            if len(begun) > MAX_DEPTH:
                expected = f"at most {MAX_DEPTH} lists and mappings within each other"
                raise refuse("too_deep", expected, hint="close brackets that were left open")
    except (yaml.parser.ParserError, yaml.scanner.ScannerError, yaml.reader.ReaderError):
        pass  # loading it says what is wrong
    try:
        return yaml.load(text, Loader=_Loader)
    except ValueError as error:  # such as a date with a tag
        raise yaml.YAMLError(str(error)) from error


def _read_overrides(overrides: Sequence[str], rename: Rename) -> dict[Any, Any]:
    """Read the values of overrides, with references as they are written; later ones win."""
    values: dict[Any, Any] = {}
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals:
            hint = "flags start with --"
            raise ConfigError("override", expected="key=value", found=repr(override), hint=hint)
        names = key.replace("[", ".").replace("]", "").split(".")
        if len(names) > MAX_DEPTH:
            expected = f"a key of at most {MAX_DEPTH} names"
            raise ConfigError("override", kind="too_deep", expected=expected, found="more")
        try:
            value = _parse(text, subject=f"override {key}")
        except yaml.YAMLError as error:
            facts: dict[str, Any] = {"expected": "YAML values", "found": repr(override)}
            raise ConfigError("overrides", hint="check brackets and quotes", **facts) from error
        values = _merge(values, _nest(names, value), None)
    return _renamed(values, None, rename)


def _nest(names: Sequence[str], value: Any) -> Any:
    for name in reversed(names):
        value = {name: value}
    return value


def _merge(old: Any, new: Any, path: Path | None, key: str = "", *, is_override: bool = False) -> Any:
    """Return the newer of two values; keys of both where both have some."""
    if isinstance(old, dict) and isinstance(new, dict):
        both = {}
        for name in (name for name in new if name in old):
            inner = f"{key}.{name}" if key else str(name)
            both[name] = _merge(old[name], new[name], path, inner, is_override=is_override)
        return {**old, **new, **both}
    if isinstance(new, dict) and isinstance(old, str) and "${" in old:
        hint = f"say all keys of {key} instead of {old[:100]}"
        raise ConfigError(f"{key}: keys and a reference don't merge", path=path, hint=hint)
    if {type(old), type(new)} == {dict, list}:
        if not is_override:
            hint = "say the same kind here and in the files that it includes"
            raise ConfigError(f"{key}: a list and keys don't merge", path=path, hint=hint)
        kinds = ["keys and values", "a list"] if isinstance(old, dict) else ["a list", "keys and values"]
        replacing = f"say {key}=[...], which replaces the list as a whole"
        hint = f"say {key}.<name>=..." if isinstance(old, dict) else replacing
        raise ConfigError(key, expected=kinds[0], found=kinds[1], hint=hint)
    return new


def find_config(name: Path, *, folder: Path = Path()) -> Path:
    """Return the file of a name, else the shipped configuration, else the file that is missing."""
    check_local(name)
    path = folder / name
    return path if path.is_file() else shipped_configs().get(_shipped_name(name), path)


def near_config(path: Path) -> str | None:
    """Return the shipped configuration, or the file beside it, that a path was probably meant to be."""
    beside = [str(file) for file in path.parent.glob("*.yaml")]
    near = difflib.get_close_matches(str(path), beside, n=1)
    near = near or difflib.get_close_matches(_shipped_name(path), shipped_configs(), n=1)
    return near[0] if near else None


def shipped_configs() -> dict[str, Path]:
    """Return all shipped configurations by name, without `.yaml`: those of runs first, then folders'.

    A package names its folder of YAML files by an entry point of the group `ups_store.configs`; what the
    entry point names is not imported. A file of the user's own always comes first.
    """
    named: dict[str, Path] = {}
    for point in metadata.entry_points(group=SHIPPED):
        spec = find_spec(point.value)
        for folder in map(Path, spec.submodule_search_locations or () if spec else ()):
            for file in folder.rglob("*.yaml"):
                named[file.relative_to(folder).with_suffix("").as_posix()] = file
    return dict(sorted(named.items(), key=lambda item: ("/" in item[0], item[0])))


def _shipped_name(path: Path) -> str:  # "configs/" is a folder of the earlier system's repository
    return path.as_posix().removeprefix("./").removeprefix("configs/").removesuffix(".yaml")


# --- references ---------------------------------------------------------------------------------------


class _Literal(str):
    """A text that is meant as it is written, without references: a flag's."""

    __slots__ = ()


def _as_written(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_as_written(item) for item in value]
    return _Literal(value) if isinstance(value, str) else value


class _References:
    """Values of a configuration with `${a.b}`, `${env:NAME}` and `${env:NAME,default}` in them.

    A text `\\${` stands for `${`. What a reference names may be a text with references, nothing deeper.
    """

    def __init__(self, values: Mapping[str, Any], path: Path | None) -> None:
        self.variables: dict[Key, set[str]] = {}  # of the environment, that texts depend on, by key
        self._values, self._path = values, path
        self._done: dict[Key, Any] = {}  # each text is resolved once, however often it is named
        self._num_expanded = 0

    def resolved(self) -> dict[str, Any]:
        """Return new nested dictionaries with what references stand for."""
        return {str(name): self._resolve(value, (name,), ()) for name, value in self._values.items()}

    def _resolve(self, value: Any, key: Key, through: tuple[Key, ...]) -> Any:
        if isinstance(value, dict):
            return {name: self._resolve(inner, (*key, name), ()) for name, inner in value.items()}
        if isinstance(value, list):
            return [self._resolve(inner, (*key, number), ()) for number, inner in enumerate(value)]
        if not isinstance(value, str):
            return value
        if isinstance(value, _Literal):
            return str(value)
        if value == "???":
            raise self._error(key, "is mandatory", hint=f"say {_dotted(key)}=...")
        if key in through:
            raise self._error(key, "refers to itself")
        if len(through) > MAX_DEPTH:
            raise self._error(key, f"at most {MAX_DEPTH} references to references", kind="too_deep")
        if key not in self._done:
            whole = _REFERENCE.fullmatch(value)
            if whole and not whole[1]:
                self._done[key] = self._meant(whole, key, through)
            else:
                replace = lambda match: str(self._meant(match, key, through))  # noqa: E731
                self._done[key] = _REFERENCE.sub(replace, value)
        return self._done[key]

    def _meant(self, match: re.Match[str], key: Key, through: tuple[Key, ...]) -> Any:
        """Return what one reference in the text of a key stands for."""
        name = match[2].strip()
        if match[1]:  # a backslash before it
            return match[0][1:]
        if not match[3] or not name:
            raise self._error(key, "${ without }, or a reference within another")
        scheme, colon, text = name.partition(":")
        if scheme in _ENVIRONMENT:
            variable, comma, default = (part.strip() for part in text.partition(","))
            self.variables.setdefault(key, set()).add(variable)
            if variable in os.environ:
                return os.environ[variable]
            if not comma:
                hint = f"set it, or say what stands for it: ${{env:{variable},DEFAULT}}"
                raise self._error(key, f"no variable {variable} in the environment", hint=hint)
            return None if default == "null" else default.strip("'\"")
        if colon or name.startswith("."):
            known = "references are ${a.b}, with the whole key, and ${env:NAME}"
            raise self._error(key, f"${{{name}}}: {known}")
        node: Any = self._values
        target: Key = ()
        for part in name.split("."):
            names = node if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
            same = next((known for known in names if str(known) == part), None)
            if same is None:
                raise self._error(key, f"${{{name}}} leads nowhere")
            node, target = node[same], (*target, same)
        if isinstance(node, dict | list) and "${" in str(node):
            raise self._error(key, f"${{{name}}} is of values that refer to others", hint="write them out")
        value = self._resolve(node, target, (*through, key))
        if target in self.variables:
            self.variables.setdefault(key, set()).update(self.variables[target])
        self._num_expanded += len(str(value))
        if self._num_expanded > MAX_EXPANDED:
            problem = f"references of more than {MAX_EXPANDED:,} letters together"
            hint = "write values out instead of referring to them"
            raise self._error(key, problem, kind="too_long", hint=hint)
        return value

    def _error(
        self, key: Key, problem: str, kind: str | None = None, hint: str = "check the dotted keys"
    ) -> ConfigError:
        return ConfigError(f"{_dotted(key)}: {problem}", kind=kind, path=self._path, hint=hint)


def _dotted(key: Key) -> str:
    return ".".join(map(str, key))[:200]


def _check_environment(variables: Mapping[Key, set[str]], values: Any, path: Path | None) -> None:
    """Refuse a variable in what decides a store or a training: the same file would mean another elsewhere.

    Likewise one that a URL, or another key that leaves this machine, would tell to somebody, unless the
    command line allows it.
    """
    others = load_other_keys() if variables else ()
    allowed = (*PLACES, *(key_prefix for other in others for key_prefix in other.PLACES))
    sent = tuple(key for other in others for key in other.SENT)
    for key, names in variables.items():
        if not (dotted := _dotted(key)).startswith(allowed):
            raise ConfigError(
                f"{dotted} decides what is stored, and that must not depend on the environment",
                kind="from_environment",
                path=path,
                expected="a value",
                found=f"${{env:{min(names)}}}",
                hint=f'let the shell say it on the command line: {dotted}="${min(names)}"',
            )
        value = values[str(key[0])]
        for name in key[1:]:
            value = value[name]
        if dotted.startswith(sent) or is_remote(value):
            _check_allowed(names, f"{dotted} would send it to another machine", path)


def _check_allowed(variables: Iterable[str], problem: str, path: Path | None) -> None:
    """Refuse variables of the environment that `--allow-env` doesn't name, nor UPS_ALLOW_ENV."""
    allowed = os.environ.get(ALLOWED_VARIABLES, "").split(",")
    for name in sorted(set(variables).difference(allowed)):
        raise ConfigError(
            f"variable {name} of the environment: {problem}",
            kind="environment_not_allowed",
            path=path,
            hint=f"if that is meant, say --allow-env {name}",
        )


def _variables_in(value: Any) -> Iterator[str]:
    """Give the variables of the environment that texts of a file refer to."""
    if isinstance(value, str):
        for match in _REFERENCE.finditer(value):
            scheme, _, text = match[2].strip().partition(":")
            if scheme in _ENVIRONMENT:
                yield text.partition(",")[0].strip()
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _variables_in(inner)
