"""The request for the digest of a source file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from ups_store.ingest.reader_process import Reader

DigestKind = Literal["full", "sampled"]


@dataclass(frozen=True)
class DigestRequest:
    """Read a file for its digest; see `DigestCache.digest`.

    Attributes:
        path: The file.
        kind: "full": of all bytes; "sampled": of the size, the HDF5 structure, and some blocks.
        size: Length of the file in bytes.
    """

    path: Path
    kind: DigestKind
    size: int
    subject = "the digest"
    first_sample = None

    def run(self, reader: Reader) -> str:
        """The digest, blake3 in hexadecimal digits; tells bytes as they are read."""
        from ups_store.ingest import digest  # HDF5: only where it is read

        reader.doing("digesting")
        if self.kind == "full":
            return digest.full_digest(self.path, reader.progressed)
        return digest.sampled_digest(self.path, self.size, reader.progressed)
