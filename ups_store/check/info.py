"""What a store is: `describe`, and `shared_samples`, the samples that two stores share."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided

from ups_store.check.statistics import ArrayStatistics, Statistics
from ups_store.format.build_tail import BUILDER_LOCK
from ups_store.format.checksum import crc32c
from ups_store.format.layout import CHECKSUM_BYTES, slot_nbytes
from ups_store.format.metadata import LARGE_SAMPLE_BYTES, ArrayMeta, dtype_name
from ups_store.read.base import AnyStore
from ups_store.read.recovery import building_path, read_building_file
from ups_store.read.several import PartitionedStore, parts_of
from ups_store.read.store import SpoolStore, Store
from ups_store.remote.store import RemoteStore
from ups_store.system import files, locks
from ups_store.system.progress import Progress
from ups_store.write.building import read_owner

if TYPE_CHECKING:
    from ups_store.packed.store import PackedStore

_BLOCK_ELEMENTS = 1 << 20  # 8 MiB as float64
_MIN_SAMPLE_BYTES = 64  # equal parameters are no sign of equal samples


@dataclass(frozen=True)
class ArrayInfo:
    """One array.

    Attributes:
        shape: Whole shape, N first unless it is a constant; None for the rows of a ragged array.
        dtype: Zarr data type name.
        dims: Dimension names.
        sample_nbytes: Payload bytes of one sample, on average if ragged; of the whole array for a constant.
        slot_nbytes: Bytes from one sample to the next in the file; None where samples have no slots.
        attrs: Attributes.
    """

    shape: tuple[int | None, ...]
    dtype: str
    dims: tuple[str, ...]
    sample_nbytes: int
    slot_nbytes: int | None
    attrs: dict[str, Any]


@dataclass(frozen=True)
class BuildInfo:
    """State of an unfinished store.

    Attributes:
        num_committed: Samples that are there.
        durability: "durable" or "lazy"; None once only its renaming is left.
        is_running: Whether a builder holds its lock.
        owner: The process that built it last, "pid 7 on host"; None if it isn't noted.
        is_counted: Whether it is known how many samples there will be.
    """

    num_committed: int
    durability: str | None
    is_running: bool
    owner: str | None
    is_counted: bool = True


@dataclass(frozen=True)
class PackedInfo:
    """How a packed store is packed; of partitions that differ codec "mixed" and no level.

    Attributes:
        codec: "blosc" or "pcodec".
        level: Its effort.
        mapped_nbytes: Length of the mapped file, or files, that `unpack` makes.
    """

    codec: str
    level: int | None
    mapped_nbytes: int


@dataclass(frozen=True)
class StoreInfo:
    """What `describe` finds of a store.

    Attributes:
        path: The file, or the pattern of its partitions; under its building name while it isn't finished.
        nbytes: Length of the finished file, or files.
        modified_s: When it was last written, seconds since the epoch.
        resident_share: Share of the file in RAM, 0 to 1.
        reads: How samples are read: "map", "pread", "decode", "remote"; "mixed" of partitions that differ.
        network: Name of the network file system that it lies on, or scheme of its URL; None for local ones.
        fingerprint: Digest of the content; None while it isn't finished.
        identity: What it was made from, as its builder said it.
        identity_document: The same with the arrays and the constants' digests around it.
        arrays: Arrays with a sample axis, by name.
        constants: Arrays without one, by name.
        build: State of an unfinished store; None of a finished one.
        packed: How a packed store is packed; None of others.
        partitions: Names of the files of a store in partitions; empty for others.
        statistics: By array, where asked for.
    """

    path: Path
    format_version: str
    num_samples: int
    nbytes: int
    modified_s: float
    resident_share: float
    reads: str
    network: str | None
    config_hash: str
    fingerprint: str | None
    identity: dict[str, Any]
    identity_document: dict[str, Any]
    attrs: dict[str, Any]
    arrays: dict[str, ArrayInfo]
    constants: dict[str, ArrayInfo]
    build: BuildInfo | None
    packed: PackedInfo | None = None
    partitions: tuple[str, ...] = ()
    statistics: dict[str, ArrayStatistics] | None = None

    def to_json(self) -> dict[str, Any]:
        """The same as JSON values; the time as ISO 8601 in UTC."""
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
        packed=_packed_info(store),
        partitions=tuple(part.path.name for part in partitions),
        statistics=_statistics(store, progress or (lambda nbytes: None)) if statistics else None,
    )


def _array_info(meta: ArrayMeta, store: AnyStore) -> ArrayInfo:
    slot = slot_nbytes(meta.sample_nbytes) if meta.is_sharded and store.codec == "none" else None
    shape: tuple[int | None, ...] = meta.shape
    nbytes = meta.sample_nbytes
    if meta.is_ragged:
        shape, nbytes = (len(store), None, *meta.sample_shape), meta.nbytes // max(1, len(store))
    return ArrayInfo(shape, meta.dtype, meta.axes, nbytes, slot, dict(meta.attrs))


def _packed_info(store: AnyStore) -> PackedInfo | None:
    if store.codec == "none":
        return None
    packed = [cast("PackedStore", part) for part in parts_of(store) if part.codec != "none"]
    levels = {part.catalog.packing.level for part in packed}
    return PackedInfo(store.codec, levels.pop() if len(levels) == 1 else None, mapped_nbytes(store))


def mapped_nbytes(store: AnyStore) -> int:
    """Length that a finished store's files have where they are mapped."""
    return sum(
        part.nbytes if part.codec == "none" else cast("PackedStore", part).catalog.layout.file_nbytes
        for part in parts_of(store)
    )


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
            for block in _blocks(store, name, samples):
                statistics.add({name: block})
                progress(block.nbytes)
    return statistics.by_array()


