"""Canonical JSON: one text per value, whatever program writes it (RFC 8785; spec 4.1, 8.2).

Reading checks the form of a text, which takes no conversion of numbers: that its numbers have the shortest
digits, too, is for `verify` to find.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import rfc8785

from ups_store.errors import SpecError

_SIMPLE_JSON = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), sort_keys=True)
MAX_EXACT_INTEGER = 2**53 - 1  # beyond it two JSON readers may see different numbers (RFC 8785, 3.2.2.3)
MAX_DEPTH = 100  # of objects and arrays, the document counted as 1 (spec 9.1)
_TOO_DEEP = f"valid Unicode, nested at most {MAX_DEPTH} deep"
_NUMBER = re.compile(
    r"0|-?(?:[1-9][0-9]{0,20}"
    r"|(?:0\.0{0,5}(?=[1-9])|[1-9][0-9]{0,20}\.)[0-9]*[1-9]"
    r"|[1-9](?:\.[0-9]*[1-9])?e(?:\+(?:2[1-9]|[3-9][0-9]|[12][0-9]{2}|30[0-8])|-(?:[7-9]|[1-9][0-9]|[12][0-9]{2}|3[01][0-9]|32[0-4])))"
)  # spec 4.1, item 4
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[-0-9][-+.0-9eE]*')


def canonical_json(document: Any, *, what: str) -> bytes:
    """Write a document as RFC 8785 says: one text per value, whatever program writes it.

    It is of dicts with string keys, lists, tuples, strings, numbers, booleans, None, NumPy scalars. A value
    that JSON can't hold exactly is a `SpecError`, which names its key path; `what` is the start of that.
    """
    try:
        if _is_simple(document):
            return _SIMPLE_JSON.encode(document).encode()
        return rfc8785.dumps(plain_json(document, what=what))
    except (rfc8785.CanonicalizationError, UnicodeEncodeError, RecursionError) as error:
        raise _refused(what, _TOO_DEEP, error) from error


def plain_json(document: Any, *, what: str) -> Any:
    """Convert a document to plain JSON values: NumPy scalars and tuples, too; see `canonical_json`."""
    try:
        return _plain(document, what)
    except RecursionError as error:
        raise _refused(what, _TOO_DEEP, error) from error


def _is_simple(value: Any, depth: int = 1) -> bool:
    """Tell whether `json`, five times as fast, writes what RFC 8785 wants: no odd key or fraction."""
    kind = type(value)
    if kind is str or kind is bool or value is None:
        return True
    if kind is int:
        return bool(abs(value) <= MAX_EXACT_INTEGER)
    if kind is float:  # where Python and ECMAScript write the same digits
        return 1e-4 <= abs(value) < 1e16 and not value.is_integer()
    if kind is dict or kind is list or kind is tuple:
        if depth > MAX_DEPTH:
            raise RecursionError
        if kind is dict:  # by code points, as Python sorts, is by UTF-16 units below the surrogates
            keys = all(type(key) is str and (key.isascii() or max(key) < "\ud800") for key in value)
            return keys and all(_is_simple(item, depth + 1) for item in value.values())
        return all(_is_simple(item, depth + 1) for item in value)
    return False


def _plain(value: Any, where: str, depth: int = 1) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        if abs(value) > MAX_EXACT_INTEGER:
            raise _refused(where, "an integer of at most 53 bits (or a string)", value)
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise _refused(where, "a finite number", value)
        return value
    if isinstance(value, Mapping | list | tuple) and depth > MAX_DEPTH:
        raise RecursionError
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise _refused(where, "string keys", key)
        return {key: _plain(item, f"{where}.{key}", depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]
    raise _refused(where, "a JSON value", type(value).__name__)


def _refused(where: str, expected: str, found: object) -> SpecError:
    return SpecError(
        f"{where} can't be stored", kind="not_canonical", clause="8.2", expected=expected, found=found
    )


def parse_json(raw: bytes) -> Any:
    """Read a JSON text in UTF-8, canonical or not; ValueError for any other."""
    try:
        return _DECODER.decode(raw.decode())
    except RecursionError as error:
        raise ValueError("nested too deep") from error


def is_text_of(document: Any, free: Any, raw: bytes) -> bool:
    """Tell quickly whether a text is that of a document in which only the value `free` is the caller's."""
    try:
        return _is_simple(free, 2) and _SIMPLE_JSON.encode(document).encode() == raw
    except (RecursionError, UnicodeEncodeError):
        return False


def check_canonical(raw: bytes, document: Any) -> None:
    """Refuse a text of a document that isn't canonical in form, with ValueError."""
    text = raw.decode()
    try:
        if canonical_json(document, what="document") == raw:
            return
        # Perhaps only digits differ: the form is that of the same text with other numbers.
        form = _TOKEN.sub(_without_digits, text)
        expected = canonical_json(json.loads(form), what="document").decode()
    except (SpecError, RecursionError) as error:
        raise ValueError(getattr(error, "expected", None) or "nested too deep") from error
    if form != expected:
        at = next((i for i, pair in enumerate(zip(form, expected, strict=False)) if len({*pair}) > 1), 0)
        raise ValueError(f"not its canonical text: expected {expected[at:][:40]!r}, found {form[at:][:40]!r}")


def _without_digits(token: re.Match[str]) -> str:
    text = token[0]
    if text.startswith('"'):
        return text
    if not _NUMBER.fullmatch(text):
        raise ValueError(f"a number that isn't as RFC 8785 writes it: {text[:40]}")
    return "0"


def member_text(text: str, *keys: str) -> str:
    """Cut the value at a path of keys, which are there, out of a canonical text of objects."""
    first, end = 0, len(text)
    for key_text in keys:
        key, end = None, first
        while key != key_text:  # values one behind the other, after "{" or ","
            key, colon = _PLAIN_DECODER.raw_decode(text, end + 1)
            first = colon + 1
            _, end = _PLAIN_DECODER.raw_decode(text, first)
    return text[first:end]


def _number(text: str) -> int | float:
    """Read an integer; beyond 53 bits the nearest double, which RFC 8785 writes with digits up to 1e21."""
    number = float(text)
    return int(text) if abs(number) <= MAX_EXACT_INTEGER else number


def _raise_on_constant(text: str) -> None:
    raise ValueError(f"{text} is no JSON number")


_PLAIN_DECODER = json.JSONDecoder()
_DECODER = json.JSONDecoder(parse_int=_number, parse_constant=_raise_on_constant)
