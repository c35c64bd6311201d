"""Which samples of a ragged array verify, and reading them, of a file in whatever state (spec 14.5)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ups_store.errors import CorruptChunkError
from ups_store.format.checksum import crc32c
from ups_store.format.layout import RaggedLayout
from ups_store.format.metadata import dtype_of
from ups_store.format.ragged import Offsets
from ups_store.read.file_reads import read_at
from ups_store.read.gather import Samples
from ups_store.read.offsets import offset_flaws

_BLOCK_BYTES = 4 << 20


def intact_rows(fd: int, layout: RaggedLayout) -> npt.NDArray[np.bool_]:
    """Which samples have the CRC-32C that the file has for them, shape (N,); none where offsets are wrong."""
    num_samples = layout.checks.meta.shape[0]
    offsets, stored = _offsets_of(fd, layout), _checks_of(fd, layout)
    if offsets is None or len(stored) < num_samples:
        return np.zeros(num_samples, bool)
    checks = (computed == wanted for computed, wanted in zip(_crcs(fd, layout, offsets), stored, strict=True))
    return np.fromiter(checks, bool, num_samples)


def lengths_of(fd: int, layout: RaggedLayout, samples: Samples) -> npt.NDArray[np.int64]:
    """Numbers of rows of samples that verified."""
    offsets = _offsets_of(fd, layout)
    assert offsets is not None
    return np.diff(offsets)[samples]


def read_rows(fd: int, layout: RaggedLayout, samples: Samples, *, path: Path) -> list[npt.NDArray[Any]]:
    """Samples that verified, checked again on what is returned.

    Raises:
        CorruptChunkError: If the file changed meanwhile.
    """
    offsets, meta = _offsets_of(fd, layout), layout.rows.meta
    stored, found = _checks_of(fd, layout), []
    for sample in samples.tolist():
        first, end = layout.extent(*offsets[sample : sample + 2].tolist()) if offsets is not None else (0, 0)
        raw = read_at(fd, first, end - first)
        if offsets is None or crc32c(raw) != stored[sample]:
            raise CorruptChunkError(
                "it changed while it was copied", path=path, array=meta.name, sample=sample
            )
        found.append(np.frombuffer(raw, dtype_of(meta.dtype)).reshape(-1, *meta.sample_shape))
    return found


def _offsets_of(fd: int, layout: RaggedLayout) -> Offsets | None:
    raw = read_at(fd, layout.offsets.offset, layout.offsets.meta.nbytes)
    if len(raw) < layout.offsets.meta.nbytes:
        return None
    offsets = np.frombuffer(raw, "<i8")
    return None if any(offset_flaws(offsets, layout)) else offsets


def _checks_of(fd: int, layout: RaggedLayout) -> npt.NDArray[np.uint32]:
    raw = read_at(fd, layout.checks.offset, layout.checks.meta.nbytes)
    return np.frombuffer(raw[: len(raw) // 4 * 4], "<u4")


def _crcs(fd: int, layout: RaggedLayout, offsets: Offsets) -> Iterator[int | None]:
    """CRC-32C of every sample's bytes; None where the file ends before."""
    for start, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        first, past = layout.extent(start, end)
        computed, got = 0, 0
        for offset in range(first, past, _BLOCK_BYTES):
            block = read_at(fd, offset, min(_BLOCK_BYTES, past - offset))
            computed, got = crc32c(block, computed), got + len(block)
        yield computed if got == past - first else None
