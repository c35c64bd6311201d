"""The generated reference has every public name, error, verb, option and key, and says what each is."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import pytest
import typer

from tools import docs_reference
from tools.docs_reference import CONFIGURATIONS, ERROR_MODULES, PUBLIC_MODULES, RETURNED, Program

PAGES = docs_reference.reference_pages()
PROGRAMS = docs_reference.programs()


def attribute(dotted: str) -> Any:
    module, _, name = dotted.rpartition(".")
    return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("module", PUBLIC_MODULES)
def test_every_public_name_has_a_docstring_and_a_place(module: str) -> None:
    names = [f"{module}.{name}" for name in docs_reference.public_names(module)]
    for name in (*names, *RETURNED.get(module, ())):
        shown = name.replace("ups_store.build.", "ups_store.building.")
        assert f"\n::: {shown}\n" in PAGES[f"reference/{module}.md"], name
        value = attribute(name)
        is_documented = inspect.isroutine(value) or isinstance(value, type)
        assert not is_documented or inspect.getdoc(value), name


@pytest.mark.parametrize("module", ERROR_MODULES)
def test_every_error_is_in_the_table_with_kind_and_meaning(module: str) -> None:
    page = PAGES["reference/errors.md"]
    classes = docs_reference.error_classes(module)
    assert len(classes) > 5
    for cls in classes:
        (row,) = [line for line in page.splitlines() if f"[{module}.{cls.__name__}]" in line]
        _, name, _, kind, exit_code, meaning, _ = (cell.strip() for cell in row.split("|"))
        assert name, row
        assert meaning.endswith((".", "`")), row
        assert issubclass(cls, Warning) or (kind and exit_code), row


def test_every_error_that_ups_store_offers_is_in_the_table() -> None:
    module = importlib.import_module("ups_store")
    offered = {name for name in module.__all__ if name.endswith("Error")}
    assert offered <= {cls.__name__ for cls in docs_reference.error_classes("ups_store.errors")}


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_every_verb_and_option_has_help(program: Program) -> None:
    page = PAGES[f"reference/commands/{program.name}.md"]
    for words, command in docs_reference.verbs(program):
        assert f"{words} [OPTIONS]" in page, words
        assert command.help, words
        for param in command.params:
            assert getattr(param, "hidden", False) or param.help, f"{words}: {param.name}"


def test_verb_that_is_imported_late_is_there_with_its_options() -> None:
    _, _, build = PAGES["reference/commands/ups-store.md"].partition("## `ups-store build`")
    assert "| `--tasks` | list: text |" in build.partition("\n## ")[0]


def test_every_installed_command_has_a_page() -> None:
    names = {program.name for program in PROGRAMS}
    assert "ups-store" in names
    assert all(f"reference/commands/{program.name}.md" in PAGES for program in PROGRAMS)


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_every_key_has_type_and_description(name: str) -> None:
    module, model, _ = CONFIGURATIONS[name]
    sections = list(docs_reference.config_sections(attribute(f"{module}.{model}")))
    keys = [key for section in sections for key in section.keys]
    assert len(keys) > 30
    assert [section.prefix for section in sections if not section.meaning] == []
    assert [key.name for key in keys if not (key.type and key.meaning)] == []
    assert [key.name for key in keys if f"`{key.name}`" not in PAGES[f"reference/config-{name}.md"]] == []


def test_hidden_verbs_are_left_out_and_those_of_groups_are_found() -> None:
    app, inner = typer.Typer(), typer.Typer()
    app.command("seen")(lambda: None)
    app.command("old", hidden=True)(lambda: None)
    inner.command("list")(lambda: None)
    inner.command("show")(lambda: None)
    app.add_typer(inner, name="configs")
    words = [words for words, _ in docs_reference.verbs(Program("x", app))]
    assert words == ["x seen", "x configs list", "x configs show"]


@pytest.mark.parametrize(
    ("annotation", "text"),
    [
        (int | None, "whole number or null"),
        (tuple[str, ...], "list: text"),
        (tuple[float, float], "list of 2: number"),
        (dict[str, bool], "true or false by name"),
    ],
)
def test_type_is_written_in_words(annotation: Any, text: str) -> None:
    assert docs_reference.type_text(annotation) == text
