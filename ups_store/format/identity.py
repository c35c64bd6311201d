"""What a store was made from: the identity document, its canonical form and its hash (spec 8)."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ups_store.format.canonical import canonical_json, plain_json
from ups_store.format.metadata import ArrayMeta
from ups_store.printable import one_line

MAX_PARTITIONS = 99_999  # five digits in the name of a file (spec 2.4)
_KEYS = {"arrays", "constants", "content"}
_DIGEST = re.compile(r"[0-9a-f]{64}")


def config_hash(identity: Mapping[str, Any]) -> str:
    """sha256 of the canonical identity document, 64 hexadecimal digits (spec 8.3)."""
    return hashlib.sha256(canonical_json(identity, what="identity")).hexdigest()


def constant_digest(payload: bytes) -> str:
    """sha256 of a constant's C-order little-endian bytes, as the identity holds it (spec 8.1)."""
    return hashlib.sha256(payload).hexdigest()


def identity_document(
    arrays: Iterable[ArrayMeta],
    constants: Mapping[str, str],
    content: Mapping[str, Any],
    partition: Sequence[int] | None = None,
) -> dict[str, Any]:
    """The identity document of a store (spec 8.1).

    Args:
        arrays: All arrays, constants included.
        constants: sha256 of each constant's bytes, by name.
        content: The caller's part: everything that decides the bytes.
        partition: Number of the partition, and of partitions; None for a split in one file.
    Returns:
        A document of plain JSON values.
    """
    document: dict[str, Any] = {
        "arrays": {meta.name: identity_of_array(meta) for meta in arrays},
        "constants": dict(constants),
        "content": dict(content),
    }
    if partition is not None:
        document["partition"] = list(partition)
    plain: dict[str, Any] = plain_json(document, what="identity")
    return plain


def identity_of_array(meta: ArrayMeta) -> dict[str, Any]:
    """What the identity says of an array: the shape is that of one sample (spec 8.1, 14.3)."""
    shape = [None, *meta.sample_shape] if meta.is_ragged else list(meta.sample_shape)
    return {"shape": shape, "dtype": meta.dtype, "dims": list(meta.axes)}


def flaws(identity: Mapping[str, Any]) -> list[str]:
    """What of an identity document isn't as spec 8.1 says, a short sentence each; empty where all is.

    Its `arrays` and the names of its `constants` are compared with the arrays' own documents.
    """
    found = []

    def differs(where: str, expected: str, value: object) -> None:
        found.append(f"{where}: expected {expected}, found {reprlib.repr(value)}")  # it may have 16 MiB

    if identity.keys() - {"partition"} != _KEYS:
        differs("keys", f"{', '.join(sorted(_KEYS))}, perhaps partition", sorted(identity))
    for key in ("arrays", "constants", "content"):
        if not isinstance(identity.get(key), dict):
            differs(f"key {key!r}", "an object", identity.get(key))
    digests = identity.get("constants")
    for name, digest in digests.items() if isinstance(digests, dict) else ():
        if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
            differs(f"sha256 of constant {name!r}", "64 lower-case hexadecimal digits", digest)
    if "partition" in identity and not _is_partition(identity["partition"]):
        expected = f"[K, M], integers, 0 <= K < M <= {MAX_PARTITIONS}"
        differs("key 'partition'", expected, identity["partition"])
    return found


def _is_partition(value: object) -> bool:
    if not isinstance(value, list) or len(value) != 2 or not all(type(n) is int for n in value):
        return False
    number, num_partitions = value
    return bool(0 <= number < num_partitions <= MAX_PARTITIONS)


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
    """One line a difference, `key: found -> expected`, at most `limit` of them; of lists the odd items."""
    lines = []
    for key, (found, expected) in differing.items():
        text = f"{found!r} -> {expected!r}"
        lists = [each for each in (found, expected) if isinstance(each, list)]
        if len(lists) == 2 and any(isinstance(item, dict) for item in itertools.chain(*lists)):
            left, right = ({json.dumps(item, sort_keys=True) for item in each} for each in lists)
            odd = [f", without {item}" for item in sorted(left - right)]
            odd += [f", also {item}" for item in sorted(right - left)]
            text = f"{len(found)} -> {len(expected)} items{''.join(odd)}"
        lines.append(one_line(f"{key}: {text}"))
    more = [f"and {len(lines) - limit} more"] if len(lines) > limit else []
    return "\n".join(lines[:limit] + more)
