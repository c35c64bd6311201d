"""`zarr.json` documents as typed values: literal texts, round trips, refusals (spec 4, 9)."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import replace
from typing import Any

import pytest

from ups_store.errors import FormatError, SpecError, VersionTooNewError
from ups_store.format.canonical import parse_json
from ups_store.format.metadata import (
    MAX_RANK,
    ArrayMeta,
    dtype_name,
    parse_array,
)
from ups_store.format.root import RootMeta, config_hash, parse_root

SMALL = ArrayMeta("nu", (3,), "float64", ("sample",), {"units": "m2 s-1"})
IDENTITY = {"content": {"task": "burgers1d"}}
ROOT = RootMeta((1, 0), config_hash(IDENTITY), IDENTITY, {"title": "Bürgers"})


def text_of(document: object) -> bytes:
    """The canonical text of documents without unusual numbers or keys."""
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def refusal_of_root(raw: bytes) -> FormatError:
    with pytest.raises(FormatError) as caught:
        parse_root(raw, path="a.zarr.zip")
    assert caught.value.path == "a.zarr.zip"
    return caught.value


# --- data types ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["complex64", "U8", [("a", "f4")]])
def test_dtype_name_refuses_what_the_format_lacks(dtype: Any) -> None:
    with pytest.raises(SpecError) as caught:
        dtype_name(dtype)
    assert caught.value.kind == "dtype"
    assert "bfloat16" in str(caught.value)


# --- arrays -------------------------------------------------------------------------------------------


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


def test_parse_array_takes_shapes_up_to_the_limits() -> None:
    """Spec 9.1."""
    most_axes = ArrayMeta("u", (1,) * MAX_RANK, "int8", ("sample", *(f"d{i}" for i in range(1, MAX_RANK))))
    longest = ArrayMeta("u", ((1 << 53) - 1, 64), "int8", ("sample", "k"))
    for meta in (most_axes, longest):
        assert parse_array("u", meta.to_json(), path="a.zarr.zip") == meta


# --- the root group -----------------------------------------------------------------------------------


def test_text_of_the_root_is_literal() -> None:
    """Spec 4.1 and 4.3."""
    text = (
        '{"attributes":{"title":"Bürgers","ups_store":{"config_hash":"' + ROOT.config_hash + '",'
        '"format_version":"1.0","identity":{"content":{"task":"burgers1d"}},"requires":[]}},'
        '"node_type":"group","zarr_format":3}'
    ).encode()
    assert ROOT.to_json() == text


def edited_root(edit: Any) -> bytes:
    document = json.loads(ROOT.to_json())
    edit(document)
    return text_of(document)


def test_parse_root_ignores_keys_of_newer_minor_versions() -> None:
    """Spec 10.3."""
    newer = {"statistics": {}, "format_version": "1.1"}
    raw = edited_root(lambda root: root["attributes"]["ups_store"].update(newer))
    assert parse_root(raw, path="a.zarr.zip") == replace(ROOT, version=(1, 1))


@pytest.mark.parametrize("version", ["1.0", "1.5"])
def test_parse_root_names_the_features_that_it_does_not_know(version: str) -> None:
    """Spec 10.3."""
    newer = {"requires": ["packed", "striped", "woven"], "format_version": version}
    error = refusal_of_root(edited_root(lambda root: root["attributes"]["ups_store"].update(newer)))
    assert isinstance(error, VersionTooNewError)
    assert (error.kind, error.clause) == ("requires", "10.3")
    assert "'striped', 'woven'" in error.problem


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
    ("text", "value"),
    [
        ("-9007199254740991", -(2**53) + 1),
        ("9007199254740992", 2.0**53),
        ("100000000000000000000", 1e20),
        ("9" * 400, math.inf),
    ],
)
def test_parse_json_reads_integers_beyond_53_bits_as_the_doubles_they_are(text: str, value: float) -> None:
    """RFC 8785 writes a double below 1e21 without point or exponent."""
    found = parse_json(b'{"n":' + text.encode() + b"}")["n"]
    assert (found, type(found)) == (value, type(value))
