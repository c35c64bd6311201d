"""The root document: version, features, and the identity: what a store was made from (spec 4.3, 8, 10).

Pure: nothing is read or written here.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ups_store.errors import FormatError, VersionTooNewError
from ups_store.format.canonical import canonical_json, member_text, plain_json
from ups_store.format.metadata import ArrayMeta, bad_key, read_document, short
from ups_store.printable import one_line

FORMAT_VERSION = (1, 0)
FEATURES = ("packed", "ragged")  # what a file may require of this reader (spec 10.3)
MAX_FEATURES = 64
MAX_PARTITIONS = 99_999  # five digits in the name of a file (spec 2.4)
_VERSION = re.compile(r"(0|[1-9][0-9]{0,5})\.(0|[1-9][0-9]{0,5})")
_FEATURE = re.compile(r"[a-z0-9][a-z0-9_.-]{0,63}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class RootMeta:
    """The root group's `zarr.json`."""

    version: tuple[int, int]  # of the format, (major, minor)
    config_hash: str  # sha256 of the canonical identity document, hexadecimal
    identity: dict[str, Any]  # the identity document (spec 8)
    attrs: dict[str, Any] = field(default_factory=dict)  # the caller's, without the key `ups_store`
    requires: tuple[str, ...] = ()  # features that a reader must know, sorted (spec 10.3)
    packed: dict[str, Any] | None = None  # how a packed store is packed (spec 13.2)

    def to_json(self) -> bytes:
        """Return the bytes of the root `zarr.json` (spec 4.3)."""
        ours = {
            "format_version": f"{self.version[0]}.{self.version[1]}",
            "config_hash": self.config_hash,
            "identity": self.identity,
            "requires": list(self.requires),
        }
        if self.packed is not None:
            ours["packed"] = self.packed
        attributes = {**self.attrs, "ups_store": ours}
        document = {"zarr_format": 3, "node_type": "group", "attributes": attributes}
        return canonical_json(document, what="attrs and identity")


def parse_root(raw: bytes, *, path: object) -> RootMeta:
    """Read the root `zarr.json`, its hash included (spec 4.3, 8.3)."""
    document = read_document(raw, path=path, entry="zarr.json")
    attrs = document.get("attributes")
    ours = attrs.get("ups_store") if isinstance(attrs, dict) else None
    node = (document.get("zarr_format"), document.get("node_type"))
    if not isinstance(attrs, dict) or not isinstance(ours, dict) or node != (3, "group"):
        raise FormatError(
            "no root group with the attribute 'ups_store'",
            path=path,
            kind="foreign",
            clause="4.3",
            hint="it is a Zarr file of another program: read it with zarr-python",
        )
    if unknown := document.keys() - {"attributes", "node_type", "zarr_format"}:
        raise _bad(path, document, min(unknown), "no such key", where="zarr.json")
    version = _parse_version(ours, path)
    requires = _parse_requires(ours, path)
    known = {"config_hash", "format_version", "identity", "requires", "packed"}
    if version <= FORMAT_VERSION and (unknown := ours.keys() - known):
        raise _bad(path, ours, min(unknown), "no such key")
    if "packed" not in requires and "packed" in ours:
        raise _bad(path, ours, "packed", "no such key unless it is required", clause="13.2")
    if "packed" in requires and not isinstance(ours.get("packed"), dict):
        raise _bad(path, ours, "packed", "an object", clause="13.2")
    if not isinstance(ours.get("config_hash"), str):
        raise _bad(path, ours, "config_hash", "64 hexadecimal digits")
    if not isinstance(ours.get("identity"), dict):
        raise _bad(path, ours, "identity", "an object")
    others = {key: value for key, value in attrs.items() if key != "ups_store"}
    root = RootMeta(version, ours["config_hash"], ours["identity"], others, requires, ours.get("packed"))
    stored = member_text(raw.decode(), "attributes", "ups_store", "identity")  # hashed as it stands there
    computed = hashlib.sha256(stored.encode()).hexdigest()
    if computed != root.config_hash:
        raise FormatError(
            "identity document and its hash disagree",
            path=path,
            kind="identity_hash",
            clause="8.3",
            expected=short(root.config_hash),
            found=computed,
            hint="the metadata was edited or damaged: rebuild it",
        )
    return root


def _parse_version(ours: dict[str, Any], path: object) -> tuple[int, int]:
    text = ours.get("format_version")
    numbers = _VERSION.fullmatch(text) if isinstance(text, str) else None
    if numbers is None:
        raise _bad(path, ours, "format_version", "'MAJOR.MINOR', numbers of at most six digits")
    version = (int(numbers[1]), int(numbers[2]))
    expected = f"version {FORMAT_VERSION[0]}.x"
    if version[0] > FORMAT_VERSION[0]:
        raise VersionTooNewError(
            "written for a newer format",
            path=path,
            clause="10.2",
            expected=expected,
            found=text,
            hint="upgrade ups-store, or read it with any Zarr v3 reader",
        )
    if version[0] < FORMAT_VERSION[0]:
        raise _bad(path, ours, "format_version", expected, clause="10.2", hint="build it again")
    return version


