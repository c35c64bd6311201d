"""What of a file verifies, in whatever state it is: the samples that can be copied out of it.

Where the root's `zarr.json` is damaged, arrays and geometry are read without the identity.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ups_store.errors import CorruptChunkError, FormatError
from ups_store.format.build_tail import TailHeader
from ups_store.format.layout import ArrayLayout, Layout, RaggedLayout
from ups_store.format.metadata import dtype_of
from ups_store.format.ragged import Offsets
from ups_store.format.root import FORMAT_VERSION, RootMeta, constant_digest, identity_document
from ups_store.format.zip_records import ROOT_NAME
from ups_store.read.catalog import (
    Catalog,
    finish_catalog,
    mark_companions,
    read_arrays,
    read_directory,
    reads_of,
)
from ups_store.read.gather import Samples, read_samples
from ups_store.read.ragged import offset_flaw
from ups_store.read.recovery import intact_parts, read_commits
from ups_store.read.store_file import Chunk, chunk_of, read_at, read_constant, rows_chunk
from ups_store.read.verify import Report
from ups_store.system import files

BATCH_BYTES = 16 << 20  # read and committed together

_OUTSIDE_PAYLOADS = ("slot_padding", "fill", "shard_index", "entry_crc")  # a copy gets new ones
_NO_HASH = ""  # no identity has it: a hash is 64 digits

ChunkAt = Callable[[int], Chunk]


@dataclass(frozen=True, eq=False)
class Intact:
    """What verifies."""

    # Which samples, bool, shape (N,), by array with a sample axis and with elements
    samples: Mapping[str, npt.NDArray[np.bool_]]
    constants: tuple[str, ...]  # names of the constants
    empty: tuple[str, ...]  # names of the arrays with a sample axis and without elements
    # Names of arrays whose chunks verify, though the checksum of the whole entry doesn't
    suspect: tuple[str, ...] = ()

    @property
    def arrays(self) -> tuple[str, ...]:
        """The arrays of which at least one sample verifies, and those without elements."""
        return (*(name for name, mask in self.samples.items() if mask.any()), *self.empty)

    @property
    def complete(self) -> Samples:
        """Numbers of the samples that verify in each of `arrays`, sorted, int64."""
        masks = [mask for mask in self.samples.values() if mask.any()]
        return np.flatnonzero(np.logical_and.reduce(masks)) if masks else np.zeros(0, np.int64)


def intact_by_report(catalog: Catalog, report: Report) -> Intact:
    """Find what verifies of a file that opens, by what `verify` found."""
    layout = catalog.layout
    samples = {array.meta.name: np.ones(layout.num_samples, bool) for array in _with_elements(layout)}
    companions = {array.meta.name for array in layout.arrays.values() if array.meta.is_companion}
    lost = set()
    for problem in report.problems:
        # Samples of ragged arrays are checked one by one, so damage of a companion that matters is theirs.
        if problem.array is None or problem.kind in _OUTSIDE_PAYLOADS or problem.array in companions:
            continue
        if problem.array not in samples:
            lost.add(problem.array)
        elif problem.kind == "offsets" or problem.sample is None:
            samples[problem.array][:] = False
        else:
            samples[problem.array][problem.sample] = False
    constants = tuple(array.meta.name for array in _constants(layout) if array.meta.name not in lost)
    suspect = tuple(p.array for p in report.problems if p.array and p.kind == "entry_crc")
    return Intact(samples, constants, _empty(layout), suspect)


def intact_by_commits(fd: int, catalog: Catalog, header: TailHeader) -> Intact:
    """Find what verifies of an unfinished file: committed samples whose bytes are those of their commit."""
    layout = catalog.layout
    committed, crcs = read_commits(fd, layout, header)
    table = np.zeros(crcs.shape, bool)
    table[committed] = intact_parts(fd, layout, np.flatnonzero(committed), crcs[committed])
    masks = {array.meta.name: table[:, i] for i, array in enumerate(layout.per_sample)}
    for name, ragged in layout.ragged.items():
        masks[name] &= masks[ragged.checks.meta.name]
    samples = {array.meta.name: masks[array.meta.name] for array in _with_elements(layout)}
    return Intact(samples, _intact_constants(fd, catalog), _empty(layout))


def intact_by_chunks(fd: int, catalog: Catalog) -> Intact:
    """Find what verifies by the CRC-32C of its chunk alone, of a file whose end is missing or damaged."""
    samples, read, num = {}, reads_of(fd), catalog.layout.num_samples
    for array in _with_elements(catalog.layout):
        name, ragged = array.meta.name, catalog.layout.ragged.get(array.meta.name)
        chunk_at = _chunks_of(fd, catalog.layout, array)
        offsets = None if ragged is None else _offsets_of(fd, ragged)
        # No commit vouches for the offsets here.
        is_lost = ragged is not None and (offsets is None or offset_flaw(offsets, ragged))
        if chunk_at is None or is_lost:
            samples[name] = np.zeros(num, bool)
        elif array.meta.is_sharded or array.meta.is_ragged:
            samples[name] = np.fromiter((chunk_at(i).is_intact(read) for i in range(num)), bool, num)
        else:
            samples[name] = np.full(num, chunk_of(array).is_intact(read))
    return Intact(samples, _intact_constants(fd, catalog), _empty(catalog.layout))


def read_intact(
    fd: int, layout: Layout, names: Sequence[str], samples: Samples, *, path: Path
) -> Iterator[tuple[Samples, dict[str, Any]]]:
    """Read samples that verified, in batches; large and ragged ones are checked again on what is returned."""
    arrays = {name: layout.arrays[name] for name in names}
    chunks = {name: _chunks_of(fd, layout, array) for name, array in arrays.items()}

    def read_again(name: str, sample: int) -> npt.NDArray[Any]:
        """Shape (rows, ...), of an array that isn't ragged (1, ...)."""
        chunk_at, meta = chunks[name], arrays[name].meta
        chunk = None if chunk_at is None else chunk_at(sample)
        raw = b"" if chunk is None else read_at(fd, chunk.first, chunk.end - chunk.first)
        payload = None if chunk is None else chunk.payload_of(raw)
        if payload is None:
            raise CorruptChunkError("it changed while it was copied", path=path, array=name, sample=sample)
        return np.frombuffer(payload, dtype_of(meta.dtype)).reshape(-1, *meta.sample_shape)

    nbytes = sum(array.meta.nbytes for array in arrays.values()) // max(1, layout.num_samples)
    step = max(1, BATCH_BYTES // max(1, nbytes))
    for first in range(0, len(samples), step):
        batch = samples[first : first + step]
        values: dict[str, Any] = {}
        for name, array in arrays.items():
            if array.meta.is_ragged or array.meta.is_sharded:
                rows = [read_again(name, sample) for sample in batch.tolist()]
                values[name] = rows if array.meta.is_ragged else np.concatenate(rows)
            else:
                values[name] = np.empty((len(batch), *array.meta.sample_shape), dtype_of(array.meta.dtype))
                read_samples(fd, array, batch, None, values[name], path=path)
        yield batch, values


def _chunks_of(fd: int, layout: Layout, array: ArrayLayout) -> ChunkAt | None:
    """Find the chunk of each sample; None where the file ends before the offsets do."""
    if not array.meta.is_ragged:
        return partial(chunk_of, array)
    ragged = layout.ragged[array.meta.name]
    offsets, checks = _offsets_of(fd, ragged), ragged.checks
    stored = read_at(fd, checks.offset, checks.meta.nbytes)
    if offsets is None or len(stored) < checks.meta.nbytes:
        return None
    crcs, edges = np.frombuffer(stored, "<u4"), offsets

    def chunk_at(sample: int) -> Chunk:
        return rows_chunk(ragged, sample, (int(edges[sample]), int(edges[sample + 1])), int(crcs[sample]))

    return chunk_at


def lengths_of(fd: int, layout: RaggedLayout, samples: Samples) -> npt.NDArray[np.int64]:
    """Numbers of rows of samples that verified."""
    offsets = _offsets_of(fd, layout)
    assert offsets is not None
    return np.diff(offsets)[samples]


def _offsets_of(fd: int, layout: RaggedLayout) -> Offsets | None:
    raw = read_at(fd, layout.offsets.offset, layout.offsets.meta.nbytes)
    return None if len(raw) < layout.offsets.meta.nbytes else np.frombuffer(raw, "<i8")


def _with_elements(layout: Layout) -> list[ArrayLayout]:
    """The arrays whose samples have elements; ragged ones too, whose samples have lengths."""
    listed = (array for array in layout.per_sample if not array.meta.is_companion)
    return [array for array in listed if array.entry or array.meta.is_ragged]


def _empty(layout: Layout) -> tuple[str, ...]:
    empty = (array.meta for array in layout.per_sample if array.entry is None)
    return tuple(meta.name for meta in empty if meta.part is None)


def _constants(layout: Layout) -> list[ArrayLayout]:
    return [array for array in layout.arrays.values() if array.meta.is_constant]


def _intact_constants(fd: int, catalog: Catalog) -> tuple[str, ...]:
    digests = catalog.root.identity.get("constants")
    declared = digests if isinstance(digests, dict) else {}
    is_lost = is_identity_lost(catalog)  # then the digests are too
    intact = []
    for array in _constants(catalog.layout):
        is_intact = array.entry is None or chunk_of(array).is_intact(reads_of(fd))
        if is_intact and array.entry is not None and not is_lost:
            digest = constant_digest(read_constant(fd, array, path=Path(array.meta.name)).tobytes())
            is_intact = digest == declared.get(array.meta.name)
        if is_intact:
            intact.append(array.meta.name)
    return tuple(intact)


def read_without_root(fd: int, path: Path) -> Catalog:
    """Read the catalog of a finished file by its directory and its arrays' metadata (spec 2.2, 4.4).

    Everything but the root group's text is checked as when a store is opened. Of the identity there is what
    the arrays tell, the geometry; digests of constants, content and attributes of the root are lost.
    """
    read = reads_of(fd)
    directory = read_directory(read, files.size(fd), path)
    names = directory.array_names()
    if len(set(names)) < len(names):
        raise FormatError("an array twice", path=path, kind="directory", clause="3.5", found=sorted(names))
    documents = read_arrays(read, path, directory.next_claim, directory.next_claim(ROOT_NAME, 0), names)
    mark_companions(documents, path)
    identity = identity_document([meta for meta, _ in documents.metas if not meta.is_companion], {}, {})
    root = RootMeta(FORMAT_VERSION, _NO_HASH, identity, {})
    catalog = finish_catalog(root, documents, directory, path)
    if catalog.layout.num_samples > files.size(fd):
        raise FormatError(
            "number of samples",
            path=path,
            kind="limits",
            clause="11.1",
            expected=f"at most {files.size(fd)}, the bytes of the file",
            found=catalog.layout.num_samples,
        )
    return catalog


def is_identity_lost(catalog: Catalog) -> bool:
    """Return whether the catalog is one of `read_without_root`."""
    return catalog.root.config_hash == _NO_HASH
