"""The JSON Schemas of docs/format/schemas take what the format allows and refuse what it doesn't.

`jsonschema` is for developers only; what their references and lists say is checked without it.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ups_store
from tests.support.spec_page import SCHEMAS, schema_of
from tests.support.spec_page import schema_problems as problems
from ups_store.format.metadata import DTYPE_NAMES, MAX_ARRAYS, MAX_RANK
from ups_store.packed.pack import pack_store

GOLDEN = Path(__file__).parents[1] / "data" / "golden" / "v1.0"


def check_documents(path: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            if name == "zarr.json":
                assert problems("root", json.loads(archive.read(name))) == [], path


@pytest.mark.parametrize("name", SCHEMAS)
def test_schema_is_one_of_draft_2020_12(name: str) -> None:
    pytest.importorskip("jsonschema").Draft202012Validator.check_schema(schema_of(name))


def test_documents_of_golden_files_are_valid() -> None:
    for path in GOLDEN.glob("*.zarr.zip"):
        check_documents(path)


@pytest.mark.parametrize(("name", "codec"), [("every_dtype", "blosc"), ("float32_slots", "pcodec")])
def test_documents_of_packed_file_are_valid(name: str, codec: str, tmp_path: Path) -> None:
    with ups_store.open(GOLDEN / f"{name}.zarr.zip") as store:
        check_documents(pack_store(store, tmp_path / "a.packed.zarr.zip", codec=codec).path)


def references(value: Any) -> Iterator[str]:
    """Every `$ref` in a schema."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        if key == "$ref":
            yield inner
        elif isinstance(inner, dict | list):
            yield from references(inner)


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_reference_of_schema_exists(name: str) -> None:
    schema = schema_of(name)
    assert (schema["$schema"], schema["$id"]) == (
        "https://json-schema.org/draft/2020-12/schema",
        f"{name}.schema.json",
    )
    for reference in references(schema):
        file, _, pointer = reference.partition("#")
        target = schema_of(file.removesuffix(".schema.json")) if file else schema
        for key in pointer.split("/")[1:]:
            target = target[key]


def test_schemas_have_types_and_limits_of_the_code() -> None:
    """Spec 4.7, 9.1."""
    identity = schema_of("identity")
    assert identity["$defs"]["data_type"]["enum"] == list(DTYPE_NAMES)
    assert identity["properties"]["arrays"]["maxProperties"] == MAX_ARRAYS
    assert identity["$defs"]["array"]["properties"]["shape"]["maxItems"] == MAX_RANK
