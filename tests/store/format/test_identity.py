"""The identity document: its keys, its hash, differences between two of them (spec 8)."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ups_store.errors import SpecError
from ups_store.format.identity import (
    config_hash,
    constant_digest,
    describe_differences,
    differences,
    flaws,
    identity_document,
)
from ups_store.format.metadata import ArrayMeta

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(0, 3) | st.text("ab", max_size=1),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab", max_size=1), inner),
    max_leaves=8,
)


# --- hashes and the document --------------------------------------------------------------------------


def test_config_hash_is_sha256_of_the_canonical_form() -> None:
    """Spec 8.3."""
    assert config_hash({}) == hashlib.sha256(b"{}").hexdigest()
    assert config_hash({"b": 1.0, "a": [None]}) == hashlib.sha256(b'{"a":[null],"b":1}').hexdigest()


def test_config_hash_of_the_smallest_store_is_that_of_the_spec() -> None:
    """Spec 12."""
    document = identity_document([ArrayMeta("u", (1,), "int8", ("sample",))], {}, {})
    assert document == {
        "format": 1,
        "arrays": {"u": {"shape": [1], "dtype": "int8", "dims": ["sample"]}},
        "constants": {},
        "content": {},
    }
    assert config_hash(document) == "5e1b02ddc7ca11c8d868844dada325c0c3376859b9f5f0e4ca4507d44afadd29"


def test_identity_document_holds_plain_values_and_no_attributes() -> None:
    """Spec 8.1."""
    metas = [
        ArrayMeta("x", (2,), "float64", ("x",), {"units": "m"}),
        ArrayMeta("u", (3, 2), "bfloat16", ("sample", "x")),
    ]
    document = identity_document(metas, {"x": "ab"}, {"nu": np.float64(0.5), "files": ("a", "b")})
    assert document["arrays"] == {
        "x": {"shape": [2], "dtype": "float64", "dims": ["x"]},
        "u": {"shape": [3, 2], "dtype": "bfloat16", "dims": ["sample", "x"]},
    }
    assert document["constants"] == {"x": "ab"}
    assert document["content"] == {"nu": 0.5, "files": ["a", "b"]}
    assert type(document["content"]["nu"]) is float


def test_identity_document_names_what_it_refuses() -> None:
    with pytest.raises(SpecError) as caught:
        identity_document([], {}, {"sources": [{"mean": math.nan}]})
    assert caught.value.problem == "identity.content.sources[0].mean can't be stored"


def test_constant_digest_is_sha256_of_the_payload() -> None:
    """Spec 8.1."""
    payload = np.linspace(0, 1, 5).tobytes()
    assert constant_digest(payload) == hashlib.sha256(payload).hexdigest()


# --- differences --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "expected", "differing"),
    [
        ({}, {}, {}),
        ({"a": 1}, {"a": 1.0}, {}),
        ({"a": 1}, {"a": 2}, {"a": (1, 2)}),
        ({"a": 1}, {}, {"a": (1, None)}),
        ({}, {"a": 1}, {"a": (None, 1)}),
        ({}, {"a": None}, {"a": (None, None)}),
        ({"a": {"b": {"c": 1}}}, {"a": {"b": {"c": 2, "d": 3}}}, {"a.b.c": (1, 2), "a.b.d": (None, 3)}),
        ({"a": [1, {"b": 2}]}, {"a": [1, {"b": 3}]}, {"a[1].b": (2, 3)}),
        ({"a": [1]}, {"a": [1, 2]}, {"a": ([1], [1, 2])}),
        ({"a": {"b": 1}}, {"a": [1]}, {"a": ({"b": 1}, [1])}),
        ({"b": 1, "a": 1}, {"b": 2, "a": 2}, {"a": (1, 2), "b": (1, 2)}),
        (None, {"a": 1}, {"": (None, {"a": 1})}),
    ],
)
def test_differences_name_the_keys(found: Any, expected: Any, differing: dict[str, Any]) -> None:
    assert differences(found, expected) == differing


@given(JSON_VALUES, JSON_VALUES)
def test_differences_are_empty_only_for_equal_documents(left: Any, right: Any) -> None:
    assert not differences(left, left)
    assert bool(differences(left, right)) == (left != right)


def test_describe_differences_writes_a_line_each() -> None:
    differing = {"a.b": (1, "x"), "c": (None, [1])}
    assert describe_differences(differing) == "a.b: 1 -> 'x'\nc: None -> [1]"


def test_describe_differences_says_how_many_more_there_are() -> None:
    differing = {f"k{i}": (i, i + 1) for i in range(10)}
    lines = describe_differences(differing, limit=3).splitlines()
    assert lines == ["k0: 0 -> 1", "k1: 1 -> 2", "k2: 2 -> 3", "and 7 more"]


WHOLE = {"format": 1, "arrays": {}, "constants": {"x": "00"}, "content": {}}


def test_flaws_of_a_whole_document_are_none() -> None:
    assert flaws(WHOLE, ["x"]) == []


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        ({"extra": 1}, "extra"),
        ({"format": 2}, "format"),
        ({"format": True}, "format"),
        ({"format": "1"}, "format"),
        ({"content": None}, "content"),
        ({"content": []}, "content"),
        ({"constants": None}, "constants"),
        ({"constants": {}}, "constants"),
        ({"constants": {"x": "00", "u": "11"}}, "constants"),
    ],
)
def test_flaws_name_what_isnt_as_the_spec_says(edit: dict[str, Any], named: str) -> None:
    (flaw,) = flaws({**WHOLE, **edit}, ["x"])
    assert named in flaw


LONG = "x" * 1_000_000


@pytest.mark.parametrize(
    "edit",
    [
        {"format": LONG},
        {"format": int("9" * 1000)},
        {"content": LONG},
        {"content": [[LONG]] * 1000},
        {"constants": LONG},
        {"constants": {LONG: LONG}},
        {"constants": {f"{i}{LONG[:100]}": LONG for i in range(1000)}},
        {f"{i}{LONG[:100]}": i for i in range(1000)},
    ],
)
def test_flaws_of_long_documents_are_short(edit: dict[str, Any]) -> None:
    names = [f"constant_with_a_long_name_{i:0100}" for i in range(1000)]
    for found in (flaws({**WHOLE, **edit}, ["x"]), flaws({**WHOLE, **edit}, names)):
        assert found
        assert all(len(flaw) < 500 and "expected" in flaw and "found" in flaw for flaw in found)


@pytest.mark.parametrize("key", ["format", "constants", "content"])
def test_flaws_name_a_key_that_is_missing(key: str) -> None:
    document = {name: value for name, value in WHOLE.items() if name != key}
    assert any(key in flaw for flaw in flaws(document, ["x"]))
