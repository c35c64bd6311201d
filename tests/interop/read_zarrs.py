"""Answers requests with zarrs, through its Python package zarrista."""

from __future__ import annotations

from pathlib import Path

import zarrista
from answering import answer_all
from zarrista.store import FilesystemStore, ZipStore


def read(store: str, array: str, first: int | None) -> tuple[list[int], bytes]:
    path = Path(store)
    zipped = ZipStore(FilesystemStore(path.parent), path.name)
    opened = zarrista.Array.open(zipped, f"/{array}")
    selection = ... if first is None else slice(first, opened.shape[0])
    tensor = opened.retrieve_array_subset(selection)
    return list(tensor.shape), bytes(tensor.buffer())


answer_all(read)
