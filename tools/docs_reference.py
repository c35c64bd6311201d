"""The pages of the reference, made from the code: public names, commands, configuration keys, errors.

Only text is made here, from what the packages say of themselves, so that a test can look at it without a
site: mkdocstrings puts the docstrings in where a page says `::: name`.
"""

from __future__ import annotations

import importlib
import inspect
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo

REPOSITORY = Path(__file__).resolve().parents[1]
PUBLIC_MODULES = ("ups_store", "ups_store.build", "ups_store.torch", "ups")
FIRST = {  # names in the order of use; the others follow by alphabet
    "ups_store": (
        "write",
        "open",
        "Store",
        "make_loader",
        "Window",
        "append",
        "create",
        "StoreWriter",
        "join",
    ),
    "ups_store.torch": ("make_loader", "StoreDataset", "Loader", "Window"),
}
RETURNED = {  # classes that have no public name, as one only gets them from a function
    "ups_store": ("ups_store.read.verify.Report", "ups_store.read.verify.Problem"),
    "ups": ("ups.trained.simulator.Simulator",),
}
ERROR_MODULES = ("ups_store.errors", "ups.errors")
MOVED_PAGES = {
    "changelog.md": "CHANGELOG.md",
    "how-we-work.md": "CONTRIBUTING.md",
}  # from the repository's root
CONFIGURATIONS = {
    "build": ("ups_store.building.config", "BuildConfig", "a build, `ups-store build`"),
    "run": ("ups.config", "RunConfig", "a run: training, evaluation, and the builds that they start"),
}


@cache
def reference_pages() -> dict[str, str]:
    """Every generated page by its path below `docs/`, as Markdown."""
    pages = {f"reference/{module}.md": _module_page(module) for module in PUBLIC_MODULES}
    pages["reference/errors.md"] = _errors_page()
    for program in programs():
        pages[f"reference/commands/{program.name}.md"] = _program_page(program)
    for name, (module, model, what) in CONFIGURATIONS.items():
        pages[f"reference/config-{name}.md"] = _config_page(_attribute(module, model), what)
    return pages


# --- public names ---


def public_names(module: str) -> list[str]:
    """Names that a module offers, without the errors that have a page of their own."""
    loaded = importlib.import_module(module)
    first = FIRST.get(module, ())
    names = [*first, *(name for name in getattr(loaded, "__all__", ()) if name not in first)]
    return [name for name in names if getattr(getattr(loaded, name), "__module__", "") not in ERROR_MODULES]


def _module_page(module: str) -> str:
    parts = [f"# `{module}`", inspect.getdoc(importlib.import_module(module)) or ""]
    room = "ups_store.building" if module == "ups_store.build" else module  # where its table of names stands
    parts += [f"::: {room}.{name}" for name in public_names(module)]
    parts += [f"::: {name}" for name in RETURNED.get(module, ())]
    return "\n\n".join(parts) + "\n"


# --- errors ---


def error_classes(module: str) -> list[type[BaseException]]:
    """Error classes of a module in the order of its source."""
    members = vars(importlib.import_module(module)).values()
    errors = [value for value in members if isinstance(value, type) and issubclass(value, BaseException)]
    return [error for error in errors if error.__module__ == module]


def _errors_page() -> str:
    parts = [
        "# Errors",
        "Every error carries what it knows as attributes and a stable `kind`. Match on the class and on"
        " `kind`; the sentence is for people and may change. `exit code` is what a command ends with.",
    ]
    for module in ERROR_MODULES:
        classes = error_classes(module)
        head = "| class | is a | `kind` | exit code | when |\n|---|---|---|---|---|\n"
        parts += [f"## `{module}`", head + "\n".join(_error_row(module, cls) for cls in classes)]
        parts += [f"::: {module}.{cls.__name__}\n    options:\n      heading_level: 3" for cls in classes]
    return "\n\n".join(parts) + "\n"


