"""The JSON Schemas of docs/format/schemas take what the format allows and refuse what it doesn't.

`jsonschema` is for developers only; what their references and lists say is checked without it.
"""

from __future__ import annotations

import copy
import json
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import ups_store
from tests.support.spec_page import SCHEMAS, schema_of
from tests.support.spec_page import schema_problems as problems
from ups_store.format.metadata import DTYPE_NAMES, MAX_ARRAYS, MAX_RANK
from ups_store.packed.pack import pack_store

GOLDEN = Path(__file__).parents[1] / "data" / "golden" / "v1.0"
LITTLE = {"name": "bytes", "configuration": {"endian": "little"}}
CRC32C = {"name": "crc32c"}
HASH = "0123456789abcdef" * 4

Document = dict[str, Any]
Edit = Callable[[Document], object]


def check_documents(path: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            if name == "zarr.json":
                assert problems("root", json.loads(archive.read(name))) == []


@pytest.mark.parametrize("name", SCHEMAS)
def test_schema_is_one_of_draft_2020_12(name: str) -> None:
    pytest.importorskip("jsonschema").Draft202012Validator.check_schema(schema_of(name))


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.zarr.zip")), ids=lambda path: path.name.split(".")[0])
def test_documents_of_golden_file_are_valid(path: Path) -> None:
    check_documents(path)


@pytest.mark.parametrize("codec", ["blosc", "pcodec"])
@pytest.mark.parametrize("name", ["every_dtype", "bfloat16_slots", "float32_slots", "bool_slots"])
def test_documents_of_packed_file_are_valid(name: str, codec: str, tmp_path: Path) -> None:
    with ups_store.open(GOLDEN / f"{name}.zarr.zip") as store:
        check_documents(pack_store(store, tmp_path / "a.packed.zarr.zip", codec=codec).path)


def identity() -> Document:
    arrays = {
        "u": {"dims": ["sample", "x"], "dtype": "float32", "shape": [2048]},
        "x": {"dims": ["x"], "dtype": "float64", "shape": [2048]},
    }
    return {"arrays": arrays, "constants": {"x": HASH}, "content": {"task": "burgers"}, "partition": [0, 2]}


POINTS = {"dims": ["sample", "point", "axis"], "dtype": "float32", "shape": [None, 3]}


def ragged_identity() -> Document:
    return {"arrays": {"points": POINTS}, "constants": {}, "content": {}}


def root(document: Document | None = None, requires: tuple[str, ...] = (), **more: Any) -> Document:
    ours = {"config_hash": HASH, "format_version": "1.0", "identity": document or identity()}
    ours = {**ours, "requires": list(requires), **more}
    return {"zarr_format": 3, "node_type": "group", "attributes": {"title": "a", "ups_store": ours}}


PACKED = {"codec": "blosc", "level": 9, "fingerprint": HASH}
VALID: dict[str, tuple[str, Document]] = {
    "root": ("root", root()),
    "root of a packed store": ("root", root(requires=("packed",), packed=PACKED)),
    "root with a ragged array": ("root", root(ragged_identity(), ("ragged",))),
    "root of a newer minor": ("root", root(requires=("colours",), format_version="1.12", palette=1)),
    "identity": ("identity", identity()),
    "identity of a ragged array": ("identity", ragged_identity()),
}


@pytest.mark.parametrize("name", VALID)
def test_document_that_the_format_allows_is_valid(name: str) -> None:
    schema, document = VALID[name]
    assert problems(schema, document) == []


def ours_of(document: Document) -> Document:
    ours: Document = document["attributes"]["ups_store"]
    return ours


WRONG: dict[str, tuple[str, Edit]] = {
    "4.3 another key": ("root", lambda d: d.update(consolidated_metadata={})),
    "4.3 no own attribute": ("root", lambda d: d["attributes"].pop("ups_store")),
    "4.3 own key of no 1.0": ("root", lambda d: ours_of(d).update(writer="me")),
    "4.3 no requires": ("root", lambda d: ours_of(d).pop("requires")),
    "8.3 upper-case hash": ("root", lambda d: ours_of(d).update(config_hash=HASH.upper())),
    "8.3 hash and a newline": ("root", lambda d: ours_of(d).update(config_hash=HASH + "\n")),
    "10.1 leading zero": ("root", lambda d: ours_of(d).update(format_version="1.00")),
    "10.2 major": ("root", lambda d: ours_of(d).update(format_version="2.0")),
    "10.3 unknown feature of 1.0": ("root", lambda d: ours_of(d).update(requires=["colours"])),
    "10.3 ragged without such an array": ("root", lambda d: ours_of(d).update(requires=["ragged"])),
    "13.2 packed isn't required": ("root", lambda d: ours_of(d).update(packed=PACKED)),
    "13.2 no key packed": ("root", lambda d: ours_of(d).update(requires=["packed"])),
    "13.2 codec": ("root of a packed store", lambda d: ours_of(d)["packed"].update(codec="zstd")),
    "13.2 level": ("root of a packed store", lambda d: ours_of(d)["packed"].update(level=10)),
    "10.3 ragged isn't required": ("root with a ragged array", lambda d: ours_of(d).update(requires=[])),
    "8.1 another key": ("identity", lambda d: d.update(format=1)),
    "8.1 no content": ("identity", lambda d: d.pop("content")),
    "8.1 partition of three": ("identity", lambda d: d.update(partition=[0, 1, 2])),
    "8.1 too many partitions": ("identity", lambda d: d.update(partition=[0, 100_000])),
    "8.1 digest": ("identity", lambda d: d["constants"].update(x="0")),
    "8.1 null in a constant": ("identity", lambda d: d["arrays"]["x"].update(shape=[None])),
    "14.1 long name": ("identity", lambda d: d["arrays"].update({"p" * 121: POINTS})),
    "14.1 no bytes": ("identity of a ragged array", lambda d: d["arrays"]["points"].update(shape=[None, 0])),
    "4.2 name": ("identity", lambda d: d["arrays"].update({"__u": d["arrays"]["u"]})),
    "4.2 name and a newline": ("identity", lambda d: d["arrays"].update({"u\n": d["arrays"]["u"]})),
    "4.5 sample last": ("identity", lambda d: d["arrays"]["u"].update(dims=["x", "sample"])),
    "4.5 twice": ("identity", lambda d: d["arrays"]["u"].update(dims=["sample", "x", "x"])),
    "4.7 data type": ("identity", lambda d: d["arrays"]["u"].update(dtype="complex64")),
}  # fmt: skip


@pytest.mark.parametrize("clause", WRONG)
def test_document_that_breaks_a_clause_is_refused(clause: str) -> None:
    name, edit = WRONG[clause]
    schema, good = VALID[name]
    document = copy.deepcopy(good)
    edit(document)
    assert problems(schema, document) != []


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
