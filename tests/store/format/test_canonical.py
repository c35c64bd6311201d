"""The canonical form of JSON documents: RFC 8785's own examples, and what has none (spec 8.2)."""

from __future__ import annotations

import json
import math
import struct
from typing import Any

import numpy as np
import pytest
import rfc8785
from hypothesis import given
from hypothesis import strategies as st

from ups_store.errors import SpecError
from ups_store.format.canonical import canonical_json, check_canonical, member_text, parse_json

# RFC 8785, appendix B: bits of a double and its text.
NUMBERS = [
    (0x0000000000000000, "0"),
    (0x8000000000000000, "0"),
    (0x0000000000000001, "5e-324"),
    (0x8000000000000001, "-5e-324"),
    (0x7FEFFFFFFFFFFFFF, "1.7976931348623157e+308"),
    (0xFFEFFFFFFFFFFFFF, "-1.7976931348623157e+308"),
    (0x4340000000000000, "9007199254740992"),
    (0xC340000000000000, "-9007199254740992"),
    (0x4430000000000000, "295147905179352830000"),
    (0x44B52D02C7E14AF5, "9.999999999999997e+22"),
    (0x44B52D02C7E14AF6, "1e+23"),
    (0x44B52D02C7E14AF7, "1.0000000000000001e+23"),
    (0x444B1AE4D6E2EF4E, "999999999999999700000"),
    (0x444B1AE4D6E2EF4F, "999999999999999900000"),
    (0x444B1AE4D6E2EF50, "1e+21"),
    (0x3EB0C6F7A0B5ED8C, "9.999999999999997e-7"),
    (0x3EB0C6F7A0B5ED8D, "0.000001"),
    (0x41B3DE4355555553, "333333333.3333332"),
    (0x41B3DE4355555554, "333333333.33333325"),
    (0x41B3DE4355555555, "333333333.3333333"),
    (0x41B3DE4355555556, "333333333.3333334"),
    (0x41B3DE4355555557, "333333333.33333343"),
    (0xBECBF647612F3696, "-0.0000033333333333333333"),
    (0x43143FF3C1CB0959, "1424953923781206.2"),
]

JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53) + 1, 2**53 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def refusal(document: Any) -> SpecError:
    with pytest.raises(SpecError) as caught:
        canonical_json(document, what="identity")
    assert (caught.value.kind, caught.value.clause) == ("not_canonical", "8.2")
    return caught.value


def test_canonical_json_writes_numbers_as_rfc_8785() -> None:
    """Spec 8.2."""
    for bits, text in NUMBERS:
        number = struct.unpack(">d", bits.to_bytes(8, "big"))[0]
        assert canonical_json({"n": number}, what="identity") == b'{"n":' + text.encode() + b"}"


def test_canonical_json_writes_the_example_of_rfc_8785() -> None:
    """RFC 8785, 3.2.2."""
    document = json.loads(
        r"""{"numbers": [333333333.33333329, 1E30, 4.50, 2e-3, 0.000000000000000000000000001],
        "string": "\u20ac$\u000F\u000aA'\u0042\u0022\u005c\\\"\/", "literals": [null, true, false]}"""
    )
    assert canonical_json(document, what="identity").decode() == (
        '{"literals":[null,true,false],"numbers":[333333333.3333333,1e+30,4.5,0.002,1e-27],'
        r'"string":"€$\u000f\nA' + r"""'B\"\\\\\"/"}"""
    )


def test_canonical_json_sorts_keys_as_rfc_8785() -> None:
    """RFC 8785, 3.2.3: by UTF-16 code units, so a character beyond 16 bits precedes U+FB33."""
    keys = ["\u20ac", "\r", "\ufb33", "1", "\U0001f600", "\u0080", "\u00f6"]
    text = canonical_json(dict.fromkeys(keys, 0), what="identity").decode()
    assert list(json.loads(text)) == ["\r", "1", "\u0080", "\u00f6", "\u20ac", "\U0001f600", "\ufb33"]


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (np.float32(0.1), float(np.float32(0.1))),
        (np.uint8(255), 255),
        (np.bool_(True), True),
        (np.str_("burgers1d"), "burgers1d"),
        ((1, (2, 3)), [1, [2, 3]]),
        (-0.0, 0),
    ],
)
def test_canonical_json_has_one_text_per_value(value: Any, plain: Any) -> None:
    assert canonical_json({"v": value}, what="") == canonical_json({"v": plain}, what="")


@given(JSON_VALUES)
def test_canonical_json_holds_the_value(value: Any) -> None:
    """Whatever JSON can hold exactly comes back; its text is that of the reference implementation (8.2)."""
    text = canonical_json({"v": value}, what="value")
    assert text == rfc8785.dumps({"v": value})
    document = parse_json(text)
    check_canonical(text, document)
    assert document == {"v": value}
    assert canonical_json(document, what="value") == text


@pytest.mark.parametrize(
    ("document", "where", "found"),
    [
        ({"a": {"b": [0, math.nan]}}, "identity.a.b[1]", "nan"),
        ({"a": -math.inf}, "identity.a", "-inf"),
        ({"a": [{"n": -(2**53)}]}, "identity.a[0].n", "-9007199254740992"),
        ({"a": np.uint64(2**63)}, "identity.a", "9223372036854775808"),
        ({"a": {None: "x"}}, "identity.a", "None"),
        ({"a": b"bytes"}, "identity.a", "bytes"),
        ({"a": np.zeros(3)}, "identity.a", "ndarray"),
    ],
)
def test_canonical_json_names_what_it_refuses(document: Any, where: str, found: str) -> None:
    """Spec 8.2: by key path and value."""
    error = refusal(document)
    assert error.problem == f"{where} can't be stored"
    assert str(error.found) == found


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb"])
def test_canonical_json_refuses_half_a_character(text: str) -> None:
    assert "Unicode" in str(refusal({"a": text}))
    assert "Unicode" in str(refusal({text: 1}))


def test_canonical_json_refuses_endless_nesting() -> None:
    endless: list[Any] = []
    endless.append(endless)
    assert "nested" in str(refusal({"a": endless}))


# --- reading ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        '{"a":"\\b\\t\\n\\f\\r\\u0001\\u001f\x7f\\"\\\\/"}',
        '{"é":"€","\U0001f600":1,"\uffff":2}',
        "[" * 100 + "]" * 100,
        '{"a":0.10000000000000001,"b":[{"c":1e+30}]}',
    ],
)
def test_canonical_text_is_read(text: str) -> None:
    """Spec 4.1: keys are sorted by UTF-16 units, where a surrogate stands before U+FFFF."""
    check_canonical(text.encode(), parse_json(text.encode()))


@given(JSON_VALUES, JSON_VALUES)
def test_member_text_is_the_text_of_the_value(value: Any, other: Any) -> None:
    document = {"a": other, "b": {"a": other, "c": value, "z": other}, "c": other}
    text = canonical_json(document, what="").decode()
    assert member_text(text, "b", "c").encode() == canonical_json(value, what="")


def test_canonical_json_refuses_more_than_a_hundred_levels() -> None:
    """Spec 9.1."""
    value: Any = 0.5
    for _ in range(100):
        value = [value]
    assert canonical_json(value, what="").count(b"[") == 100
    for number in (0, 1e-9):  # as `json` writes it, and as it doesn't
        assert "100 deep" in str(refusal([value, number]))
