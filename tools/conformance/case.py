"""One file of the corpus and what every reader must answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tools.conformance.archive import find_places, hash_of, read_document, take_apart
from ups_store.format.zip_records import ROOT_NAME

Digest = str | dict[str, Any]  # sha256 of a payload; of a ragged array those of its samples, too


@dataclass(frozen=True)
class Case:
    """A file and the answers.

    Attributes:
        file: Path in the folder of the corpus.
        raw: Its bytes.
        why: What it is, or what is wrong, a short sentence.
        kind: "mapped", "packed" or "building".
        opens: Whether opening must succeed.
        clause: The clause that a refused file breaks.
        verify: "ok", "refused" or the clauses that verifying must report; None for a building file.
        may: Clauses that verifying may report beside those.
        digests: sha256 of the payloads of arrays, by name.
        has_fingerprint: Whether the fingerprint is an answer, too.
        state: State of a building file (spec 6.5).
        committed: Its committed samples, ranges `(first, past_last)`.
        boot_id: The present boot's, in hexadecimal digits, where the answer depends on it.
        needs: Codec without which a reader can't give the answer to verify.
    """

    file: str
    raw: bytes
    why: str
    kind: str = "mapped"
    opens: bool = True
    clause: str | None = None
    verify: str | list[str] | None = None
    may: list[str] | None = None
    digests: Mapping[str, Digest] | None = None
    has_fingerprint: bool = False
    state: str | None = None
    committed: Sequence[tuple[int, int]] | None = None
    boot_id: str | None = None
    needs: str | None = None

    def to_json(self) -> dict[str, Any]:
        """The case as `corpus.json` has it."""
        answers = {
            "file": self.file,
            "kind": self.kind,
            "why": self.why,
            "open": "ok" if self.opens else "refused",
            "clause": self.clause,
            "verify": self.verify,
            "may": self.may,
            "state": self.state,
            "committed": None if self.committed is None else [list(pair) for pair in self.committed],
            "boot_id": self.boot_id,
            "needs": self.needs,
            "fingerprint": fingerprint_of(self.raw) if self.has_fingerprint else None,
            "digests": self.digests,
            "nbytes": len(self.raw),
            "sha256": hash_of(self.raw),
        }
        return {key: value for key, value in answers.items() if value is not None}


def fingerprint_of(raw: bytes) -> str:
    """The fingerprint of a good file, from its directory (spec 8.5)."""
    places = find_places(raw)
    crcs = [int.from_bytes(raw[at + 16 : at + 20], "little") for at in places.central.values()]
    root = read_document(take_apart(raw), ROOT_NAME)
    numbers = "".join(f",{crc}" for crc in crcs)
    return hash_of(f'["{root["attributes"]["ups_store"]["config_hash"]}"{numbers}]'.encode())