def _error_row(module: str, cls: Any) -> str:
    kind, code = getattr(cls, "kind", ""), getattr(cls, "exit_code", "")
    bases = ", ".join(f"`{base.__name__}`" for base in cls.__bases__)
    when = _cell((inspect.getdoc(cls) or "").partition("\n")[0])
    name = f"[`{cls.__name__}`][{module}.{cls.__name__}]"
    return f"| {name} | {bases} | {f'`{kind}`' if kind else ''} | {code} | {when} |"


# --- commands ---


@dataclass(frozen=True)
class Program:
    """What is typed, and the typer application behind it."""

    name: str
    app: typer.Typer


def programs() -> list[Program]:
    """The commands that installing makes: `pkg.cli:main` keeps its application in `pkg.cli.app`."""
    scripts = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["scripts"]
    modules = {name: f"{target.partition(':')[0]}.app" for name, target in scripts.items()}
    return [Program(name, _attribute(module, "app")) for name, module in modules.items()]


def verbs(program: Program) -> Iterator[tuple[str, Any]]:
    """What can be typed and its command, one for a program without verbs; hidden ones are left out."""

    def walk(words: str, command: Any) -> Iterator[tuple[str, Any]]:
        if not hasattr(command, "commands"):
            yield words, command
            return
        if command.invoke_without_command and words != program.name:
            yield words, command
        for name in command.commands:
            _, verb, _ = command.resolve_command(None, [name])  # as it is imported when it is typed
            if not verb.hidden:
                yield from walk(f"{words} {name}", verb)

    yield from walk(program.name, typer.main.get_command(program.app))


