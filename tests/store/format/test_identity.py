"""The identity document: its keys, its hash, differences between two of them (spec 8)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ups_store.format.metadata import ArrayMeta
from ups_store.format.root import (
    config_hash,
    describe_differences,
    differences,
    identity_document,
)

# --- hashes and the document --------------------------------------------------------------------------


def test_config_hash_of_the_smallest_store_is_that_of_the_spec() -> None:
    """Spec 12."""
    document = identity_document([ArrayMeta("u", (1,), "int8", ("sample",))], {}, {})
    assert document == {
        "arrays": {"u": {"shape": [], "dtype": "int8", "dims": ["sample"]}},
        "constants": {},
        "content": {},
    }
    assert config_hash(document) == "d05f782189954b94beb145c39a98d6a566f3deba0b263bb5e7990752d1a62988"


def test_identity_document_holds_plain_values_and_no_attributes() -> None:
    """Spec 8.1."""
    metas = [
        ArrayMeta("x", (2,), "float64", ("x",), {"units": "m"}),
        ArrayMeta("u", (3, 2), "bfloat16", ("sample", "x")),
    ]
    document = identity_document(metas, {"x": "ab"}, {"nu": np.float64(0.5), "files": ("a", "b")})
    assert document["arrays"] == {
        "x": {"shape": [2], "dtype": "float64", "dims": ["x"]},
        "u": {"shape": [2], "dtype": "bfloat16", "dims": ["sample", "x"]},
    }
    assert document["constants"] == {"x": "ab"}
    assert document["content"] == {"nu": 0.5, "files": ["a", "b"]}
    assert type(document["content"]["nu"]) is float


# --- differences --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "expected", "differing"),
    [
        ({"a": 1}, {"a": 1.0}, {}),
        ({"a": 1}, {}, {"a": (1, None)}),
        ({}, {"a": None}, {"a": (None, None)}),
        ({"a": {"b": {"c": 1}}}, {"a": {"b": {"c": 2, "d": 3}}}, {"a.b.c": (1, 2), "a.b.d": (None, 3)}),
        ({"a": [1, {"b": 2}]}, {"a": [1, {"b": 3}]}, {"a[1].b": (2, 3)}),
        ({"a": [1]}, {"a": [1, 2]}, {"a": ([1], [1, 2])}),
        ({"a": {"b": 1}}, {"a": [1]}, {"a": ({"b": 1}, [1])}),
        (None, {"a": 1}, {"": (None, {"a": 1})}),
    ],
)
def test_differences_name_the_keys(found: Any, expected: Any, differing: dict[str, Any]) -> None:
    assert differences(found, expected) == differing


def test_describe_differences_says_how_many_more_there_are() -> None:
    differing = {f"k{i}": (i, i + 1) for i in range(10)}
    lines = describe_differences(differing, limit=3).splitlines()
    assert lines == ["k0: 0 -> 1", "k1: 1 -> 2", "k2: 2 -> 3", "and 7 more"]


def test_identity_does_not_depend_on_the_number_of_samples() -> None:
    """Spec 8.1."""
    few, many = ([ArrayMeta("u", (n, 2), "int8", ("sample", "x"))] for n in (3, 3000))
    assert identity_document(few, {}, {}) == identity_document(many, {}, {})


def test_partition_is_a_key_of_the_identity_and_changes_its_hash() -> None:
    """Spec 2.4, 8.1."""
    documents = [identity_document([], {}, {}, partition) for partition in (None, (0, 2), (1, 2))]
    assert "partition" not in documents[0]
    assert documents[2]["partition"] == [1, 2]
    assert len({config_hash(document) for document in documents}) == 3
