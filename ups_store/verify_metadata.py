"""What verifying says of metadata: text that goes on behind its end, and the identity (spec 4.1, 8.1)."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping
from typing import Any

from ups_store.format.identity import constant_digest, flaws
from ups_store.format.metadata import ArrayMeta
from ups_store.format.zip_records import Entry
from ups_store.verify_report import Problem


def surplus(entry: Entry, text: bytes) -> list[Problem]:
    """A problem if a metadata entry goes on where its text should end (spec 4.1)."""
    if entry.nbytes <= len(text):
        return []
    where = (entry.data_offset + len(text), entry.end)
    detail = f"of {entry.name}: expected {len(text)} bytes, found {entry.nbytes}"
    return [Problem("metadata_text", "4.1", where, detail=detail)]


def identity_problems(root: Entry, identity: Mapping[str, Any], arrays: Iterable[ArrayMeta]) -> list[Problem]:
    """A problem for each part of the identity document, in the entry `root`, that isn't as spec 8.1 says.

    Digests of constants without elements are such parts: no bytes but those of the document could be wrong.
    """
    constants = [meta for meta in arrays if meta.is_constant]
    details = flaws(identity, [meta.name for meta in constants])
    for meta in constants:
        if not meta.nbytes:
            details += [f"constant {meta.name!r}: {flaw}" for flaw in _digest_flaws(identity, meta.name, b"")]
    where = (root.data_offset, root.end)
    return [Problem("identity", "8.1", where, detail=detail) for detail in details]


def constant_problems(
    identity: Mapping[str, Any], name: str, payload: bytes, where: tuple[int, int]
) -> list[Problem]:
    """A problem if a constant's bytes, which lie at `where`, aren't those of the identity (spec 8.1)."""
    found = _digest_flaws(identity, name, payload)
    return [Problem("constant_digest", "8.1", where, name, detail=detail) for detail in found]


def _digest_flaws(identity: Mapping[str, Any], name: str, payload: bytes) -> list[str]:
    declared = identity.get("constants")
    stored = declared.get(name) if isinstance(declared, dict) else None
    computed = constant_digest(payload)
    if stored == computed:
        return []
    is_digest = isinstance(stored, str) and len(stored) == len(computed)  # else it may be of any length
    shown = stored if is_digest else reprlib.repr(stored)
    return [f"sha256 in the identity {shown}, computed {computed}"]
