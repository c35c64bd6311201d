"""What of the specification can be run: its Python blocks, and the JSON Schemas."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tools.make_hexdump import FORMAT, SPEC, split_page

SCHEMAS = ("identity", "root")


def run_block(name: str) -> dict[str, Any]:
    """What a Python block of the page defines."""
    block = split_page(SPEC.read_text(), name)[1]
    defined: dict[str, Any] = {}
    exec(block.removeprefix("```python\n").removesuffix("```\n"), defined)
    return defined


def schema_of(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FORMAT / "schemas" / f"{name}.schema.json").read_text())
    return found


def schema_problems(name: str, document: dict[str, Any]) -> list[str]:
    """What a schema finds wrong with a document."""
    jsonschema = pytest.importorskip("jsonschema")
    referencing = pytest.importorskip("referencing")
    resources = [referencing.Resource.from_contents(schema_of(name)) for name in SCHEMAS]
    registry = referencing.Registry().with_resources([(each.id(), each) for each in resources])
    validator = jsonschema.Draft202012Validator(schema_of(name), registry=registry)
    return [error.message for error in validator.iter_errors(document)]
