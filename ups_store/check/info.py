"""What a store is, finished or not: `describe`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from ups_store.check.statistics import ArrayStatistics, Statistics
from ups_store.format.build_tail import BUILDER_LOCK
from ups_store.format.layout import aligned_slot_nbytes
from ups_store.format.metadata import ArrayMeta, dtype_name
from ups_store.read.base import AnyStore
from ups_store.read.recovery import building_path, read_building_file
from ups_store.read.several import PartitionedStore, parts_of
from ups_store.read.store import SpoolStore
from ups_store.remote.store import RemoteStore
from ups_store.system import files, locks
from ups_store.system.files import Progress
from ups_store.writing.commit import read_owner

if TYPE_CHECKING:
    from ups_store.packed.store import PackedStore

_BLOCK_ELEMENTS = 1 << 20  # 8 MiB as float64


@dataclass(frozen=True)
class ArrayInfo:
    """One array."""

    shape: tuple[int | None, ...]  # N first unless it is a constant; None for the rows of a ragged array
    dtype: str  # Zarr data type name
    dims: tuple[str, ...]
    sample_nbytes: int  # payload of a sample, on average if ragged; of the whole array for a constant
    slot_nbytes: int | None  # bytes from one sample to the next in the file; None where there are no slots
    attrs: dict[str, Any]


@dataclass(frozen=True)
class BuildInfo:
    """State of an unfinished store."""

    num_committed: int
    durability: str | None  # "durable" or "lazy"; None once only its renaming is left
    is_running: bool  # whether a builder holds its lock
    owner: str | None  # the process that built it last, "pid 7 on host"; None if it isn't noted
    is_counted: bool = True  # whether it is known how many samples there will be


@dataclass(frozen=True)
class PackedInfo:
    """How a packed store is packed; of partitions that differ codec "mixed" and no level."""

    codec: str
    level: int | None
    mapped_nbytes: int  # length of the mapped file, or files, that `unpack` makes


@dataclass(frozen=True)
class StoreInfo:
    """What `describe` finds of a store."""

    path: Path  # or the pattern of its partitions; under its building name while it isn't finished
    format_version: str
    num_samples: int
    nbytes: int  # of the finished file, or files
    modified_s: float  # since the epoch
    resident_share: float  # of the file in RAM, 0 to 1
    reads: str  # "map", "pread", "decode" or "remote"; "mixed" of partitions that differ
    network: str | None  # name of the network file system that it lies on, or scheme of its URL
    config_hash: str
    fingerprint: str | None  # None while it isn't finished
    identity: dict[str, Any]  # as its builder said it
    identity_document: dict[str, Any]  # with the arrays and the constants' digests around it
    attrs: dict[str, Any]
    arrays: dict[str, ArrayInfo]
    constants: dict[str, ArrayInfo]
    build: BuildInfo | None  # of an unfinished store
    packed: PackedInfo | None = None
    partitions: tuple[str, ...] = ()  # names of the files of a store in several
    statistics: dict[str, ArrayStatistics] | None = None  # by array, where asked for

    def to_json(self) -> dict[str, Any]:
        """Return the same as JSON values; the time as ISO 8601 in UTC."""
        document = asdict(self)
        modified = datetime.fromtimestamp(document.pop("modified_s"), UTC).isoformat(timespec="seconds")
        return {**document, "path": str(self.path), "modified": modified}


def describe(store: AnyStore, *, statistics: bool = False, progress: Progress | None = None) -> StoreInfo:
    """Describe a store, or what there is of an unfinished one; of a packed one no chunk is decoded.

    Args:
        store: Opened with `partial=True` it may be unfinished.
        statistics: Whether to read all of it, a block at a time, for the statistics of its float arrays.
        progress: Called with the number of bytes that were read for them since the last call.
    """
    partitions = store.partitions if isinstance(store, PartitionedStore) else ()
    is_there = bool(partitions) or isinstance(store, RemoteStore) or files.exists(store.path)
    is_published = is_there and not store.is_partial
    path = store.path if is_published else building_path(store.path)
    infos = {meta.name: _array_info(meta, store) for meta in store.metas.values()}
    constants = {name for name, meta in store.metas.items() if meta.is_constant}
    modified_s = [
        part.modified_s if isinstance(part, RemoteStore) else files.modified_s(part.path)
        for part in (parts_of(store) if is_published else ())
    ] or [files.modified_s(path)]
    packed = None
    if store.codec != "none":
        files_packed = [cast("PackedStore", part) for part in parts_of(store) if part.codec != "none"]
        levels = {part.catalog.packing.level for part in files_packed}
        packed = PackedInfo(store.codec, levels.pop() if len(levels) == 1 else None, mapped_nbytes(store))
    return StoreInfo(
        path=path,
        format_version=f"{store.version[0]}.{store.version[1]}",
        num_samples=len(store),
        nbytes=store.nbytes,
        modified_s=max(modified_s),
        resident_share=store.residency(),
        reads=store.access,
        network=store.network,
        config_hash=store.config_hash,
        fingerprint=store.fingerprint if is_published else None,
        identity=dict(store.identity),
        identity_document=dict(store.identity_document),
        attrs=dict(store.attrs),
        arrays={name: info for name, info in infos.items() if name not in constants},
        constants={name: info for name, info in infos.items() if name in constants},
        build=None if is_published else _build_info(path, store),
        packed=packed,
        partitions=tuple(part.path.name for part in partitions),
        statistics=_statistics(store, progress or (lambda nbytes: None)) if statistics else None,
    )


def mapped_nbytes(store: AnyStore) -> int:
    """Return the length that a finished store's files have where they are mapped."""
    return sum(
        part.nbytes if part.codec == "none" else cast("PackedStore", part).catalog.layout.file_nbytes
        for part in parts_of(store)
    )


