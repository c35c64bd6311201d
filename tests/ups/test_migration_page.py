"""docs/migration.md names every old key, and what it says of them holds."""

from __future__ import annotations

import fnmatch
import re
from pathlib import Path

from pydantic import BaseModel

from ups.config import RunConfig
from ups.config.old_names import MEANINGLESS, NOT_YET

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "migration.md").read_text()
KEY = re.compile(r"`([a-z_]+(?:\.[a-z_0-9*]+)*)`")


def section(title: str) -> str:
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def keys_of_first_column(text: str) -> set[str]:
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    return {key for row in rows for key in KEY.findall(row)}


def known_keys(model: type[BaseModel], prefix: str = "") -> set[str]:
    keys: set[str] = set()
    for name, field in model.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            keys |= known_keys(inner, f"{prefix}{name}.")
        keys.add(f"{prefix}{name}")
    return keys


def test_keys_that_are_the_same_are_keys() -> None:
    known = known_keys(RunConfig)
    said = [
        key
        for key in KEY.findall(section("Keys that are the same").replace("\n", " "))
        if "." in key or key == "seed"
    ]
    assert len(said) > 30
    assert [key for key in said if not fnmatch.filter(known, key)] == []


def test_meaningless_keys_are_all_named_and_no_others() -> None:
    assert keys_of_first_column(section("Keys that mean nothing any more")) == set(MEANINGLESS)


def test_features_that_are_not_there_yet_are_all_named() -> None:
    said = keys_of_first_column(section("Features that aren't there yet"))
    assert {key.removesuffix(".enabled") for key in said} == {key.removesuffix(".enabled") for key in NOT_YET}
