"""What a store was made from: the identity document, its canonical form and its hash (spec 8)."""

from __future__ import annotations

import hashlib
import reprlib
from collections.abc import Iterable, Mapping
from typing import Any

from ups_store.format.canonical import canonical_json, plain_json
from ups_store.format.metadata import ArrayMeta

_FORMAT = 1  # major version of the document, that of the store format
_KEYS = ["arrays", "constants", "content", "format"]


def config_hash(identity: Mapping[str, Any]) -> str:
    """sha256 of the canonical identity document, 64 hexadecimal digits (spec 8.3)."""
    return hashlib.sha256(canonical_json(identity, what="identity")).hexdigest()


def constant_digest(payload: bytes) -> str:
    """sha256 of a constant's C-order little-endian bytes, as the identity holds it (spec 8.1)."""
    return hashlib.sha256(payload).hexdigest()


def identity_document(
    arrays: Iterable[ArrayMeta], constants: Mapping[str, str], content: Mapping[str, Any]
) -> dict[str, Any]:
    """The identity document of a store (spec 8.1).

    Args:
        arrays: All arrays, constants included.
        constants: sha256 of each constant's bytes, by name.
        content: The caller's part: everything that decides the bytes.
    Returns:
        A document of plain JSON values.
    """
    geometry = {
        meta.name: {"shape": list(meta.shape), "dtype": meta.dtype, "dims": list(meta.dims)}
        for meta in arrays
    }
    document = {"format": _FORMAT, "arrays": geometry, "constants": dict(constants), "content": dict(content)}
    plain: dict[str, Any] = plain_json(document, what="identity")
    return plain


def flaws(identity: Mapping[str, Any], constants: Iterable[str]) -> list[str]:
    """What of an identity document isn't as spec 8.1 says, a short sentence each; empty where all is.

    Its `arrays` are left to who opens the store: they are compared with the arrays' own documents.

    Args:
        identity: The document.
        constants: Names of the arrays without a sample axis.
    """
    found = []

    def differs(where: str, expected: str, value: object) -> None:
        found.append(f"{where}: expected {expected}, found {reprlib.repr(value)}")  # it may have 16 MiB

    if sorted(identity) != _KEYS:
        differs("keys", ", ".join(_KEYS), sorted(identity))
    number = identity.get("format")
    if type(number) is not int or number != _FORMAT:
        differs("key 'format'", str(_FORMAT), number)
    if not isinstance(identity.get("content"), dict):
        differs("key 'content'", "an object", identity.get("content"))
    digests, names = identity.get("constants"), sorted(constants)
    if not isinstance(digests, dict) or sorted(digests) != names:
        value = sorted(digests) if isinstance(digests, dict) else digests
        differs("key 'constants'", f"digests of {reprlib.repr(names)}", value)
    return found


def differences(found: Any, expected: Any, where: str = "") -> dict[str, tuple[Any, Any]]:
    """Keys at which two documents differ, as `{key path: (found, expected)}`; None where absent."""
    if isinstance(found, dict) and isinstance(expected, dict):
        result: dict[str, tuple[Any, Any]] = {}
        for key in sorted(found.keys() | expected.keys()):
            inner = f"{where}.{key}" if where else key
            if key in found and key in expected:
                result |= differences(found[key], expected[key], inner)
            else:  # also where the other one holds None
                result[inner] = (found.get(key), expected.get(key))
        return result
    if isinstance(found, list) and isinstance(expected, list) and len(found) == len(expected):
        result = {}
        for i, (left, right) in enumerate(zip(found, expected, strict=True)):
            result |= differences(left, right, f"{where}[{i}]")
        return result
    return {} if found == expected else {where: (found, expected)}


def describe_differences(differing: Mapping[str, tuple[Any, Any]], *, limit: int = 8) -> str:
    """One line a difference, `key: found -> expected`, at most `limit` of them."""
    lines = [f"{key}: {found!r} -> {expected!r}" for key, (found, expected) in differing.items()]
    more = [f"and {len(lines) - limit} more"] if len(lines) > limit else []
    return "\n".join(lines[:limit] + more)
