"""What travels with the arrays into every format: what they were made from, and their attributes."""

from __future__ import annotations

from typing import Any

from ups_store.format.canonical import canonical_json
from ups_store.read.store import Store


def provenance(store: Store) -> dict[str, Any]:
    """Config hash and identity document of a store, as the exported copies bear them."""
    return {"config_hash": store.config_hash, "identity": dict(store.identity)}


def array_attrs(store: Store, name: str) -> dict[str, Any]:
    """Attributes of one array; constants may have some in files of other writers."""
    spec = store.arrays.get(name)
    return dict(spec.attrs or {}) if spec else {}


def json_text(document: Any) -> str:
    """One line of canonical JSON."""
    return canonical_json(document, what="attrs").decode()