def _array_info(meta: ArrayMeta, store: AnyStore) -> ArrayInfo:
    slot = aligned_slot_nbytes(meta.sample_nbytes) if meta.is_sharded and store.codec == "none" else None
    shape: tuple[int | None, ...] = meta.shape
    nbytes = meta.sample_nbytes
    if meta.is_ragged:
        shape, nbytes = (len(store), None, *meta.sample_shape), meta.nbytes // max(1, len(store))
    return ArrayInfo(shape, meta.dtype, meta.axes, nbytes, slot, dict(meta.attrs))


def _build_info(path: Path, store: AnyStore) -> BuildInfo:
    with files.opened(path) as fd:
        header = read_building_file(fd, path).header
        owner = read_owner(fd, path) if header else None
        is_running = locks.is_locked(fd, BUILDER_LOCK)
    return BuildInfo(
        num_committed=int(store.committed.sum()),
        durability=None if header is None else "lazy" if header.is_lazy else "durable",
        is_running=is_running,
        owner=f"pid {owner.pid} on {owner.host}" if owner else None,
        is_counted=not isinstance(store, SpoolStore),
    )


def _statistics(store: AnyStore, progress: Progress) -> dict[str, ArrayStatistics]:
    samples = np.flatnonzero(store.committed)
    statistics = Statistics(with_mean=True)
    for name, spec in store.arrays.items():
        if "float" in dtype_name(spec.dtype):
            statistics.add({name: np.empty(0)})  # an array without values is there too
            for block in _value_blocks(store, name, samples):
                statistics.add({name: block})
                progress(block.nbytes)
    return statistics.by_array()


def _value_blocks(store: AnyStore, name: str, samples: npt.NDArray[np.int64]) -> Iterator[npt.NDArray[Any]]:
    """Yield all values of an array, flat, at most a block at a time: several samples, or some of one."""
    spec = store.arrays[name]
    num_elements = 0 if spec.is_ragged else math.prod(spec.shape[1:])
    step = 1 if spec.is_ragged else max(1, _BLOCK_ELEMENTS // max(1, num_elements))
    for first in range(0, len(samples), step):
        if num_elements > _BLOCK_ELEMENTS:
            flat = store.sample(int(samples[first]))[name].reshape(-1)
            yield from (flat[at : at + _BLOCK_ELEMENTS] for at in range(0, num_elements, _BLOCK_ELEMENTS))
            continue
        values = store.gather(samples[first : first + step], [name])[name]
        yield (values[0] if spec.is_ragged else values).reshape(-1)