def _parse_requires(ours: dict[str, Any], path: object) -> tuple[str, ...]:
    names: Any = ours.get("requires")
    is_list = isinstance(names, list) and len(names) <= MAX_FEATURES
    if not is_list or not all(isinstance(name, str) and _FEATURE.fullmatch(name) for name in names or ()):
        expected = f"a list of at most {MAX_FEATURES} features, names of 1 to 64 of a-z, 0-9, '_', '.', '-'"
        raise _bad(path, ours, "requires", expected)
    if names != sorted(set(names)):
        raise _bad(path, ours, "requires", "sorted names, none twice")
    unknown = [name for name in names if name not in FEATURES]
    if unknown:
        raise VersionTooNewError(
            f"it requires {short(unknown)[1:-1]}, which this version doesn't know",
            path=path,
            kind="requires",
            clause="10.3",
            expected=f"only {', '.join(map(repr, FEATURES))}",
            found=short(unknown),
            hint="upgrade ups-store",
        )
    if len(names) > 1:
        raise _bad(path, ours, "requires", "packed or ragged, not both", clause="10.3")
    return tuple(names)


def _bad(path: object, document: dict[str, Any], key: str, expected: str, **values: str) -> FormatError:
    """Return the error for a key of the root's attribute `ups_store`, or where `values` say."""
    values = {"where": "attribute 'ups_store'", "kind": "root_metadata", "clause": "4.3", **values}
    return bad_key(path, document, key, expected, **values)


def config_hash(identity: Mapping[str, Any]) -> str:
    """Return the sha256 of the canonical identity document, 64 hexadecimal digits (spec 8.3)."""
    return hashlib.sha256(canonical_json(identity, what="identity")).hexdigest()


def constant_digest(payload: bytes) -> str:
    """Return the sha256 of a constant's C-order little-endian bytes, as the identity holds it (spec 8.1)."""
    return hashlib.sha256(payload).hexdigest()


def identity_document(
    arrays: Iterable[ArrayMeta],
    constants: Mapping[str, str],
    content: Mapping[str, Any],
    partition: Sequence[int] | None = None,
) -> dict[str, Any]:
    """Make the identity document of a store, of plain JSON values (spec 8.1).

    Args:
        arrays: All arrays, constants included.
        constants: sha256 of each constant's bytes, by name.
        content: The caller's document: everything else that decides the bytes.
        partition: Number of the partition, and of partitions; None for a split in one file.
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
    """Return what the identity says of an array: the shape is that of one sample (spec 8.1, 14.3)."""
    shape = [None, *meta.sample_shape] if meta.is_ragged else list(meta.sample_shape)
    return {"shape": shape, "dtype": meta.dtype, "dims": list(meta.axes)}


def identity_flaw(identity: Mapping[str, Any]) -> str | None:
    """Say in a short sentence what of an identity document isn't as spec 8.1 says; None if all is.

    Its `arrays` and the names of its `constants` are compared with the arrays' own documents.
    """

    def differs(where: str, expected: str, value: object) -> str:
        return f"{where}: expected {expected}, found {reprlib.repr(value)}"  # it may have 16 MiB

    keys = ("arrays", "constants", "content")
    for key in keys:
        if not isinstance(identity.get(key), dict):
            return differs(f"key {key!r}", "an object", identity.get(key))
    if identity.keys() - {*keys, "partition"}:
        return differs("keys", f"{', '.join(keys)}, perhaps partition", sorted(identity))
    for name, digest in identity["constants"].items():
        if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
            where = f"sha256 of constant {reprlib.repr(name)}"
            return differs(where, "64 lower-case hexadecimal digits", digest)
    numbers = identity.get("partition", [0, 1])
    are_integers = isinstance(numbers, list) and len(numbers) == 2 and all(type(n) is int for n in numbers)
    if not are_integers or not 0 <= numbers[0] < numbers[1] <= MAX_PARTITIONS:
        expected = f"[k, K], integers, 0 <= k < K <= {MAX_PARTITIONS}"
        return differs("key 'partition'", expected, numbers)
    return None


def differences(found: Any, expected: Any, where: str = "") -> dict[str, tuple[Any, Any]]:
    """Compare two documents: `{key path: (found, expected)}` where they differ, None where absent."""
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
        for i, (first, second) in enumerate(zip(found, expected, strict=True)):
            result |= differences(first, second, f"{where}[{i}]")
        return result
    return {} if found == expected else {where: (found, expected)}


def describe_differences(differing: Mapping[str, tuple[Any, Any]], *, limit: int = 8) -> str:
    """Write a line for each difference, `key: found -> expected`, at most `limit`; of lists the odd items."""
    lines = []
    for key, (actual, expected) in differing.items():
        text = f"{actual!r} -> {expected!r}"
        lists = [values for values in (actual, expected) if isinstance(values, list)]
        if len(lists) == 2 and any(isinstance(item, dict) for item in itertools.chain(*lists)):
            items, others = ({json.dumps(item, sort_keys=True) for item in values} for values in lists)
            odd = [f", without {item}" for item in sorted(items - others)]
            odd += [f", also {item}" for item in sorted(others - items)]
            text = f"{len(actual)} -> {len(expected)} items{''.join(odd)}"
        lines.append(one_line(f"{key}: {text}"))
    more = [f"and {len(lines) - limit} more"] if len(lines) > limit else []
    return "\n".join(lines[:limit] + more)
