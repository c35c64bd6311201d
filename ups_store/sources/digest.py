"""Digests of source files: of all bytes, or of the structure and some blocks."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import Any

from ups_store.errors import SourceError, needs
from ups_store.sources.hdf5 import h5py, has_signature, known_shape, no_file_any_more, open_hdf5, translated
from ups_store.system.files import Progress
from ups_store.system.memory import page_aligned

with needs("hdf5"):
    import blake3

_READ_BYTES = 1 << 20  # stays in the processor's cache between reading and hashing
_NUM_BLOCKS = 64  # of a sampled digest
_BLOCK_BYTES = 64 << 10


def full_digest(path: Path, progress: Progress) -> str:
    """Digest all bytes; `progress` gets numbers of bytes as they are read."""
    hasher = blake3.blake3(max_threads=blake3.blake3.AUTO)
    buffer = page_aligned(_READ_BYTES).data
    with _opened(path) as file:
        while nbytes := file.readinto(buffer):
            hasher.update(buffer[:nbytes])
            progress(nbytes)
    return hasher.hexdigest()


def sampled_digest(path: Path, size: int, progress: Progress) -> str:
    """Digest the size, the HDF5 structure, if it has one, and evenly spaced blocks of a file of `size` bytes.

    The structure is every dataset with shape, dtype and chunks.
    """
    if path.exists() and not path.is_file():
        raise no_file_any_more(path)
    lines: list[str] = []

    def note(name: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset):
            lines.append(f"{name} {known_shape(item)} {item.dtype.str} {item.chunks}")

    if has_signature(path):
        with open_hdf5(path) as hdf5, translated("can't read the structure", path):
            hdf5.visititems(note)
    structure = "\n".join(sorted(lines))
    hasher = blake3.blake3(f"{size}\n{structure}\n".encode())
    with _opened(path) as file:
        for i in range(_NUM_BLOCKS):
            file.seek(max(0, size - _BLOCK_BYTES) * i // (_NUM_BLOCKS - 1))
            hasher.update(file.read(_BLOCK_BYTES))
            progress(size // _NUM_BLOCKS)
    return hasher.hexdigest()


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[FileIO]:
    # A pipe that took its place is opened without waiting for the other end.
    opener = lambda name, flags: os.open(name, flags | os.O_NONBLOCK)  # noqa: E731
    try:
        with open(path, "rb", buffering=0, opener=opener) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise no_file_any_more(path)
            yield file
    except OSError as error:
        raise SourceError(f"source can't be read ({error.strerror})", kind="unreadable", path=path) from error