def _blocks(store: AnyStore, name: str, samples: npt.NDArray[np.int64]) -> Iterator[npt.NDArray[Any]]:
    """All values of an array, flat, at most a block at a time: several samples, or some of one."""
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


def shared_samples(a: Store, b: Store) -> npt.NDArray[np.int64]:
    """Find the samples of `a` that occur in `b` too, by their largest common array.

    Samples are found by their checksums and then compared byte by byte, since checksums of different bytes
    can be equal. Stores without a common array larger than a few parameters share nothing.

    Returns:
        Sample numbers in `a`, sorted, shape (M,), int64.
    """
    common = {
        name: a.metas[name].sample_nbytes
        for name, spec in a.arrays.items()
        if (other := b.arrays.get(name)) and not spec.is_ragged
        if (other.shape[1:], other.dtype) == (spec.shape[1:], spec.dtype)
    }
    name = max(common, key=lambda name: common[name], default=None)
    if name is None or common[name] < _MIN_SAMPLE_BYTES:
        return np.empty(0, np.int64)
    left, right = a[name], b[name]
    order = np.argsort(checksums := _checksums(right), kind="stable")
    wanted = _checksums(left)
    first, end = (np.searchsorted(checksums, wanted, side, sorter=order) for side in ("left", "right"))

    def raw(sample: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
        return sample.reshape(-1).view(np.uint8)

    shared = [
        i
        for i in np.flatnonzero(first < end).tolist()
        if any(np.array_equal(raw(left[i]), raw(right[j])) for j in order[first[i] : end[i]].tolist())
    ]
    return np.array(shared, np.int64)


def _checksums(view: npt.NDArray[Any]) -> npt.NDArray[np.uint32]:
    """CRC-32C of every sample, shape (N,): those behind the samples where there are slots (spec 5.3)."""
    num, nbytes = len(view), view[:1].nbytes
    if num and nbytes >= LARGE_SAMPLE_BYTES:
        first = view[:1].reshape(-1).view(np.uint8)
        slots = as_strided(first, (num, nbytes + CHECKSUM_BYTES), (view.strides[0], 1), writeable=False)
        return np.ascontiguousarray(slots[:, nbytes:]).view("<u4").reshape(-1)
    return np.fromiter((crc32c(sample.tobytes()) for sample in view), np.uint32, num)
