"""The manifest of a set: which parts it consists of, in order; canonical JSON; pure (spec 15.3)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from ups_store.errors import FormatError, VersionTooNewError
from ups_store.format.canonical import MAX_EXACT_INTEGER, canonical_json

SET_VERSION = "1.0"
MAX_MANIFEST_BYTES = 16 << 20
MAX_PARTS = 1 << 16
_KIND = "ups_store_set"
_KEYS = ["format_version", "kind", "parts"]
_PART_KEYS = ["config_hash", "count", "fingerprint", "name"]
_NAME = re.compile(r"[0-9]{5}\.zarr\.zip")
_HEX = re.compile(r"[0-9a-f]{32,64}")


@dataclass(frozen=True)
class SetPart:
    """One part of a set.

    Attributes:
        name: File name in the folder of parts.
        count: Samples in it.
        config_hash: Of its identity.
        fingerprint: Of its content.
    """

    name: str
    count: int
    config_hash: str
    fingerprint: str


def part_name(number: int) -> str:
    """File name of part number `number`."""
    return f"{number:05d}.zarr.zip"


def number_of_part(name: str) -> int | None:
    """Number of the part with this file name; None if it is no part's."""
    return int(name[:5]) if _NAME.fullmatch(name) else None


def pack_manifest(parts: Iterable[SetPart]) -> bytes:
    """The text of a manifest (spec 15.3)."""
    document = {"format_version": SET_VERSION, "kind": _KIND, "parts": [vars(part) for part in parts]}
    return canonical_json(document, what="manifest")


def parse_manifest(raw: bytes, *, path: object) -> tuple[SetPart, ...]:
    """The parts that a manifest names; any other text than `pack_manifest` writes is refused."""

    def bad(problem: str, **values: Any) -> FormatError:
        hint = "it was edited or damaged: write it again, or open the parts one by one"
        return FormatError(
            f"manifest: {problem}", path=path, kind="manifest", clause="15.3", hint=hint, **values
        )

    try:
        document = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise bad("no JSON", found=str(error)) from error
    if not isinstance(document, dict) or document.get("kind") != _KIND:
        raise bad("not one of a set", expected=f"kind {_KIND!r}")
    version = document.get("format_version")
    if version != SET_VERSION:
        problem = "written for a newer format"
        raise VersionTooNewError(problem, path=path, clause="15.3", expected=SET_VERSION, found=version)
    listed = document.get("parts")
    if sorted(document) != _KEYS or not isinstance(listed, list):
        raise bad("its keys", expected=_KEYS, found=sorted(document))
    if not 0 < len(listed) <= MAX_PARTS:
        raise bad("its number of parts", expected=f"1 to {MAX_PARTS}", found=len(listed))
    parts = tuple(_parse_part(number, part, bad) for number, part in enumerate(listed))
    if len({part.name for part in parts}) < len(parts) or pack_manifest(parts) != raw:
        raise bad("not its canonical text, or a part twice")
    return parts


def _parse_part(number: int, part: object, bad: Callable[..., FormatError]) -> SetPart:
    if isinstance(part, dict) and sorted(part) == _PART_KEYS:
        name, count = part["name"], part["count"]
        digests = part["config_hash"], part["fingerprint"]
        is_counted = type(count) is int and 0 <= count <= MAX_EXACT_INTEGER
        is_named = isinstance(name, str) and _NAME.fullmatch(name)
        if is_named and is_counted and all(isinstance(d, str) and _HEX.fullmatch(d) for d in digests):
            return SetPart(name, count, *digests)
    expected = "a name such as 00017.zarr.zip, a count and two digests"
    raise bad(f"part {number}", expected=expected, found=part)