def _program_page(program: Program) -> str:
    top = typer.main.get_command(program.app)
    parts = [f"# `{program.name}`"]
    if hasattr(top, "commands"):
        parts += [_prose(top.help), _options(top)]
    for words, command in verbs(program):
        heading = [f"## `{words}`"] if words != program.name else []
        parts += [
            *heading,
            f"```text\n{_usage(words, command)}\n```",
            _prose(command.help),
            _options(command),
        ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _usage(words: str, command: Any) -> str:
    arguments = [_argument(param) for param in command.params if not _is_option(param)]
    return " ".join([words, "[OPTIONS]", *arguments])


def _argument(param: Any) -> str:
    name = str(param.metavar or param.name.upper()).strip("[].")
    name = name if param.required else f"[{name}]"
    return f"{name}..." if param.nargs == -1 else name


def _is_option(param: Any) -> bool:
    return param.opts[0].startswith("-")


def _options(command: Any) -> str:
    rows = []
    for param in command.params:
        if getattr(param, "hidden", False):
            continue
        names = [*param.opts, *param.secondary_opts] if _is_option(param) else [_argument(param)]
        names_text = ", ".join(f"`{name}`" for name in names)
        rows.append(f"| {_cell(names_text)} | {_value(param)} | {_cell(param.help or '')}{_default(param)} |")
    return "| option | value | meaning |\n|---|---|---|\n" + "\n".join(rows) if rows else ""


def _value(param: Any) -> str:
    if getattr(param, "is_flag", False) or getattr(param, "count", False):
        return ""
    return _cell(type_text(param.type_descriptor.annotation))


def _default(param: Any) -> str:
    default = getattr(param, "default", None)
    is_plain = isinstance(default, int | float | str) and not isinstance(default, bool)
    if not is_plain or getattr(param, "count", False) or "default" in (param.help or ""):
        return ""
    return f" (default: `{default.value if isinstance(default, Enum) else default}`)"


# --- configurations ---


@dataclass(frozen=True)
class Key:
    """One key of a configuration; `<name>` in it is the user's to choose."""

    name: str
    type: str
    default: str
    meaning: str

    @property
    def anchor(self) -> str:
        """To link to, such as `stages.name.epochs`."""
        return re.sub(r"[^\w.]", "", self.name)


@dataclass(frozen=True)
class ConfigSection:
    """Keys below one prefix, and what its model's docstring says."""

    prefix: str
    meaning: str
    keys: tuple[Key, ...]


def config_sections(model: type[BaseModel], prefix: str = "") -> Iterator[ConfigSection]:
    """Sections of a configuration from the outside in, each with the keys that hold values."""
    keys = []
    inner: list[tuple[str, type[BaseModel]]] = []
    for name, field in model.model_fields.items():
        path = f"{prefix}{name}"
        found = list(_inner_models(field.annotation, path))
        inner += found
        if not found or field.description:
            keys.append(Key(path, _field_type(field), _field_default(field), field.description or ""))
    yield ConfigSection(prefix.rstrip("."), inspect.getdoc(model) or "", tuple(keys))
    for path, section in inner:
        yield from config_sections(section, f"{path}.")


def _inner_models(annotation: Any, path: str) -> Iterator[tuple[str, type[BaseModel]]]:
    """Models that a key's value is made of, and where their keys lie."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield path, annotation
        return
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is dict:
        yield from _inner_models(arguments[1], f"{path}.<name>")
    elif origin in (tuple, list):
        yield from _inner_models(arguments[0], f"{path}[]")
    elif origin in (Union, UnionType, Annotated):
        for argument in arguments[:1] if origin is Annotated else arguments:
            yield from _inner_models(argument, path)


def _config_page(model: type[BaseModel], what: str) -> str:
    parts = [
        f"# Configuration of {what}",
        "Write it as YAML, or as dotted overrides on the command line, such as `data.limit=100`. A key that"
        " doesn't exist is an error that names the nearest one. `<name>` is a name of your choice, `[]` an"
        " item of a list.",
    ]
    for section in config_sections(model):
        head = "| key | type | default | meaning |\n|---|---|---|---|\n"
        rows = [
            f'| <a id="{key.anchor}"></a>`{key.name}` | {_cell(key.type)} | {_cell(key.default)} '
            f"| {_cell(key.meaning)} |"
            for key in section.keys
        ]
        parts += [f"## `{section.prefix}`" if section.prefix else "## At the top", _prose(section.meaning)]
        parts += [head + "\n".join(rows)] if rows else []
    return "\n\n".join(parts) + "\n"


def _field_type(field: FieldInfo) -> str:
    return type_text(field.annotation) + _limits(field.metadata)


def _field_default(field: FieldInfo) -> str:
    if field.is_required():
        return "" if "by default" in (field.description or "") else "required"
    value = field.get_default(call_default_factory=True)
    return f"`{_yaml(value)}`"


def _yaml(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_yaml, value))}]"
    if isinstance(value, BaseModel):
        return "see below"
    return str(value)


_PLAIN = {
    int: "whole number",
    float: "number",
    str: "text",
    bool: "true or false",
    Path: "path",
    type(None): "null",
}


def type_text(annotation: Any) -> str:
    """What may stand there, in words: `whole number >= 1 or null`."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation in _PLAIN:
        return _PLAIN[annotation]
    if origin is Annotated:
        return type_text(arguments[0]) + _limits(arguments[1:])
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin in (Union, UnionType):
        return " or ".join(type_text(argument) for argument in arguments)
    if origin in (tuple, list):
        several = [argument for argument in arguments if argument is not ...]
        count = f" of {len(several)}" if len(several) > 1 else ""
        return f"list{count}: {type_text(several[0])}"
    if origin is dict:
        return f"{type_text(arguments[1])} by name"
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return ", ".join(f"`{member.value}`" for member in annotation)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "section"
    return str(getattr(annotation, "__name__", annotation))


_SIGNS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}


def _limits(metadata: Any) -> str:
    """Bounds that pydantic knows, such as ` >= 1`."""
    flat = [
        inner for item in metadata for inner in (item.metadata if isinstance(item, FieldInfo) else (item,))
    ]
    found = [
        f"{sign} {getattr(item, name)}"
        for item in flat
        for name, sign in _SIGNS.items()
        if hasattr(item, name)
    ]
    return f" {', '.join(found)}" if found else ""


# --- text ---


def _attribute(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


def _prose(text: str | None) -> str:
    """Text of a docstring as Markdown: what looks like a tag is shown as it is."""
    return "`".join(
        part if i % 2 else part.replace("<", "&lt;") for i, part in enumerate((text or "").strip().split("`"))
    )


def _cell(text: str) -> str:
    return _prose(text).replace("|", "&#124;").replace("\n", " ")
