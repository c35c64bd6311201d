"""The root group's `zarr.json`: version, features, identity and its hash; pure (spec 4.3, 8.3, 10)."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from typing import Any

from ups_store.errors import FormatError, VersionTooNewError
from ups_store.format.canonical import canonical_json, member_text
from ups_store.format.metadata import bad_key, read_document, short

FORMAT_VERSION = (1, 0)
FEATURES = ("packed", "ragged")  # what a file may require of this reader (spec 10.3)
_ROOT_KEYS = {"attributes", "node_type", "zarr_format"}
_OUR_KEYS = ("config_hash", "format_version", "identity", "requires")
MAX_FEATURES = 64
_FEATURE_PATTERN = re.compile(r"[a-z0-9][a-z0-9_.-]{0,63}")
_VERSION_PATTERN = re.compile(r"(0|[1-9][0-9]{0,5})\.(0|[1-9][0-9]{0,5})")


@dataclass(frozen=True)
class RootMeta:
    """The root group's `zarr.json`.

    Attributes:
        version: Format version, `(major, minor)`.
        config_hash: sha256 of the canonical identity document, hexadecimal.
        identity: The identity document (spec 8).
        attrs: The caller's attributes, without the key `ups_store`.
        requires: Features that a reader must know, sorted (spec 10.3).
        packed: How a packed store is packed (spec 13.2); None for a mapped one.
    """

    version: tuple[int, int]
    config_hash: str
    identity: dict[str, Any]
    attrs: dict[str, Any] = field(default_factory=dict)
    requires: tuple[str, ...] = ()
    packed: dict[str, Any] | None = None

    def to_json(self) -> bytes:
        """The bytes of the root `zarr.json` (spec 4.3)."""
        ours = {
            "format_version": f"{self.version[0]}.{self.version[1]}",
            "config_hash": self.config_hash,
            "identity": self.identity,
            "requires": list(self.requires),
        }
        if self.packed is not None:
            ours["packed"] = self.packed
        document = {
            "zarr_format": 3,
            "node_type": "group",
            "attributes": {**self.attrs, "ups_store": ours},
        }
        return canonical_json(document, what="attrs and identity")


def parse_root(raw: bytes, *, path: object) -> RootMeta:
    """Read the root `zarr.json`, its hash included (spec 4.3, 8.3).

    Raises:
        FormatError: Says what is wrong with which key.
        VersionTooNewError: If it is of a newer major version, or requires features that are unknown here.
    """
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
    if len(document) > 3:
        key = _unknown(document, _ROOT_KEYS)
        raise bad_key(path, document, key, "no such key", kind="root_metadata", clause="4.3")
    version = _parse_version(ours, path)
    requires = _parse_requires(ours, path)
    _check_our_keys(ours, requires, is_newer=version > FORMAT_VERSION, path=path)
    others = {key: value for key, value in attrs.items() if key != "ups_store"}
    root = RootMeta(version, ours["config_hash"], ours["identity"], others, requires, ours.get("packed"))
    _check_hash(root, member_text(raw.decode(), "attributes", "ups_store", "identity"), path)
    return root


def _parse_version(ours: dict[str, Any], path: object) -> tuple[int, int]:
    text = ours.get("format_version")
    numbers = _VERSION_PATTERN.fullmatch(text) if isinstance(text, str) else None
    if numbers is None:
        raise _bad_ours(path, ours, "format_version", "'MAJOR.MINOR', numbers of at most six digits")
    version = (int(numbers[1]), int(numbers[2]))
    if version[0] > FORMAT_VERSION[0]:
        raise VersionTooNewError(
            "written for a newer format",
            path=path,
            clause="10.2",
            expected=f"version {FORMAT_VERSION[0]}.x",
            found=text,
            hint="upgrade ups-store, or read it with any Zarr v3 reader",
        )
    if version[0] < FORMAT_VERSION[0]:
        expected = f"version {FORMAT_VERSION[0]}.x"
        raise _bad_ours(path, ours, "format_version", expected, clause="10.2", hint="build it again")
    return version


def _parse_requires(ours: dict[str, Any], path: object) -> tuple[str, ...]:
    names = ours.get("requires")
    if not isinstance(names, list) or len(names) > MAX_FEATURES or not all(map(_is_feature, names)):
        expected = f"a list of at most {MAX_FEATURES} names of features, 1 to 64 of a-z, 0-9, '_', '.', '-'"
        raise _bad_ours(path, ours, "requires", expected)
    if names != sorted(set(names)):
        raise _bad_ours(path, ours, "requires", "sorted names, none twice")
    unknown = [name for name in names if name not in FEATURES]
    if unknown:
        error = VersionTooNewError(
            f"it requires {', '.join(map(repr, unknown))}, which this version doesn't know",
            path=path,
            kind="requires",
            clause="10.3",
            expected=f"only {', '.join(map(repr, FEATURES))}",
            found=short(unknown),
            hint="upgrade ups-store",
        )
        raise error
    if len(names) > 1:
        raise _bad_ours(path, ours, "requires", "packed or ragged, not both", clause="10.3")
    return tuple(names)


def _is_feature(name: object) -> bool:
    return isinstance(name, str) and _FEATURE_PATTERN.fullmatch(name) is not None


def _check_our_keys(ours: dict[str, Any], requires: tuple[str, ...], *, is_newer: bool, path: object) -> None:
    """Check the keys of `ups_store`: all that there must be, of their kinds, and no others (spec 4.3)."""
    if not is_newer and ours.keys() - {*_OUR_KEYS, "packed"}:
        raise _bad_ours(path, ours, _unknown(ours, {*_OUR_KEYS, "packed"}), "no such key")
    if "packed" not in requires and "packed" in ours:
        raise _bad_ours(path, ours, "packed", "no such key unless it is required", clause="13.2")
    if "packed" in requires and not isinstance(ours.get("packed"), dict):
        raise _bad_ours(path, ours, "packed", "an object", clause="13.2")
    if not isinstance(ours.get("config_hash"), str):
        raise _bad_ours(path, ours, "config_hash", "64 hexadecimal digits")
    if not isinstance(ours.get("identity"), dict):
        raise _bad_ours(path, ours, "identity", "an object")


def _check_hash(root: RootMeta, text: str, path: object) -> None:
    """Compare the hash with that of the identity's text, as it stands in the file (spec 8.3)."""
    found = hashlib.sha256(text.encode()).hexdigest()
    if found != root.config_hash:
        raise FormatError(
            "identity document and its hash disagree",
            path=path,
            kind="identity_hash",
            clause="8.3",
            expected=short(root.config_hash),
            found=found,
            hint="the metadata was edited or damaged: rebuild it",
        )


def _unknown(found: dict[str, Any], known: set[str]) -> str:
    return min(found.keys() - known, default="zarr_format")


def _bad_ours(path: object, ours: dict[str, Any], key: str, expected: str, **values: str) -> FormatError:
    """What is wrong with a key of the root's attribute `ups_store`."""
    values = {"where": "attribute 'ups_store'", "kind": "root_metadata", "clause": "4.3", **values}
    return bad_key(path, ours, key, expected, **values)
