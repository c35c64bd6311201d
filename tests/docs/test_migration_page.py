"""docs/guides/migrate.md names every old key, flag, script, stage, metric and file; what it says holds."""

from __future__ import annotations

import fnmatch
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from pydantic import BaseModel

from ups.cli.app import app
from ups.config import RunConfig
from ups.config.legacy import KEYS, MEANINGLESS, STAGES, SWITCHES
from ups.stages import STAGE_NAMES
from ups_store import old_names

EARLIER: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "earlier_names.yaml").read_text())
PAGE = (Path(__file__).resolve().parents[2] / "docs" / "guides" / "migrate.md").read_text()
OLD = sorted((Path(__file__).parents[1] / "ups" / "configs").glob("old_*.yaml"))
KEY = re.compile(r"`([a-z_]+(?:\.[a-z_0-9*]+)*)`")
OF_STAGES = re.compile(r"`stages\.<stage>\.\{([a-z_,]+)\}`")
PRECOMPUTE_FLAGS = {
    *("--config", "--tasks", "--splits", "--root", "--cache-dir", "--cache-dtype", "--latent-dim"),
    *("--latent-len", "--device", "--batch-size", "--num-workers", "--parallel", "--no-parallel"),
    *("--pin-memory", "--limit", "--overwrite", "--manifest"),
}


def section(title: str) -> str:
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def keys_of_first_column(text: str) -> set[str]:
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    return {key for row in rows for key in KEY.findall(row)}


def keys_that_are_the_same() -> list[str]:
    text = section("Keys that are the same").split("\n\n")[0].replace("\n", " ")
    (of_stages,) = OF_STAGES.findall(text)
    said = [key for key in KEY.findall(text) if "." in key or key == "seed"]
    return said + [f"stages.*.{name}" for name in of_stages.split(",")]


def known_keys(model: type[BaseModel], prefix: str = "") -> set[str]:
    keys: set[str] = set()
    for name, field in model.model_fields.items():
        for inner in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                middle = "" if inner is field.annotation else "<stage>."
                keys |= known_keys(inner, f"{prefix}{name}.{middle}")
        keys.add(f"{prefix}{name}")
    return keys


def leaves(values: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def flags_of(application: typer.Typer, verb: str | None = None) -> set[str]:
    command: Any = typer.main.get_command(application)
    command = command if verb is None else command.commands[verb]
    return {flag for parameter in command.params for flag in (*parameter.opts, *parameter.secondary_opts)}


def test_keys_that_are_the_same_are_keys() -> None:
    known, said = known_keys(RunConfig), keys_that_are_the_same()
    assert len(said) > 35
    assert [key for key in said if not fnmatch.filter(known, key)] == []


def test_meaningless_keys_are_all_named_and_no_others() -> None:
    assert keys_of_first_column(section("Keys that mean nothing any more")) == set(MEANINGLESS)


@pytest.mark.parametrize("path", OLD, ids=lambda path: path.stem)
def test_every_key_of_an_old_file_is_named(path: Path) -> None:
    said = [
        *keys_that_are_the_same(),
        *old_names.KEYS,
        *KEYS,
        *MEANINGLESS,
        *SWITCHES,
    ]
    patterns = [pattern for key in said for pattern in (key, f"{key}.*")]
    keys = list(leaves(yaml.safe_load(path.read_text())))
    assert len(keys) > 40
    assert [key for key in keys if not any(fnmatch.fnmatch(key, pattern) for pattern in patterns)] == []


def test_flags_are_named_and_still_there() -> None:
    said = set(re.findall(r"--[a-z-]+", section("Flags")))
    skips = {"--skip-validation", "--skip-data-check", "--skip-dry-run"}
    assert {*PRECOMPUTE_FLAGS, *skips, "--epochs", "--seed"} <= said
    assert skips <= flags_of(app, "run")
    present = {old_names.FLAGS.get(flag, flag) for flag in PRECOMPUTE_FLAGS}
    assert flags_of(importlib.import_module("ups_store.building.command").app) >= present
    assert {"--config", "--epochs", "--seed", "--stage"} <= flags_of(app, "train")


def test_words_that_have_changed_are_all_named_with_what_they_are_now() -> None:
    rows = re.findall(r"^\| `([^`]+)` \| `([^`]+)`", section("Words that have changed"), re.MULTILINE)
    keys = {old: new for old, new in KEYS.items() if not old.startswith("pipeline.")}  # those of gates
    assert dict(rows) == {**old_names.KEYS, **keys, **old_names.FLAGS}
    present = {key for key in (*old_names.KEYS.values(), *KEYS.values()) if "stages" not in key}
    assert {key for key in present if "throughput" not in key} <= known_keys(RunConfig)


def test_stages_are_named_and_are_there() -> None:
    said = set(KEY.findall(section("Stages")))
    assert {*STAGE_NAMES, *STAGES} <= said


def earlier_names(kind: str) -> list[str]:
    names = EARLIER[kind]
    return names if isinstance(names, list) else [flag for flags in names.values() for flag in flags]


def said_in_code(text: str) -> list[str]:
    """What stands in backticks, with `a.{b,c}` as `a.b` and `a.c`."""
    said = []
    for code in re.findall(r"`([^`\n]+)`", text):
        head, brace, rest = code.partition("{")
        inner = rest.partition("}")[0].split(",") if brace else [""]
        said += [f"{head}{each}" for each in inner] if brace else [code]
    return said


@pytest.mark.parametrize("kind", [kind for kind in EARLIER if kind != "flags"])
def test_every_name_of_the_earlier_system_is_on_the_page(kind: str) -> None:
    said = said_in_code(PAGE)
    starts = re.compile(r"[\w<]")
    missing = [
        name
        for name in earlier_names(kind)
        # As a whole: not within a longer name.
        if not any(
            re.search(rf"(?<![\w]){re.escape(name)}" + (r"(?![\w])" if name[-1].isalnum() else ""), code)
            for code in said
            if starts.search(code)
        )
    ]
    assert missing == []


@pytest.mark.parametrize("script", EARLIER["flags"])
def test_every_flag_of_an_earlier_script_is_in_a_row_about_it(script: str) -> None:
    rows = [line for line in PAGE.splitlines() if script in line]
    rows += [line for line in section("Words that have changed").splitlines() if line.startswith("| `--")]
    if script == "precompute_latent_cache.py":
        rows += [line for line in section("Flags").splitlines() if line.startswith("| its `")]
    said = {flag for row in rows for flag in re.findall(r"--[a-z-]+", row)}
    assert [flag for flag in EARLIER["flags"][script] if flag not in said] == []


def test_python_names_of_now_can_be_imported() -> None:
    column = [line.split("|")[2] for line in section("Python names").splitlines() if line.startswith("| `")]
    paths = [code for text in column for code in re.findall(r"`(ups(?:_store)?\.[\w.]+)", text)]
    assert len(paths) > 6
    for path in paths:
        module, _, name = path.rpartition(".")
        assert hasattr(importlib.import_module(module), name), path
