"""`zarr.json` documents as typed values: literal texts, round trips, refusals (spec 4, 9)."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ups_store.errors import FormatError, SpecError, VersionTooNewError
from ups_store.format.canonical import parse_json
from ups_store.format.identity import config_hash
from ups_store.format.metadata import (
    DTYPE_NAMES,
    MAX_RANK,
    ArrayMeta,
    check_name,
    dtype_name,
    dtype_of,
    is_name,
    parse_array,
    read_document,
)
from ups_store.format.root_metadata import RootMeta, parse_root

SMALL = ArrayMeta("nu", (3,), "float64", ("sample",), {"units": "m2 s-1"})
LARGE = ArrayMeta("fields", (3, 40, 32), "float32", ("sample", "time", "x"))
CONSTANT = ArrayMeta("x", (32,), "float64", ("x",))
NUMBER = ArrayMeta("length", (), "int16", ())
EMPTY = ArrayMeta("none", (3, 0), "bool", ("sample", "k"))
ALL = [SMALL, LARGE, CONSTANT, NUMBER, EMPTY]

IDENTITY = {"content": {"task": "burgers1d"}}
ROOT = RootMeta((1, 0), config_hash(IDENTITY), IDENTITY, {"title": "Bürgers"})


def text_of(document: object) -> bytes:
    """The canonical text of documents without unusual numbers or keys."""
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def as_json(meta: ArrayMeta) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(meta.to_json())
    return document


def refusal_of_array(document: object, *, meta: ArrayMeta = SMALL) -> FormatError:
    raw = document if isinstance(document, bytes) else text_of(document)
    with pytest.raises(FormatError) as caught:
        parse_array(meta.name, raw, path="a.zarr.zip")
    assert caught.value.path == "a.zarr.zip"
    return caught.value


def refusal_of_root(raw: bytes) -> FormatError:
    with pytest.raises(FormatError) as caught:
        parse_root(raw, path="a.zarr.zip")
    assert caught.value.path == "a.zarr.zip"
    return caught.value


# --- data types ---------------------------------------------------------------------------------------


def test_dtype_names_are_those_of_the_spec() -> None:
    """Spec 4.7."""
    integers = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
    assert set(DTYPE_NAMES) == {"bool", *integers, "float16", "float32", "float64", "bfloat16"}
    assert len(DTYPE_NAMES) == 13


@pytest.mark.parametrize("name", DTYPE_NAMES)
def test_dtype_of_is_little_endian_and_has_its_name(name: str) -> None:
    dtype = dtype_of(name)
    assert dtype == dtype.newbyteorder("<")
    assert dtype_name(dtype) == name
    assert dtype_name(name) == name


def test_dtype_of_bfloat16_is_that_of_ml_dtypes() -> None:
    assert dtype_of("bfloat16") == ml_dtypes.bfloat16
    assert dtype_of("bfloat16").itemsize == 2


@pytest.mark.parametrize("dtype", [">f4", "=i8", np.float16, float, bool, np.dtype("u2")])
def test_dtype_name_takes_whatever_numpy_takes(dtype: Any) -> None:
    assert dtype_name(dtype) == np.dtype(dtype).name


@pytest.mark.parametrize("dtype", ["complex64", "U8", "S3", "datetime64[s]", "O", "V8", [("a", "f4")]])
def test_dtype_name_refuses_what_the_format_lacks(dtype: Any) -> None:
    with pytest.raises(SpecError) as caught:
        dtype_name(dtype)
    assert caught.value.kind == "dtype"
    assert "bfloat16" in str(caught.value)


# --- names --------------------------------------------------------------------------------------------

GOOD_NAMES = ["u", "U0", "_", "0", "a.b-c_d", "bc_left", "x" * 128, "zarr.jso", "_a_"]
BAD_NAMES = ["", ".u", "-u", "__u", "zarr.json", "a/b", "ü", "a b", "u\n", "x" * 129, "..", 7, None]


@pytest.mark.parametrize("name", GOOD_NAMES)
def test_check_name_returns_an_allowed_name(name: str) -> None:
    """Spec 4.2."""
    assert is_name(name)
    assert check_name(name) == name


@pytest.mark.parametrize("name", BAD_NAMES)
def test_check_name_refuses_other_names(name: Any) -> None:
    assert not is_name(name)
    with pytest.raises(SpecError) as caught:
        check_name(name)
    assert (caught.value.kind, caught.value.clause, caught.value.found) == ("name", "4.2", repr(name))


# --- arrays -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("meta", "is_constant", "sample_shape", "sample_nbytes", "nbytes", "is_sharded", "chunk_key"),
    [
        (SMALL, False, (), 8, 24, False, "nu/c/0"),
        (LARGE, False, (40, 32), 5120, 15360, True, "fields/c/0/0/0"),
        (CONSTANT, True, (32,), 256, 256, False, "x/c/0"),
        (NUMBER, True, (), 2, 2, False, "length/c"),
        (EMPTY, False, (0,), 0, 0, False, "none/c/0/0"),
        (replace(CONSTANT, shape=(9000,)), True, (9000,), 72000, 72000, False, "x/c/0"),
    ],
)
def test_array_knows_its_sizes_and_key(
    meta: ArrayMeta,
    is_constant: bool,
    sample_shape: tuple[int, ...],
    sample_nbytes: int,
    nbytes: int,
    is_sharded: bool,
    chunk_key: str,
) -> None:
    """Spec 4.5, 4.6, 5.1."""
    assert (meta.is_constant, meta.sample_shape) == (is_constant, sample_shape)
    assert (meta.sample_nbytes, meta.nbytes) == (sample_nbytes, nbytes)
    assert (meta.is_sharded, meta.chunk_key) == (is_sharded, chunk_key)


def test_text_of_a_small_array_is_literal() -> None:
    """Spec 4.1 and 4.4: sorted keys, no white space."""
    assert SMALL.to_json() == (
        b'{"attributes":{"units":"m2 s-1"},'
        b'"chunk_grid":{"configuration":{"chunk_shape":[3]},"name":"regular"},'
        b'"chunk_key_encoding":{"configuration":{"separator":"/"},"name":"default"},'
        b'"codecs":[{"configuration":{"endian":"little"},"name":"bytes"},{"name":"crc32c"}],'
        b'"data_type":"float64","dimension_names":["sample"],"fill_value":0,"node_type":"array",'
        b'"shape":[3],"zarr_format":3}'
    )


def test_large_array_is_a_shard_of_samples() -> None:
    """Spec 4.4."""
    little = {"name": "bytes", "configuration": {"endian": "little"}}
    assert as_json(LARGE)["codecs"] == [
        {
            "name": "sharding_indexed",
            "configuration": {
                "chunk_shape": [1, 40, 32],
                "codecs": [little, {"name": "crc32c"}],
                "index_codecs": [little, {"name": "crc32c"}],
                "index_location": "end",
            },
        }
    ]
    assert as_json(LARGE)["chunk_grid"]["configuration"]["chunk_shape"] == [3, 40, 32]


def test_axis_of_length_0_has_a_chunk_of_length_1() -> None:
    """Spec 4.4."""
    assert as_json(EMPTY)["chunk_grid"]["configuration"]["chunk_shape"] == [3, 1]


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
def test_bytes_codec_and_fill_value_follow_the_dtype(dtype: str) -> None:
    """Spec 4.4: one-byte types have no order of bytes; only `bool` is filled with `false`."""
    document = as_json(replace(SMALL, dtype=dtype))
    has_order = dtype not in ("bool", "int8", "uint8")
    assert document["codecs"][0].get("configuration") == ({"endian": "little"} if has_order else None)
    assert repr(document["fill_value"]) == ("False" if dtype == "bool" else "0")
    assert document["data_type"] == dtype


@pytest.mark.parametrize("meta", ALL)
def test_parse_array_returns_what_was_written(meta: ArrayMeta) -> None:
    assert parse_array(meta.name, meta.to_json(), path="a.zarr.zip") == meta


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
@pytest.mark.parametrize("shape", [(0,), (1,), (7,), (2, 5000), (2, 0, 3), (1, 1, 1, 1, 1, 1)])
def test_parse_array_returns_every_dtype_and_rank(dtype: str, shape: tuple[int, ...]) -> None:
    dims = ("sample", *(f"d{i}" for i in range(1, len(shape))))
    meta = ArrayMeta("u", shape, dtype, dims, {"a": [1, 2.5, None, True, {"b": "ü"}]})
    assert parse_array("u", meta.to_json(), path="a.zarr.zip") == meta


def test_parse_array_takes_shapes_up_to_the_limits() -> None:
    """Spec 9.1."""
    most_axes = ArrayMeta("u", (1,) * MAX_RANK, "int8", ("sample", *(f"d{i}" for i in range(1, MAX_RANK))))
    longest = ArrayMeta("u", ((1 << 53) - 1, 64), "int8", ("sample", "k"))
    for meta in (most_axes, longest):
        assert parse_array("u", meta.to_json(), path="a.zarr.zip") == meta


@pytest.mark.parametrize(
    ("key", "value", "kind"),
    [
        ("shape", None, "array_metadata"),
        ("shape", 3, "array_metadata"),
        ("shape", [-1], "array_metadata"),
        ("shape", [True], "array_metadata"),
        ("shape", ["3"], "array_metadata"),
        ("shape", [1] * (MAX_RANK + 1), "array_metadata"),
        ("shape", [1 << 53], "array_metadata"),
        ("shape", [1 << 30, 1 << 30], "array_metadata"),
        ("shape", [0, 1 << 30, 1 << 30], "array_metadata"),
        ("data_type", "complex64", "dtype"),
        ("data_type", None, "dtype"),
        ("data_type", ["float64"], "dtype"),
        ("dimension_names", None, "array_metadata"),
        ("dimension_names", [], "array_metadata"),
        ("dimension_names", [None], "array_metadata"),
        ("dimension_names", ["sample", "x"], "array_metadata"),
        ("attributes", None, "array_metadata"),
        ("attributes", [], "array_metadata"),
        ("chunk_grid", {"name": "rectilinear"}, "array_metadata"),
        ("chunk_key_encoding", {"name": "v2"}, "array_metadata"),
        ("codecs", [], "codec"),
        ("codecs", None, "codec"),
        ("codecs", [{"name": "bytes"}, {"name": "crc32c"}], "codec"),
        ("fill_value", 1, "array_metadata"),
        ("fill_value", False, "array_metadata"),
        ("node_type", "group", "array_metadata"),
        ("zarr_format", 2, "array_metadata"),
        ("storage_transformers", [], "array_metadata"),
    ],
)
def test_parse_array_refuses_another_value(key: str, value: object, kind: str) -> None:
    """Spec 4.4."""
    error = refusal_of_array(as_json(SMALL) | {key: value})
    assert (error.kind, error.clause, error.array) == (kind, "4.4", "nu")
    assert repr(key) in error.problem


def test_parse_array_refuses_attributes_without_canonical_form() -> None:
    """Spec 4.1."""
    error = refusal_of_array(SMALL.to_json().replace(b'"m2 s-1"', b"1e999"))
    assert (error.kind, error.clause) == ("json", "4.1")
    assert "nu/zarr.json" in error.problem


@pytest.mark.parametrize(
    ("shape", "key"), [([4], "chunk_grid"), ([3, 512], "dimension_names"), ([], "dimension_names")]
)
def test_parse_array_refuses_a_shape_that_the_other_keys_contradict(shape: list[int], key: str) -> None:
    assert repr(key) in refusal_of_array(as_json(SMALL) | {"shape": shape}).problem


def test_parse_array_refuses_a_large_array_with_the_codecs_of_a_small_one() -> None:
    """Spec 5.1: 4096 bytes a sample need a slot each."""
    document = as_json(replace(SMALL, shape=(3, 511), dims=("sample", "x")))
    document["shape"][1] = document["chunk_grid"]["configuration"]["chunk_shape"][1] = 512
    assert refusal_of_array(document).kind == "codec"


@pytest.mark.parametrize("key", sorted(SMALL.document()))
def test_parse_array_refuses_a_missing_key(key: str) -> None:
    document = as_json(SMALL)
    del document[key]
    error = refusal_of_array(document)
    assert error.clause == "4.4"
    assert repr(key) in error.problem
    assert str(error.found).startswith("only ['")


@pytest.mark.parametrize("dims", [["sample", "x", "x"], ["time", "sample", "x"], ["sample", "sample", "x"]])
def test_parse_array_refuses_dimensions_that_no_array_has(dims: list[str]) -> None:
    """Spec 4.5."""
    error = refusal_of_array(as_json(LARGE) | {"dimension_names": dims}, meta=LARGE)
    assert (error.kind, error.clause, error.found) == ("dims", "4.5", repr(dims))


def test_parse_array_shows_little_of_a_long_value() -> None:
    error = refusal_of_array(as_json(SMALL) | {"shape": [1] * 100_000})
    assert len(str(error)) < 500


# --- the root group -----------------------------------------------------------------------------------


def test_text_of_the_root_is_literal() -> None:
    """Spec 4.1 and 4.3."""
    text = (
        '{"attributes":{"title":"Bürgers","ups_store":{"config_hash":"' + ROOT.config_hash + '",'
        '"format_version":"1.0","identity":{"content":{"task":"burgers1d"}},"requires":[]}},'
        '"node_type":"group","zarr_format":3}'
    ).encode()
    assert ROOT.to_json() == text


@pytest.mark.parametrize("version", [(1, 0), (1, 7), (1, 345678)])
def test_parse_root_returns_what_was_written(version: tuple[int, int]) -> None:
    root = replace(ROOT, version=version)
    assert parse_root(root.to_json(), path="a.zarr.zip") == root


@pytest.mark.parametrize(("version", "is_newer"), [((0, 9), False), ((2, 0), True), ((12, 3), True)])
def test_parse_root_refuses_another_major_version(version: tuple[int, int], is_newer: bool) -> None:
    """Spec 10.2."""
    error = refusal_of_root(replace(ROOT, version=version).to_json())
    assert (error.clause, isinstance(error, VersionTooNewError)) == ("10.2", is_newer)


def edited_root(edit: Any) -> bytes:
    document = json.loads(ROOT.to_json())
    edit(document)
    return text_of(document)


@pytest.mark.parametrize(
    "edit",
    [
        lambda root: root.pop("attributes"),
        lambda root: root.update(attributes=None),
        lambda root: root["attributes"].pop("ups_store"),
        lambda root: root["attributes"].update(ups_store="1.0"),
        lambda root: root.update(node_type="array"),
        lambda root: root.update(zarr_format=2),
    ],
)
def test_parse_root_refuses_the_group_of_another_program(edit: Any) -> None:
    error = refusal_of_root(edited_root(edit))
    assert (error.kind, error.clause) == ("foreign", "4.3")


@pytest.mark.parametrize(
    "values",
    [
        {"format_version": None},
        {"format_version": 1},
        {"format_version": "1"},
        {"format_version": "1.0.0"},
        {"format_version": "01.0"},
        {"format_version": "1.00"},
        {"format_version": "-1.0"},
        {"format_version": "1.1234567"},
        {"format_version": "1.٣"},
        {"format_version": "1.0\n"},
        {"config_hash": None},
        {"config_hash": 7},
        {"identity": None},
        {"identity": []},
        {"requires": None},
        {"requires": "packed"},
        {"requires": [1]},
        {"requires": ["packed", "packed"]},
        {"statistics": {}},
    ],
)
def test_parse_root_refuses_incomplete_attributes(values: dict[str, Any]) -> None:
    error = refusal_of_root(edited_root(lambda root: root["attributes"]["ups_store"].update(values)))
    assert (error.kind, error.clause) == ("root_metadata", "4.3")
    assert f"key {next(iter(values))!r}" in error.problem


@pytest.mark.parametrize("packed", [None, 1, []])
def test_parse_root_refuses_a_mark_that_is_no_object(packed: Any) -> None:
    mark = {"packed": packed, "requires": ["packed"]}
    error = refusal_of_root(edited_root(lambda root: root["attributes"]["ups_store"].update(mark)))
    assert (error.kind, error.clause) == ("root_metadata", "13.2")


def test_parse_root_refuses_attributes_without_canonical_form() -> None:
    error = refusal_of_root(ROOT.to_json().replace("Bürgers".encode(), b"\\ud800"))
    assert (error.kind, error.clause) == ("json", "4.1")


def test_parse_root_ignores_keys_of_newer_minor_versions() -> None:
    """Spec 10.3."""
    newer = {"statistics": {}, "format_version": "1.1"}
    raw = edited_root(lambda root: root["attributes"]["ups_store"].update(newer))
    assert parse_root(raw, path="a.zarr.zip") == replace(ROOT, version=(1, 1))


def test_parse_root_refuses_other_keys_beside_the_attributes() -> None:
    error = refusal_of_root(edited_root(lambda root: root.update(consolidated_metadata={})))
    assert (error.kind, error.clause) == ("root_metadata", "4.3")
    assert "consolidated_metadata" in error.problem


@pytest.mark.parametrize("version", ["1.0", "1.5"])
def test_parse_root_names_the_features_that_it_does_not_know(version: str) -> None:
    """Spec 10.3."""
    newer = {"requires": ["packed", "striped", "woven"], "format_version": version}
    error = refusal_of_root(edited_root(lambda root: root["attributes"]["ups_store"].update(newer)))
    assert isinstance(error, VersionTooNewError)
    assert (error.kind, error.clause) == ("requires", "10.3")
    assert "'striped', 'woven'" in error.problem


def test_parse_root_refuses_a_mark_that_is_not_required() -> None:
    """Spec 4.3."""
    error = refusal_of_root(edited_root(lambda root: root["attributes"]["ups_store"].update(packed={})))
    assert (error.kind, error.clause) == ("root_metadata", "13.2")


def test_hash_is_that_of_the_bytes_of_the_identity() -> None:
    """Spec 8.3: also where its numbers have other digits than RFC 8785 gives them."""
    identity = {"content": {"nu": 0.1}}
    text = RootMeta((1, 0), "0" * 64, identity).to_json().replace(b"0.1}", b"0.10000000000000001}")
    digest = hashlib.sha256(b'{"content":{"nu":0.10000000000000001}}').hexdigest()
    assert parse_root(text.replace(b"0" * 64, digest.encode()), path="a.zarr.zip").identity == identity
    error = refusal_of_root(text.replace(b"0" * 64, config_hash(identity).encode()))
    assert (error.kind, error.clause) == ("identity_hash", "8.3")


# --- JSON ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b'{"a":1}x',
        b'{"a":NaN}',
        b'{"a":-Infinity}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"\xff{}",
        '{"a":1}'.encode("utf-16"),
        '{"a":1}'.encode("utf-8-sig"),
        b"[]",
        b"null",
        b'"text"',
    ],
)
def test_read_document_refuses_what_is_not_an_object(raw: bytes) -> None:
    with pytest.raises(FormatError) as caught:
        read_document(raw, path="a.zarr.zip", entry="u/zarr.json")
    error = caught.value
    assert (error.kind, error.clause, error.path) == ("json", "4.1", "a.zarr.zip")
    assert "u/zarr.json" in error.problem
    assert len(str(error)) < 300


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("9007199254740991", 2**53 - 1),
        ("-9007199254740991", -(2**53) + 1),
        ("9007199254740992", 2.0**53),
        ("100000000000000000000", 1e20),
        ("-9756481173063566", -9756481173063566.0),
        ("9" * 400, math.inf),
    ],
)
def test_parse_json_reads_integers_beyond_53_bits_as_the_doubles_they_are(text: str, value: float) -> None:
    """RFC 8785 writes a double below 1e21 without point or exponent."""
    found = parse_json(b'{"n":' + text.encode() + b"}")["n"]
    assert (found, type(found)) == (value, type(value))
