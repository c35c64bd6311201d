"""The corpus of what commit e492260 made, unpacked into a folder."""

from __future__ import annotations

import tarfile
from pathlib import Path

CORPUS = Path(__file__).parents[1] / "data" / "before_houses" / "corpus.tar.xz"


def unpack_corpus(folder: Path) -> Path:
    """Unpack the corpus into a folder, and return it."""
    with tarfile.open(CORPUS) as archive:
        archive.extractall(folder, filter="data")
    return folder
